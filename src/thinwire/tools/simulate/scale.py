"""Model of a step with up to thousands of workers for each exchange, calibrated by measurements."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import thinwire
from thinwire.tools.lab.units import format_rate, parse_delay, parse_rate
from thinwire.tools.observe import describe_machine, now
from thinwire.tools.race.advise import GOODPUT
from thinwire.tools.report.markup import Row, write_page
from thinwire.tools.report.page import megabytes
from thinwire.tune.cost import Array
from thinwire.tune.forecast import EVERY, HIDDEN, PACED, paced_part, scattered_parts, update_bytes, update_settings


@dataclass(frozen=True)
class Task:
    """What a worker does in a step. Times are seconds on a processor of its own."""

    elements: int
    frame: float  # bytes of a compressed gradient
    compute: float  # seconds
    encode: float = 0.0  # seconds to encode a frame
    decode: float = 0.0  # seconds to decode one
    per_byte: float = 0.5e-9  # processor seconds for each byte through a socket, in either direction
    per_message: float = 20e-6  # processor seconds for each message sent
    wire: float = 1.0  # measured transfer time over the time that the rate promises
    buckets: int = 1  # all-reduces of a dense step
    overlap: float = 0.0  # share of the computing time that overlaps with the exchange


@dataclass(frozen=True)
class SimulatedCluster:
    """Workers with one link each; the hierarchical exchange puts `per_machine` of them on a machine with one link."""

    rate: float  # bits per second in each direction, without headers; the harmonic mean where links differ
    delay: float = 0.0  # seconds from one worker to another, one way
    stragglers: float = 0.0  # standard deviation of computing times between workers, as a share of their mean
    rate_spread: float = 0.0  # the same of the transfer time of a byte on the workers' links
    per_machine: int = 8  # of the hierarchical exchange
    bus: float = 100e9  # bits per second within a machine
    cores: int | None = None  # shared by all workers, as emulated hosts share them; None: each has its own
    switching: float = 0.0  # seconds that a message waits until its receiver runs

    def __post_init__(self) -> None:
        if not (self.rate > 0.0 and self.bus > 0.0 and self.delay >= 0.0):
            raise ValueError("a rate is above 0 and a delay at least 0")
        if not (0.0 <= self.stragglers <= 5.0 and 0.0 <= self.rate_spread <= 5.0):
            raise ValueError("a spread is a share of the mean from 0 to 5, such as 0.2")

    def share(self, workers: int) -> float:
        """Return how many times longer computing takes because cores are shared."""
        return max(1.0, workers / self.cores) if self.cores else 1.0


@dataclass(frozen=True)
class ScaleTraffic:
    """The communication of one step of an exchange."""

    busiest: float  # bytes on the busiest link, one way
    sent: float  # bytes that a worker sends
    delays: float  # one-way delays of messages that must follow one another
    messages: float  # sent by a worker
    encodes: float = 0.0  # frames encoded one after the other
    decodes: float = 0.0  # frames decoded one after the other
    inside: float = 0.0  # bytes over a machine's bus
    # Bytes of the messages that TCP paces. Two rounds over the same connections count as one message: the second begins
    # within a round trip of the first, so that TCP measures the bytes of both in it.
    paced: tuple[float, ...] = ()


def star(n: int, task: Task, cluster: SimulatedCluster) -> ScaleTraffic:
    """A parameter server whose link has a worker's rate; all frames cross it in both directions."""
    paced = (task.frame, task.frame)
    return ScaleTraffic(2.0 * n * task.frame, task.frame, 2.0, 1.0, encodes=2.0, decodes=n + 1.0, paced=paced)


def ring(n: int, task: Task, cluster: SimulatedCluster) -> ScaleTraffic:
    """DDP's all-reduce of the whole gradient."""
    volume, rounds = 2.0 * 4.0 * task.elements * (n - 1) / n, 2.0 * (n - 1)
    return ScaleTraffic(volume, volume, rounds, rounds * task.buckets)  # Gloo runs two all-reduces at a time


def gather(n: int, task: Task, cluster: SimulatedCluster) -> ScaleTraffic:
    """An all-gather of the frames."""
    volume = (n - 1) * task.frame
    return ScaleTraffic(volume, volume, 1.0, n - 1.0, encodes=1.0, decodes=float(n), paced=(task.frame,))


def scatter_reduce(n: int, task: Task, cluster: SimulatedCluster) -> ScaleTraffic:
    """A reduce-scatter of the frames' parts, then an all-gather of the reduced parts."""
    parts = scattered_parts(task.frame, n)
    volume = (n - 1) * sum(parts)
    return ScaleTraffic(volume, volume, 2.0, 2.0 * (n - 1), encodes=2.0, decodes=2.0, paced=(sum(parts),))


def hierarchical(n: int, task: Task, cluster: SimulatedCluster) -> ScaleTraffic:
    """A dense reduction within each machine, an all-gather of frames between the machines' first workers."""
    within, machines = min(n, cluster.per_machine), max(1, math.ceil(n / cluster.per_machine))
    between = gather(machines, task, cluster)
    return replace(
        between,
        sent=between.sent * machines / n,
        delays=between.delays if machines > 1 else 0.0,
        paced=between.paced if machines > 1 else (),
        messages=between.messages + 2.0 * math.ceil(math.log2(within)),
        inside=2.0 * 4.0 * task.elements if within > 1 else 0.0,
    )


def updates(n: int, task: Task, cluster: SimulatedCluster, name: str) -> ScaleTraffic:
    """One exchange of updates with a preset: coordinates are reduced and gathered. The time to compress is left out."""
    setting = next(each for each in update_settings(n) if each.name == name)
    frame = update_bytes(setting, task.elements)
    if setting.exchange == "gather":
        return ScaleTraffic((n - 1) * frame, (n - 1) * frame, 1.0, n - 1.0, paced=(frame,))
    volume = 2.0 * frame * (n - 1) / n
    return ScaleTraffic(volume, volume, 2.0, 2.0 * (n - 1), paced=(2.0 * frame / n,))


EXCHANGES: dict[str, Callable[[int, Task, SimulatedCluster], ScaleTraffic]] = {
    "star": star,
    "ring": ring,
    "gather": gather,
    "scatter-reduce": scatter_reduce,
    "hierarchical": hierarchical,
    **{name: partial(updates, name=name) for name in EVERY},
}


@dataclass(frozen=True)
class ScalePrediction:
    """What is predicted for one exchange and one number of workers."""

    exchange: str
    workers: int
    seconds: float
    sent: float  # bytes per worker and step
    efficiency: float  # share of the step that is computing


def predict(exchange: str, workers: int, task: Task, cluster: SimulatedCluster) -> ScalePrediction:
    """Predict a step with an exchange; `none` is a step without communication."""
    share = cluster.share(workers)
    computing = task.compute * share * slowest(workers, cluster.stragglers)
    if exchange == "none":
        return ScalePrediction(exchange, workers, computing, 0.0, 1.0 / slowest(workers, cluster.stragglers))
    if exchange in EVERY:
        return _predict_updates(exchange, workers, task, cluster)
    exchanging, sent = _exchanging(exchange, workers, task, cluster), EXCHANGES[exchange](workers, task, cluster).sent
    seconds = computing + max(exchanging - task.overlap * task.compute * share, 0.0)
    return ScalePrediction(exchange, workers, seconds, sent, task.compute * share / max(seconds, 1e-12))


def _predict_updates(exchange: str, workers: int, task: Task, cluster: SimulatedCluster) -> ScalePrediction:
    """Predict a step of updates. Local steps overlap the exchange; workers wait for the slowest once a round only."""
    every, share = EVERY[exchange], cluster.share(workers)
    computing = task.compute * share * slowest(workers, cluster.stragglers / math.sqrt(every))
    hidden = every * computing if every > 1 else 0.0
    waited = max(_exchanging(exchange, workers, task, cluster) - hidden, 0.0) / every
    seconds = computing + waited
    sent = EXCHANGES[exchange](workers, task, cluster).sent / every
    return ScalePrediction(exchange, workers, seconds, sent, task.compute * share / max(seconds, 1e-12))


def _exchanging(exchange: str, workers: int, task: Task, cluster: SimulatedCluster) -> float:
    """Return the seconds of one exchange."""
    traffic = EXCHANGES[exchange](workers, task, cluster)
    spent = (
        traffic.encodes * task.encode
        + traffic.decodes * task.decode
        + 2.0 * traffic.sent * task.per_byte
        + traffic.messages * (task.per_message + cluster.switching)
    )
    paced = PACED * cluster.delay * sum(map(paced_part, traffic.paced))
    wire = max(task.wire * on_wire(traffic, workers, cluster), paced)
    return wire + traffic.delays * cluster.delay + 8.0 * traffic.inside / cluster.bus + spent * cluster.share(workers)


def on_wire(traffic: ScaleTraffic, workers: int, cluster: SimulatedCluster) -> float:
    """Return the seconds that the busiest link takes at its rate."""
    return 8.0 * traffic.busiest / cluster.rate * slowest(workers, cluster.rate_spread)


@lru_cache(maxsize=4096)
def slowest(n: int, spread: float) -> float:
    """Return the expected maximum of n log-normal times with mean 1 and standard deviation `spread`."""
    if n <= 1 or spread == 0.0:
        return 1.0
    sigma = math.sqrt(math.log1p(spread * spread))
    z = np.linspace(-9.0, 9.0 + sigma, 20001)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    times = np.exp(sigma * z - 0.5 * sigma * sigma)
    # The distribution function of the maximum is that of a single time to the n-th power.
    return max(1.0, float(np.sum(0.5 * (times[1:] + times[:-1]) * np.diff(below**n))))  # a sum may round below 1


# Relative errors that predictions of measured steps should not exceed, without and with a delay.
_BAR, _DELAYED_BAR = 0.20, 0.25
# The fitted parameters, in the order of the columns.
_FITTED = ("compute", "per_byte", "switching", "wire")
_OVERLAPS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Point:
    """A measured step; the exchange `none` is a step without communication."""

    exchange: str
    workers: int
    rate: float  # bits per second
    seconds: float
    sent: float  # bytes per worker
    codec: float = 0.0  # processor seconds for encoding and decoding
    delay: float = 0.0  # seconds, one way
    width: float = 4.0  # bytes of an element that a ring sends

    @property
    def name(self) -> str:
        """The exchange, as tables show it."""
        return self.exchange if self.width == 4.0 else f"{self.exchange}, {8 * self.width:.0f} bits"


def calibrated(points: Sequence[Point], task: Task, cluster: SimulatedCluster) -> tuple[Task, SimulatedCluster]:
    """Fit the times of task and cluster to steps measured without a delay; ValueError if there are too few."""
    points = [p for p in points if not p.delay]
    if not any(p.exchange == "none" for p in points) or len(points) < 2:
        raise ValueError("calibration needs a measured step without communication and at least one with an exchange")
    frames = [p.sent / (p.workers - 1) for p in points if p.exchange == "gather"]
    known = _with_codec(points, replace(task, frame=float(np.median(frames))) if frames else task, cluster)
    fits = [_fit(points, replace(known, overlap=overlap), cluster) for overlap in _OVERLAPS]
    return min(fits, key=lambda fit: max(abs(off(p, *fit)) for p in points))


def off(point: Point, task: Task, cluster: SimulatedCluster) -> float:
    """Return the relative error of the prediction of a measured step."""
    return _predicted(point, task, cluster).seconds / point.seconds - 1.0


def _predicted(point: Point, task: Task, cluster: SimulatedCluster) -> ScalePrediction:
    task = replace(task, elements=round(task.elements * point.width / 4.0))
    return predict(point.exchange, point.workers, task, replace(cluster, rate=point.rate, delay=point.delay))


def _fit(points: Sequence[Point], task: Task, cluster: SimulatedCluster) -> tuple[Task, SimulatedCluster]:
    """Fit by least squares: a column is what one unit of a parameter adds to each step; known times are subtracted."""
    empty, still = _with(task, cluster, [0.0] * len(_FITTED))
    columns = np.array([[_unit(p, empty, name, still) for name in _FITTED] for p in points])
    fixed = np.array([_predicted(p, empty, still).seconds for p in points])
    measured = np.array([p.seconds for p in points])
    return _with(task, cluster, _least_squares(columns / measured[:, None], (measured - fixed) / measured).tolist())


def _with(task: Task, cluster: SimulatedCluster, values: Sequence[float]) -> tuple[Task, SimulatedCluster]:
    compute, per_byte, switching, wire = values
    return replace(task, compute=compute, per_byte=per_byte, wire=wire), replace(cluster, switching=switching)


def _with_codec(points: Sequence[Point], task: Task, cluster: SimulatedCluster) -> Task:
    """Fit the times of encoding and decoding a frame to the measured processor times of the codec."""
    timed = [(EXCHANGES[p.exchange](p.workers, task, cluster), p.codec) for p in points if p.codec > 0.0]
    if not timed:
        return task
    columns = np.array([[traffic.encodes, traffic.decodes] for traffic, _ in timed])
    taken = np.array([seconds for _, seconds in timed])
    encode, decode = _least_squares(columns / taken[:, None], np.ones(len(taken)))
    return replace(task, encode=float(encode), decode=float(decode))


def _unit(point: Point, task: Task, name: str, cluster: SimulatedCluster) -> float:
    """Return the seconds that one unit of a parameter adds to a step."""
    if point.exchange == "none" and name != "compute":
        return 0.0
    place = replace(cluster, rate=point.rate)
    share = place.share(point.workers)
    if name == "compute":
        hidden = 0.0 if point.exchange == "none" else task.overlap
        return predict("none", point.workers, replace(task, compute=1.0), place).seconds - hidden * share
    traffic = EXCHANGES[point.exchange](point.workers, task, place)
    if name == "wire":
        return on_wire(traffic, point.workers, place)
    return share * (2.0 * traffic.sent if name == "per_byte" else traffic.messages)


def _least_squares(columns: Array, wanted: Array) -> Array:
    """Solve by least squares; the most negative unknown becomes 0 and the rest is solved again until none is left."""
    used = [i for i in range(columns.shape[1]) if np.any(columns[:, i])]
    solution = np.zeros(columns.shape[1])
    while used:
        scale = np.abs(columns[:, used]).max(axis=0)
        part, *_ = np.linalg.lstsq(columns[:, used] / scale, wanted, rcond=None)
        worst = int(np.argmin(part))
        if part[worst] >= 0.0:
            solution[used] = part / scale
            break
        del used[worst]
    return solution


# Exchanges by the methods and the class names that `thinwire bench ddp` writes.
_METHODS = {"infinite": "none", "dense": "ring"}
_CLASSES = {"Gather": "gather", "ScatterReduce": "scatter-reduce", "Hierarchical": "hierarchical"}
# Rings of fewer bytes per element. The model is not calibrated with them.
_NARROW = {"fp16": 2.0}


def read_points(path: Path) -> list[Point]:
    """Read the steps in a file of `thinwire bench ddp --json`; methods that the model does not cover are left out.

    With a delay, `infinite` is left out, too: exchanging its single number takes round trips.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        points = [point for each in found.get("delays", [found]) for point in _points(each)]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{path} is not a file of thinwire bench ddp --json ({error!r})") from error
    if not all(point.rate for point in points):
        raise ValueError(f"{path} was measured without a limit: give measurements at a rate")
    return points


def _points(found: dict[str, Any]) -> list[Point]:
    """Return the steps of one table of `thinwire bench ddp`."""
    rate, delay, rows = parse_rate(found["rate"]), parse_delay(found.get("delay")), found["rows"]
    workers = int(found["workers"] if "workers" in found else found["hosts"])  # older files call them hosts
    idle = next(float(row["bytes_sent"]) for row in rows if row["name"] == "infinite")
    exchanges = dict(_METHODS) if not delay else {"dense": "ring", **dict.fromkeys(_NARROW, "ring")}
    return [
        # What a step without communication sends anyway (barriers) is subtracted.
        Point(
            exchange,
            workers,
            GOODPUT * (rate or 0),
            float(row["step_ms"]) / 1e3,
            max(float(row["bytes_sent"]) - idle, 0.0),
            float(row["hook_cpu_ms"]) / 1e3,
            delay,
            _NARROW.get(row["name"], 4.0),
        )
        for row in rows
        if (exchange := exchanges.get(row["name"], _CLASSES.get(str(row["exchange"]).partition("(")[0])))
    ]


@dataclass(frozen=True)
class Scaling:
    """The predictions, and their comparison with steps measured on hosts that share the cores of `lab`."""

    task: Task
    cluster: SimulatedCluster
    exchanges: tuple[str, ...]
    workers: tuple[int, ...]
    points: tuple[Point, ...]
    lab: SimulatedCluster
    command: str

    def curve(self, exchange: str) -> list[ScalePrediction]:
        """Return the predictions of an exchange for all numbers of workers."""
        return [predict(exchange, n, self.task, self.cluster) for n in self.workers]

    def fastest(self) -> list[tuple[str, int]]:
        """Return which exchange is the fastest up to which number of workers."""

        def best(n: int) -> str:
            # Local steps train worse per step: they are compared among themselves, by `hiding`.
            whole = [exchange for exchange in self.exchanges if EVERY.get(exchange, 1) == 1]
            return min(
                whole or self.exchanges, key=lambda exchange: predict(exchange, n, self.task, self.cluster).seconds
            )

        return [(exchange, list(group)[-1]) for exchange, group in groupby(self.workers, best)]

    def hiding(self) -> list[tuple[str, int]]:
        """Return up to which number of workers the ring or which preset of updates is the first to hide the network."""
        names = [name for name in ("ring", *EVERY) if name in self.exchanges]
        if not names:
            return []

        def first(n: int) -> str:
            found = {name: predict(name, n, self.task, self.cluster).seconds for name in names}
            return next(name for name in names if found[name] <= (1.0 + HIDDEN) * min(found.values()))

        return [(name, list(group)[-1]) for name, group in groupby(self.workers, first)]

    def choice(self) -> str:
        """Say which domain and how many local steps optimizers such as Adam need, without the time to compress."""
        shown = ", then ".join(f"{name} up to {n:,} workers" for name, n in self.hiding())
        return f"With Adam, the first to hide the network is {shown}; compressing takes time besides."

    def verdict(self) -> str:
        """Say which exchange is the fastest, and how far the model is from the measurements."""
        *others, (last, most) = parts = self.fastest()
        words = ", then ".join(f"{e} up to {n:,}" for e, n in others)
        end = predict(last, most, self.task, self.cluster)
        said = (f"The fastest is {words} workers, then {last}" if words else f"{last.capitalize()} is the fastest") + (
            f"; with {most:,} workers a step takes {_ms(end.seconds)}, of which {end.efficiency:.0%} is computing."
        )
        if any(exchange == "hierarchical" for exchange, _ in parts):
            bus = format_rate(round(self.cluster.bus))
            said += f" Hierarchical has {self.cluster.per_machine} workers in each machine, on a bus of {bus}."
        if any(exchange in EVERY for exchange in self.exchanges):
            said += f" {self.choice()}"
        near = [abs(off(p, self.task, self.lab)) for p in self.points if not p.delay]
        far = [abs(off(p, self.task, self.lab)) for p in self.points if p.delay]
        for errors, which, bar in ((near, "", _BAR), (far, " with a delay", _DELAYED_BAR)):
            if errors:
                inside, worst = sum(error <= bar for error in errors), max(errors)
                said += f" {inside} of {len(errors)} measured steps{which} are within {100 * bar:.0f} %"
                said += f", the worst is {worst:.0%} off."
        return said

    def checks(self) -> list[dict[str, Any]]:
        """Return every measured step with its prediction."""
        return [
            {
                "exchange": p.name,
                "workers": p.workers,
                "rate": format_rate(round(p.rate / GOODPUT)),
                "delay_ms": 1e3 * p.delay,
                "measured_ms": 1e3 * p.seconds,
                "predicted_ms": 1e3 * _predicted(p, self.task, self.lab).seconds,
                "off": off(p, self.task, self.lab),
                "sent": p.sent,
                "predicted_sent": _predicted(p, self.task, self.lab).sent,
            }
            for p in sorted(self.points, key=lambda p: (p.rate, p.delay, p.workers))
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return {
            "task": asdict(self.task),
            "cluster": asdict(self.cluster),
            "curves": {e: [asdict(s) for s in self.curve(e)] for e in self.exchanges},
            "fastest": [{"exchange": e, "up_to": n} for e, n in self.fastest()],
            "hiding": [{"exchange": e, "up_to": n} for e, n in self.hiding()],
            "measured": self.checks(),
            "verdict": self.verdict(),
            "version": thinwire.__version__,
            "command": self.command,
        }

    def rows(self) -> list[Row]:
        """Return the table: for each exchange the step times with up to six numbers of workers, evenly chosen."""
        shown = [self.workers[place] for place in sorted({round(i * (len(self.workers) - 1) / 5) for i in range(6)})]
        table: list[Row] = []
        for exchange in self.exchanges:
            curve = {s.workers: s for s in self.curve(exchange)}
            half = [n for n, s in curve.items() if s.efficiency >= 0.5]
            row = {"Exchange": exchange, **{f"{n:,} workers": _ms(curve[n].seconds) for n in shown}}
            row["Sent at most"] = megabytes(max(s.sent for s in curve.values()))
            row["Half efficient up to"] = f"{max(half):,}" if half else "–"
            table.append(row)
        return table

    def page(self, path: Path) -> None:
        """Write the page with plots."""
        task, cluster = self.task, self.cluster
        write_page(
            path,
            "scale",
            title=f"{task.elements:,} parameters at {format_rate(round(cluster.rate / GOODPUT))}",
            verdict=self.verdict(),
            facts={
                "parameters": f"{task.elements:,}",
                "frame": megabytes(task.frame),
                "computing": _ms(task.compute),
                "delay": f"{1e3 * cluster.delay:.3g} ms",
                "stragglers": f"±{cluster.stragglers:.0%}",
                "links": f"±{cluster.rate_spread:.0%}",
            },
            table=self.rows(),
            made={
                "Command": self.command,
                "Machine": describe_machine(),
                "Version": f"thinwire {thinwire.__version__}",
                "Date": now(),
            },
            data={
                "workers": self.workers,
                "curves": {e: self._drawn(e) for e in self.exchanges},
                "lab": self._lab(),
                "cores": self.lab.cores,
            },
        )

    def _drawn(self, exchange: str) -> dict[str, list[float]]:
        figures = [(1e3 * s.seconds, s.sent / 1e6, 100.0 * s.efficiency) for s in self.curve(exchange)]
        return dict(zip(("ms", "mb", "efficiency"), map(list, zip(*figures, strict=True)), strict=True))

    def _lab(self) -> list[dict[str, Any]]:
        """Return for each measured rate the curves with shared cores and the measured steps."""
        checks, figures = [check for check in self.checks() if not check["delay_ms"]], []
        for rate in dict.fromkeys(check["rate"] for check in checks):
            here = [check for check in checks if check["rate"] == rate]
            measured = next(p.rate for p in self.points if format_rate(round(p.rate / GOODPUT)) == rate)
            cluster = replace(self.lab, rate=measured)
            most = max(check["workers"] for check in here)
            workers = sorted({n for n in range(2, 2 * most) if n <= 32 or n % 8 == 0})
            names = list(dict.fromkeys(check["exchange"] for check in here))
            curves = {e: [1e3 * predict(e, n, self.task, cluster).seconds for n in workers] for e in names}
            figures.append({"rate": rate, "workers": workers, "curves": curves, "points": here})
        return figures


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
