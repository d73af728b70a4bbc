"""Frames that are read together, two in turns, give the same sums and errors as when they are read alone."""

import random
from itertools import accumulate

import pytest
import torch

import thinwire as tw
import thinwire.codec
from tests.codec import reference
from tests.codec.codec_cases import VALUES
from tests.codec.reference import Part
from tests.codec.test_hostile import HOSTILE, NUMELS, fixed, small_frame
from thinwire.codec.frame import Frames, sum_frames
from thinwire.codec.selection import Selection

SIZES = [30_000, 300, 0, 1]

SELECTIONS: list[Selection] = [
    tw.TopK(1.0),  # runs
    tw.TopK(0.9, exact=True),
    tw.TopK(0.1),
    tw.TopK(0.01),
    tw.TopK(0.0003, exact=True),
    tw.RandomK(0.05, seed=5),  # strata
    tw.Rotate(0.3),  # windows
    tw.Threshold(1e9),  # nothing of the large tensor
]


def large_frame(selection: Selection, seed: int) -> bytes:
    g = torch.Generator().manual_seed(seed)
    x = {str(i): torch.randn(n, generator=g) ** 3 for i, n in enumerate(SIZES)}
    if seed % 2:
        x["0"][5000:15_000] = 1e4 + x["0"][5000:15_000].abs()  # a dense region among sparse ones
    return bytes(tw.Codec(selection, VALUES[seed % len(VALUES)], min_numel=64).encode(x).tobytes())


def frames_of_all_kinds() -> list[bytes]:
    frames = [large_frame(selection, seed) for seed, selection in enumerate(SELECTIONS * 3)]
    return [*frames, reference.write_frame([]), reference.write_frame([], flags=1)]


def tensor(data: bytes) -> torch.Tensor:
    return tw.codec.Frame.from_bytes(data).data


def fault(data: bytes, numels: list[int]) -> str | None:
    """Return the error of the frame when it is read alone."""
    try:
        tw.codec.FrameReader(tensor(data), numels)
    except tw.FrameError as error:
        return str(error)
    return None


def test_sums_are_those_of_the_frames_one_by_one() -> None:
    kinds = frames_of_all_kinds()
    draw = random.Random(1)
    together = Frames()  # one object for all steps, as in an exchange
    for count in [0, 1, 2, 3, 5, 14, 40] * 3:
        frames = [tensor(draw.choice(kinds)) for _ in range(count)]
        together.read(frames, [SIZES])
        readers = [tw.codec.FrameReader(frame, SIZES) for frame in frames]
        sums, expected = ([torch.full((n,), 7.0) for n in SIZES] for _ in range(2))
        together.sum_to(sums)
        sum_frames(readers, expected)
        assert all(map(torch.equal, sums, expected))
        assert together.lengths == [reader.length for reader in readers]
        assert together.non_finite == [i for i, reader in enumerate(readers) if reader.non_finite]


def test_the_error_is_that_of_the_first_bad_frame() -> None:
    draw = random.Random(2)
    good = [(frame, SIZES) for frame in frames_of_all_kinds()] + [(small_frame(), NUMELS)]
    bad = [(frame, NUMELS) for frame, _ in HOSTILE.values()]
    for frame, numels in good * 12:
        if len(frame) > 24:  # late in a large frame, while later frames are bad from their first byte on
            torn = bytearray(frame[: draw.randrange(24, len(frame))] if draw.random() < 0.4 else frame)
            for _ in range(draw.randrange(1, 4)):
                torn[draw.randrange(min(24, len(torn) - 1), len(torn))] ^= 1 << draw.randrange(8)
            bad.append((fixed(bytes(torn)), numels))
    together, seen = Frames(), set()
    for _ in range(600):
        picked = [draw.choice(bad if draw.random() < 0.3 else good) for _ in range(draw.randrange(1, 9))]
        expected = next(filter(None, (fault(*each) for each in picked)), None)
        messages, sizes = [tensor(frame) for frame, _ in picked], [numels for _, numels in picked]
        if expected is None:
            together.read(messages, sizes)
            continue
        with pytest.raises(tw.FrameError) as caught:
            together.read(messages, sizes)
        assert str(caught.value) == expected
        seen.add(expected)
    assert len(seen) > 30


def thinner_and_thinner(numel: int) -> list[Part]:
    """Gaps of every length, some far longer than the others of their block."""
    draw, parts = random.Random(numel), []
    for bits in range(numel.bit_length() - 8):
        gaps = [draw.randrange(2**bits) * (30 if draw.random() < 0.02 else 1) for _ in range(draw.randrange(1, 700))]
        ends = [end + i for i, end in enumerate(accumulate(gaps))]
        positions = [end for end in ends if end < numel] or [numel - 1]
        parts.append(Part(0, reference.SIGN, numel, positions, torch.ones(len(positions))))
    return parts


@pytest.mark.parametrize("numel", [2_000_000, 2**32 - 1, 2**32, 2**50])
def test_gaps_of_every_length(numel: int) -> None:
    parts = thinner_and_thinner(numel)
    frames = [tensor(reference.write_frame([part])) for part in parts]
    for frame, part in zip(frames, parts, strict=True):
        reader = tw.codec.FrameReader(frame, [numel])
        assert reader.entries(reader.sections[0])[0].tolist() == part.positions
    together = Frames()
    together.read(frames, [[numel]])
    if numel < 2**32 - 1:  # small enough for a sum
        found, expected = torch.empty(numel), torch.zeros(numel)
        together.sum_to([found])
        for part in parts:
            expected[part.positions] += 1.0
        assert torch.equal(found, expected)
