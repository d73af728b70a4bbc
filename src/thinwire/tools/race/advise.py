"""Advice: measure a model and its codecs, predict the step of each method on a network, and recommend one."""

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import Vector
from thinwire.codec.selection import NativeGroup
from thinwire.errors import RecipeError
from thinwire.exchange.channel import Channel, OwnGroups, gather_json
from thinwire.link.autotune import (
    codec_seconds,
    conversion_seconds,
    gather_cpu,
    paced_seconds,
    probe_network,
    update_seconds,
)
from thinwire.tools.lab.units import parse_rates
from thinwire.tools.observe import describe_machine, now
from thinwire.tools.race.measured import MODEL, MeasuredCost, fidelity_folder, measured_costs
from thinwire.tools.recipes import get_recipe
from thinwire.tools.report.markup import Row, write_page
from thinwire.tools.report.page import megabytes
from thinwire.tune.adaptive import MagnitudeCurve
from thinwire.tune.forecast import (
    DENSE,
    DENSITIES,
    EVERY,
    FP16,
    CodecTimes,
    Forecast,
    Network,
    Setting,
    TuningPolicy,
    Workload,
    cheapest_hidden,
    forecast,
    update_bytes,
    update_settings,
)
from thinwire.tune.presets import resolve_codec

# Rates over which the predictions are drawn: 1 Mbit/s to 100 Gbit/s.
LOWEST, HIGHEST = 1e6, 1e11
# Relative error of a predicted exchange. Where the network was measured it is the largest of 16 cases (the median is
# 5 %; results/bench-advice.json); where only a rate is known it is an assumption.
_PROBED, _RATED = 0.19, 0.25
# Methods whose effect on training was measured with SGD (results/race-*.json and results/sparsify-gradients-*.json).
TRAINED = ("dense", "fp16", "percentile90", "topk1", "0.01")
# Optimizers that divide by a moving average of squared gradients: compressed gradients train worse with them.
ADAPTIVE = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.RMSprop)


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one method: a line of the table."""

    method: str
    exchange: str
    seconds: float
    overhead: float  # communication overhead
    sent: float  # bytes per worker and step
    efficiency: float  # the share of the step that is computing
    alpha: float | None  # the share of the gradient's squared norm that is sent; None where updates are sent
    uncertainty: float  # relative error of the step time
    setting: str  # how to ask for it
    every: int = 0  # steps between two exchanges of updates; 0: gradients are exchanged in every step

    @property
    def time(self) -> str:
        """The step time and its uncertainty, for a sentence."""
        return f"{_ms(self.seconds)} (± {self.uncertainty:.0%})"


@dataclass(frozen=True)
class Advice:
    """The predictions of all methods and the recommended one."""

    rows: tuple[Prediction, ...]
    best: Prediction
    verdict: str
    costs: Mapping[str, MeasuredCost] = field(default_factory=dict)  # measured effects on training, by method

    @property
    def compress(self) -> bool:
        """Whether a method other than dense is recommended."""
        return self.best.method != DENSE.name


def cheapest(settings: Sequence[Setting], work: Workload, network: Network) -> list[Forecast]:
    """Return the forecast of each method with the exchange that is fastest for it."""
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
    optimizer: str = "",
    policy: TuningPolicy | None = None,
    costs: Mapping[str, MeasuredCost] | None = None,
) -> Advice:
    """Recommend a method among those whose effect on training is known.

    spread: relative variation of the measured computing time. optimizer: its name if it is one of ADAPTIVE, for which
    presets of updates are considered in place of compressed gradients. costs: what these cost in training.
    """
    policy = policy if policy is not None else TuningPolicy()
    doubt = _PROBED if probed else _RATED
    updates = update_settings(network.world) if optimizer else ()
    forecasts = cheapest((*settings, *updates), work, network)
    rows = tuple(_predicted(found, work, spread, doubt) for found in forecasts)
    if optimizer:
        usable = [found for found in forecasts if found.setting.every or not found.setting.compressed]
        return _advise_updates(rows, usable, optimizer, costs if costs is not None else {}, doubt)
    dense = next(row for row in rows if row.method == DENSE.name)
    allowed = [row for row in rows if row.method in TRAINED and row.alpha is not None and row.alpha >= policy.alpha]
    least = min(row.seconds for row in allowed)
    # Of methods that take about the same time, the one that sends the largest part of the gradient.
    near = (row for row in allowed if row.seconds <= 1.03 * least)
    best = max(near, key=lambda row: (round(row.alpha or 0.0, 1), row.sent))
    gain = dense.seconds / best.seconds
    if best is dense or gain < 1.0 / (1.0 - policy.compress_from):
        said = f"Do not compress: dense takes {dense.time} a step, of which {dense.efficiency:.0%} is computing"
        if best is not dense:
            said += f", and the best method, {best.method}, gains {gain - 1.0:.0%}"
        best = dense
    elif best.overhead * (1.0 + doubt) >= dense.overhead * (1.0 - doubt):  # computing takes the same time in both
        said = f"Not decided: {best.method} takes {best.time} a step and dense {dense.time}: too close to tell; "
        said += "compare them with thinwire race"
        best = dense
    else:
        said = f"Compress: {best.method} takes {best.time} a step where dense takes {dense.time}, {gain:.1f}x as long; "
        said += f"use {'thinwire.' if best.exchange else ''}{best.setting}"
    return Advice(rows, best, f"{said}.{_caveat(rows, best)}")


def _advise_updates(
    rows: Sequence[Prediction],
    found: Sequence[Forecast],
    optimizer: str,
    costs: Mapping[str, MeasuredCost],
    doubt: float,
) -> Advice:
    """Recommend dense gradients or a preset of updates: the first that hides the network."""
    by_name = {row.method: row for row in rows}
    dense = by_name[DENSE.name]
    best = by_name[cheapest_hidden(found).setting.name]
    gain = dense.seconds / best.seconds
    if best.every and best.overhead * (1.0 + doubt) >= dense.overhead * (1.0 - doubt):
        said = f"Not decided: {best.method} takes {best.time} a step and dense {dense.time}: too close to tell; "
        said += "compare them with thinwire race"
        best = dense
    elif best.every:
        said = f"Compress updates: {best.method} takes {best.time} a step where dense takes {dense.time}, "
        said += f"{gain:.1f}x as long; it is the first that hides the network; use thinwire.{best.setting}"
    else:
        said = f"Do not compress: dense takes {dense.time} a step, of which {dense.efficiency:.0%} is computing"
        said += f", and {best.method} takes {best.time}" if best is not dense else ""
    return Advice(tuple(rows), best, f"{said}. {_training_costs(optimizer, costs)}", dict(costs))


def _training_costs(optimizer: str, costs: Mapping[str, MeasuredCost]) -> str:
    """Say what was measured of the effect on training, and of which presets nothing was."""
    said = f"Compressing gradients trains worse with {optimizer}, so that no such method is recommended."
    late = "" if all(cost.overlap or EVERY[name] == 1 for name, cost in costs.items()) else "; * without overlap"
    known = ", ".join(f"{name}{_star(name, cost)} {cost}" for name, cost in costs.items())
    if costs:
        said += f" What updates cost was measured on {MODEL}, against dense: {known}{late}."
    unknown = [name for name in EVERY if name not in costs]
    if unknown:
        said += f" There is no measurement of what {_and(unknown)} cost{'s' if len(unknown) == 1 else ''} in training"
        said += ": more local steps train worse per step; measure with thinwire race."
    return said


def _star(name: str, cost: MeasuredCost) -> str:
    return "" if cost.overlap or EVERY[name] == 1 else "*"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _caveat(rows: Sequence[Prediction], best: Prediction) -> str:
    faster = [row.method for row in rows if row.method not in TRAINED and row.seconds < 0.97 * best.seconds]
    if not faster:
        return ""
    verb = "is" if len(faster) == 1 else "are"
    return f" {', '.join(faster)} {verb} predicted to be faster, but the effect on training has not been measured."


def _predicted(found: Forecast, work: Workload, spread: float, doubt: float) -> Prediction:
    waiting = max(found.seconds - work.compute, 0.0) / found.seconds
    uncertainty = math.hypot((1.0 - waiting) * spread, waiting * doubt)
    return Prediction(
        found.setting.name,
        found.setting.exchange if found.setting.compressed else "",
        found.seconds,
        found.seconds / work.compute - 1.0,
        found.sent,
        work.compute / found.seconds,
        None if found.setting.every else found.alpha,
        uncertainty,
        how_to(found.setting),
        found.setting.every,
    )


def how_to(setting: Setting) -> str:
    """Return the line of code that asks for a setting."""
    if setting.every:
        return f'attach(model, "{setting.name}", optimizer=optimizer)'
    if setting.compressed:
        return f'attach(model, "{setting.name}", exchange="{setting.exchange}")'
    return "DDP without a hook" if setting == DENSE else "model.register_comm_hook(None, fp16_compress_hook)"


def at_rates(
    settings: Sequence[Setting], work: Workload, network: Callable[[float], Network], points: int = 61
) -> tuple[list[float], dict[str, list[float]]]:
    """Return rates in bits per second, and the step time of each method at each rate."""
    rates = [LOWEST * (HIGHEST / LOWEST) ** (i / (points - 1)) for i in range(points)]
    curves: dict[str, list[float]] = {}
    for rate in rates:
        for found in cheapest(settings, work, network(rate)):
            curves.setdefault(found.setting.name, []).append(found.seconds)
    return rates, curves


def crossings(
    settings: Sequence[Setting], work: Workload, network: Callable[[float], Network]
) -> dict[str, float | None]:
    """Return the rate up to which each method is worth it against dense; None where it is at every rate."""

    def pays(name: str, rate: float) -> bool:
        net = network(rate)
        enough = (1.0 - TuningPolicy().compress_from) * forecast(DENSE, work, net).seconds
        return min(forecast(s, work, net).seconds for s in settings if s.name == name) < enough

    names = dict.fromkeys(s.name for s in settings if s != DENSE)
    return {name: _limit(partial(pays, name)) for name in names}


def _limit(pays: Callable[[float], bool]) -> float | None:
    low, high = LOWEST, HIGHEST
    if not pays(low):
        return low
    if pays(high):
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


# As in DDP, where the first bucket is small so that the exchange begins early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
EXCHANGES = ("gather", "scatter-reduce")


@dataclass
class Subject:
    """A model, the loss of its i-th step, and its optimizer."""

    name: str
    model: nn.Module
    loss: Callable[[int], Tensor]
    optimizer: optim.Optimizer


def subject_of(recipe: str, *, data: Path | None = None, batch: int | None = None, rank: int = 0) -> Subject:
    """Return the model of a recipe, or of a module:function that returns a Recipe or a pair of model and loss."""
    made = _made(recipe)
    if isinstance(made, tuple):
        net, loss = made
        return Subject(recipe, net, lambda step: loss(net), optim.SGD(net.parameters(), lr=0.01))
    splits, size = made.load(data), batch if batch is not None else made.defaults.batch
    net = made.build(0)

    def recipe_loss(step: int) -> Tensor:
        first = (step * 131 + rank) * size
        result: Tensor = made.loss(net, splits.train.batch([i % len(splits.train) for i in range(first, first + size)]))
        return result

    return Subject(made.name, net, recipe_loss, made.optimizer(net))


def _made(name: str) -> Any:
    try:
        return get_recipe(name)
    except RecipeError as error:
        where, colon, function = name.rpartition(":")
        if not colon or "returned" not in str(error):
            raise
        made = getattr(sys.modules[Path(where).stem if where.endswith(".py") else where], function)()
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
            return made
        wanted = "a Recipe, or a model and a function of it to a loss"
        raise RecipeError(f"{name} must return {wanted}, not {type(made).__name__}") from None


@dataclass(frozen=True)
class ModelFigures:
    """A measured model: its workload, the settings of its codecs, and the variation of its computing time."""

    work: Workload
    settings: tuple[Setting, ...]
    spread: float


def _step_timer(sync: Callable[[], None]) -> Callable[[Callable[[], object]], float]:
    """Return a function that times what all ranks do together; `sync` waits for all ranks."""

    def seconds(work: Callable[[], object]) -> float:
        sync()
        began = time.perf_counter()
        work()
        sync()
        return time.perf_counter() - began

    own = statistics.mean(seconds(lambda: None) for _ in range(3))
    return lambda work: max(seconds(work) - own, 1e-7)


def measure(
    subject: Subject,
    methods: Sequence[str],
    *,
    updates: Sequence[str] = (),
    workers: int = 4,
    steps: int = 10,
    sync: Callable[[], None] = lambda: None,
) -> ModelFigures:
    """Time some steps without communication, then each codec on the gradients.

    updates: presets of updates, which are measured as so many workers would use them.
    """
    timed = _step_timer(sync)
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

    taken = [timed(partial(step, number)) for number in range(3 + steps)][3:]  # without the warm-up
    for handle in handles:
        handle.remove()
    buckets, ready = in_buckets(filled)
    named = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    compute = statistics.median(taken)
    spread = statistics.median(abs(t - compute) for t in taken) / compute
    copying = conversion_seconds(sum(g.numel() for g in named.values()))
    codecs: dict[str, CodecTimes] = {}
    settings: list[Setting] = []
    for method in methods:
        codec = resolve_codec(method)
        codecs[method], density = _codec_times(codec, named, sync)
        settings += [Setting(method, e, density=density, bits=codec.values.bits) for e in EXCHANGES]
    for setting in update_settings(workers):
        if setting.name in updates:
            sync()
            size = update_bytes(setting, sum(g.numel() for g in named.values()))
            codecs[setting.name] = CodecTimes(*update_seconds(resolve_codec(setting.name, workers), named), size)
    work = Workload(compute, buckets, ready, 0.0, 0.0, copying, _alpha(named), codecs)
    return ModelFigures(work, tuple(settings), spread)


def in_buckets(filled: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Group gradients, in the order in which they are ready, into DDP's buckets; times are relative to the last."""
    buckets: list[int] = []
    ready: list[float] = []
    elements = 0
    for number, (numel, at) in enumerate(filled, start=1):
        elements += numel
        if number == len(filled) or 4 * elements >= (_BUCKET if buckets else _FIRST_BUCKET):
            buckets.append(elements)
            ready.append(at - filled[-1][1])
            elements = 0
    return tuple(buckets), tuple(ready)


def _codec_times(codec: Codec, gradients: dict[str, Tensor], sync: Callable[[], None]) -> tuple[CodecTimes, float]:
    """Return the times of a codec and its density, in the steady state: after a few encodes."""
    times = []
    for _ in range(5):
        sync()
        times.append(codec_seconds(codec, gradients))
    encode, decode = (statistics.median(column) for column in zip(*times, strict=True))
    fresh = codec.copy()
    frame = [fresh.encode(gradients) for _ in range(3)][-1]
    density = min(max(sum(frame.counts) / sum(g.numel() for g in gradients.values()), 1e-6), 1.0)
    return CodecTimes(encode, decode, 1.04 * len(frame) + 64), density


def _alpha(gradients: dict[str, Tensor]) -> dict[float, float]:
    """Return the share of the squared norm that each density sends, selecting in each large tensor by itself."""
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
    """The network: as probed, or from the rate of the workers' links and the one-way delay."""

    network: Network
    rate: float  # bits per second
    shown: str
    probed: bool
    crowd: float = 1.0  # ranks for each core, where ranks share cores

    def at(self, rate: float) -> Network:
        """Return the same network at another rate."""
        return self.network.at_rate(GOODPUT * rate)


def wire_of(workers: int, rate: str, delay: float) -> Wire:
    """Return the network of these options; the slower direction of a link counts."""
    both = parse_rates(rate)
    slower = min((r for r in (both.up, both.down) if r is not None), default=None)
    if slower is None:
        raise ValueError("--rate: advice needs a rate such as 500mbit; to measure real links use --probe")
    return Wire(Network.ideal(workers, GOODPUT * slower, delay), slower, rate, False)


def probed_wire() -> Wire:
    """Measure the network of the default process group; call it on all ranks."""
    parent = dist.distributed_c10d._get_default_group()
    groups = OwnGroups(parent, torch.device("cpu"), None)
    channel = groups.all
    network = probe_network(channel)
    rate = network.bandwidth / GOODPUT
    machines = gather_json(channel, _machine())
    crowd = torch.get_num_threads() * machines.count(machines[channel.rank]) / (os.cpu_count() or 1)
    crowd = max(1.0, *gather_json(channel, crowd))
    if crowd > 1.0:
        network = replace(network, cpu=gather_cpu(channel, network))
    new = dist.new_group(dist.get_process_group_ranks(parent))
    network = replace(network, paced=paced_seconds(Channel(new), network))
    dist.destroy_process_group(new)
    groups.close()
    return Wire(network, rate, f"{rate / 1e6:,.0f} Mbit/s, probed", True, crowd)


def _machine() -> str:
    """Return an identifier of the machine; emulated hosts have names of their own but share one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return platform.node()


@dataclass(frozen=True)
class AdviceReport:
    """The measured figures and the advice, for the table, the page and `--json`."""

    subject: str
    workers: int
    wire: Wire
    figures: ModelFigures
    advice: Advice
    command: str

    @property
    def title(self) -> str:
        """The title of the table and the page."""
        return f"{self.subject}: {self.workers} workers at {self.wire.shown}"

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All methods with all exchanges that were considered."""
        updates = update_settings(self.workers) if any(row.every for row in self.advice.rows) else ()
        return (DENSE, FP16, *self.figures.settings, *updates)

    def crossings(self) -> dict[str, float | None]:
        """Return the rate up to which each method is worth it."""
        return crossings(self.settings, self.figures.work, self.wire.at)

    def rows(self) -> list[Row]:
        """Return the table: one line for each method."""
        limits, updates = self.crossings(), any(row.every for row in self.advice.rows)
        return [
            {
                "method": row.method,
                "step": _ms(row.seconds),
                "±": f"{row.uncertainty:.0%}",
                "overhead": f"{row.overhead:+.0%}",
                "sent": megabytes(row.sent),
                # With updates, what counts is their measured effect on training.
                **({"loss": self._loss(row)} if updates else {"alpha": f"{row.alpha or 0.0:.2f}"}),
                "exchange": row.exchange.partition("-")[0],
                "pays up to": "" if row.method == "dense" else _rate(limits[row.method]),
            }
            for row in self.advice.rows
        ]

    def _loss(self, row: Prediction) -> str:
        """Return what a method costs in loss, as far as it was measured."""
        cost = self.advice.costs.get(row.method)
        if cost is None:
            return "?" if row.every else ""
        return f"{cost.loss:+.1%}{_star(row.method, cost)}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        work = self.figures.work
        return {
            "model": self.subject,
            "workers": self.workers,
            "rate": self.wire.rate,
            "probed": self.wire.probed,
            "parameters": work.elements,
            "compute_ms": 1e3 * work.compute,
            "alpha": {f"{density:g}": alpha for density, alpha in (work.alpha or {}).items()},
            "network": asdict(self.wire.network),
            "methods": [_figures(row) for row in self.advice.rows],
            "training_costs": {name: asdict(cost) for name, cost in self.advice.costs.items()},
            "crossings": self.crossings(),
            "recommended": self.advice.best.method,
            "compress": self.advice.compress,
            "verdict": self.advice.verdict,
            "version": thinwire.__version__,
            "command": self.command,
        }

    def page(self, path: Path) -> None:
        """Write the page with plots."""
        work = self.figures.work
        rates, curves = at_rates(self.settings, work, self.wire.at)
        write_page(
            path,
            "advice",
            title=self.title,
            verdict=self.advice.verdict,
            facts={
                "model": self.subject,
                "parameters": f"{work.elements:,}",
                "workers": f"{self.workers}",
                "link": self.wire.shown,
                "step without communication": f"{1e3 * work.compute:,.1f} ms",
            },
            table=[{**row, "setting": p.setting} for row, p in zip(self.rows(), self.advice.rows, strict=True)],
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


def _figures(row: Prediction) -> dict[str, Any]:
    figures = asdict(row)
    name, seconds, sent = (figures.pop(key) for key in ("method", "seconds", "sent"))
    return {"name": name, "step_ms": 1e3 * seconds, "bytes_per_host_step": sent, **figures}


def _rate(rate: float | None) -> str:
    if rate is None:
        return "any rate"
    return f"{rate / 1e9:.2g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.2g} Mbit/s"


def make_report(subject: Subject, wire: Wire, methods: list[str], command: str) -> AdviceReport:
    """Measure the model and advise; call it on all ranks where the network was probed."""
    threads = torch.get_num_threads()
    optimizer = type(subject.optimizer).__name__ if isinstance(subject.optimizer, ADAPTIVE) else ""
    sync = dist.barrier if wire.probed else lambda: None
    updates = tuple(EVERY) if optimizer else ()
    figures = measure(subject, methods, updates=updates, workers=wire.network.world, sync=sync)
    figures = replace(figures, work=replace(figures.work, crowd=wire.crowd))
    torch.set_num_threads(threads)
    settings = (DENSE, FP16, *figures.settings)
    costs = measured_costs(fidelity_folder()) if optimizer else {}
    options: dict[str, Any] = {"spread": figures.spread, "probed": wire.probed, "optimizer": optimizer, "costs": costs}
    advice = advise(settings, figures.work, wire.network, **options)
    return AdviceReport(subject.name, wire.network.world, wire, figures, advice, command)
