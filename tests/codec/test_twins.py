"""AVX2, portable C++, torch operations and the reference implementation write the same bytes."""

import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
import thinwire.codec
from tests.codec import reference
from tests.codec.codec_cases import DTYPES, EXACT, FEEDBACKS, VALUES, gradients, positions_of, quick, sizes
from thinwire import _native
from thinwire.codec.codec import Kernels, Scope
from thinwire.codec.feedback import Feedback
from thinwire.codec.selection import Selection
from thinwire.codec.values import Values


@pytest.fixture(autouse=True)
def same_kernels_afterwards() -> Iterator[None]:
    before = _native.avx2_in_use()
    yield
    _native.avx2(before)


def three_runs(
    selection: Selection, values: Values, feedback: Feedback, scope: Scope, steps: list[dict[str, Tensor]]
) -> list[tuple[list[bytes], list[Tensor]]]:
    runs = []
    ways: list[tuple[bool, Kernels]] = [(True, "native"), (False, "native"), (False, "torch")]
    for avx2, kernels in ways:
        _native.avx2(avx2)
        codec = tw.Codec(selection, values, feedback, scope=scope, kernels=kernels, min_numel=64)
        frames = [codec.encode(g).tobytes() for g in steps]
        runs.append((frames, [t for name in steps[0] for t in codec.residuals(name).values()]))
    return runs


def assert_same(runs: list[tuple[list[bytes], list[Tensor]]]) -> None:
    frames, residuals = runs[0]
    for other_frames, other_residuals in runs[1:]:
        assert frames == other_frames
        assert all(torch.equal(a, b) for a, b in zip(residuals, other_residuals, strict=True))


@quick
@given(
    selection=st.sampled_from(EXACT),
    values=st.sampled_from(VALUES),
    feedback=st.sampled_from(FEEDBACKS),
    scope=st.sampled_from(["tensor", "global"]),
    shapes=sizes,
    dtype=st.sampled_from(DTYPES),
    kind=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_kernels_agree(
    selection: Selection,
    values: Values,
    feedback: Feedback,
    scope: Scope,
    shapes: list[int],
    dtype: torch.dtype,
    kind: int,
    seed: int,
) -> None:
    steps = [gradients(shapes, dtype, kind, seed + step) for step in range(2)]
    assert_same(three_runs(selection, values, feedback, scope, steps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_agree_for_every_format_and_selection(dtype: torch.dtype) -> None:
    steps = [gradients([5000, 100, 1300], dtype, kind, kind) for kind in (0, 1, 5)]
    for values in VALUES:
        for selection in EXACT:
            assert_same(three_runs(selection, values, tw.ErrorFeedback(0.9), "tensor", steps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_are_found_at_every_position(dtype: torch.dtype) -> None:
    for n in (1, 7, 8, 33, 64, 129):
        for place in range(n):
            for bad in (torch.inf, -torch.inf, torch.nan):
                x = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
                x[place] = bad
                for avx2 in (True, False):
                    _native.avx2(avx2)
                    code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[dtype]
                    assert _native.first_not_finite([(x.data_ptr(), code, place), (x.data_ptr(), code, n)]) == 1
                    assert _native.first_not_finite([(x.data_ptr(), code, place)]) == -1


def parts_of(frame: tw.codec.Frame, x: dict[str, Tensor], codec: tw.Codec, step: int) -> list[reference.Part]:
    """Return what the reference needs to write the same frame: positions, values before rounding, seeds."""
    numels = [t.numel() for t in x.values()]
    places = positions_of(frame, numels)
    parts = []
    for section in tw.codec.FrameReader(frame, numels).sections:
        name, positions = f"t{section.id}", places[section.id]
        part = reference.Part(section.id, section.format, section.numel, positions.tolist(), x[name][positions])
        values = codec.small_values if section.numel < codec.min_numel else codec.values
        if values.seed is not None:
            part.rounding = reference.mix(reference.mix(values.seed ^ step) ^ zlib.crc32(name.encode()))
        if section.coding == reference.WINDOW:
            part.start = int(positions[0])
        if section.coding == reference.STRATA:
            key = zlib.crc32(name.encode())
            part.strata = reference.mix(reference.mix(reference.mix(5) ^ step) ^ key)
        parts.append(part)
    return parts


@settings(quick, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    selection=st.sampled_from(EXACT),
    values=st.sampled_from(VALUES),
    shapes=sizes,
    kind=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_the_reference_writes_and_reads_the_same_bytes(
    selection: Selection, values: Values, shapes: list[int], kind: int, seed: int
) -> None:
    x = gradients(shapes, torch.float32, kind, seed)
    codec = tw.Codec(selection, values, tw.NoFeedback(), min_numel=64)
    frame = codec.encode(x, step=seed % 7)
    assert reference.write_frame(parts_of(frame, x, codec, seed % 7)) == frame.tobytes()
    decoded = tw.Codec.decode(frame, x)
    for part in reference.read_frame(frame.tobytes()):
        expected = torch.zeros(part.numel)
        expected[torch.tensor(part.positions, dtype=torch.int64)] = part.values
        assert torch.equal(decoded[f"t{part.id}"], expected)


@quick
@given(
    numel=st.one_of(st.integers(1, 5000), st.integers(1, 2**62)),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=1200),
    clustered=st.booleans(),
)
def test_any_positions_are_written_and_read(numel: int, places: list[float], clustered: bool) -> None:
    """The native writer and reader agree with the reference for gaps of up to 62 bits."""
    scale = min(numel, 4000) if clustered else numel
    positions = sorted({int(place * scale) for place in places})
    values = torch.randn(len(positions))
    where, sent = torch.tensor(positions), torch.empty(len(positions))
    buffer = torch.empty(100_000, dtype=torch.uint8)
    writer = _native.Writer(buffer.data_ptr(), len(buffer))
    entries = (0, where.data_ptr(), values.data_ptr(), len(values), numel, sent.data_ptr(), 0, False, 0)
    count = writer.add_entries(entries, None, 0)
    assert count == len(values) and torch.equal(sent, values)
    frame = buffer[: writer.finish(0, False)]
    part = reference.Part(0, reference.FLOAT32, numel, positions, values)
    assert frame.numpy().tobytes() == reference.write_frame([part])
    reader = tw.codec.FrameReader(frame, [numel])
    there, back = reader.entries(reader.sections[0])
    assert torch.equal(there, where) and torch.equal(back, values)


@settings(max_examples=200)
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_half_precision_rounds_as_in_torch(x: float) -> None:
    g = {"w": torch.tensor([x])}
    for values, dtype in [(tw.Float16(), torch.float16), (tw.BFloat16(), torch.bfloat16)]:
        most = torch.finfo(dtype).max
        sent = tw.Codec.decode(tw.Codec(0.5, values).encode(g), g)["w"]
        assert torch.equal(sent, g["w"].clamp(-most, most).to(dtype).float())


def test_every_half_is_read_as_in_torch() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, avx2 in [(d, a) for d in (torch.float16, torch.bfloat16) for a in (True, False)]:
        _native.avx2(avx2)
        x = halves.view(dtype)
        x = x[x.isfinite()]
        g = {"w": x}
        codec = tw.Codec(tw.Threshold(0.0), tw.Float32(), tw.NoFeedback())
        assert torch.equal(tw.Codec.decode(codec.encode(g), g)["w"], x.float())


def test_checksum() -> None:
    data = bytearray(b"123456789")
    view = torch.frombuffer(data, dtype=torch.uint8)
    assert _native.crc32c(view.data_ptr(), 9) == 0xE3069283 == reference.crc32c(bytes(data))
    long = torch.arange(0, 1021, dtype=torch.int32).to(torch.uint8)
    assert _native.crc32c(long.data_ptr(), len(long)) == reference.crc32c(long.numpy().tobytes())
