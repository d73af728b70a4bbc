"""Stats: what a link counts, once per bucket: bytes, entries and seconds; and the figures of a diagnosis."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from thinwire.codec.encode import elements_of
from thinwire.exchange.base import Outcome
from thinwire.exchange.channel import Channel


@dataclass
class Counters:
    """Sums over buckets. Bytes are those that this rank's collectives move."""

    bytes_sent: int = 0
    bytes_received: int = 0
    entries: int = 0
    elements: int = 0
    compress_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0
    cpu_seconds: float = 0.0  # CPU time of the link's thread, collectives not counted
    messages_sent: int = 0  # from rank to rank; those of the process group's collectives are not counted
    round_trips: float = 0.0  # messages that wait for one another, each of which takes half a round trip

    def report(self, world: int) -> dict[str, Any]:
        """All counters, the density, and the compression ratio against a dense 32-bit all-reduce."""
        dense = 8.0 * self.elements * (world - 1) / world
        return {
            **vars(self),
            "density": self.entries / self.elements if self.elements else 0.0,
            "compression_ratio": dense / self.bytes_sent if self.bytes_sent else 1.0,
        }


@dataclass
class Stats:
    """Counters of the whole run, of the last step and of the present step."""

    steps: int = 0
    skipped: int = 0
    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    per_parameter: dict[str, int] = field(default_factory=dict)
    _now: Counters = field(default_factory=Counters)
    _seen: dict[Channel, tuple[int, int, float, float, int]] = field(default_factory=dict)

    def add(self, outcome: Outcome, tensors: Mapping[str, Tensor], hold: frozenset[str]) -> None:
        """Count one bucket."""
        now = self._now
        now.entries += sum(outcome.counts.values())
        now.elements += elements_of(tensors) - sum(tensors[name].numel() for name in hold)
        now.compress_seconds += outcome.compress
        now.decode_seconds += outcome.decode
        self.per_parameter.update(outcome.counts)

    def count_dense(self, elements: int, volume: int, trips: float) -> None:
        """Count a step that was averaged by an all-reduce outside the link."""
        self._now.entries += elements
        self._now.elements += elements
        self._now.bytes_sent += volume
        self._now.bytes_received += volume
        self._now.round_trips += trips

    def add_cpu(self, seconds: float) -> None:
        """Count CPU time of the link's thread; `end_step` subtracts the collectives' part."""
        self._now.cpu_seconds += seconds

    def add_trips(self, trips: float, *, together: bool) -> None:
        """Count the round trips of one bucket, which took place together with those of other buckets or after them."""
        before = self._now.round_trips
        self._now.round_trips = max(before, trips) if together else before + trips

    def end_step(self, channels: Sequence[Channel]) -> None:
        """Add the present step to the totals, with what these channels moved in it."""
        now = self._now
        for channel in channels:  # a tuner may have replaced the exchange, and its channels, since the last step
            sent, received, seconds, cpu, messages = self._seen.get(channel, (0, 0, 0.0, 0.0, 0))
            now.bytes_sent += channel.sent - sent
            now.bytes_received += channel.received - received
            now.exchange_seconds += channel.seconds - seconds
            now.cpu_seconds -= channel.cpu - cpu
            now.messages_sent += channel.messages - messages
            self._seen[channel] = channel.sent, channel.received, channel.seconds, channel.cpu, channel.messages
        self.total = Counters(*map(operator.add, vars(self.total).values(), vars(now).values()))
        self.last, self._now = now, Counters()
        self.steps += 1

    def report(self, world: int) -> dict[str, Any]:
        """Everything as plain figures."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            **self.total.report(world),
            "last_step": self.last.report(world),
            "per_parameter": dict(self.per_parameter),
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How far a step's compressed mean was from what training would do without compression."""

    event: ClassVar[str] = "diagnosis"
    step: int
    delta: float  # ||sent||^2 / ||accumulated||^2
    xi: float  # ||selection of the mean - what was applied|| / ||dense mean||
    residual_ratio: float  # ||residual|| / ||gradient||
    cosine: float  # of what was applied and the dense mean
    age: float = math.nan  # steps that the residual's entries have waited, on average
    age_oldest: int = 0
    waited: float = math.nan  # steps that entries sent since the last diagnosis had waited, on average

    def text(self) -> str:
        """All figures in one line."""
        ages = f"age {self.age:.1f} steps (oldest {self.age_oldest}), waited {self.waited:.1f}"
        return (
            f"delta {self.delta:.3g}, xi {self.xi:.3g}, residual/gradient {self.residual_ratio:.3g}, "
            f"cosine {self.cosine:.3g}" + (f", {ages}" if math.isfinite(self.age) else "")
        )
