"""The codec's rows: each way of compressing, timed against a copy of the same tensor in the same moments.

Residuals are in a steady state: every repetition starts from the residual that some steps at this density left.
Copies take turns with everything that is timed, and all ratios of a size are to the best of its copies: noise can only
make thinwire look worse.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import _native
from thinwire.bench.rivals import Way, sparsify_gradients, torch_sampled, torch_topk
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.codec.selection import Dynamic, Percentile, RandomK, Selection, StdDev, Threshold, TopK
from thinwire.codec.values import Bits, Values

DENSITIES = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Row:
    """One line of the table; times and bits are None where there are none."""

    name: str
    n: int
    density: float
    milliseconds: float | None
    bits_per_element: float | None
    bits_per_index: float | None
    entropy_bits: float | None
    kept: float  # the density that came out
    ratio_to_copy: float | None = None  # known when all copies are done

    def against(self, copy: float) -> "Row":
        """The same row with its ratio to a copy of so many milliseconds."""
        return self if self.milliseconds is None else replace(self, ratio_to_copy=self.milliseconds / copy)


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
        self.copy = math.inf  # seconds of the best copy so far

    def settle(self, density: float) -> None:
        """The residual that a few steps leave."""
        codec = Codec(TopK(density), Bits(8))
        for step in range(4):
            codec.encode({"w": self.gradients[step % 2]})
        self.saved.copy_(codec.held("w")["residual"])

    def best_of_several(self, run: Callable[[], object], reset: Callable[[], object]) -> float:
        """Best milliseconds of `run`; a copy of the gradient takes turns with it."""
        best, spent, turns = math.inf, 0.0, 0
        while turns < 3 or (spent < self.seconds and turns < 40):
            reset()
            self.copy = min(self.copy, _timed(lambda: self.copied.copy_(self.gradients[0])))
            took = _timed(run)
            best, spent, turns = min(best, took), spent + took + self.copy, turns + 1
        return 1e3 * best


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
    }


def rivals(stage: Stage, density: float) -> dict[str, Way]:
    gradient, residual = stage.gradients[0], stage.residual
    return {
        "SparsifyGradients' way": sparsify_gradients(gradient, density),
        "torch.topk": torch_topk(gradient, residual, density),
        "torch sampled threshold": torch_sampled(gradient, residual, density),
    }


def rival_row(stage: Stage, density: float, name: str, way: Way) -> Row:
    """Time one of the other ways; positions take what their integers take."""
    size, kept = way()
    took = stage.best_of_several(way, lambda: stage.residual.copy_(stage.saved))
    share = kept / stage.n
    return Row(name, stage.n, density, took, 8.0 * size / stage.n, 8.0 * size / kept - 32.0, entropy_bits(share), share)


def encode_row(stage: Stage, density: float, name: str, selection: Selection) -> tuple[Row, Frame]:
    """Time thinwire's encode with `Residual` and `Bits(8)`, check and residual included."""
    codec = Codec(selection, Bits(8))
    codec.encode({"w": stage.gradients[1]})
    residual = codec.held("w")["residual"]
    frames: list[Frame] = []

    def run() -> None:
        frames[:] = [codec.encode({"w": stage.gradients[0]})]

    took = stage.best_of_several(run, lambda: residual.copy_(stage.saved))
    return frame_row(f"encode {name}", stage.n, density, frames[0], Bits(8), took), frames[0]


def decode_row(stage: Stage, density: float, frame: Frame) -> Row:
    """Time validating a frame and adding it to a gradient."""
    out = torch.zeros(stage.n)

    def run() -> None:
        FrameReader(frame, [stage.n]).add_to([out], 0.5)

    return frame_row("decode and add", stage.n, density, frame, Bits(8), stage.best_of_several(run, lambda: None))


def frame_row(name: str, n: int, density: float, frame: Frame, values: Values, took: float | None) -> Row:
    """The bits of a frame of one tensor: what is neither value nor scale counts as index."""
    (count,) = frame.counts
    full, rest = divmod(count, _native.BLOCK)
    stored = full * _native.block_bytes(values.code, _native.BLOCK)
    stored += _native.block_bytes(values.code, rest) if rest else 0
    index = 8.0 * (len(frame) - stored) / max(count, 1)
    return Row(name, n, density, took, 8.0 * len(frame) / n, index, entropy_bits(count / n), count / n)


def two_bit_row(gradient: Tensor, density: float) -> Row:
    """The size of a frame with two bits a value."""
    frame = Codec(TopK(density, exact=True), Bits(2)).encode({"w": gradient})
    return frame_row("encode TopK exact, 2 bits", gradient.numel(), density, frame, Bits(2), None)


def steps_of(n: int) -> int:
    """How many rows a size has, for the progress bar."""
    return len(DENSITIES) * 11 + 1


def rows_of(n: int, seconds: float, done: Callable[[Row], None]) -> list[Row]:
    """All rows of one size; `done` hears of each when it is measured."""
    stage = Stage(n, seconds)
    rows = []
    for row in _measured(stage):
        done(row)
        rows.append(row)
    return [row.against(1e3 * stage.copy) for row in rows]


def _measured(stage: Stage) -> Iterator[Row]:
    for density in DENSITIES:
        stage.settle(density)
        for name, way in rivals(stage, density).items():
            stage.residual.copy_(stage.saved)
            yield rival_row(stage, density, name, way)
        sent = None
        for name, selection in selections(stage, density).items():
            row, frame = encode_row(stage, density, name, selection)
            sent = frame if name == "TopK exact" else sent
            yield row
        assert sent is not None
        yield decode_row(stage, density, sent)
    yield two_bit_row(stage.gradients[0], 0.01)
