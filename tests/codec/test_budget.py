"""Frames never exceed their budget, bounds hold, and both empty and huge tensors are encoded."""

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
import thinwire.codec
from tests.codec.codec_cases import EXACT, SELECTIONS, VALUES, gradients, positions_of, quick, sizes
from thinwire import _native
from thinwire.codec.codec import Kernels
from thinwire.codec.selection import Selection
from thinwire.codec.values import Values


@quick
@given(
    selection=st.sampled_from(SELECTIONS),
    values=st.sampled_from(VALUES),
    shapes=sizes,
    kind=st.integers(0, 5),
    seed=st.integers(0, 2**31),
    budget=st.one_of(st.integers(24, 300), st.integers(24, 20_000)),
    kernels=st.sampled_from(["native", "torch"]),
)
def test_a_budget_is_never_exceeded_and_nothing_is_lost(
    selection: Selection, values: Values, shapes: list[int], kind: int, seed: int, budget: int, kernels: Kernels
) -> None:
    codec = tw.Codec(selection, values, min_numel=100, kernels=kernels)
    kept = {f"t{i}": torch.zeros(n) for i, n in enumerate(shapes)}
    for step in range(2):
        g = gradients(shapes, torch.float32, kind, seed + step)
        frame = codec.encode(g, budget=budget)
        assert len(frame) <= budget
        sent = tw.Codec.decode(frame, g)
        assert sum(frame.counts) == sum(len(p) for p in positions_of(frame, shapes).values())
        for name in g:
            now = codec.residuals(name)["residual"]
            assert torch.equal(kept[name] + g[name] - sent[name], now)
            kept[name] = now.clone()


@quick
@given(
    selection=st.sampled_from(EXACT),
    values=st.sampled_from(VALUES),
    shapes=sizes,
    kind=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_a_frame_fits_its_bound(selection: Selection, values: Values, shapes: list[int], kind: int, seed: int) -> None:
    g = gradients(shapes, torch.float32, kind, seed)
    codec = tw.Codec(selection, values, tw.NoFeedback(), min_numel=100)
    frame = codec.encode(g, step=0)
    bound = codec.frame_bound(shapes, frame.counts)
    assert len(frame) <= bound <= codec.frame_bound(shapes)
    again = codec.encode(g, step=0, budget=bound)
    assert again.tobytes() == frame.tobytes()  # with a budget of the bound, everything fits


@quick
@given(
    n=st.integers(1, 2**40),
    gaps=st.lists(st.floats(0, 1), min_size=1, max_size=1500),
    power=st.sampled_from([1, 4, 30]),
)
def test_the_bound_holds_for_uneven_gaps(n: int, gaps: list[float], power: int) -> None:
    positions = torch.tensor(sorted({int(g**power * (n - 1)) for g in gaps}))
    count, values = len(positions), torch.ones(len(positions))
    codec = tw.Codec(0.5, tw.Float32(), min_numel=0)
    buffer = torch.empty(codec.frame_bound([n], [count]), dtype=torch.uint8)
    writer = _native.Writer(buffer.data_ptr(), len(buffer))
    entries = (0, positions.data_ptr(), values.data_ptr(), count, n, values.data_ptr(), 0, False, 0)
    assert writer.add_entries(entries, None, 0) == count


def test_a_tight_budget_is_used_up() -> None:
    x = {"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))}
    whole = tw.Codec(0.1, tw.Bits(8)).encode(x)
    for budget in (100, 400, 1000, 5000, 10_000):
        frame = tw.Codec(0.1, tw.Bits(8)).encode(x, budget=budget)
        assert budget * 0.45 < len(frame) <= budget < len(whole)
        assert frame.counts[0] > 0


def test_small_tensors_find_room_before_large_ones() -> None:
    g = {"w": torch.randn(50_000), "b": torch.randn(100)}
    frame = tw.Codec(0.5, tw.Bits(8)).encode(g, budget=400)
    assert frame.counts[1] == 100


@pytest.mark.parametrize("budget", [-1, 0, 23])
def test_an_impossible_budget_changes_nothing(budget: int) -> None:
    codec = tw.Codec(0.1, feedback=tw.MomentumCorrection())
    codec.encode({"w": torch.ones(2000)})
    before = codec.residuals("w")["momentum"].clone()
    with pytest.raises(ValueError, match="budget"):
        codec.encode({"w": torch.ones(2000)}, budget=budget)
    assert codec.step == 1 and torch.equal(codec.residuals("w")["momentum"], before)


def test_empty_frames() -> None:
    codec = tw.Codec(0.1)
    assert len(codec.encode({})) == 24
    assert tw.Codec.decode(codec.encode({}), {}) == {}
    frame = codec.encode({"none": torch.empty(0), "zero": torch.zeros(5000), "one": torch.tensor(3.0)})
    assert frame.counts == (0, 0, 1)
    like = {"none": torch.empty(0), "zero": torch.zeros(5000), "one": torch.tensor(0.0)}
    sent = tw.Codec.decode(frame, like)
    assert sent["one"] == 3.0 and sent["one"].shape == () and not sent["zero"].any()


def test_a_tensor_beyond_two_to_the_31() -> None:
    n = 2**31 + 1000
    # Mapped memory that was never written takes no space: all its pages are the same page of zeros.
    x = torch.frombuffer(mmap.mmap(-1, 2 * n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.bfloat16)
    there = torch.tensor([0, 5, 2**31 - 1, 2**31, n - 1])
    x[there] = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0], dtype=torch.bfloat16)
    frame = tw.Codec(tw.Threshold(0.0), tw.Bits(8), tw.NoFeedback()).encode({"w": x}, budget=10_000)
    assert frame.counts == (5,) and len(frame) < 100
    reader = tw.codec.FrameReader(frame, [n])
    positions, values = reader.entries(reader.sections[0])
    assert torch.equal(positions, there)
    assert torch.allclose(values, x[there].float(), rtol=0.02)


def test_positions_of_64_bits_are_added_in_the_right_place() -> None:
    # The tensor is said to have 2^33 elements; only some of the first ones are sent.
    positions, values = torch.tensor([3, 70, 900]), torch.tensor([1.0, 2.0, 3.0])
    buffer, sent, n = torch.empty(1000, dtype=torch.uint8), torch.empty(3), 2**33
    writer = _native.Writer(buffer.data_ptr(), 1000)
    writer.add_entries((0, positions.data_ptr(), values.data_ptr(), 3, n, sent.data_ptr(), 0, False, 0), None, 0)
    data = buffer[: writer.finish(0, False)].clone()
    reader = _native.Reader(data.data_ptr(), len(data), [n], False)
    out = torch.zeros(1000)
    reader.add(reader.sections[0], out.data_ptr(), 2.0)
    assert out[positions].tolist() == [2.0, 4.0, 6.0] and out.count_nonzero() == 3
