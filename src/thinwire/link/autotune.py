"""Pilot: flies a link that was attached with "auto": measures, decides with all ranks, changes the setting.

It probes the network, starts dense if that is quick and with 1 % by gather if not, which is cheap on every network, and
decides after a few steps. Where dense or fp16 is chosen, buckets go straight to the process group as without thinwire;
every few steps the ranks compare how long they waited, and probe again when that has changed.
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
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import TopK
from thinwire.codec.vectors import NativeGroup, TorchGroup, Vector
from thinwire.exchange.base import Groups
from thinwire.exchange.channel import Channel, gather_json, share
from thinwire.exchange.choose import NAMES
from thinwire.exchange.hierarchical import Hierarchical, tiers
from thinwire.link.link import Counters, Link
from thinwire.tune.adaptive import Adaptive, Law
from thinwire.tune.cost import Measured
from thinwire.tune.forecast import (
    DENSE,
    DENSITIES,
    HIERARCHICAL,
    Decision,
    Line,
    Network,
    Policy,
    Setting,
    Tiers,
    Watch,
    Workload,
    decide,
)

_TINY = 64
_FIRST = 16 * 1024
_GROWTH = 4
_LARGEST = 8 << 20
# A message that takes so much longer than three empty ones tells the bandwidth well enough.
_ENOUGH = 0.03


def probe_network(channel: Channel, elements: int | None = None) -> Network:
    """Call it on all ranks at the same point; the same network comes back everywhere.

    With the model's `elements` no message is larger than those of a step would be: what is slower than that to
    measure is of no interest.
    """
    frame, vector = (elements // 4, 4 * elements) if elements is not None else (_LARGEST, _LARGEST)

    def reduced(size: int) -> None:
        channel.all_reduce(torch.zeros(size // 4, device=channel.device))

    return Network(channel.world, gather_line(channel, frame), measured_line(channel, reduced, vector))


def gather_line(channel: Channel, largest: int) -> Line:
    """All-gathers between the ranks of a channel."""
    return measured_line(channel, lambda size: channel.all_gather(torch.zeros(size, dtype=torch.uint8)), largest)


def measured_line(channel: Channel, collective: Callable[[int], object], largest: int) -> Line:
    """What a collective takes by its bytes, up to about the largest that matters."""
    _timed(channel, collective, _TINY)  # the first makes connections
    empty = sorted(_timed(channel, collective, _TINY) for _ in range(3))
    size, most = _FIRST, max(_FIRST, min(largest, _LARGEST))
    while (took := _timed(channel, collective, size)) < 3.0 * empty[0] + _ENOUGH and size < most:
        size = min(size * _GROWTH, most)
    # Noise only ever adds: the better of two, and of three where that is cheap.
    for _ in range(2 if took < 2 * _ENOUGH else 1):
        took = min(took, _timed(channel, collective, size))
    # The best ones tell the slope; a step meets the usual delay, not the shortest.
    return replace(Line.through((_TINY, empty[0]), (size, took)), fixed=empty[1])


def _timed(channel: Channel, collective: Callable[[int], object], size: int) -> float:
    """Seconds until the slowest rank has its result; all begin together, having just told each other of the last."""
    began = time.perf_counter()
    collective(size)
    return max(took for (took,) in share(channel, [time.perf_counter() - began]))


EVERY = 8  # steps between two agreements
_PROBES = (1e4, 1e5, 1e6)  # bytes of frames whose cost the first probe stands for


class Agreement:
    """Feeds one link's selection. All ranks have one, or none has."""

    def __init__(self, selection: Adaptive, channel: Channel, sizes: Mapping[str, int], *, scattered: bool) -> None:
        self._selection, self._channel, self._sizes = selection, channel, sizes
        self._elements = sum(sizes.values())
        self._seen: list[tuple[float, float, float]] = []  # period, exchange, entries
        self._ended: float | None = None
        if isinstance(selection.cost, Measured):
            network = probe_network(channel)
            for size in _PROBES:
                seconds = network.scatter(size) if scattered else network.gather(size)
                selection.cost.observe(8.0 * size, seconds)

    def end_step(self, codec: Codec, last: Counters) -> None:
        """Called when a step's last bucket is done, by the thread that talks for the link."""
        now = time.perf_counter()
        if self._ended is not None:
            self._seen.append((now - self._ended, last.exchange, float(last.entries)))
        if len(self._seen) >= EVERY:
            self._agree(codec)
        self._ended = time.perf_counter()

    def _agree(self, codec: Codec) -> None:
        medians = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        self._seen.clear()
        # A parameter's place is everybody's, whoever used it; who has no wish for it says 0.
        wishes = [codec.learned.get(name, {}).get("wish", 0.0) for name in self._sizes]
        everybody = share(self._channel, [*medians, *wishes])
        selection = self._selection
        if isinstance(selection.cost, Measured):
            # Who comes last waits for nobody: the shortest exchange is the network's own time.
            exchange = min(row[1] for row in everybody)
            entries = statistics.mean(row[2] for row in everybody)
            bits = float(selection.frame_bits(np.array([entries]), self._elements)[0])
            beside = max(max(row[0] for row in everybody) - exchange, 1e-6)
            selection.cost.observe(bits, exchange, beside=beside)
        if selection.agree is None:
            return
        for place, name in enumerate(self._sizes, start=3):
            wished = [row[place] for row in everybody if row[place] > 0.0]
            if wished and name in codec.learned:
                codec.learned[name]["agreed"] = selection.agreed(wished)


class Machines:
    """The machine of this rank, and the first ranks of all machines."""

    def __init__(self, channel: Channel, size: int, groups: Groups) -> None:
        blocks = [list(range(first, first + size)) for first in range(0, channel.world, size)]
        self.size = size
        self._everybody = channel
        self._inside, self._outside = tiers(channel, blocks, groups)
        self._leads = channel.rank % size == 0

    @classmethod
    def found(cls, channel: Channel, groups: Groups) -> "Machines | None":
        """As torchrun says; None where all ranks are on one machine, each on its own, or machines differ."""
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        alike = {row[0] for row in share(channel, [float(size)])} == {float(size)}
        several = alike and 1 < size < channel.world and channel.world % size == 0
        return cls(channel, size, groups) if several else None

    def probe(self, elements: int) -> Tiers:
        """Call it on all ranks; the slowest machine's figures come back everywhere."""
        within = measured_line(self._inside, self._to_first_and_back, 4 * elements)
        between = gather_line(self._outside, elements // 4) if self._leads else Line(0.0, 0.0)
        rows = share(self._everybody, [within.fixed, within.per_byte, between.fixed, between.per_byte])
        slowest = [max(column) for column in zip(*rows, strict=True)]
        return Tiers(self.size, Line(*slowest[:2]), Line(*slowest[2:]))

    def _to_first_and_back(self, size: int) -> None:
        vector = torch.zeros(size // 4, device=self._inside.device)
        self._inside.reduce(vector, 0)
        self._inside.broadcast(vector, 0)

    def to_first(self, codec: Codec, sizes: Mapping[str, int]) -> None:
        """The first rank takes over the mean of its machine's memories: they count as much as before."""
        for name, numel in sizes.items():
            held = codec.residuals(name).get("residual")
            mean = torch.zeros(numel) if held is None else held.cpu() / self.size
            mean = mean.to(self._inside.device)
            self._inside.reduce(mean, 0)
            if self._leads:
                codec.ensure_residuals(name, mean if held is None else held)["residual"].copy_(mean)
            elif held is not None:
                held.zero_()

    def from_first(self, codec: Codec) -> None:
        """The first rank's memory counts for one rank from now on, not for its machine's."""
        if self._leads:
            codec.rescale(float(self.size))


def codec_seconds(codec: Codec, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """What it takes to encode gradients, once the codec knows their size, and to read the frame."""
    fresh = codec.copy()
    fresh.encode(gradients)
    began = time.perf_counter()
    frame = fresh.encode(gradients)
    encoded = time.perf_counter()
    outs = [torch.zeros(g.numel()) for g in gradients.values()]
    zeroed = time.perf_counter()
    FrameReader(frame, [out.numel() for out in outs]).add_to(outs)
    return encoded - began, time.perf_counter() - zeroed


def copy_seconds(elements: int) -> float:
    """What it takes to narrow so many elements to 16 bits and back."""
    part = min(elements, 1 << 20)
    x = torch.ones(part)
    began = time.perf_counter()
    x.copy_(x.to(torch.float16))
    return (time.perf_counter() - began) * elements / max(part, 1)


_log = logging.getLogger("thinwire")

FIRST = Setting("0.01", "gather", density=0.01)
WARM = 2  # steps that are not measured: buckets are rebuilt, sizes are guesses
MEASURED = 4  # steps before the first decision
LOOK = 10  # steps between two looks at the waiting times
QUICK = 0.05  # seconds that an all-reduce of everything may take to be what a run starts with
AGAIN = 10  # looks after which a compressed link probes anyway: a network that became fast does not show otherwise
_SAMPLE = 1 << 16


@dataclass
class _Step:
    """One step's times on this rank."""

    began: float
    buckets: list[int] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def wait(self) -> float:
        return max(self.ended - self.filled[-1], 0.0) if self.filled else 0.0


class Pilot:
    """All ranks call the same methods at the same steps, and decide alike."""

    probe = staticmethod(probe_network)  # tests bring a weather of their own

    def __init__(
        self,
        link: Link,
        channel: Channel,
        sizes: Mapping[str, int],
        groups: Groups,
        policy: Policy | None = None,
        width: int = 4,
    ) -> None:
        self.setting = FIRST
        self._dense = replace(DENSE, width=width)  # bytes an element of the gradients
        self.width = 0  # bytes an element in an all-reduce of its own; 0: buckets go to the link
        self.decisions: list[Decision] = []
        self._link, self._channel, self._sizes, self._groups = link, channel, sizes, groups
        self._policy = policy if policy is not None else _policy_for(self._dense)
        self._watch = Watch()
        self._count, self._looks = 0, 0
        self._machines: Machines | None = None
        self._first: Network | None = None  # as probed before the first step, until the first decision
        self._now: _Step | None = None
        self._waits: list[float] = []
        self._periods: list[float] = []
        self._codec: list[tuple[float, float]] = []  # seconds of encoding and of reading one frame
        self._trial = 0.0, 0.0  # the same, tried out on one step
        self._squares = [0.0] * (len(DENSITIES) + 1)  # carried at each density, and all
        self._alpha: dict[float, float] = dict.fromkeys(DENSITIES, 1.0)

    # What the hook calls

    def begin_step(self) -> None:
        """Before a step's first bucket: nothing of this link is under way anywhere on this rank."""
        self._link.wait()
        self._close(time.perf_counter())
        if self._channel.world > 1:
            first = WARM + MEASURED
            if self._count == 0:
                self._take_off()
            elif self._count == first or (self._count > first and (self._count - first) % LOOK == 0):
                self._look()
        self._settle()
        self._count += 1
        if self.sampling:
            self._squares, self._trial = [0.0] * len(self._squares), (0.0, 0.0)
        self._now = _Step(time.perf_counter())

    @property
    def sampling(self) -> bool:
        """Whether this step's gradients are looked at: in the step before a decision may be needed."""
        return self._count == WARM + MEASURED or (self._count > WARM + MEASURED and self._count % (5 * LOOK) == 0)

    def filled(self, elements: int) -> None:
        """A bucket is full."""
        assert self._now is not None
        self._now.buckets.append(elements)
        self._now.filled.append(time.perf_counter())

    def ended(self) -> None:
        """The step's last bucket holds the mean."""
        if self._now is not None:
            self._now.ended = time.perf_counter()

    def sample(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the law of a bucket's large tensors, memory included; and what a codec takes, if none is in use."""
        if not self._codec:
            encode, decode = codec_seconds(self._link.codec, gradients)
            self._trial = self._trial[0] + encode, self._trial[1] + decode
        for name, gradient in gradients.items():
            if gradient.numel() < self._link.codec.min_numel:
                continue
            vector = Vector(gradient.detach(), self._link.codec.residuals(name).get("residual"), 1.0, None, None)
            make = NativeGroup if gradient.device.type == "cpu" else TorchGroup
            law = Law(make([vector]).histogram(_SAMPLE, self._count), vector.n)
            if law.empty or not np.isfinite(law.squares[-1]):
                continue
            shares = law.alpha(np.array(DENSITIES) * law.n)
            for place, share_of in enumerate([*shares, 1.0]):
                self._squares[place] += float(share_of * law.squares[-1])

    # What follows from it

    def _take_off(self) -> None:
        """Where dense is quick nothing else is tried first: entries that wait would cost steps."""
        self._machines = Machines.found(self._channel, self._groups)
        self._first = self._probed()
        if self._first.reduce(float(self._dense.width) * sum(self._sizes.values())) < QUICK:
            self._change(self._dense)

    def _close(self, now: float) -> None:
        """Note the step before."""
        step = self._now
        if step is None or not step.filled:
            return
        if self.width:
            world, elements = self._channel.world, sum(step.buckets)
            self._link.passed(elements, 2 * self.width * elements * (world - 1) // world)
        if self._count > WARM:
            self._waits.append(step.wait)
            self._periods.append(now - step.began)
            if not self.width and self.setting.compressed:
                last, frames = self._link.last_step, self._channel.world
                if self._machines is not None and self.setting.exchange == HIERARCHICAL:
                    frames //= self._machines.size
                self._codec.append((last.compress, last.decode / max(frames, 1)))

    def _look(self) -> None:
        """Compare the waiting times of all ranks, and decide if there is a reason to."""
        rows = share(self._channel, [statistics.median(self._waits), statistics.median(self._periods)])
        # Who comes last waits for nobody: the shortest wait is the network's own time.
        wait, period = min(row[0] for row in rows), max(row[1] for row in rows)
        self._looks += 1
        due = not self.decisions or (self.setting.compressed and self._looks % AGAIN == 0)
        if self._watch.suspicious([wait], period) or due:
            self._decide(period - wait)
        self._waits.clear()
        self._periods.clear()

    def _probed(self) -> Network:
        elements = sum(self._sizes.values())
        network = self.probe(self._channel, elements)
        return network if self._machines is None else replace(network, tiers=self._machines.probe(elements))

    def _decide(self, compute: float) -> None:
        network = self._first if self._first is not None else self._probed()
        self._first = None
        work = self._workload(compute)
        decision = decide(work, network, self.setting if self.decisions else None, self._policy)
        self._watch.reset()
        self._link.why = decision.why()
        if not self.decisions or decision.changed:
            if self._channel.rank == 0:
                _log.info("auto, step %d: %s", self._link.step, decision.why())
            self._change(decision.setting)
        self.decisions.append(decision)

    def _workload(self, compute: float) -> Workload:
        """The same on every rank: times are the ranks' medians, alpha is their mean, buckets are rank 0's."""
        step = self._now
        assert step is not None
        codec = [statistics.median(column) for column in zip(*self._codec[-LOOK:], strict=True)] or self._trial
        ready = [filled - step.filled[-1] for filled in step.filled]
        mine = [*codec, copy_seconds(sum(step.buckets)), *self._squares]
        everybody = gather_json(self._channel, {"mine": mine, "buckets": step.buckets, "ready": ready})
        columns = list(zip(*(row["mine"] for row in everybody), strict=True))
        # In a hierarchical exchange only the machines' first ranks know what a codec takes.
        encode, decode, copy = (statistics.median([v for v in c if v > 0.0] or [0.0]) for c in columns[:3])
        *carried, everything = (sum(column) for column in columns[3:])
        if everything > 0.0:
            self._alpha = {d: c / everything for d, c in zip(DENSITIES, carried, strict=True)}
        return Workload(
            max(compute, 1e-6),
            tuple(everybody[0]["buckets"]),
            tuple(everybody[0]["ready"]),
            encode,
            decode,
            copy,
            self._alpha,
        )

    def _change(self, setting: Setting) -> None:
        before, tiered = self.setting.exchange == HIERARCHICAL, setting.exchange == HIERARCHICAL
        if self._machines is not None and before != tiered:
            if tiered:
                self._machines.to_first(self._link.codec, self._sizes)
            else:
                self._machines.from_first(self._link.codec)
        self.setting, self.width = setting, 0
        self._link.codec.selection = TopK(setting.density if setting.compressed else FIRST.density)
        per_machine = self._machines.size if self._machines is not None else 1
        exchange = Hierarchical(per_machine=per_machine) if tiered else NAMES[setting.exchange]()
        exchange.setup(self._channel, self._link.codec, self._sizes, self._groups)
        self._link.exchange = exchange

    def _settle(self) -> None:
        """After a change to dense what was held back travels by the link first; then buckets may go straight."""
        straight = not self.setting.compressed or self._channel.world == 1
        if straight and not self.width and self._agreed_empty():
            self.width = self.setting.width or self._dense.width

    def _agreed_empty(self) -> bool:
        """Whether no rank holds anything back."""
        held = [t for name in self._sizes for t in self._link.codec.residuals(name).values()]
        mine = float(any(bool(t.any()) for t in held))
        return not any(row[0] for row in share(self._channel, [mine]))


def _policy_for(dense: Setting) -> Policy:
    """What there is to choose from: gradients that are 16 bits wide already gain nothing from fp16."""
    others = (setting for setting in Policy().settings if setting.width == 0 or setting.width < dense.width)
    return replace(Policy(), settings=(dense, *others))
