"""Forecast: the time of a training step by setting, and which setting is best for a model, a machine and a network.

Arithmetic only: the same figures give the same decision on every rank.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from thinwire.codec.low_rank import LowRank
from thinwire.tune.presets import LOCAL, resolve_codec


@dataclass(frozen=True)
class LinearTime:
    """Seconds as a linear function of bytes."""

    fixed: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.fixed + self.per_byte * size

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> "LinearTime":
        """The function through two measurements (bytes, seconds). Its slope is positive whatever the noise."""
        slope = max((large[1] - small[1]) / max(large[0] - small[0], 1.0), 1e-13)
        return cls(max(small[1] - slope * small[0], 1e-7), slope)


# TCP (BBR) paces the packets of a message. It is idle between messages, so that the rate that it measures is the bytes
# of one message per round trip, however fast the link is, and it sends at 2.9 times that rate. The packets therefore
# leave over this share of the one-way delay, unless the link itself takes longer. Measured at 10 and 50 ms: 0.8.
PACED = 0.8
# Bytes that leave at once: two packets.
_UNPACED = 2 * 1448


def paced_part(size: float) -> float:
    """The share of a message of `size` bytes that TCP paces: all but its first packets."""
    return max(1.0 - _UNPACED / max(size, 1.0), 0.0)


@dataclass(frozen=True)
class Tiers:
    """Times of exchanges within a machine of several ranks, and between the first ranks of all machines."""

    per_machine: int
    inside: LinearTime  # reduce and broadcast, by the bytes of the vector
    between: LinearTime  # all-gather, by the bytes of each machine's message
    latency: float = 0.0  # as that of a `Network`, between machines


@dataclass(frozen=True)
class Network:
    """Times of collectives between `world` ranks, measured or computed from a rate."""

    world: int
    gather: LinearTime  # all-gather, by the bytes of each rank's message
    reduce: LinearTime  # all-reduce, by the bytes of the vector
    tiers: Tiers | None = None  # for machines of several ranks each
    latency: float = 0.0  # seconds of a message's way, during which other messages can be sent
    paced: float = 0.0  # seconds over which TCP spreads a long message, on connections that never sent a longer one
    cpu: LinearTime = LinearTime(0.0, 0.0)  # processor time of a rank in an all-gather, by the bytes of its message

    @classmethod
    def ideal(cls, world: int, bandwidth: float, latency: float) -> "Network":
        """A network of links with `bandwidth` bits per second, whose packets take `latency` seconds, one way.

        An all-gather sends to all ranks at once, in one round; an all-reduce is a ring of 2 (world - 1) rounds, of
        which each begins while the last one still sends.
        """
        byte, others = 8.0 / bandwidth, world - 1
        return cls(
            world,
            LinearTime(latency, others * byte),
            LinearTime(2 * others * latency, 2 * others / max(world, 1) * byte),
            latency=latency,
            paced=PACED * latency,
        )

    def at_rate(self, bandwidth: float) -> "Network":
        """The same network with links of another rate."""
        other = Network.ideal(self.world, bandwidth, 0.0)
        return replace(
            self,
            gather=replace(self.gather, per_byte=other.gather.per_byte),
            reduce=replace(self.reduce, per_byte=other.reduce.per_byte),
            tiers=None,
        )

    def spread(self, size: float) -> float:
        """Seconds over which TCP spreads the packets of a message of `size` bytes, whatever the link's rate is."""
        return self.paced * paced_part(size)

    def exchange(self, size: float) -> float:
        """Seconds of an all-gather of messages of `size` bytes each, pacing included."""
        return self.gather.fixed + max(self.gather.per_byte * size, self.spread(size))

    def scatter(self, size: float) -> float:
        """Seconds to send the parts of a message to their owners, and to gather the results: two rounds of 1/world."""
        return 2.0 * self.exchange(size / max(self.world, 1))

    @property
    def bandwidth(self) -> float:
        """Bits per second that a rank can send. The better of two estimates, because all that disturbs takes time."""
        others = max(self.world - 1, 1)
        return 8.0 * others * max(1.0 / self.gather.per_byte, 2.0 / max(self.world, 2) / self.reduce.per_byte)

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e6:,.0f} Mbit/s and {1e3 * self.gather.fixed:.1f} ms a round for {self.world} ranks"


@dataclass(frozen=True)
class Setting:
    """A way to average: an all-reduce of `width` bytes per element, or a codec of a density and bits.

    A codec compresses gradients, or where `every` is given the updates of so many steps of the optimizer.
    """

    name: str
    exchange: str = "dense"
    width: int = 0
    density: float = 1.0
    bits: float = 8.0
    every: int = 0  # steps between two exchanges of updates; 0: gradients are exchanged in every step

    @property
    def compressed(self) -> bool:
        return self.width == 0

    def __str__(self) -> str:
        return f"{self.name} by {self.exchange}" if self.compressed else self.name


# A link exchanges a bucket of fewer elements together with the next: a collective costs more than overlapping it gains.
JOINED_BELOW = 1 << 19
# All-reduces that Gloo runs at the same time.
_ALL_REDUCES = 2
# Time to encode an entry that is sent, relative to reading an element that is not.
_ENTRY = 17.0
# Bytes of headers in every part of a frame that is split: the part's own and those of about ten tensors.
PART = 350.0

HIERARCHICAL = "hierarchical"


def density_setting(density: float, exchange: str) -> Setting:
    """Return the setting for a density, whose values are those of its codec."""
    return Setting(f"{density:g}", exchange, density=density, bits=resolve_codec(density).values.bits)


DENSE, FP16 = Setting("dense", width=4), Setting("fp16", width=2)
DENSITIES = (0.1, 0.01, 0.001)
SETTINGS = (
    DENSE,
    FP16,
    *(density_setting(d, exchange) for d in DENSITIES for exchange in ("gather", "scatter-reduce")),
)
# For machines of several ranks each.
TIERED = tuple(density_setting(d, HIERARCHICAL) for d in DENSITIES)


@dataclass(frozen=True)
class CodecTimes:
    """Measurements of a codec on the whole model: seconds to encode, seconds to decode one frame, bytes of a frame."""

    encode: float
    decode: float
    frame: float


@dataclass(frozen=True)
class Workload:
    """A step of a model on its machine, without any exchange."""

    compute: float  # seconds
    buckets: tuple[int, ...]  # elements, in the order of submission
    ready: tuple[float, ...]  # seconds relative to the last bucket's submission: at most 0
    encode: float  # seconds to encode 1 % of the model
    decode: float  # seconds to decode one such frame
    copy: float = 0.0  # seconds to convert the model to 16 bits and back
    alpha: Mapping[float, float] | None = None  # by density: the share of the squared norm that is sent
    codecs: Mapping[str, CodecTimes] | None = None  # measured codecs, by the setting's name
    crowd: float = 1.0  # ranks for each core: above 1 an exchange takes processor time from other ranks

    @property
    def elements(self) -> int:
        return sum(self.buckets)

    def times(self, setting: Setting) -> CodecTimes:
        """The times of a setting's codec: measured, or scaled from the times at 1 %."""
        if self.codecs is not None and setting.name in self.codecs:
            return self.codecs[setting.name]
        if setting.every:  # compressing updates is not known from compressing gradients
            return CodecTimes(0.0, 0.0, update_bytes(setting, self.elements))
        # Encoding reads all elements and writes the selected entries; decoding reads only these.
        encode = self.encode * (1.0 + _ENTRY * setting.density) / (1.0 + 0.01 * _ENTRY)
        return CodecTimes(encode, self.decode * setting.density / 0.01, frame_bytes(setting, self.elements))

    def together(self) -> "Workload":
        """The same workload with small buckets joined to the next one, as links exchange them."""
        buckets, ready, waiting = [], [], 0
        for place, (elements, at) in enumerate(zip(self.buckets, self.ready, strict=True)):
            waiting += elements
            if waiting >= JOINED_BELOW or place == len(self.buckets) - 1:
                buckets.append(waiting)
                ready.append(at)
                waiting = 0
        return replace(self, buckets=tuple(buckets), ready=tuple(ready))


@dataclass(frozen=True)
class Forecast:
    """The expected time, traffic and alpha of a setting."""

    setting: Setting
    seconds: float
    sent: float  # bytes per rank and step
    alpha: float


def frame_bytes(setting: Setting, elements: int) -> float:
    """The approximate bytes of a frame: values and scales, positions, and spare room."""
    each = setting.bits + 0.13 + 1.6 + math.log2(1.0 / setting.density)
    return 64.0 + 1.04 * setting.density * elements * each / 8.0


def update_bytes(setting: Setting, elements: int) -> float:
    """The approximate bytes of an exchange of updates: coordinates, scales of blocks, and vectors in more bits."""
    return 64.0 + 1.08 * setting.density * elements * setting.bits / 8.0


def scattered_parts(frame: float, world: int) -> tuple[float, float]:
    """The bytes of the messages to each rank in the two rounds of a scatter-reduce: a part, and a sum of parts.

    A sum has the entries of all ranks. It is limited so that both rounds together send the bytes of two frames at most.
    """
    results = min((2.0 * world / (world - 1) - 1.0) / world, 1.0) if world > 1 else 1.0
    return frame / max(world, 1) + PART, results * frame + PART


@dataclass(frozen=True)
class _Stage:
    """A stage of an exchange: seconds of computing, then of a message on this rank's link, then of its way.

    paced: seconds over which TCP spreads the message, at the same time as those of other buckets.
    busy: processor seconds of the message, on top of computing.
    """

    compute: float
    transfer: float = 0.0
    latency: float = 0.0
    paced: float = 0.0
    busy: float = 0.0


def forecast(setting: Setting, work: Workload, network: Network) -> Forecast:
    """Forecast a step, whose buckets are under way at the same time, each as soon as it is ready."""
    if setting.every:
        return _forecast_update(setting, work, network)
    work = work.together() if setting.compressed else work
    stages = [_stages(setting, work, network, elements) for elements in work.buckets]
    ready, taken = work.ready, 0.0
    if work.crowd > 1.0 and setting.compressed:
        # While a rank waits, others compute: the processor time of all exchanges lengthens the step, at whatever time
        # it is spent, and messages are under way meanwhile.
        taken = work.crowd * sum(stage.compute + stage.busy for bucket in stages for stage in bucket)
        stages = [[replace(stage, compute=0.0) for stage in bucket] for bucket in stages]
    elif work.crowd > 1.0:  # an all-reduce slows down the backward pass that it overlaps
        ready = (0.0,) * len(ready)
    done = _last_done(ready, stages, None if setting.compressed else _ALL_REDUCES)
    alpha = 1.0 if not setting.compressed or work.alpha is None else at_density(work.alpha, setting.density)
    return Forecast(setting, work.compute + taken + max(done, 0.0), sent(setting, work, network), alpha)


def _forecast_update(setting: Setting, work: Workload, network: Network) -> Forecast:
    """Forecast a step of updates: the exchange follows the step, or overlaps as many steps as a round has.

    Alpha is 1: what a low-rank projection sends is not a share of the squared norm that is known beforehand.
    """
    times = work.times(setting)
    gathers = setting.exchange == "gather"
    busy = network.cpu(times.frame) if gathers else 2.0 * network.cpu(times.frame / max(network.world, 1))
    computing = times.encode + times.decode + (busy if work.crowd > 1.0 else 0.0)
    exchange = (network.exchange if gathers else network.scatter)(times.frame) + work.crowd * computing
    hidden = setting.every * work.compute if setting.every > 1 else 0.0
    waited = max(exchange - hidden, 0.0) / setting.every
    return Forecast(setting, work.compute + waited, sent(setting, work, network), 1.0)


def sent(setting: Setting, work: Workload, network: Network) -> float:
    """Bytes that a rank sends in a step to other machines, on average."""
    world = network.world
    if setting.every:
        frame = work.times(setting).frame / setting.every
        return frame * (world - 1) if setting.exchange == "gather" else 2.0 * frame * (world - 1) / world
    if not setting.compressed:
        return 2.0 * setting.width * work.elements * (world - 1) / world
    frame = work.times(setting).frame
    if setting.exchange == HIERARCHICAL:
        return frame * (world / _tiers(network).per_machine - 1.0) / _tiers(network).per_machine
    return (world - 1) * (frame if setting.exchange == "gather" else sum(scattered_parts(frame, world)))


def _stages(setting: Setting, work: Workload, network: Network, elements: int) -> list[_Stage]:
    """The stages from a full bucket to its mean."""
    share, world = elements / max(work.elements, 1), network.world
    if not setting.compressed:
        copy = work.copy * share if setting.width < 4 else 0.0
        reduce = network.reduce
        return [_Stage(copy, reduce.per_byte * setting.width * elements, reduce.fixed), _Stage(0.0)]
    times = work.times(setting)
    encode, decode, frame = share * times.encode, share * times.decode, share * times.frame
    if setting.exchange == HIERARCHICAL:
        tiers = _tiers(network)
        between = replace(network, gather=tiers.between, latency=tiers.latency)
        first = _message(between, tiers.inside(4.0 * elements) + encode, frame)
        return [first, _Stage(world / tiers.per_machine * decode)]
    if setting.exchange == "gather":
        return [_message(network, encode, frame), _Stage(world * decode)]
    # Each rank encodes twice: its own entries, and the sums of its share. It decodes its share, then all results.
    entries, (part, result) = _ENTRY * setting.density, scattered_parts(frame, world)
    second = encode * (1.0 + entries / world) / (1.0 + entries)
    return [_message(network, encode, part), _message(network, second + decode, result), _Stage(decode)]


def _message(network: Network, compute: float, size: float) -> _Stage:
    """A stage that sends `size` bytes. What the fixed time of a message has beyond the latency keeps the rank busy."""
    time, latency = network.gather, network.latency
    waiting = max(time.fixed - latency, 0.0)
    transfer, paced = time.per_byte * size, network.spread(size)
    return _Stage(compute + waiting, transfer, min(latency, time.fixed), paced, max(network.cpu(size) - waiting, 0.0))


def _last_done(ready: Sequence[float], buckets: Sequence[Sequence[_Stage]], at_once: int | None) -> float:
    """When the last stage of the last bucket ends.

    One thread computes, and begins buckets as soon as they are ready; messages leave one after the other. At most
    `at_once` buckets are under way at the same time.
    """
    computed = sent = done = -math.inf
    under_way: deque[tuple[float, Sequence[_Stage]]] = deque()  # when the messages arrive, and what follows

    def run(at: float, stages: Sequence[_Stage]) -> None:
        nonlocal computed, sent, done
        computed = max(computed, at) + stages[0].compute
        if len(stages) == 1:
            done = max(done, computed)
            return
        sent = max(sent, computed) + stages[0].transfer
        arrived = max(sent, computed + stages[0].paced) + stages[0].latency
        under_way.append((arrived, stages[1:]))

    for at, stages in zip(ready, buckets, strict=True):
        while under_way and (under_way[0][0] <= max(at, computed) or len(under_way) == at_once):
            run(*under_way.popleft())
        run(at, stages)
    while under_way:
        run(*under_way.popleft())
    return done


def _tiers(network: Network) -> Tiers:
    if network.tiers is None:
        raise ValueError("a hierarchical exchange needs measurements of machines with several ranks each")
    return network.tiers


def at_density(alpha: Mapping[float, float], density: float) -> float:
    """Alpha at a density, interpolated between the measured densities on logarithmic scales."""
    known = sorted(alpha)
    if density <= known[0] or len(known) == 1:
        return alpha[known[0]] * min(1.0, density / known[0])
    for low, high in pairwise(known):
        if density <= high:
            way = math.log(density / low) / math.log(high / low)
            return math.exp((1.0 - way) * math.log(alpha[low] + 1e-12) + way * math.log(alpha[high] + 1e-12))
    return alpha[known[-1]]


@dataclass(frozen=True)
class TuningPolicy:
    """The settings that the autotuner chooses from, and the thresholds of its decisions."""

    settings: tuple[Setting, ...] = SETTINGS
    alpha: float = 0.05  # the least share of the squared norm that a step must send
    margin: float = 0.15  # gain, as a share of the step time, from which another setting replaces the present one
    compress_from: float = 0.05  # gain over dense, as a share of the step time, from which compression is used
    late: float = 0.01  # additional training steps, as a share, per 1 / alpha: late entries cost steps

    def cost(self, found: Forecast) -> float:
        """The time of a step, multiplied by the steps that training needs relative to dense.

        Measured on the recipe digits: 70 steps at 1 % (alpha 0.12) and 120 at 0.1 % (alpha 0.015), against 65 dense.
        """
        return found.seconds * (1.0 + self.late / max(found.alpha, 1e-6)) if found.setting.compressed else found.seconds


@dataclass(frozen=True)
class Decision:
    """The chosen setting, and the forecasts of all settings."""

    setting: Setting
    forecasts: tuple[Forecast, ...]
    network: Network
    changed: bool

    @property
    def expected(self) -> Forecast:
        return next(f for f in self.forecasts if f.setting == self.setting)

    def why(self) -> str:
        """One line that says what was chosen and why."""
        dense = next(f for f in self.forecasts if f.setting.name == DENSE.name)
        others = sorted((f for f in self.forecasts if f.setting != self.setting), key=lambda f: f.seconds)
        shown = {DENSE: dense, **{f.setting: f for f in others[:2]}}
        rest = ", ".join(f"{s} {1e3 * f.seconds:.0f} ms" for s, f in shown.items() if s != self.setting)
        best = self.expected
        share = f", alpha {best.alpha:.2f}" if best.setting.compressed else ""
        return f"{best.setting} at {1e3 * best.seconds:.0f} ms a step{share} (expected: {rest}); {self.network}"


def decide(
    work: Workload, network: Network, present: Setting | None = None, policy: TuningPolicy | None = None
) -> Decision:
    """The cheapest setting with enough alpha; the present setting stays unless another is clearly cheaper."""
    policy = policy if policy is not None else TuningPolicy()
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


# Updates and local steps. A preset fixes the number of steps between two exchanges and the share of the change that is
# sent. Fewer steps between exchanges train better per step, and dense gradients best of all.

# A step that is longer by so much, relative to the fastest setting's, still counts as one that hides the network.
HIDDEN = 0.05
EVERY = {"update": 1, **LOCAL}  # steps between two exchanges, by preset


def update_settings(world: int) -> tuple[Setting, ...]:
    """Return the presets that exchange updates, in the order of their local steps, as a link of so many ranks would."""
    exchange = "gather" if world <= 2 else "scatter-reduce"
    found = []
    for name, every in EVERY.items():
        codec = resolve_codec(name, world)
        assert isinstance(codec.selection, LowRank)
        found.append(Setting(name, exchange, density=codec.selection.density, bits=codec.values.bits, every=every))
    return tuple(found)


def settings_for_updates(world: int) -> tuple[Setting, ...]:
    """Return all settings for optimizers with which compressed gradients train worse, the best training first."""
    return (DENSE, FP16, *update_settings(world))


def cheapest_hidden(found: Sequence[Forecast]) -> Forecast:
    """Return the first forecast whose step is about as fast as the fastest of all."""
    least = min(each.seconds for each in found)
    return next(each for each in found if each.seconds <= (1.0 + HIDDEN) * least)


def decide_update(work: Workload, network: Network, settings: Sequence[Setting]) -> tuple[Setting, str]:
    """Return the setting to use, and one line that says why."""
    found = [forecast(setting, work, network) for setting in settings]
    best = cheapest_hidden(found)
    others = ", ".join(f"{f.setting.name} {1e3 * f.seconds:.0f} ms" for f in found if f is not best)
    return best.setting, (
        f"{best.setting.name} at {1e3 * best.seconds:.0f} ms a step is the first that hides the network "
        f"(computing takes {1e3 * work.compute:.0f} ms; expected: {others}); {network}"
    )


def dense_instead(work: Workload, network: Network, settings: Sequence[Setting], width: int) -> str:
    """Return a clause that advises dense gradients if they hide the network as well as these settings, or nothing.

    width: bytes per element. All of the all-reduce is assumed to follow the step, although DDP overlaps a part of it.
    """
    dense = forecast(replace(DENSE, width=width), work, network)
    if cheapest_hidden([dense, *(forecast(setting, work, network) for setting in settings)]) is not dense:
        return ""
    return (
        f"uncompressed gradients would hide it as well, at {1e3 * dense.seconds:.0f} ms a step, and train better per "
        "step: use DDP without thinwire"
    )


class ChangeDetector:
    """Detects a change of the network from the time that training waits for the exchange.

    The first wait after a decision is the reference. A later one that differs by half of it counts as a change.
    """

    def __init__(self, *, factor: float = 1.5, least: float = 0.002) -> None:
        self._factor, self._least = factor, least
        self._reference: float | None = None

    def reset(self) -> None:
        """Take the next wait as the new reference."""
        self._reference = None

    def changed(self, waits: Sequence[float], period: float) -> bool:
        """Whether the median of these waits differs from the reference; `period` is the time of a whole step."""
        now = statistics.median(waits)
        if self._reference is None:
            self._reference = now
            return False
        differs = max(now, self._reference) > self._factor * min(now, self._reference)
        # A change of a small wait is not worth a probe.
        return differs and abs(now - self._reference) > max(self._least, 0.1 * period)
