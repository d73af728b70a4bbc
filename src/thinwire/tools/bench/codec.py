"""Runs the codec's benchmark and shows it: progress on stderr, tables on stdout, rows and bars as JSON."""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.codec.selection import Dynamic, Percentile, RandomK, Selection, StdDev, Threshold, TopK
from thinwire.codec.values import Bits, Values
from thinwire.tools.options import verdict, write_json
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Affine

Way = Callable[[], tuple[int, int]]  # bytes that travel and entries among them


def sparsify_gradients(gradient: Tensor, density: float) -> Way:
    """numpy's percentile and scipy's compressed rows, as in SparsifyGradients; nothing is held back."""
    from scipy.sparse import csr_matrix

    columns = 384  # of the model's largest layer; the last elements that fill no row are left out
    rows = gradient[: gradient.numel() // columns * columns].numpy().reshape(-1, columns)

    def encode() -> tuple[int, int]:
        magnitudes = np.abs(rows)
        kept = np.where(magnitudes > np.percentile(magnitudes, 100.0 * (1.0 - density)), rows, np.float32(0.0))
        matrix = csr_matrix(kept)
        return matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes, matrix.nnz

    return encode


def torch_topk(gradient: Tensor, residual: Tensor, density: float) -> Way:
    """torch.topk over all magnitudes, gather, and the residual's update."""
    k = max(1, int(density * gradient.numel()))

    def encode() -> tuple[int, int]:
        residual.add_(gradient)
        indices = residual.abs().topk(k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        return 12 * len(values), len(values)

    return encode


def torch_sampled(gradient: Tensor, residual: Tensor, density: float) -> Way:
    """A threshold from every 100th magnitude, compare, gather, and the residual's update."""

    def encode() -> tuple[int, int]:
        residual.add_(gradient)
        sample = residual[::100].abs()
        threshold = sample.topk(max(1, int(density * len(sample)))).values[-1]
        indices = (residual.abs() > threshold).nonzero().flatten()
        values = residual[indices]
        residual[indices] = 0.0
        return 12 * len(values), len(values)

    return encode


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
        self.saved.copy_(codec.residuals("w")["residual"])

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
    """thinwire's encode with `ErrorFeedback` and `Bits(8)`, all checks included; and the frames that it makes."""
    codec = Codec(selection, Bits(8))
    codec.encode({"w": stage.gradients[1]})
    residual = codec.residuals("w")["residual"]
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


BARS_FOR = 25_000_000  # elements


@dataclass(frozen=True)
class Bar:
    """A limit and what was measured (None: it could not be); `most` tells the direction."""

    what: str
    limit: float
    measured: float | None
    unit: str
    most: bool = True

    @property
    def passed(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.limit if self.most else self.measured >= self.limit


def from_rows(rows: Iterable[Row], n: int) -> list[Bar]:
    """Bars on speed and size at 1 % (and where said at 10 % and 0.1 %)."""
    found = {(row.name, row.density): row for row in rows if row.n == n}

    def ratio(name: str, density: float = 0.01) -> float:
        return found[name, density].ratio_to_copy or 0.0

    def took(name: str) -> float:
        return found[name, 0.01].milliseconds or math.inf

    def smaller(name: str, density: float) -> float:
        return 32.0 / found[name, density].bits_per_element

    bars = [
        Bar("encode, sampled TopK", 2.5, ratio("encode TopK"), "x the copy"),
        Bar("the torch.topk way against it", 40.0, took("torch.topk") / took("encode TopK"), "x slower", most=False),
        Bar("encode, exact TopK", 6.0, ratio("encode TopK exact"), "x the copy"),
        Bar("encode, StdDev", 3.5, ratio("encode StdDev"), "x the copy"),
        Bar("encode, Dynamic", 3.5, ratio("encode Dynamic"), "x the copy"),
        Bar("encode, Adaptive", 1.5, ratio("encode Adaptive") / ratio("encode TopK"), "x sampled TopK"),
        Bar("decode and add one frame", 0.35, ratio("decode and add"), "x the copy"),
    ]
    for density in (0.1, 0.01, 0.001):
        row = found["encode TopK exact", density]
        bars.append(Bar(f"index bits at {density:.1%}", 1.015, row.bits_per_index / row.entropy_bits, "x the entropy"))
    sizes = [
        ("encode TopK exact", 0.1, 24.0, "10 %, 8 bits"),
        ("encode TopK exact", 0.01, 195.0, "1 %, 8 bits"),
        ("encode TopK exact, 2 bits", 0.01, 305.0, "1 %, 2 bits"),
        ("encode TopK exact", 0.001, 1550.0, "0.1 %, 8 bits"),
    ]
    for name, density, limit, words in sizes:
        bars.append(Bar(f"float32 against the frame, {words}", limit, smaller(name, density), "x larger", most=False))
    return bars


def _laws() -> dict[str, Callable[[int, torch.Generator], Tensor]]:
    return {
        "Gaussian": lambda n, g: torch.randn(n, generator=g),
        "Laplace": lambda n, g: -torch.rand(n, generator=g).clamp_(1e-7).log(),
        "Pareto": lambda n, g: torch.rand(n, generator=g).clamp_(1e-7).pow(-1 / 1.2),
    }


def density_bars(n: int) -> list[Bar]:
    """How far sampled TopK is from the density asked for, at its worst over densities and seeds."""
    bars = []
    for place, (law, make) in enumerate(_laws().items()):
        worst = 0.0
        for seed in range(2):
            x = make(n, torch.Generator().manual_seed(10 * place + seed))
            for density in (0.1, 0.01, 0.001):
                (count,) = Codec(TopK(density), Bits(8)).encode({"w": x}, step=seed).counts
                worst = max(worst, abs(count / (density * n) - 1.0))
        bars.append(Bar(f"sampled TopK's density, {law}", 10.0, 100.0 * worst, "% off at the worst"))
    return bars


# Run in a fresh process: the peak of resident memory during one encode or decode, less what was there before and the
# frame. Writing 5 to clear_refs resets the peak.
_PEAK = """
import sys, torch
from thinwire.codec.codec import Codec
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import TopK
torch.set_num_threads(1)
n, exact = int(sys.argv[1]), sys.argv[2] == "exact"
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
codec = Codec(TopK(0.01, exact=exact))
small = torch.randn(1000000)
FrameReader(codec.encode({"small": small}), [1000000]).add_to([small])
gradient, out = torch.randn(n), torch.ones(n)
codec.load_state_dict({"version": 2, "step": 0, "selection": {}, "residuals": {"w": {"residual": torch.randn(n)}}})
def beyond(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    kept = work()
    return status("VmHWM") - before, kept
peak, frame = beyond(lambda: codec.encode({"w": gradient}))
decode, _ = beyond(lambda: FrameReader(frame, [n]).add_to([out]))
print(peak - len(frame), decode)
"""


def memory_bars(n: int) -> list[Bar]:
    """Peak memory beyond residual and frame, as a share of the tensor; not measured where the process fails.

    It does where Linux' /proc is missing, or memory for the tensors.
    """
    bars = []
    for way, words in (("sampled", "encode, sampled TopK"), ("exact", "encode, exact TopK")):
        done = subprocess.run([sys.executable, "-c", _PEAK, str(n), way], capture_output=True, text=True)
        found = [100.0 * max(0, int(part)) / (4 * n) for part in done.stdout.split()] if done.returncode == 0 else []
        encode, decode = found or (None, None)
        bars.append(Bar(f"memory beyond residual and frame, {words}", 5.0, encode, "% of the tensor"))
        if way == "sampled":
            bars.append(Bar("memory beyond the frame, decode", 5.0, decode, "% of the tensor"))
    return bars


def run(sizes: list[int], file: Path | None, seconds: float) -> int:
    """Measure all rows and bars; `seconds` is spent on each row. Returns 1 if a bar was missed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, bars = _measure(sizes, seconds)
    finally:
        torch.set_num_threads(threads)
    console = Console() if Console().is_terminal else Console(width=120)
    for n in sizes:
        console.print(_table([row for row in rows if row.n == n], n))
    console.print(_bar_table(bars, max(sizes)))
    # The bars are set for one size; at another the figures stand without a verdict.
    judged = max(sizes) == BARS_FOR
    figures = [{**asdict(bar), "passed": bar.passed if judged else None} for bar in bars]
    write_json(file, {"rows": [asdict(row) for row in rows], "bars": figures})
    return verdict(bar.passed for bar in bars if judged)


def _measure(sizes: list[int], seconds: float) -> tuple[list[Row], list[Bar]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    rows: list[Row] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("bench codec", total=sum(steps_of(n) for n in sizes) + 2)
        for n in sizes:

            def advance(density: float, n: int = n) -> None:
                progress.update(task, advance=1, description=f"n = {n:,} at {density:.1%}")

            rows += rows_of(n, seconds, advance)
        largest = max(sizes)
        progress.update(task, description="densities")
        bars = from_rows(rows, largest) + density_bars(min(largest, 4_000_000))
        progress.update(task, advance=1, description="memory")
        bars += memory_bars(largest)
        progress.update(task, advance=1)
    return rows, bars


def _number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:,.{digits}f}"


def _table(rows: list[Row], n: int) -> Table:
    table = Table(title=f"n = {n:,}: one thread, ratios to copying the tensor, ErrorFeedback + Bits(8)")
    table.add_column("")
    for column in ("density", "kept", "x the copy", "ms", "bits/element", "bits/index", "entropy"):
        table.add_column(column, justify="right")
    last = None
    for row in rows:
        if last is not None and row.density != last:
            table.add_section()
        last = row.density
        table.add_row(
            row.name,
            f"{row.density:.1%}",
            f"{row.kept:.3%}",
            _number(row.ratio_to_copy),
            _number(row.milliseconds),
            _number(row.bits_per_element, 4),
            _number(row.bits_per_index, 3),
            _number(row.entropy_bits, 3),
        )
    return table


def _bar_table(bars: list[Bar], n: int) -> Table:
    judged = n == BARS_FOR
    table = Table(
        title=f"Bars for n = {BARS_FOR:,}, at 1 % unless said otherwise" + ("" if judged else f"; here {n:,}")
    )
    for column, justify in (("what", "left"), ("bar", "right"), ("measured", "right"), ("", "left"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for bar in bars:
        words = {True: "[green]pass[/]", False: "[red]missed[/]", None: "not measured"}
        sign = "≤" if bar.most else "≥"
        digits = 3 if bar.limit < 2 else 2
        word = words[bar.passed] if judged or bar.passed is None else ""
        table.add_row(bar.what, f"{sign} {bar.limit:g}", _number(bar.measured, digits), bar.unit, word)
    return table
