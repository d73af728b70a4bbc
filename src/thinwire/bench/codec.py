"""The codec's rows: each way of compressing, timed against a copy of the same tensor in the same moments.

Residuals are in a steady state: every repetition starts from the residual that some steps at this density left.
Everything that is timed takes turns with a copy, in several sittings a while apart, and the ratio is of the bests of
both: they share the machine's moods, and a bad one does not last for all sittings.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import _native
from thinwire.bench.rivals import Way, sparsify_gradients, torch_sampled, torch_topk
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.codec.selection import Dynamic, Percentile, RandomK, Selection, StdDev, Threshold, TopK
from thinwire.codec.values import Bits, Values
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Affine

DENSITIES = (0.1, 0.01, 0.001)
SITTINGS = 2


class Time(NamedTuple):
    """Seconds of the best run, and of the best copy of the tensor next to it."""

    best: float
    copy: float

    def and_then(self, other: "Time") -> "Time":
        """The bests of two sittings."""
        return Time(min(self.best, other.best), min(self.copy, other.copy))


@dataclass(frozen=True)
class Row:
    """One line of the table; times are None where only the size is of interest."""

    name: str
    n: int
    density: float
    ratio_to_copy: float | None
    bits_per_element: float
    bits_per_index: float
    entropy_bits: float
    milliseconds: float | None
    kept: float  # the density that came out


def entropy_bits(density: float) -> float:
    """Bits that the position of one kept entry costs at least, at uniformly random positions."""
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


class Stage:
    """A gradient in rotation, a steady residual, and a clock that runs next to a copy."""

    def __init__(self, n: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(n)
        self.n, self.seconds = n, seconds
        self.gradients = [torch.randn(n, generator=generator) for _ in range(2)]
        self.residual = torch.zeros(n)
        self.saved = torch.zeros(n)
        self.copied = torch.empty(n)

    def settle(self, density: float) -> None:
        """The residual that a few steps leave."""
        codec = Codec(TopK(density), Bits(8))
        for step in range(4):
            codec.encode({"w": self.gradients[step % 2]})
        self.saved.copy_(codec.held("w")["residual"])

    def time(self, run: Callable[[], object], reset: Callable[[], object]) -> Time:
        """Best of several runs, and of as many copies of the gradient, in turns."""
        best, copy, spent, turns = math.inf, math.inf, 0.0, 0
        while turns < 5 or (spent < self.seconds and turns < 40):
            reset()
            copy = min(copy, _timed(lambda: self.copied.copy_(self.gradients[0])))
            took = _timed(run)
            best, spent, turns = min(best, took), spent + took + copy, turns + 1
        return Time(best, copy)


def _timed(run: Callable[[], object]) -> float:
    """Seconds of this thread on a processor: while other programs have their turn, the clock stands still."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def selections(stage: Stage, density: float) -> dict[str, Selection]:
    """Every selection with the parameters that give this density on the stage's accumulated gradient."""
    x = stage.saved + stage.gradients[0]
    value = _native.select([(x.data_ptr(), 0, 0, 1.0, stage.n)], int(density * stage.n))[0]
    return {
        "TopK": TopK(density),
        "TopK exact": TopK(density, exact=True),
        "Percentile": Percentile(100.0 * (1.0 - density)),
        "Threshold": Threshold(value),
        "StdDev": StdDev(value / float(x.double().std(correction=0))),
        "Dynamic": Dynamic(density, density),
        "RandomK": RandomK(density),
        # The whole rule is computed; its bounds then pin the density that the row is about.
        "Adaptive": Adaptive(Affine(0.01, 1e8), floor=density, start=density, ceiling=density),
    }


def rivals(stage: Stage, density: float) -> dict[str, Way]:
    gradient, residual = stage.gradients[0], stage.residual
    return {
        "SparsifyGradients' way": sparsify_gradients(gradient, density),
        "torch.topk": torch_topk(gradient, residual, density),
        "torch sampled threshold": torch_sampled(gradient, residual, density),
    }


class Entrant(NamedTuple):
    """One way of compressing: runs again and again, and knows its row for a time."""

    run: Callable[[], object]
    reset: Callable[[], object]
    row: Callable[[Time], Row]


def rival(stage: Stage, density: float, name: str, way: Way) -> Entrant:
    """One of the other ways; positions take what their integers take."""
    stage.residual.copy_(stage.saved)
    size, kept = way()

    def row(took: Time) -> Row:
        return _row(name, stage.n, density, took, 8.0 * size, 8.0 * size - 32.0 * kept, kept)

    return Entrant(way, lambda: stage.residual.copy_(stage.saved), row)


def encoder(stage: Stage, density: float, name: str, selection: Selection) -> tuple[Entrant, list[Frame]]:
    """thinwire's encode with `Residual` and `Bits(8)`, check and residual included; and the frames that it makes."""
    codec = Codec(selection, Bits(8))
    codec.encode({"w": stage.gradients[1]})
    residual = codec.held("w")["residual"]
    frames: list[Frame] = []

    def run() -> None:
        frames[:] = [codec.encode({"w": stage.gradients[0]})]

    def row(took: Time) -> Row:
        return frame_row(f"encode {name}", stage.n, density, frames[0], Bits(8), took)

    return Entrant(run, lambda: residual.copy_(stage.saved), row), frames


def decoder(stage: Stage, density: float, frames: list[Frame]) -> Entrant:
    """Validating a frame and adding it to a gradient."""
    out = torch.zeros(stage.n)

    def run() -> None:
        FrameReader(frames[0], [stage.n]).add_to([out], 0.5)

    return Entrant(
        run, lambda: None, lambda took: frame_row("decode and add", stage.n, density, frames[0], Bits(8), took)
    )


def frame_row(name: str, n: int, density: float, frame: Frame, values: Values, took: Time | None) -> Row:
    """The bits of a frame of one tensor: what is neither value nor scale counts as index."""
    (count,) = frame.counts
    full, rest = divmod(count, _native.BLOCK)
    stored = full * _native.block_bytes(values.code, _native.BLOCK)
    stored += _native.block_bytes(values.code, rest) if rest else 0
    return _row(name, n, density, took, 8.0 * len(frame), 8.0 * (len(frame) - stored), count)


def _row(name: str, n: int, density: float, took: Time | None, bits: float, index: float, kept: int) -> Row:
    each, share = index / max(kept, 1), kept / n
    ratio, milliseconds = (took.best / took.copy, 1e3 * took.best) if took is not None else (None, None)
    return Row(name, n, density, ratio, bits / n, each, entropy_bits(share), milliseconds, share)


def two_bit_row(gradient: Tensor, density: float) -> Row:
    """The size of a frame with two bits a value."""
    frame = Codec(TopK(density, exact=True), Bits(2)).encode({"w": gradient})
    return frame_row("encode TopK exact, 2 bits", gradient.numel(), density, frame, Bits(2), None)


def steps_of(n: int) -> int:
    """How often something is timed, for the progress bar."""
    return len(DENSITIES) * SITTINGS * 12


def rows_of(n: int, seconds: float, advance: Callable[[float], None] = lambda density: None) -> Iterator[Row]:
    """All rows of one size; `advance` hears of each sitting's density when a way has been timed in it."""
    stage = Stage(n, seconds / SITTINGS)
    for density in DENSITIES:
        stage.settle(density)
        entrants = _entrants(stage, density)
        times: list[Time | None] = [None] * len(entrants)
        for _ in range(SITTINGS):
            for i, entrant in enumerate(entrants):
                took, before = stage.time(entrant.run, entrant.reset), times[i]
                times[i] = took if before is None else before.and_then(took)
                advance(density)
        for entrant, best in zip(entrants, times, strict=True):
            assert best is not None
            yield entrant.row(best)
    yield two_bit_row(stage.gradients[0], 0.01)


def _entrants(stage: Stage, density: float) -> list[Entrant]:
    entrants = [rival(stage, density, name, way) for name, way in rivals(stage, density).items()]
    sent: list[Frame] = []
    for name, selection in selections(stage, density).items():
        entrant, frames = encoder(stage, density, name, selection)
        entrants.append(entrant)
        sent = frames if name == "TopK exact" else sent
    return [*entrants, decoder(stage, density, sent)]
