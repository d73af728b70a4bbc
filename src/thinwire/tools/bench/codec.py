"""`thinwire bench codec`: speed and size of encoding and decoding, on one thread.

Times are ratios to copying the same tensor in the same run. Baselines are the usual ways to compress with numpy and
torch.
"""

import itertools
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
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import Accumulated, NoFeedback, array_args
from thinwire.codec.frame import Frame, FrameReader, section_bound
from thinwire.codec.low_rank import Basis, LowRank
from thinwire.codec.selection import Dynamic, Percentile, RandomK, Rotate, Selection, StdDev, Threshold, TopK
from thinwire.codec.values import Bits, Float32, Unary, Values
from thinwire.tools.options import verdict, write_json
from thinwire.tools.progress import WorkProgress
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Affine

Encoder = Callable[[], tuple[int, int]]  # returns the bytes sent and the number of entries in them


def sparsify_gradients(gradient: Tensor, density: float) -> Encoder:
    """Return the encoder of SparsifyGradients: numpy's percentile, scipy's compressed rows, no error feedback."""
    from scipy.sparse import csr_matrix

    columns = 384  # width of the model's largest layer; elements that do not fill a row are left out
    rows = gradient[: gradient.numel() // columns * columns].numpy().reshape(-1, columns)

    def encode() -> tuple[int, int]:
        magnitudes = np.abs(rows)
        kept = np.where(magnitudes > np.percentile(magnitudes, 100.0 * (1.0 - density)), rows, np.float32(0.0))
        matrix = csr_matrix(kept)
        return matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes, matrix.nnz

    return encode


def with_torch(gradient: Tensor, residual: Tensor, select: Callable[[Tensor], Tensor]) -> Encoder:
    """Return an encoder with error feedback in torch operations; `select` returns the indices to send."""

    def encode() -> tuple[int, int]:
        residual.add_(gradient)
        indices = select(residual)
        values = residual[indices]
        residual[indices] = 0.0
        return 12 * len(values), len(values)

    return encode


def sampled_indices(x: Tensor, density: float) -> Tensor:
    """Select by a threshold from every 100th magnitude."""
    sample = x[::100].abs()
    threshold = sample.topk(max(1, int(density * len(sample)))).values[-1]
    return (x.abs() > threshold).nonzero().flatten()


DENSITIES = (0.1, 0.01, 0.001)
PASSES = 2
EIGHT = Bits(8)
TIMINGS = len(DENSITIES) * PASSES * 17  # of one size, for the progress bar


class Timing(NamedTuple):
    """Seconds of the fastest run, and of the fastest copy of the tensor in between."""

    best: float
    copy: float


@dataclass(frozen=True)
class CodecRow:
    """Figures of one encoder or decoder at one size and density; times are None if only the size is measured."""

    name: str
    n: int
    density: float
    ratio_to_copy: float | None
    bits_per_element: float
    bits_per_index: float
    entropy_bits: float
    milliseconds: float | None
    kept: float  # the density of the frame


def entropy_bits(density: float) -> float:
    """Return the least number of bits that one position needs if positions are uniformly random."""
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


class Bench:
    """Gradients and a residual of one size, and a timer that compares with copying a gradient."""

    def __init__(self, n: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(n)
        self.n, self.seconds = n, seconds
        self.gradients = [torch.randn(n, generator=generator) for _ in range(2)]
        self.residual = torch.zeros(n)
        self.saved = torch.zeros(n)
        self.copied = torch.empty(n)

    def settle(self, density: float) -> None:
        """Set the residual to the one that a few steps at this density leave."""
        codec = Codec(TopK(density), Bits(8))
        for step in range(4):
            codec.encode({"w": self.gradients[step % 2]})
        self.saved.copy_(codec.residuals("w")["residual"])

    def time(self, run: Callable[[], object], reset: Callable[[], object]) -> Timing:
        """Return the fastest of several runs and of as many copies of the gradient, in turns."""
        best, copy, spent, turns = math.inf, math.inf, 0.0, 0
        while turns < 5 or (spent < self.seconds and turns < 40):
            reset()
            copy = min(copy, _timed(lambda: self.copied.copy_(self.gradients[0])))
            took = _timed(run)
            best, spent, turns = min(best, took), spent + took + copy, turns + 1
        return Timing(best, copy)


def _timed(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread, which do not include the time of other programs."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def selections(bench: Bench, density: float) -> dict[str, Selection]:
    """Return every selection, with the parameters that give this density on gradient + residual."""
    x = bench.saved + bench.gradients[0]
    value = _native.select([(x.data_ptr(), 0, 0, 1.0, bench.n)], int(density * bench.n))[0]
    return {
        "TopK": TopK(density),
        "TopK exact": TopK(density, exact=True),
        "Percentile": Percentile(100.0 * (1.0 - density)),
        "Threshold": Threshold(value),
        "StdDev": StdDev(value / float(x.double().std(correction=0))),
        "Dynamic": Dynamic(density, density),
        "RandomK": RandomK(density),
        "Rotate": Rotate(density),
        # The rule is computed in full; its bounds then set the density of the row.
        "Adaptive": Adaptive(Affine(0.01, 1e8), floor=density, start=density, ceiling=density),
    }


def baselines(bench: Bench, density: float) -> dict[str, Encoder]:
    """Return the encoders that thinwire is compared with."""
    gradient, residual, count = bench.gradients[0], bench.residual, max(1, int(density * bench.n))
    return {
        "SparsifyGradients": sparsify_gradients(gradient, density),
        "torch.topk": with_torch(gradient, residual, lambda x: x.abs().topk(count, sorted=False).indices),
        "torch sampled threshold": with_torch(gradient, residual, lambda x: sampled_indices(x, density)),
    }


class Candidate(NamedTuple):
    """An encoder or decoder to be timed: its run, what resets its state, and the sizes for its row."""

    name: str
    run: Callable[[], object]
    reset: Callable[[], object]
    sizes: Callable[[], tuple[float, float, int]]  # all bits, index bits, entries


def baseline(bench: Bench, name: str, encode: Encoder) -> Candidate:
    """Return the candidate of a baseline; its positions are counted as whole integers."""
    bench.residual.copy_(bench.saved)
    size, kept = encode()
    sizes = 8.0 * size, 8.0 * size - 32.0 * kept, kept
    return Candidate(name, encode, lambda: bench.residual.copy_(bench.saved), lambda: sizes)


def encoder(bench: Bench, name: str, selection: Selection, values: Values = EIGHT) -> tuple[Candidate, list[Frame]]:
    """Return the candidate of thinwire's encode with `ErrorFeedback`, and a list with its last frame."""
    codec = Codec(selection, values)
    codec.encode({"w": bench.gradients[1]})
    residual = codec.residuals("w")["residual"]
    frames: list[Frame] = []

    def run() -> None:
        frames[:] = [codec.encode({"w": bench.gradients[0]})]

    def sizes() -> tuple[float, float, int]:
        return frame_sizes(frames[0], bench.n)

    return Candidate(f"encode {name}", run, lambda: residual.copy_(bench.saved), sizes), frames


def frame_sizes(frame: Frame, n: int) -> tuple[float, float, int]:
    """Return the sizes of a frame of one tensor; all bits but those of values and scales count as index bits.

    The index bits are those of a frame with the same entries as float32, whose values take 32 bits each.
    """
    (count,) = frame.counts
    reader = FrameReader(frame, [n])
    (section,) = reader.sections
    positions, values = reader.entries(section)
    if section.coding != _native.GAPS:  # the header implies the positions
        return 8.0 * len(frame), 8.0 * (_native.HEADER_BYTES + _native.section_bytes(0, n, section.coding)), count
    buffer = torch.empty(section_bound(n, count, Float32()) + _native.HEADER_BYTES, dtype=torch.uint8)
    writer = _native.Writer(buffer.data_ptr(), len(buffer))
    entries = (0, positions.data_ptr(), values.data_ptr(), count, n, values.data_ptr(), Float32.code, False, 0)
    writer.add_entries(entries, None, 0)
    return 8.0 * len(frame), 8.0 * (writer.finish(0, False) - 4 * count), count


def _row(name: str, n: int, density: float, took: Timing | None, bits: float, index: float, kept: int) -> CodecRow:
    each, share = index / max(kept, 1), kept / n
    ratio, milliseconds = (took.best / took.copy, 1e3 * took.best) if took is not None else (None, None)
    return CodecRow(name, n, density, ratio, bits / n, each, entropy_bits(share), milliseconds, share)


def rows_of(n: int, seconds: float, advance: Callable[[str], None]) -> Iterator[CodecRow]:
    """Yield all rows of one size; `advance` is called with the size and the density after each timing."""
    bench = Bench(n, seconds / PASSES)
    for density in DENSITIES:
        bench.settle(density)
        candidates = _candidates(bench, density)
        times = [Timing(math.inf, math.inf)] * len(candidates)
        for _ in range(PASSES):
            for i, candidate in enumerate(candidates):
                times[i] = Timing(*map(min, times[i], bench.time(candidate.run, candidate.reset)))
                advance(f"n = {n:,} at {density:.1%}")
        for candidate, best in zip(candidates, times, strict=True):
            yield _row(candidate.name, n, density, best, *candidate.sizes())
    frame = Codec(TopK(0.01, exact=True), Bits(2)).encode({"w": bench.gradients[0]})
    yield _row("encode TopK exact, 2 bits", n, 0.01, None, *frame_sizes(frame, n))
    for density in DENSITIES:
        frame = Codec(TopK(density, exact=True), Unary()).encode({"w": bench.gradients[0]})
        yield _row("encode TopK exact, unary", n, density, None, *frame_sizes(frame, n))


def _candidates(bench: Bench, density: float) -> list[Candidate]:
    candidates = [baseline(bench, name, encode) for name, encode in baselines(bench, density).items()]
    encoders = {name: encoder(bench, name, each) for name, each in selections(bench, density).items()}
    candidates += [candidate for candidate, _ in encoders.values()]
    exact, frames = encoders["TopK exact"]
    out = torch.zeros(bench.n)

    def decoder(name: str, frames: list[Frame], sizes: Callable[[], tuple[float, float, int]]) -> Candidate:
        def decode() -> None:  # validates the frame and adds it to a gradient
            FrameReader(frames[0], [bench.n]).add_to([out], 0.5)

        return Candidate(name, decode, lambda: None, sizes)

    unary, coded = encoder(bench, "TopK, unary", TopK(density), Unary())
    decoders = decoder("decode and add", frames, exact.sizes), decoder("decode and add, unary", coded, unary.sizes)
    return [*candidates, unary, update_encoder(bench), low_rank_encoder(bench), *decoders]


def update_encoder(bench: Bench) -> Candidate:
    """Return the candidate that encodes an optimizer's update: shared and local parameters and the residual, by Rotate.

    It is the update domain's whole work before sending with a share of 8 % and 2 bits, whatever the row's density.
    """
    codec = Codec(Rotate(0.08), Bits(2), Accumulated())
    residual = codec.ensure_residuals("w", bench.saved)["residual"]
    shared, local = bench.gradients
    frames: list[Frame] = []

    def run() -> None:
        _native.accumulate_updates([(shared.data_ptr(), residual.data_ptr(), array_args(local), 1.0)], 1.0)
        frames[:] = [codec.encode({"w": residual})]

    return Candidate(
        "encode an update", run, lambda: residual.copy_(bench.saved), lambda: frame_sizes(frames[0], bench.n)
    )


def low_rank_encoder(bench: Bench) -> Candidate:
    """Return the candidate that encodes an update by LowRank, the default of the update domain: a square matrix.

    It accumulates the change, projects the residual, encodes the coordinates in 2 bits, and subtracts what they stand
    for from the residual. A step takes 6 m n r operations for a matrix of m x n and a basis of r vectors: 4 m n r here,
    for the two products, and the rest to expand the mean.
    """
    rows = math.isqrt(bench.n)
    columns = bench.n // rows  # elements that do not fill a row are left out
    basis = Basis.first("w", (rows, columns), LowRank().rank(rows, columns))
    codec, coordinates = Codec(Rotate(1.0), Bits(2)), torch.empty(basis.size)
    rounding = codec.ensure_residuals("w", coordinates)["residual"]
    residual = bench.residual
    matrix = residual[: rows * columns]
    shared, local = bench.gradients
    frames: list[Frame] = []

    def run() -> None:
        _native.accumulate_updates([(shared.data_ptr(), residual.data_ptr(), array_args(local), 1.0)], 1.0)
        basis.project(matrix, coordinates)
        frames[:] = [codec.encode({"w": coordinates})]
        basis.subtract(matrix, coordinates.sub_(rounding))
        rounding.zero_()

    return Candidate(
        "encode an update, LowRank",
        run,
        lambda: residual.copy_(bench.saved),
        lambda: frame_sizes(frames[0], basis.size),
    )


BARS_FOR = 25_000_000  # elements


@dataclass(frozen=True)
class Bar:
    """A limit and the measured value, or None if it could not be measured; `most` means an upper limit."""

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


def from_rows(rows: Iterable[CodecRow], n: int) -> list[Bar]:
    """Return the bars on speed and size, at a density of 1 % unless their names say otherwise."""
    found = {(row.name, row.density): row for row in rows if row.n == n}

    def ratio(name: str, density: float = 0.01) -> float:
        return found[name, density].ratio_to_copy or 0.0

    def took(name: str) -> float:
        return found[name, 0.01].milliseconds or math.inf

    bars = [
        Bar("encode, sampled TopK", 2.5, ratio("encode TopK"), "x the copy"),
        Bar("torch.topk against it", 40.0, took("torch.topk") / took("encode TopK"), "x slower", most=False),
        Bar("encode, exact TopK", 6.0, ratio("encode TopK exact"), "x the copy"),
        Bar("encode, StdDev", 3.5, ratio("encode StdDev"), "x the copy"),
        Bar("encode, Dynamic", 3.5, ratio("encode Dynamic"), "x the copy"),
        Bar("encode, Adaptive", 1.5, ratio("encode Adaptive") / ratio("encode TopK"), "x sampled TopK"),
        Bar("encode an update, 8 %, 2 bits", 2.5, ratio("encode an update"), "x the copy"),
        Bar("encode, sampled TopK, unary", 1.75, ratio("encode TopK, unary"), "x the copy"),
        Bar("decode and add one frame", 0.35, ratio("decode and add"), "x the copy"),
        Bar("decode and add one frame, unary", 0.4, ratio("decode and add, unary"), "x the copy"),
    ]
    for density in DENSITIES:
        row = found["encode TopK exact", density]
        bars.append(Bar(f"index bits at {density:.1%}", 1.015, row.bits_per_index / row.entropy_bits, "x the entropy"))
    for name, density, limit, words in (
        ("encode TopK exact", 0.1, 24.0, "10 %, 8 bits"),
        ("encode TopK exact", 0.01, 195.0, "1 %, 8 bits"),
        ("encode TopK exact, 2 bits", 0.01, 305.0, "1 %, 2 bits"),
        ("encode TopK exact", 0.001, 1550.0, "0.1 %, 8 bits"),
        ("encode TopK exact, unary", 0.01, 290.0, "1 %, unary"),
        ("encode TopK exact, unary", 0.001, 2050.0, "0.1 %, unary"),
    ):
        smaller = 32.0 / found[name, density].bits_per_element
        bars.append(Bar(f"float32 against the frame, {words}", limit, smaller, "x larger", most=False))
    return bars


_DISTRIBUTIONS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "Gaussian": lambda n, g: torch.randn(n, generator=g),
    "Laplace": lambda n, g: -torch.rand(n, generator=g).clamp_(1e-7).log(),
    "Pareto": lambda n, g: torch.rand(n, generator=g).clamp_(1e-7).pow(-1 / 1.2),
}


def density_bars(n: int) -> list[Bar]:
    """Return bars on the largest deviation of sampled TopK from its density, over densities and seeds."""
    bars = []
    for place, (name, make) in enumerate(_DISTRIBUTIONS.items()):
        worst = 0.0
        for seed in range(2):
            x = make(n, torch.Generator().manual_seed(10 * place + seed))
            for density in DENSITIES:
                (count,) = Codec(TopK(density), Bits(8)).encode({"w": x}, step=seed).counts
                worst = max(worst, abs(count / (density * n) - 1.0))
        bars.append(Bar(f"sampled TopK's density, {name}", 10.0, 100.0 * worst, "% off at most"))
    return bars


_TAILS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "Laplace": _DISTRIBUTIONS["Laplace"],
    "Student t3": lambda n, g: (
        torch.randn(n, generator=g) / (torch.randn(3, n, generator=g).square_().sum(0) / 3.0).sqrt_()
    ),
}


def error_bars(n: int) -> list[Bar]:
    """Return bars on the relative squared error of the largest 1 % as unary values."""
    bars = []
    for (name, make), limit in zip(_TAILS.items(), (0.003, 0.008), strict=True):
        x = make(n, torch.Generator().manual_seed(0))
        reader = FrameReader(Codec(TopK(0.01, exact=True), Unary(), NoFeedback()).encode({"w": x}), [n])
        positions, values = reader.entries(reader.sections[0])
        kept = x[positions].double()
        error = float((values - kept).square().sum() / kept.square().sum())
        bars.append(Bar(f"squared error of unary values, {name}", limit, error, "of their square"))
    return bars


# Runs in a new process and prints the peak of resident memory during one encode and one decode, less the memory before
# it and the frame. Writing 5 to clear_refs resets the peak.
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
    """Return bars on peak memory beyond residual and frame, as a share of the tensor.

    They are not measured where the process fails, for example without Linux' /proc or with too little memory.
    """
    bars = []
    for kind, words in (("sampled", "encode, sampled TopK"), ("exact", "encode, exact TopK")):
        done = subprocess.run([sys.executable, "-c", _PEAK, str(n), kind], capture_output=True, text=True)
        found = [100.0 * max(0, int(part)) / (4 * n) for part in done.stdout.split()] if done.returncode == 0 else []
        encode, decode = found or (None, None)
        bars.append(Bar(f"memory beyond residual and frame, {words}", 5.0, encode, "% of the tensor"))
        if kind == "sampled":
            bars.append(Bar("memory beyond the frame, decode", 5.0, decode, "% of the tensor"))
    return bars


def run(sizes: list[int], file: Path | None, seconds: float) -> int:
    """Measure all rows and bars, with `seconds` for each row; print and write them; return 1 if a bar was missed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, bars = _measure(sizes, seconds)
    finally:
        torch.set_num_threads(threads)
    console = Console()
    for n in sizes:
        console.print(_table([row for row in rows if row.n == n], n))
    console.print(_bar_table(bars, max(sizes)))
    # The bars are limits for one size; other sizes have no verdict.
    judged = max(sizes) == BARS_FOR
    figures = [{**asdict(bar), "passed": bar.passed if judged else None} for bar in bars]
    write_json(file, {"rows": [asdict(row) for row in rows], "bars": figures})
    return verdict(bar.passed for bar in bars if judged)


def _measure(sizes: list[int], seconds: float) -> tuple[list[CodecRow], list[Bar]]:
    rows: list[CodecRow] = []
    largest = max(sizes)
    with WorkProgress("bench codec", TIMINGS * len(sizes) + 2) as progress:
        for n in sizes:
            rows += rows_of(n, seconds, lambda words: progress.advance(figures=words))
        progress.advance(0, figures="densities")
        bars = from_rows(rows, largest) + density_bars(min(largest, 4_000_000))
        bars += error_bars(min(largest, 4_000_000))
        progress.advance(figures="memory")
        bars += memory_bars(largest)
        progress.advance()
    return rows, bars


def _number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:,.{digits}f}"


def _table(rows: list[CodecRow], n: int) -> Table:
    title = f"n = {n:,}: one thread, ratios to copying the tensor, ErrorFeedback + Bits(8) unless stated otherwise"
    table = Table("", title=title, box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("density", "kept", "x copy", "ms", "bits/el", "bits/idx", "entropy"):
        table.add_column(column, justify="right", no_wrap=True)
    for _, group in itertools.groupby(rows, key=lambda row: row.density):
        for row in group:
            times = _number(row.ratio_to_copy), _number(row.milliseconds)
            bits = f"{row.bits_per_element:,.4f}", f"{row.bits_per_index:,.2f}", f"{row.entropy_bits:,.2f}"
            table.add_row(row.name, f"{row.density:.1%}", f"{row.kept:.2%}", *times, *bits)
        table.add_section()
    return table


def _bar_table(bars: list[Bar], n: int) -> Table:
    judged = n == BARS_FOR
    title = f"Bars for n = {BARS_FOR:,}, at 1 % unless stated otherwise" + ("" if judged else f"; here {n:,}")
    numbers = Column("bar", justify="right", no_wrap=True), Column("measured", justify="right", no_wrap=True)
    table = Table("what", *numbers, "", Column("", no_wrap=True), title=title, box=SIMPLE, pad_edge=False)
    words = {True: "[green]pass[/]", False: "[red]missed[/]", None: "not measured"}
    for bar in bars:
        limit = f"{'≤' if bar.most else '≥'} {bar.limit:g}"
        word = words[bar.passed] if judged or bar.passed is None else ""
        table.add_row(
            bar.what, limit, _number(bar.measured, 5 if bar.limit < 0.1 else 3 if bar.limit < 2 else 2), bar.unit, word
        )
    return table
