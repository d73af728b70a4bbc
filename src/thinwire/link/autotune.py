"""Autotuner: measures model and network, agrees on a setting with all ranks, and applies it to a link.

It probes the network before the first step. If a dense all-reduce is quick there, the run starts dense, otherwise with
1 % by all-gather, which is cheap on every network. After a few steps it forecasts every setting and takes the best.
Where dense or fp16 is chosen, buckets are averaged by the hook's own all-reduce, as without thinwire. Every few steps
the ranks compare how long they waited for the exchange, and probe again when that has changed.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import Vector
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import NativeGroup, TopK, TorchGroup
from thinwire.exchange.base import Bucket, Groups
from thinwire.exchange.channel import Channel, LocalChannel, gather_json, share
from thinwire.exchange.choose import NAMES, choose_doubling
from thinwire.exchange.gather import Gather
from thinwire.exchange.hierarchical import Hierarchical, tiers
from thinwire.exchange.low_rank import LowRankMean
from thinwire.link.link import Link
from thinwire.link.stats import Counters
from thinwire.tune.adaptive import Adaptive, MagnitudeCurve
from thinwire.tune.cost import Measured
from thinwire.tune.forecast import (
    DENSE,
    DENSITIES,
    HIERARCHICAL,
    ChangeDetector,
    Decision,
    LinearTime,
    Network,
    Setting,
    Tiers,
    TuningPolicy,
    Workload,
    decide,
    density_setting,
)

_log = logging.getLogger("thinwire")

# Probes of the network: bytes of an empty message, of the first message, their growth, and of the largest.
_EMPTY = 64
_FIRST = 16 * 1024
_GROWTH = 4
_LARGEST = 8 << 20
# Seconds beyond the time of empty messages that a message must take to give a good estimate of the bandwidth.
_LONG_ENOUGH = 0.03
# Seconds for which empty messages are repeated, up to three times.
_PATIENCE = 0.3
# Seconds of an empty message from which the network counts as long: there TCP takes round trips to learn its rate, and
# paces what it sends, so that empty messages say little about the fixed time of others.
_LONG = 0.005
# Times that a size is measured on a long network, until it takes no less.
_REPEATS = 4
# Messages that are under way together to tell their latency from the time that each of them takes by itself.
_TOGETHER = 5


def probe_network(channel: Channel, elements: int | None = None) -> Network:
    """Measure all-gather and all-reduce between the ranks. Call it on all ranks.

    It takes a fraction of a second, and on networks of high latency about 50 + 5 (ranks - 1) times the latency. All
    ranks get the same figures. With the model's `elements` no message is larger than those of a step would be.
    """
    frame, vector = (elements // 4, 4 * elements) if elements is not None else (_LARGEST, _LARGEST)

    def reduced(size: int) -> None:
        channel.all_reduce(torch.zeros(max(size // 4, 1), device=channel.device))

    gather, latency = _gather_time(channel, frame)
    # One size is enough where the rate is known: an all-reduce sends 2 / ranks of what an all-gather does.
    known = gather.per_byte * 2.0 / max(channel.world, 2)
    reduce = _measured_time(channel, reduced, vector, known)
    return Network(channel.world, gather, reduce, latency=latency)


def _gather_time(channel: Channel, largest: int) -> tuple[LinearTime, float]:
    """The time of an all-gather by the bytes of each rank's message, and the latency that is part of it."""

    def gathered(size: int) -> None:
        channel.gather(torch.zeros(size, dtype=torch.uint8), 1).finish()

    def together(size: int) -> None:
        message = torch.zeros(size, dtype=torch.uint8)
        for each in [channel.gather(message, lane) for lane in range(1, 1 + _TOGETHER)]:
            each.finish()

    for first in (gathered, together):  # the first ones open connections and post receives
        _timed(channel, first, _EMPTY)
    found = _measured_time(channel, gathered, largest)
    several = min(_empty_times(channel, together))
    busy = max((several - found.fixed) / (_TOGETHER - 1), 0.0)  # seconds of each message in which no other can be sent
    return found, max(found.fixed - busy, 0.0)


# Bytes of the messages that show how TCP paces, and how many there are. Its rate settles within the first ones.
_PACED, _PACINGS = 40_000, 6
# Messages whose processor time is measured; the largest takes so many seconds on the link.
_BUSY, _LONGEST_BUSY = 4, 0.05


def paced_seconds(channel: Channel, network: Network) -> float:
    """Seconds over which TCP spreads the packets of long messages on this channel, which has sent no messages before.

    TCP learns a connection's rate from what it sends. Probes send longer messages than a step does, and so learn a
    higher rate than the connections of a link will. Call it on all ranks.
    """
    transfer = network.gather.per_byte * _PACED
    if network.latency < _LONG or transfer > 2.0 * network.latency:  # pacing would not show
        return 0.0

    def gathered(size: int) -> None:
        channel.gather(torch.zeros(size, dtype=torch.uint8), 1).finish()

    times = [_timed(channel, gathered, _PACED) for _ in range(_PACINGS)]
    beyond = statistics.median(times[_PACINGS // 2 :]) - network.gather.fixed
    return beyond if beyond > 1.2 * transfer else 0.0


def gather_cpu(channel: Channel, network: Network) -> LinearTime:
    """The processor time of a rank in an all-gather, by the bytes of its message. Call it on all ranks."""

    def spent(size: int) -> float:
        message, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(_BUSY):
            share(channel, [0.0])
            began = time.process_time()
            channel.gather(message, 1).finish()
            times.append(time.process_time() - began)
        return statistics.median(t for row in share(channel, times[1:]) for t in row)

    size = int(min(max(_LONGEST_BUSY / network.gather.per_byte, _FIRST), 1 << 18))
    return LinearTime.through((_EMPTY, spent(_EMPTY)), (size, spent(size)))


def _empty_times(channel: Channel, collective: Callable[[int], object]) -> list[float]:
    """The times of empty messages: three of them where that is quick."""
    times = [_timed(channel, collective, _EMPTY)]
    while len(times) < 3 and sum(times) < _PATIENCE:
        times.append(_timed(channel, collective, _EMPTY))
    return times


def _measured_time(
    channel: Channel, collective: Callable[[int], object], largest: int, per_byte: float = 0.0
) -> LinearTime:
    """The time of a collective by its bytes. Messages grow until one takes long enough, or is the largest of use.

    per_byte: the expected seconds of a byte, from which the first size is chosen.
    """
    empty = _empty_times(channel, collective)
    least = min(empty)
    if least >= _LONG and not per_byte:
        return _long_time(channel, collective, largest, least)
    size, most = _FIRST, max(_FIRST, min(largest, _LARGEST))
    if per_byte:
        size = min(max(round(1.2 * (_LONG_ENOUGH + 0.5 * least) / per_byte), _FIRST), most)
    while (took := _timed(channel, collective, size)) < 1.5 * least + _LONG_ENOUGH and size < most:
        size = min(size * _GROWTH, most)
    # Noise only adds time: take the best of two, or of three where that is cheap.
    for _ in range(2 if took < 2 * _LONG_ENOUGH else 1):
        took = min(took, _timed(channel, collective, size))
    # The slope comes from the best times. The fixed part is the median: a step meets the usual delay.
    return replace(LinearTime.through((_EMPTY, least), (size, took)), fixed=statistics.median(empty))


def _long_time(channel: Channel, collective: Callable[[int], object], largest: int, least: float) -> LinearTime:
    """The time of a collective by its bytes on a long network, from messages of two sizes and not from empty ones.

    least: seconds of an empty message.
    """
    small = large = (0.0, least)
    size, most = _FIRST, max(_FIRST, min(largest, _LARGEST))
    while True:
        small, large = large, (float(size), _settled_time(channel, collective, size))
        if (small[0] and large[1] - small[1] >= _LONG_ENOUGH) or size == most:
            break
        size = min(size * _GROWTH, most)
    found = LinearTime.through(small, large)
    return replace(found, fixed=max(found.fixed, least))


def _settled_time(channel: Channel, collective: Callable[[int], object], size: int) -> float:
    """The seconds of a collective when TCP has learned the rate: the first messages of a size take longer."""
    took = _timed(channel, collective, size)
    for _ in range(_REPEATS - 1):
        before, took = took, min(took, _timed(channel, collective, size))
        if took > 0.95 * before:
            break
    return took


def _timed(channel: Channel, collective: Callable[[int], object], size: int) -> float:
    """Seconds until the slowest rank has its result. Sharing the last result makes all ranks start together."""
    began = time.perf_counter()
    collective(size)
    return max(took for (took,) in share(channel, [time.perf_counter() - began]))


def codec_seconds(codec: Codec, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """Seconds to encode these tensors with a codec that has seen them before, and to decode the frame."""
    fresh = codec.copy()
    fresh.encode(gradients)
    began = time.perf_counter()
    frame = fresh.encode(gradients)
    encoded = time.perf_counter()
    outs = [torch.zeros(g.numel()) for g in gradients.values()]
    zeroed = time.perf_counter()
    FrameReader(frame, [out.numel() for out in outs]).add_to(outs)
    return encoded - began, time.perf_counter() - zeroed


def update_seconds(codec: Codec, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
    """Seconds to compress updates of these tensors, and to decode them, with a codec of low-rank projections."""
    fresh, exchange = codec.copy(), LowRankMean(Gather(), {name: t.shape for name, t in tensors.items()})
    exchange.setup(LocalChannel(), fresh, {name: t.numel() for name, t in tensors.items()}, lambda members: [])
    flat = {name: t.detach().reshape(-1).float().cpu() for name, t in tensors.items()}
    outs = [torch.empty(t.numel()) for t in flat.values()]
    for step in range(2):  # the first one allocates
        outcome = exchange.mean(Bucket(flat, outs, step, frozenset()))
    return outcome.compress, outcome.decode


def conversion_seconds(elements: int) -> float:
    """Seconds to convert so many elements to 16 bits and back."""
    part = min(elements, 1 << 20)
    x = torch.ones(part)
    began = time.perf_counter()
    x.copy_(x.to(torch.float16))
    return (time.perf_counter() - began) * elements / max(part, 1)


class Machines:
    """Groups the ranks by machine, for hierarchical exchanges.

    In a hierarchical exchange the first rank of a machine keeps the residual of all its ranks.
    """

    def __init__(self, channel: Channel, size: int, groups: Groups) -> None:
        blocks = [list(range(first, first + size)) for first in range(0, channel.world, size)]
        self.size = size
        self._channel = channel
        self._inside, self._between = tiers(channel, blocks, groups)
        self._leads = channel.rank % size == 0

    @classmethod
    def detect(cls, channel: Channel, groups: Groups) -> "Machines | None":
        """By torchrun's LOCAL_WORLD_SIZE; None for one machine, machines of one rank, or machines that differ."""
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        alike = {row[0] for row in share(channel, [float(size)])} == {float(size)}
        several = alike and 1 < size < channel.world and channel.world % size == 0
        return cls(channel, size, groups) if several else None

    def probe(self, elements: int) -> Tiers:
        """Measure the exchange within and between machines; all ranks get the slowest machine's figures."""
        within = _measured_time(self._inside, self._reduce_and_broadcast, 4 * elements)
        between, latency = LinearTime(0.0, 0.0), 0.0
        if self._leads:
            between, latency = _gather_time(self._between, elements // 4)
        rows = share(self._channel, [within.fixed, within.per_byte, between.fixed, between.per_byte, latency])
        slowest = [max(column) for column in zip(*rows, strict=True)]
        return Tiers(self.size, LinearTime(*slowest[:2]), LinearTime(*slowest[2:4]), slowest[4])

    def _reduce_and_broadcast(self, size: int) -> None:
        vector = torch.zeros(size // 4, device=self._inside.device)
        self._inside.reduce(vector, 0)
        self._inside.spread(vector, 0, 0).finish()

    def move_to_first(self, codec: Codec, sizes: Mapping[str, int]) -> None:
        """Move the mean of a machine's residuals to its first rank, where it counts for all ranks of the machine."""
        for name, numel in sizes.items():
            kept = codec.residuals(name).get("residual")
            mean = torch.zeros(numel) if kept is None else kept.cpu() / self.size
            mean = mean.to(self._inside.device)
            self._inside.reduce(mean, 0)
            if self._leads:
                codec.ensure_residuals(name, mean if kept is None else kept)["residual"].copy_(mean)
            elif kept is not None:
                kept.zero_()

    def move_from_first(self, codec: Codec) -> None:
        """Let the first rank's residual count for that rank alone again, which multiplies it by the machine's ranks."""
        if self._leads:
            codec.rescale(float(self.size))


class AdaptiveAgreement:
    """Tells an `Adaptive` selection what exchanges cost and what the other ranks would send, every few steps.

    Either all ranks of a link have one, or none has.
    """

    EVERY = 8  # steps between two agreements
    _PROBED = (1e4, 1e5, 1e6)  # bytes of the frames whose cost is estimated from the first probe

    def __init__(self, selection: Adaptive, channel: Channel, sizes: Mapping[str, int], *, scattered: bool) -> None:
        self._selection, self._channel, self._sizes = selection, channel, sizes
        self._elements = sum(sizes.values())
        self._seen: list[tuple[float, float, float]] = []  # seconds of a step, seconds of its exchange, entries
        self._ended: float | None = None
        self._latency = 0.0  # of the rounds of an exchange
        if isinstance(selection.cost, Measured):
            network = probe_network(channel)
            self._latency = network.latency * (2.0 if scattered else 1.0)
            for size in self._PROBED:
                seconds = network.scatter(size) if scattered else network.gather(size)
                selection.cost.observe(8.0 * size, seconds, latency=self._latency)

    def end_step(self, codec: Codec, last: Counters) -> None:
        """Called by the link's thread when a step's last bucket is done."""
        now = time.perf_counter()
        if self._ended is not None:
            self._seen.append((now - self._ended, last.exchange_seconds, float(last.entries)))
        if len(self._seen) >= self.EVERY:
            self._agree(codec)
        self._ended = time.perf_counter()

    def _agree(self, codec: Codec) -> None:
        medians = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        self._seen.clear()
        # One number per parameter in a common order; 0 stands for a parameter without a wish on this rank.
        wishes = [codec.learned.get(name, {}).get("wish", 0.0) for name in self._sizes]
        rows = share(self._channel, [*medians, *wishes])
        selection = self._selection
        if isinstance(selection.cost, Measured):
            # The last rank to arrive does not wait for others, so that the shortest exchange is the network's own time.
            exchange = min(row[1] for row in rows)
            entries = statistics.mean(row[2] for row in rows)
            bits = float(selection.frame_bits(np.array([entries]), self._elements)[0])
            beside = max(max(row[0] for row in rows) - exchange, 1e-6)
            selection.cost.observe(bits, exchange, latency=self._latency, beside=beside)
        if selection.agree is None:
            return
        for place, name in enumerate(self._sizes, start=3):
            wished = [row[place] for row in rows if row[place] > 0.0]
            if wished and name in codec.learned:
                codec.learned[name]["agreed"] = selection.agreed(wished)


FIRST = density_setting(0.01, "gather")
WARM = 2  # steps that are not measured: DDP rebuilds its buckets, message sizes are estimates
MEASURED = 4  # steps before the first decision
COMPARE_EVERY = 10  # steps between two comparisons of the waiting times
QUICK = 0.05  # a run starts dense if an all-reduce of everything takes fewer seconds than this
PROBE_EVERY = 10  # comparisons after which a compressed link probes anyway, because it cannot see a network become fast
PROBE_SHARE = 0.02  # the share of the time that these probes may take
_SAMPLE = 1 << 16


@dataclass
class _StepTimes:
    """The times of one step on this rank."""

    began: float
    buckets: list[int] = field(default_factory=list)  # elements
    submitted: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def wait(self) -> float:
        """Seconds from the last bucket's submission to its mean."""
        return max(self.ended - self.submitted[-1], 0.0) if self.submitted else 0.0


class Autotuner:
    """Tunes one link (a `Tuner`). All ranks call the same methods at the same steps, and decide alike."""

    probe = staticmethod(probe_network)  # tests replace it

    def __init__(
        self,
        link: Link,
        channel: Channel,
        sizes: Mapping[str, int],
        groups: Groups,
        policy: TuningPolicy | None = None,
        width: int = 4,
    ) -> None:
        self.setting = FIRST
        self.hierarchical = True  # whether ranks of one machine may exchange among themselves first
        self.decisions: list[Decision] = []
        self._dense = replace(DENSE, width=width)  # width: bytes per element of the tensors
        self._link, self._channel, self._sizes, self._groups = link, channel, sizes, groups
        self._policy = policy if policy is not None else _policy_for(self._dense)
        self._detector = ChangeDetector()
        self._steps, self._comparisons = 0, 0
        self._probed, self._since_probe = 0.0, 0.0  # seconds that the last probe took, and seconds of training since
        self._machines: Machines | None = None
        self._first_probe: Network | None = None  # until the first decision
        self._now: _StepTimes | None = None
        self._waits: list[float] = []
        self._periods: list[float] = []
        self._codec_seconds: list[tuple[float, float]] = []  # of encoding, and of decoding one frame
        self._trial = 0.0, 0.0  # the same, measured by a trial on one step's gradients
        self._squares = [0.0] * (len(DENSITIES) + 1)  # squared norm that each density would send, and all of it
        self._alpha: dict[float, float] = dict.fromkeys(DENSITIES, 1.0)

    # Called by the link

    def begin_step(self) -> None:
        """Record the last step, and decide if it is time to. Nothing of this link is under way then."""
        self._link.wait()
        self._record(time.perf_counter())
        first = WARM + MEASURED
        if self._steps == 0:
            self._start()
        elif self._steps == first or (self._steps > first and (self._steps - first) % COMPARE_EVERY == 0):
            self._compare()
        self._leave_link_if_possible()
        self._steps += 1
        if self._sampling:
            self._squares, self._trial = [0.0] * len(self._squares), (0.0, 0.0)
        self._now = _StepTimes(time.perf_counter())

    def bucket_ready(self, tensors: Mapping[str, Tensor], elements: int) -> None:
        """Note the time of a bucket, and sample its magnitudes in the step before a decision may be due."""
        assert self._now is not None
        if self._sampling:
            self._sample(tensors)
        self._now.buckets.append(elements)
        self._now.submitted.append(time.perf_counter())

    def end_step(self) -> None:
        """Note that the step's last bucket holds the mean."""
        if self._now is not None:
            self._now.ended = time.perf_counter()

    @property
    def _sampling(self) -> bool:
        first = WARM + MEASURED
        return self._steps == first or (self._steps > first and self._steps % (5 * COMPARE_EVERY) == 0)

    def _sample(self, tensors: Mapping[str, Tensor]) -> None:
        """Estimate how much of the squared norm each density would send; time a codec if none is in use."""
        codec = self._link.codec
        if not self._codec_seconds:
            encode, decode = codec_seconds(codec, tensors)
            self._trial = self._trial[0] + encode, self._trial[1] + decode
        for name, tensor in tensors.items():
            if tensor.numel() < codec.min_numel:
                continue
            vector = Vector(tensor.detach(), codec.residuals(name).get("residual"), 1.0, None, None)
            make = NativeGroup if tensor.device.type == "cpu" else TorchGroup
            curve = MagnitudeCurve(make([vector]).histogram(_SAMPLE, self._steps), vector.n)
            if curve.empty or not np.isfinite(curve.squares[-1]):
                continue
            shares = curve.alpha(np.array(DENSITIES) * curve.n)
            for place, share_of in enumerate([*shares, 1.0]):
                self._squares[place] += float(share_of * curve.squares[-1])

    # Measurements and decisions

    def _start(self) -> None:
        """Start dense where that is quick, because entries that are sent late cost training steps."""
        self._machines = Machines.detect(self._channel, self._groups) if self.hierarchical else None
        self._first_probe = self._probe_network()
        if self._first_probe.reduce(float(self._dense.width) * sum(self._sizes.values())) < QUICK:
            self._apply(self._dense)

    def _record(self, now: float) -> None:
        """Record the step before."""
        step, link = self._now, self._link
        if step is None or not step.submitted:
            return
        if link.dense_width:
            world, elements = self._channel.world, sum(step.buckets)
            link.count_dense_step(elements, 2 * link.dense_width * elements * (world - 1) // world)
        if self._steps > WARM:
            self._waits.append(step.wait)
            self._periods.append(now - step.began)
            if not link.dense_width and self.setting.compressed:
                last, frames = link.last_step, self._channel.world
                if self._machines is not None and self.setting.exchange == HIERARCHICAL:
                    frames //= self._machines.size
                self._codec_seconds.append((last.compress_seconds, last.decode_seconds / max(frames, 1)))

    def _compare(self) -> None:
        """Compare the waiting times of all ranks, and decide again if they have changed or it is time to."""
        rows = share(self._channel, [statistics.median(self._waits), statistics.median(self._periods)])
        # The last rank to arrive does not wait for others: the shortest wait is the network's own time.
        wait, period = min(row[0] for row in rows), max(row[1] for row in rows)
        self._comparisons += 1
        self._since_probe += period * len(self._periods)
        often = self._comparisons % PROBE_EVERY == 0 and self._probed <= PROBE_SHARE * self._since_probe
        due = not self.decisions or (self.setting.compressed and often)
        if self._detector.changed([wait], period) or due:
            self._decide(period - wait)
        self._waits.clear()
        self._periods.clear()

    def _probe_network(self) -> Network:
        elements, began = sum(self._sizes.values()), time.perf_counter()
        choose_doubling(self._channel)
        network = self.probe(self._channel, elements)
        if self._machines is not None:
            network = replace(network, tiers=self._machines.probe(elements))
        self._probed = max(row[0] for row in share(self._channel, [time.perf_counter() - began]))
        self._since_probe = 0.0
        return network

    def _decide(self, compute: float) -> None:
        network = self._first_probe if self._first_probe is not None else self._probe_network()
        self._first_probe = None
        work = self._workload(compute)
        decision = decide(work, network, self.setting if self.decisions else None, self._policy)
        self._detector.reset()
        self._link.why = decision.why()
        if not self.decisions or decision.changed:
            if self._channel.rank == 0:
                _log.info("auto, step %d: %s", self._link.step, decision.why())
            self._apply(decision.setting)
        self.decisions.append(decision)

    def _workload(self, compute: float) -> Workload:
        """The same on every rank: times are the ranks' medians, alpha is their mean, buckets are rank 0's."""
        step = self._now
        assert step is not None
        recent = self._codec_seconds[-COMPARE_EVERY:]
        codec = [statistics.median(column) for column in zip(*recent, strict=True)] or self._trial
        ready = [submitted - step.submitted[-1] for submitted in step.submitted]
        mine = [*codec, conversion_seconds(sum(step.buckets)), *self._squares]
        rows = gather_json(self._channel, {"mine": mine, "buckets": step.buckets, "ready": ready})
        columns = list(zip(*(row["mine"] for row in rows), strict=True))
        # In a hierarchical exchange only the machines' first ranks use a codec: zeros of the others do not count.
        encode, decode, copy = (statistics.median([v for v in c if v > 0.0] or [0.0]) for c in columns[:3])
        *sent, everything = (sum(column) for column in columns[3:])
        if everything > 0.0:
            self._alpha = {d: part / everything for d, part in zip(DENSITIES, sent, strict=True)}
        buckets, times = tuple(rows[0]["buckets"]), tuple(rows[0]["ready"])
        return Workload(max(compute, 1e-6), buckets, times, encode, decode, copy, self._alpha)

    def _apply(self, setting: Setting) -> None:
        """Change to a setting; a change to dense first sends the residual through the link."""
        before, after = self.setting.exchange == HIERARCHICAL, setting.exchange == HIERARCHICAL
        if self._machines is not None and before != after:
            if after:
                self._machines.move_to_first(self._link.codec, self._sizes)
            else:
                self._machines.move_from_first(self._link.codec)
        self.setting = setting
        per_machine = self._machines.size if self._machines is not None else 1
        exchange = Hierarchical(per_machine=per_machine) if after else NAMES[setting.exchange]()
        exchange.setup(self._channel, self._link.codec, self._sizes, self._groups)
        self._link.use_exchange(exchange, TopK(setting.density if setting.compressed else FIRST.density))

    def _leave_link_if_possible(self) -> None:
        """Use the hook's own all-reduce for a dense setting, once no rank has a residual left."""
        link = self._link
        if self.setting.compressed or link.dense_width or not link.can_all_reduce:
            return
        kept = [t for name in self._sizes for t in link.codec.residuals(name).values()]
        mine = float(any(bool(t.any()) for t in kept))
        if not any(row[0] for row in share(self._channel, [mine])):
            link.use_all_reduce(self.setting.width or self._dense.width)


def _policy_for(dense: Setting) -> TuningPolicy:
    """The settings to choose from; gradients that have 16 bits already gain nothing from fp16."""
    others = (setting for setting in TuningPolicy().settings if setting.width == 0 or setting.width < dense.width)
    return replace(TuningPolicy(), settings=(dense, *others))
