"""The codec's rows: each way of compressing, timed against a copy of the same tensor in the same moments.

Residuals are in a steady state: every repetition starts from the residual that some steps at this density left.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

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
    """One line of the table; bits are of what travels, None where nothing does."""

    name: str
    n: int
    density: float
    ratio_to_copy: float | None
    bits_per_element: float | None = None
    bits_per_index: float | None = None
    entropy_bits: float | None = None
    milliseconds: float | None = None
    kept: float | None = None  # the density that came out

    def plain(self) -> dict[str, object]:
        return asdict(self)


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

    def against_copy(self, run: Callable[[], object], reset: Callable[[], object]) -> tuple[float, float]:
        """Best seconds of `run`, and their ratio to the best copy; both take turns."""
        best, copy, spent, turns = math.inf, math.inf, 0.0, 0
        while turns < 2 or (spent < self.seconds and turns < 40):
            reset()
            copy = min(copy, _timed(lambda: self.copied.copy_(self.gradients[0])))
            took = _timed(run)
            best, spent, turns = min(best, took), spent + took + copy, turns + 1
        return best, best / copy


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


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
    seconds, ratio = stage.against_copy(way, lambda: stage.residual.copy_(stage.saved))
    bits = 8.0 * size / stage.n
    return Row(
        name,
        stage.n,
        density,
        ratio,
        bits,
        8.0 * size / kept - 32.0,
        entropy_bits(kept / stage.n),
        1e3 * seconds,
        kept / stage.n,
    )


def encode_row(stage: Stage, density: float, name: str, selection: Selection) -> tuple[Row, Frame]:
    """Time thinwire's encode with `Residual` and `Bits(8)`, check and residual included."""
    codec = Codec(selection, Bits(8))
    codec.encode({"w": stage.gradients[1]})
    residual = codec.held("w")["residual"]
    frames: list[Frame] = []

    def run() -> None:
        frames[:] = [codec.encode({"w": stage.gradients[0]})]

    seconds, ratio = stage.against_copy(run, lambda: residual.copy_(stage.saved))
    row = size_row(f"encode {name}", stage.n, density, frames[0], Bits(8))
    return Row(**{**row.plain(), "ratio_to_copy": ratio, "milliseconds": 1e3 * seconds}), frames[0]  # type: ignore[arg-type]


def decode_row(stage: Stage, density: float, frame: Frame) -> Row:
    """Time validating a frame and adding it to a gradient."""
    out = torch.zeros(stage.n)

    def run() -> None:
        FrameReader(frame, [stage.n]).add_to([out], 0.5)

    seconds, ratio = stage.against_copy(run, lambda: None)
    row = size_row("decode and add", stage.n, density, frame, Bits(8))
    return Row(**{**row.plain(), "ratio_to_copy": ratio, "milliseconds": 1e3 * seconds})  # type: ignore[arg-type]


def size_row(name: str, n: int, density: float, frame: Frame, values: Values) -> Row:
    """The bits of a frame of one tensor: what is neither value nor scale counts as index."""
    (count,) = frame.counts
    full, rest = divmod(count, _native.BLOCK)
    stored = full * _native.block_bytes(values.code, _native.BLOCK)
    stored += _native.block_bytes(values.code, rest) if rest else 0
    index = 8.0 * (len(frame) - stored) / max(count, 1)
    return Row(name, n, density, None, 8.0 * len(frame) / n, index, entropy_bits(count / n), None, count / n)


def two_bit_row(gradient: Tensor, density: float) -> Row:
    """The size of a frame with two bits a value."""
    frame = Codec(TopK(density, exact=True), Bits(2)).encode({"w": gradient})
    return size_row("encode TopK exact, 2 bits", gradient.numel(), density, frame, Bits(2))


def steps_of(n: int) -> int:
    """How many rows a size has, for the progress bar."""
    return len(DENSITIES) * 11 + 1


def rows_of(n: int, seconds: float) -> Iterator[Row]:
    """All rows of one size, as they are measured."""
    stage = Stage(n, seconds)
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
