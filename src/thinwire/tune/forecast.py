"""Forecast: how long a step takes with a setting, from what was measured of the model, the machine and the network.

Buckets fill during the backward pass and are exchanged one after the other; what is not done when the last one is
full is what training waits for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from thinwire.tune.network import Network, Tiers


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
