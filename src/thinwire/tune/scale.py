"""Scale: step time, volume and efficiency of an exchange from two workers to thousands, by arithmetic.

Every exchange is described by what it asks of the busiest link and of a worker's processor. A step waits for the
slowest of all workers and of all links; emulated hosts share the cores of one machine besides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Bytes of headers that a frame has for every part that it is cut into: its own, and those of about ten tensors.
PART = 350.0


@dataclass(frozen=True)
class Task:
    """What a worker has to do in a step. Seconds are of a processor that it has for itself."""

    elements: int
    frame: float  # bytes of a compressed gradient
    compute: float  # seconds
    encode: float = 0.0  # seconds to make a frame
    decode: float = 0.0  # seconds to read one
    per_byte: float = 0.5e-9  # seconds for each byte that goes through its sockets, either way
    per_message: float = 20e-6  # seconds for each message that it sends
    wire: float = 1.0  # what a link really takes for its bytes, in what its rate says
    buckets: int = 1  # exchanges of a dense step, one after the other
    overlap: float = 0.0  # share of the computing during which an exchange is under way


@dataclass(frozen=True)
class Cluster:
    """Workers, one to a link; with `per_machine` several share a machine and its bus, and the first has the link."""

    rate: float  # bits a second, either way, headers taken off; the harmonic mean where links differ
    latency: float = 0.0  # seconds from one worker to another
    stragglers: float = 0.0  # standard deviation of computing times between workers, as a share of their mean
    rate_spread: float = 0.0  # the same for the time that a byte takes on the workers' links
    per_machine: int = 8  # of the hierarchical exchange
    bus: float = 100e9  # bits a second within a machine
    cores: int | None = None  # that all workers share, as emulated hosts do; None: everybody has its own
    switching: float = 0.0  # seconds that a message waits for its receiver's turn on a core

    def __post_init__(self) -> None:
        if not (self.rate > 0.0 and self.bus > 0.0 and self.latency >= 0.0):
            raise ValueError("a rate is above 0 and a latency at least 0")
        if not (0.0 <= self.stragglers <= 5.0 and 0.0 <= self.rate_spread <= 5.0):
            raise ValueError("a spread is a share of the mean from 0 to 5, such as 0.2")

    def share(self, workers: int) -> float:
        """How much longer computing takes because cores are shared."""
        return max(1.0, workers / self.cores) if self.cores else 1.0


@dataclass(frozen=True)
class Traffic:
    """What one step of an exchange asks for."""

    busiest: float  # bytes on the busiest link, one way
    sent: float  # bytes that a worker sends
    rounds: float  # hops that follow one another
    messages: float  # that a worker sends
    encodes: float = 0.0  # frames that are made, one after the other
    decodes: float = 0.0  # frames that are read, one after the other
    inside: float = 0.0  # bytes over a machine's bus


def star(n: int, task: Task, cluster: Cluster) -> Traffic:
    """A parameter server with a link like the workers': frames both ways, all of them over that link."""
    return Traffic(2.0 * n * task.frame, task.frame, 2.0, 1.0, encodes=2.0, decodes=n + 1.0)


def ring(n: int, task: Task, cluster: Cluster) -> Traffic:
    """DDP's all-reduce of the whole gradient."""
    volume, rounds = 2.0 * 4.0 * task.elements * (n - 1) / n, 2.0 * (n - 1) * task.buckets
    return Traffic(volume, volume, rounds, rounds)


def gather(n: int, task: Task, cluster: Cluster) -> Traffic:
    """Everybody's frame to everybody."""
    volume = (n - 1) * task.frame
    return Traffic(volume, volume, 1.0, n - 1.0, encodes=1.0, decodes=float(n))


def scatter_reduce(n: int, task: Task, cluster: Cluster) -> Traffic:
    """Parts of a frame to their owners, and the owners' results to everybody."""
    # The owners keep so much of the sums that both rounds are two frames together, if there is so much to keep.
    results = min((2.0 * n / (n - 1) - 1.0) / n, 1.0)
    volume = (n - 1) * (task.frame / n + task.frame * results + 2.0 * PART)
    return Traffic(volume, volume, 2.0, 2.0 * (n - 1), encodes=2.0, decodes=2.0)


def hierarchical(n: int, task: Task, cluster: Cluster) -> Traffic:
    """Dense within a machine, a gather of frames between the machines' first workers."""
    within, machines = min(n, cluster.per_machine), max(1, math.ceil(n / cluster.per_machine))
    between = gather(machines, task, cluster)
    inside = 2.0 * 4.0 * task.elements if within > 1 else 0.0
    per_worker = between.sent * machines / n
    hops = 2.0 * math.ceil(math.log2(within)) if within > 1 else 0.0
    return Traffic(
        between.busiest,
        per_worker,
        between.rounds if machines > 1 else 0.0,
        between.messages + hops,
        between.encodes,
        between.decodes,
        inside,
    )


EXCHANGES: dict[str, Callable[[int, Task, Cluster], Traffic]] = {
    "star": star,
    "ring": ring,
    "gather": gather,
    "scatter-reduce": scatter_reduce,
    "hierarchical": hierarchical,
}


@dataclass(frozen=True)
class Scaled:
    """One exchange with so many workers."""

    exchange: str
    workers: int
    seconds: float
    sent: float  # bytes per worker and step
    efficiency: float  # computing of one worker alone, as a share of the step


def predict(exchange: str, workers: int, task: Task, cluster: Cluster) -> Scaled:
    """A step with one exchange; `none` is a step without any."""
    share = cluster.share(workers)
    computing = task.compute * share * slowest(workers, cluster.stragglers)
    if exchange == "none":
        return Scaled(exchange, workers, computing, 0.0, 1.0 / slowest(workers, cluster.stragglers))
    traffic = EXCHANGES[exchange](workers, task, cluster)
    spent = (
        traffic.encodes * task.encode
        + traffic.decodes * task.decode
        + 2.0 * traffic.sent * task.per_byte
        + traffic.messages * (task.per_message + cluster.switching)
    )
    wire = task.wire * on_wire(traffic, workers, cluster)
    exchanging = wire + traffic.rounds * cluster.latency + 8.0 * traffic.inside / cluster.bus + spent * share
    seconds = computing + max(exchanging - task.overlap * task.compute * share, 0.0)
    return Scaled(exchange, workers, seconds, traffic.sent, task.compute * share / max(seconds, 1e-12))


def on_wire(traffic: Traffic, workers: int, cluster: Cluster) -> float:
    """Seconds that the busiest link takes, by its rate."""
    return 8.0 * traffic.busiest / cluster.rate * slowest(workers, cluster.rate_spread)


@lru_cache(maxsize=4096)
def slowest(n: int, spread: float) -> float:
    """The expected maximum of n times whose mean is 1 and whose standard deviation is `spread`, by a log-normal law."""
    if n <= 1 or spread == 0.0:
        return 1.0
    sigma = math.sqrt(math.log1p(spread * spread))
    z = np.linspace(-9.0, 9.0 + sigma, 20001)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    times = np.exp(sigma * z - 0.5 * sigma * sigma)
    # The mean of the law of the maximum, whose distribution is that of one to the n-th power.
    return float(np.sum(0.5 * (times[1:] + times[:-1]) * np.diff(below**n)))
