"""Auto: which setting a model, a machine and a network ask for, and when to think again.

It only computes: whoever measures gives every rank the same figures, and so every rank decides alike.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Line:
    """Seconds by bytes."""

    fixed: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.fixed + self.per_byte * size

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> "Line":
        """The line through two probes (bytes, seconds); noise must not give it a negative slope."""
        slope = max((large[1] - small[1]) / max(large[0] - small[0], 1.0), 1e-13)
        return cls(max(small[1] - slope * small[0], 1e-7), slope)


@dataclass(frozen=True)
class Tiers:
    """Machines of several ranks: what it takes within one, and between the first ranks of all."""

    per_machine: int
    inside: Line  # to one rank and back to all, by the bytes of the vector that is summed
    between: Line  # all-gather, by the bytes of each machine's message


@dataclass(frozen=True)
class Network:
    """All-gathers and all-reduces between `world` ranks."""

    world: int
    gather: Line  # by the bytes of each rank's message
    reduce: Line  # by the bytes of the vector that is summed
    tiers: Tiers | None = None  # where machines have several ranks each

    @classmethod
    def ideal(cls, world: int, bandwidth: float, latency: float) -> "Network":
        """Links of so many bits a second for each rank, and so many seconds for each of a ring's rounds."""
        byte, others = 8.0 / bandwidth, world - 1
        return cls(
            world,
            Line(others * latency, others * byte),
            Line(2 * others * latency, 2 * others / max(world, 1) * byte),
        )

    def scatter(self, size: float) -> float:
        """Parts of a message to their owners and everybody's result back: two rounds of 1/world of the message."""
        return 2.0 * self.gather(size / max(self.world, 1))

    @property
    def bandwidth(self) -> float:
        """Bits a second that a rank can send, as all-gathers see it."""
        return 8.0 * max(self.world - 1, 1) / self.gather.per_byte

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e6:,.0f} Mbit/s and {1e3 * self.gather.fixed:.1f} ms for {self.world} ranks"


@dataclass(frozen=True)
class Setting:
    """A way to average gradients: `width` bytes an element in an all-reduce, or a codec of some density and bits."""

    name: str
    exchange: str = "dense"
    width: int = 0
    density: float = 1.0
    bits: float = 8.0

    @property
    def compressed(self) -> bool:
        return self.width == 0

    def __str__(self) -> str:
        return f"{self.name} by {self.exchange}" if self.compressed else self.name


# Elements below which a link lets a bucket wait for the next (ddp/link.py).
SMALL = 1 << 19
# What encoding takes for an entry that travels, in elements that are only looked at.
_ENTRY = 17.0
# What headers and spare room add when a frame is cut into one part for every rank.
_SCATTERED = 1.2

HIERARCHICAL = "hierarchical"
DENSE, FP16 = Setting("dense", width=4), Setting("fp16", width=2)
DENSITIES = (0.1, 0.01, 0.001)
SETTINGS = (
    DENSE,
    FP16,
    *(Setting(f"{d:g}", exchange, density=d) for d in DENSITIES for exchange in ("gather", "scatter-reduce")),
)
# For machines of several ranks each.
TIERED = tuple(Setting(f"{d:g}", HIERARCHICAL, density=d) for d in DENSITIES)


@dataclass(frozen=True)
class CodecTimes:
    """What a codec really takes for the whole model: seconds to encode, to read one frame, and the frame's bytes."""

    encode: float
    decode: float
    frame: float


@dataclass(frozen=True)
class Workload:
    """A step of a model on its machine, without any exchange."""

    compute: float  # seconds
    buckets: tuple[int, ...]  # elements, in the order in which they fill
    ready: tuple[float, ...]  # seconds before the last bucket is full, as numbers of at most 0
    encode: float  # seconds to encode 1 % of everything
    decode: float  # seconds to read one such frame
    copy: float = 0.0  # seconds to narrow everything to 16 bits and back
    alpha: Mapping[float, float] | None = None  # by density: the share of the squared norm that it carries
    codecs: Mapping[str, CodecTimes] | None = None  # by a setting's name, where they were measured

    @property
    def elements(self) -> int:
        return sum(self.buckets)

    def times(self, setting: Setting) -> CodecTimes:
        """What a codec takes: as measured, or from what 1 % takes."""
        if self.codecs is not None and setting.name in self.codecs:
            return self.codecs[setting.name]
        # Encoding reads every element and writes the chosen ones; decoding knows only these.
        encode = self.encode * (1.0 + _ENTRY * setting.density) / (1.0 + 0.01 * _ENTRY)
        return CodecTimes(encode, self.decode * setting.density / 0.01, frame_bytes(setting, self.elements))

    def together(self) -> "Workload":
        """The same with small buckets exchanged together with the next, as links do."""
        buckets, ready, waiting = [], [], 0
        for place, (elements, at) in enumerate(zip(self.buckets, self.ready, strict=True)):
            waiting += elements
            if waiting >= SMALL or place == len(self.buckets) - 1:
                buckets.append(waiting)
                ready.append(at)
                waiting = 0
        return replace(self, buckets=tuple(buckets), ready=tuple(ready))


@dataclass(frozen=True)
class Forecast:
    """What a setting is expected to do."""

    setting: Setting
    seconds: float
    sent: float  # bytes per rank and step
    alpha: float


def frame_bytes(setting: Setting, elements: int) -> float:
    """About the bytes of a frame of that many elements: values and scales, positions, and room to spare."""
    each = setting.bits + 0.13 + 1.6 + math.log2(1.0 / setting.density)
    return 64.0 + 1.04 * setting.density * elements * each / 8.0


def forecast(setting: Setting, work: Workload, network: Network) -> Forecast:
    """The time of a step and what a rank sends in it."""
    done = -math.inf
    work = work.together() if setting.compressed else work
    for elements, ready in zip(work.buckets, work.ready, strict=True):
        done = max(done, ready) + _exchange(setting, work, network, elements)
    alpha = 1.0 if not setting.compressed or work.alpha is None else at_density(work.alpha, setting.density)
    return Forecast(setting, work.compute + max(done, 0.0), sent(setting, work, network), alpha)


def sent(setting: Setting, work: Workload, network: Network) -> float:
    """Bytes that a rank sends in a step to other machines, on average."""
    world = network.world
    if not setting.compressed:
        return 2.0 * setting.width * work.elements * (world - 1) / world
    frame = work.times(setting).frame
    if setting.exchange == HIERARCHICAL:
        return frame * (world / _tiers(network).per_machine - 1.0) / _tiers(network).per_machine
    return frame * (world - 1) if setting.exchange == "gather" else 2.0 * _SCATTERED * frame * (world - 1) / world


def _exchange(setting: Setting, work: Workload, network: Network, elements: int) -> float:
    """Seconds from a full bucket to its mean."""
    share = elements / max(work.elements, 1)
    if not setting.compressed:
        return network.reduce(setting.width * elements) + (work.copy * share if setting.width < 4 else 0.0)
    times = work.times(setting)
    if setting.exchange == HIERARCHICAL:
        tiers = _tiers(network)
        machines = network.world / tiers.per_machine
        within = tiers.inside(4.0 * elements)
        return within + share * (times.encode + machines * times.decode) + tiers.between(share * times.frame)
    if setting.exchange == "gather":
        return share * (times.encode + network.world * times.decode) + network.gather(share * times.frame)
    # Two selections, the second of a share of the entries; of every entry one rank reads all, and everybody the result.
    entries = _ENTRY * setting.density
    second = times.encode * (1.0 + entries / network.world) / (1.0 + entries)
    return share * (times.encode + second + 2.0 * times.decode) + network.scatter(_SCATTERED * share * times.frame)


def _tiers(network: Network) -> Tiers:
    if network.tiers is None:
        raise ValueError("machines with several ranks each were not measured: nothing is hierarchical here")
    return network.tiers


def at_density(alpha: Mapping[float, float], density: float) -> float:
    """Alpha between the densities that were measured, by ratio."""
    known = sorted(alpha)
    if density <= known[0] or len(known) == 1:
        return alpha[known[0]] * min(1.0, density / known[0])
    for low, high in pairwise(known):
        if density <= high:
            way = math.log(density / low) / math.log(high / low)
            return math.exp((1.0 - way) * math.log(alpha[low] + 1e-12) + way * math.log(alpha[high] + 1e-12))
    return alpha[known[-1]]


@dataclass(frozen=True)
class Policy:
    """What auto may choose, and how readily it changes its mind."""

    settings: tuple[Setting, ...] = SETTINGS
    alpha: float = 0.05  # the least share of the squared norm that a step must carry
    margin: float = 0.15  # what another setting must gain to be worth a change, as a share of the step
    compress_from: float = 0.05  # what compression must gain on dense to be worth its noise
    late: float = 0.01  # steps that are needed besides, as a share, where alpha is 1: what waits arrives late

    def cost(self, found: Forecast) -> float:
        """The time of a step, times the steps that it takes more than dense would.

        With 1 % alpha was about 0.12 on digits and 70 steps reached what 65 dense ones did; with 0.1 %, 0.015 and 120.
        """
        return found.seconds * (1.0 + self.late / max(found.alpha, 1e-6)) if found.setting.compressed else found.seconds


@dataclass(frozen=True)
class Decision:
    """A setting and what was expected of all."""

    setting: Setting
    forecasts: tuple[Forecast, ...]
    network: Network
    changed: bool

    @property
    def expected(self) -> Forecast:
        return next(f for f in self.forecasts if f.setting == self.setting)

    def why(self) -> str:
        """One line: what was chosen and why."""
        dense = next(f for f in self.forecasts if f.setting.name == DENSE.name)
        others = sorted((f for f in self.forecasts if f.setting != self.setting), key=lambda f: f.seconds)
        shown = {DENSE: dense, **{f.setting: f for f in others[:2]}}
        rest = ", ".join(f"{s} {1e3 * f.seconds:.0f} ms" for s, f in shown.items() if s != self.setting)
        best = self.expected
        share = f", alpha {best.alpha:.2f}" if best.setting.compressed else ""
        return f"{best.setting} at {1e3 * best.seconds:.0f} ms a step{share} (expected: {rest}); {self.network}"


def decide(work: Workload, network: Network, present: Setting | None = None, policy: Policy | None = None) -> Decision:
    """The cheapest setting that carries enough; the present one stays unless another is clearly cheaper."""
    policy = policy if policy is not None else Policy()
    settings = policy.settings + (TIERED if network.tiers is not None else ())
    forecasts = tuple(forecast(setting, work, network) for setting in settings)
    allowed = [f for f in forecasts if f.alpha >= policy.alpha]
    dense = next(f for f in forecasts if f.setting.name == DENSE.name)
    best = min(allowed, key=policy.cost, default=dense)
    if best.setting.name != DENSE.name and policy.cost(best) > (1.0 - policy.compress_from) * dense.seconds:
        best = dense
    now = next((f for f in allowed if f.setting == present), None)
    if now is not None and policy.cost(best) > (1.0 - policy.margin) * policy.cost(now):
        best = now
    return Decision(best.setting, forecasts, network, best.setting != present)


class Watch:
    """Notices from the time that training waits for the exchange that the network is not what it was.

    The first window after a decision is the yardstick; a later one that differs by half is a reason to probe again.
    """

    def __init__(self, *, factor: float = 1.5, least: float = 0.002) -> None:
        self._factor, self._least = factor, least
        self._usual: float | None = None

    def reset(self) -> None:
        """After a decision: what comes next is the new yardstick."""
        self._usual = None

    def suspicious(self, waits: Sequence[float], period: float) -> bool:
        """Whether a window of waits says that something has changed; `period` is the time of a whole step."""
        now = statistics.median(waits)
        if self._usual is None:
            self._usual = now
            return False
        changed = max(now, self._usual) > self._factor * min(now, self._usual)
        # Small waits may vary as they like: they are not worth a probe.
        return changed and abs(now - self._usual) > max(self._least, 0.1 * period)
