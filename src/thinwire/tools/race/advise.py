"""Advising: from a model and a network to the table, the page and the JSON of `thinwire advise`."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.frame import FrameReader
from thinwire.codec.vectors import NativeGroup, Vector
from thinwire.errors import RecipeError
from thinwire.exchange.channel import Channel, gather_json
from thinwire.link.autotune import probe_network
from thinwire.tools.lab.units import parse_rates
from thinwire.tools.observe import describe_machine, now
from thinwire.tools.recipes import get_recipe
from thinwire.tools.report.markup import Row as Cells
from thinwire.tools.report.markup import write_page
from thinwire.tools.report.page import megabytes
from thinwire.tune.adaptive import MagnitudeCurve
from thinwire.tune.forecast import (
    DENSE,
    DENSITIES,
    FP16,
    CodecTimes,
    Forecast,
    LinearTime,
    Network,
    Setting,
    TuningPolicy,
    Workload,
    forecast,
)
from thinwire.tune.presets import resolve_codec

# Rates over which the answers are drawn: 1 Mbit/s to 100 Gbit/s.
LOWEST, HIGHEST = 1e6, 1e11
# How far a prediction may be off where the network was measured, and where only its rate is known.
_PROBED, _RATED = 0.10, 0.25


@dataclass(frozen=True)
class Row:
    """One method's line of the table."""

    method: str
    exchange: str
    seconds: float
    tax: float  # beyond the step without any exchange, as a share of that
    sent: float  # bytes per host and step
    efficiency: float  # the share of the step that is computing
    alpha: float
    uncertainty: float  # as a share of the step
    setting: str  # how to ask for it


@dataclass(frozen=True)
class Advice:
    """The table and the answer."""

    rows: tuple[Row, ...]
    best: Row
    verdict: str

    @property
    def compress(self) -> bool:
        return self.best.method != DENSE.name


def cheapest(settings: Sequence[Setting], work: Workload, network: Network) -> list[Forecast]:
    """Each method with the exchange that suits it best."""
    best: dict[str, Forecast] = {}
    for setting in settings:
        found = forecast(setting, work, network)
        if setting.name not in best or found.seconds < best[setting.name].seconds:
            best[setting.name] = found
    return list(best.values())


def advise(
    settings: Sequence[Setting],
    work: Workload,
    network: Network,
    *,
    spread: float = 0.0,
    probed: bool = False,
    policy: TuningPolicy | None = None,
) -> Advice:
    """What to do on this network; `spread` is how much the measured computing varied, as a share of itself."""
    policy = policy if policy is not None else TuningPolicy()
    rows = tuple(_row(f, work, spread, _PROBED if probed else _RATED) for f in cheapest(settings, work, network))
    dense = next(row for row in rows if row.method == DENSE.name)
    allowed = [row for row in rows if row.alpha >= policy.alpha]
    least = min(row.seconds for row in allowed)
    # Of methods that take the same time, the one that carries the most.
    best = max((row for row in allowed if row.seconds <= 1.03 * least), key=lambda row: (round(row.alpha, 1), row.sent))
    gain = dense.seconds / best.seconds
    if best is dense or gain < 1.0 / (1.0 - policy.compress_from):
        words = (
            f"Do not compress: dense takes {_ms(dense.seconds)} a step, of which {dense.efficiency:.0%} is computing"
        )
        if best is not dense:
            words += f", and the best method, {best.method}, gains {gain - 1.0:.0%}"
        return Advice(rows, dense, words + ".")
    words = (
        f"Compress: {best.method} takes {_ms(best.seconds)} a step where dense takes {_ms(dense.seconds)} "
        f"({gain:.1f}x); use {'thinwire.' if best.exchange else ''}{best.setting}."
    )
    return Advice(rows, best, words)


def _row(found: Forecast, work: Workload, spread: float, doubt: float) -> Row:
    waiting = max(found.seconds - work.compute, 0.0) / found.seconds
    uncertainty = math.hypot((1.0 - waiting) * spread, waiting * doubt)
    return Row(
        found.setting.name,
        found.setting.exchange if found.setting.compressed else "",
        found.seconds,
        found.seconds / work.compute - 1.0,
        found.sent,
        work.compute / found.seconds,
        found.alpha,
        uncertainty,
        how_to(found.setting),
    )


def how_to(setting: Setting) -> str:
    """The line that asks for a setting."""
    if setting == DENSE:
        return "DDP as it is"
    if not setting.compressed:
        return "model.register_comm_hook(None, fp16_compress_hook)"
    return f'attach(model, "{setting.name}", exchange="{setting.exchange}")'


def at_rates(
    settings: Sequence[Setting], work: Workload, network: Callable[[float], Network], points: int = 61
) -> tuple[list[float], dict[str, list[float]]]:
    """Bits a second, and each method's seconds a step at each."""
    rates = [LOWEST * (HIGHEST / LOWEST) ** (i / (points - 1)) for i in range(points)]
    curves: dict[str, list[float]] = {}
    for rate in rates:
        for found in cheapest(settings, work, network(rate)):
            curves.setdefault(found.setting.name, []).append(found.seconds)
    return rates, curves


def crossings(
    settings: Sequence[Setting], work: Workload, network: Callable[[float], Network]
) -> dict[str, float | None]:
    """The rate up to which each method gains enough on dense to be worth it; None where it does at any rate."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(s.name for s in settings if s != DENSE):
        those = [s for s in settings if s.name == name]

        def lead(rate: float, those: list[Setting] = those) -> float:
            """Seconds that the method is ahead of dense, beyond what it must be."""
            net = network(rate)
            enough = (1.0 - TuningPolicy().compress_from) * forecast(DENSE, work, net).seconds
            return enough - min(forecast(s, work, net).seconds for s in those)

        found[name] = _root(lead)
    return found


def _root(lead: Callable[[float], float]) -> float | None:
    low, high = LOWEST, HIGHEST
    if lead(low) <= 0.0:
        return low
    if lead(high) > 0.0:
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if lead(middle) > 0.0 else (low, middle)
    return high


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


# DDP's own: the first bucket is small so that the exchange begins early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
EXCHANGES = ("gather", "scatter-reduce")


@dataclass
class Subject:
    """A model, the loss of its i-th step, and its optimizer."""

    name: str
    model: nn.Module
    loss: Callable[[int], Tensor]
    optimizer: torch.optim.Optimizer


def subject_of(model: str, *, data: Path | None = None, batch: int | None = None, rank: int = 0) -> Subject:
    """A recipe by name, or module:function that returns a Recipe, or a model and a function of it to its loss."""
    made = _made(model)
    if isinstance(made, tuple):
        net, loss = made
        return Subject(model, net, lambda step: loss(net), torch.optim.SGD(net.parameters(), lr=0.01))
    recipe = made
    splits, size = recipe.load(data), batch if batch is not None else recipe.defaults.batch
    net = recipe.build(0)

    def recipe_loss(step: int) -> Tensor:
        first = (step * 131 + rank) * size
        result: Tensor = recipe.loss(
            net, splits.train.batch([i % len(splits.train) for i in range(first, first + size)])
        )
        return result

    return Subject(recipe.name, net, recipe_loss, recipe.optimizer(net))


def _made(model: str) -> Any:
    try:
        return get_recipe(model)
    except RecipeError as error:
        module, colon, function = model.partition(":")
        if not colon or "returned" not in str(error):
            raise
        import sys

        made = getattr(sys.modules[module], function)()
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
            return made
        raise RecipeError(
            f"{model} must return a Recipe, or a model and a function of it to a loss, not {type(made).__name__}"
        ) from None


@dataclass(frozen=True)
class Figures:
    """A workload, the settings that were measured, and how much the computing varied."""

    work: Workload
    settings: tuple[Setting, ...]
    spread: float


class Meter:
    """Times what all ranks do together; `sync` waits for all of them and does nothing on one machine."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        sync()
        began = time.perf_counter()
        for _ in range(3):
            sync()
        self._own = (time.perf_counter() - began) / 3

    def time(self, work: Callable[[], object]) -> float:
        """Seconds until all have done it."""
        self._sync()
        began = time.perf_counter()
        work()
        self._sync()
        return max(time.perf_counter() - began - self._own, 1e-7)


def measure(
    subject: Subject, methods: Sequence[str], *, steps: int = 10, sync: Callable[[], None] = lambda: None
) -> Figures:
    """Run some steps alone, then each codec on real gradients."""
    meter = Meter(sync)
    filled: list[tuple[int, float]] = []
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: filled.append((p.numel(), time.perf_counter())))
        for p in parameters
    ]

    def step(number: int) -> None:
        filled.clear()
        subject.optimizer.zero_grad(set_to_none=True)
        subject.loss(number).backward()
        subject.optimizer.step()

    for number in range(3):
        step(number)
    taken = [meter.time(partial(step, 3 + number)) for number in range(steps)]
    for handle in handles:
        handle.remove()
    buckets, ready = in_buckets(filled)
    named = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    compute = statistics.median(taken)
    spread = statistics.median(abs(t - compute) for t in taken) / compute
    work = Workload(compute, buckets, ready, 0.0, 0.0, _copying(meter, named), _alpha(named))
    codecs: dict[str, CodecTimes] = {}
    settings: list[Setting] = []
    for method in methods:
        codec = resolve_codec(method)
        codecs[method], density = _codec_times(meter, codec, named)
        settings += [Setting(method, e, density=density, bits=codec.values.bits) for e in EXCHANGES]
    return Figures(replace(work, codecs=codecs), tuple(settings), spread)


def in_buckets(filled: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Gradients in the order in which they were ready, as DDP groups them; times count to the last."""
    buckets: list[int] = []
    ready: list[float] = []
    elements = 0
    for numel, at in filled:
        elements += numel
        if 4 * elements >= (_FIRST_BUCKET if not buckets else _BUCKET):
            buckets.append(elements)
            ready.append(at - filled[-1][1])
            elements = 0
    if elements:
        buckets.append(elements)
        ready.append(0.0)
    return tuple(buckets), tuple(ready)


def _codec_times(meter: Meter, codec: Codec, gradients: dict[str, Tensor]) -> tuple[CodecTimes, float]:
    """Steady state: a few encodes before any is timed."""
    frames = [codec.encode(gradients) for _ in range(3)]
    encode = statistics.median(meter.time(lambda: frames.append(codec.encode(gradients))) for _ in range(5))
    outs = [torch.zeros(g.numel()) for g in gradients.values()]

    def read() -> None:
        FrameReader(frames[-1], [out.numel() for out in outs]).add_to(outs, 0.5)

    decode = statistics.median(meter.time(read) for _ in range(5))
    count = sum(frames[-1].counts)
    density = min(max(count / sum(out.numel() for out in outs), 1e-6), 1.0)
    return CodecTimes(encode, decode, 1.04 * len(frames[-1]) + 64), density


def _copying(meter: Meter, gradients: dict[str, Tensor]) -> float:
    x = torch.zeros(sum(g.numel() for g in gradients.values()))
    return statistics.median(meter.time(lambda: x.copy_(x.to(torch.float16))) for _ in range(5))


def _alpha(gradients: dict[str, Tensor]) -> dict[float, float]:
    """Of the large tensors, each with its own threshold, as codecs select."""
    carried, everything = np.zeros(len(DENSITIES)), 0.0
    for gradient in gradients.values():
        group = NativeGroup([Vector(gradient.reshape(-1), None, 1.0, None, None)])
        law = MagnitudeCurve(group.histogram(1 << 20, 0), gradient.numel())
        if gradient.numel() >= 1024 and not law.empty:
            carried += law.alpha(np.array(DENSITIES) * law.n) * law.squares[-1]
            everything += float(law.squares[-1])
    return {d: float(c) / everything if everything else 1.0 for d, c in zip(DENSITIES, carried, strict=True)}


# TCP's payload of a full Ethernet frame.
GOODPUT = 1448 / 1514


@dataclass(frozen=True)
class Wire:
    """The network in question: as probed, or from the rate of the hosts' links and the time of a round."""

    network: Network
    rate: float  # bits a second
    shown: str
    probed: bool
    crowded: bool = False  # ranks share cores: what computes beside the backward pass slows it down

    def at(self, rate: float) -> Network:
        """The same network at another rate."""
        ideal = Network.ideal(self.network.world, GOODPUT * rate, 0.0)
        gather, reduce = self.network.gather, self.network.reduce
        return Network(
            self.network.world,
            LinearTime(gather.fixed, ideal.gather.per_byte),
            LinearTime(reduce.fixed, ideal.reduce.per_byte),
        )


def wire_of(hosts: int, rate: str, latency: float) -> Wire:
    """From the command line's words."""
    both = parse_rates(rate)
    slower = min((r for r in (both.up, both.down) if r is not None), default=None)
    if slower is None:
        raise ValueError("--rate: advice needs a rate such as 500mbit; to measure real links use --probe")
    return Wire(Network.ideal(hosts, GOODPUT * slower, latency), slower, rate, False)


def probed_wire() -> Wire:
    """From the process group that torchrun, or the lab, made; call it on all ranks."""
    channel = Channel(dist.group.WORLD)  # type: ignore[arg-type]
    network = probe_network(channel)
    rate = network.bandwidth / GOODPUT
    machines = gather_json(channel, _machine())
    crowded = torch.get_num_threads() * machines.count(machines[channel.rank]) > (os.cpu_count() or 1)
    everybody = any(gather_json(channel, crowded))
    return Wire(network, rate, f"{rate / 1e6:,.0f} Mbit/s, probed", True, everybody)


def _machine() -> str:
    """Names the machine; emulated hosts have names of their own and one kernel in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return platform.node()


@dataclass(frozen=True)
class Report:
    """Everything that was found out."""

    subject: str
    hosts: int
    wire: Wire
    figures: Figures
    advice: Advice
    command: str

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (DENSE, FP16, *self.figures.settings)

    def crossings(self) -> dict[str, float | None]:
        """The rate up to which each method is faster than dense."""
        return crossings(self.settings, self.figures.work, self.wire.at)

    def to_json(self) -> dict[str, Any]:
        """Under the names that machines rely on."""
        work = self.figures.work
        return {
            "model": self.subject,
            "hosts": self.hosts,
            "rate": self.wire.rate,
            "probed": self.wire.probed,
            "parameters": work.elements,
            "compute_ms": 1e3 * work.compute,
            "alpha": {f"{density:g}": alpha for density, alpha in (work.alpha or {}).items()},
            "network": asdict(self.wire.network),
            "methods": [_figures(row) for row in self.advice.rows],
            "crossings": self.crossings(),
            "recommended": self.advice.best.method,
            "compress": self.advice.compress,
            "verdict": self.advice.verdict,
            "version": thinwire.__version__,
            "command": self.command,
        }

    def page(self, path: Path) -> None:
        """Write the page."""
        work = self.figures.work
        rates, curves = at_rates(self.settings, work, self.wire.at)
        write_page(
            path,
            "advice",
            title=f"{self.subject}: {self.hosts} hosts at {self.wire.shown}",
            verdict=self.advice.verdict,
            facts={
                "model": self.subject,
                "parameters": f"{work.elements:,}",
                "hosts": f"{self.hosts}",
                "link": self.wire.shown,
                "step without exchange": f"{1e3 * work.compute:,.1f} ms",
            },
            table=[cells(row) for row in self.advice.rows],
            made={
                "Command": self.command,
                "Machine": describe_machine(),
                "Version": f"thinwire {thinwire.__version__}",
                "Date": now(),
            },
            data={
                "rates": rates,
                "curves": {name: [1e3 * s for s in seconds] for name, seconds in curves.items()},
                "crossings": self.crossings(),
                "best": self.advice.best.method,
                "rate": self.wire.rate,
                "here": self.wire.shown,
            },
        )


def _figures(row: Row) -> dict[str, Any]:
    return {
        "name": row.method,
        "exchange": row.exchange,
        "step_ms": 1e3 * row.seconds,
        "tax": row.tax,
        "bytes_per_host_step": row.sent,
        "efficiency": row.efficiency,
        "alpha": row.alpha,
        "uncertainty": row.uncertainty,
        "setting": row.setting,
    }


def cells(row: Row) -> Cells:
    """A row as text."""
    return {
        "Method": row.method,
        "Step": f"{1e3 * row.seconds:,.0f} ms" if row.seconds >= 0.01 else f"{1e3 * row.seconds:.1f} ms",
        "Give or take": f"{row.uncertainty:.0%}",
        "Tax": f"{row.tax:+.0%}",
        "Sent per host": megabytes(row.sent),
        "Efficiency": f"{row.efficiency:.0%}",
        "Alpha": f"{row.alpha:.2f}",
        "Setting": row.setting,
    }


def make_report(subject: Subject, wire: Wire, methods: list[str], command: str) -> Report:
    """Measure and advise; on all ranks together where the network was probed."""
    threads = torch.get_num_threads()
    figures = measure(subject, methods, sync=dist.barrier if wire.probed else lambda: None)
    if wire.crowded:
        alone = replace(figures.work, ready=(0.0,) * len(figures.work.ready))
        figures = replace(figures, work=alone)
    torch.set_num_threads(threads)
    settings = (DENSE, FP16, *figures.settings)
    advice = advise(settings, figures.work, wire.network, spread=figures.spread, probed=wire.probed)
    return Report(subject.name, wire.network.world, wire, figures, advice, command)
