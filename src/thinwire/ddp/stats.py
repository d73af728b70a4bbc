"""Stats: what a link counts, cheaply, once per bucket.

Bytes are those that this rank's collectives move; the kernel's own counters in the lab confirm them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.exchange.channel import Channel


@dataclass
class Counters:
    """Sums over buckets."""

    bytes_sent: int = 0
    bytes_received: int = 0
    entries: int = 0
    elements: int = 0
    compress: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0
    cpu: float = 0.0  # seconds that the link's thread computed, collectives not counted

    def report(self) -> dict[str, Any]:
        return {**vars(self), "density": self.entries / self.elements if self.elements else 0.0}


@dataclass
class Stats:
    """Counters of the whole run, of the last step and of the step under way."""

    steps: int = 0
    skipped: int = 0
    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    per_parameter: dict[str, int] = field(default_factory=dict)
    _now: Counters = field(default_factory=Counters)
    _seen: dict[Channel, tuple[int, int, float, float]] = field(default_factory=dict)

    def note(self, outcome: Outcome, gradients: Mapping[str, Tensor], hold: frozenset[str]) -> None:
        """One bucket."""
        now = self._now
        now.entries += sum(outcome.counts.values())
        now.elements += sum(g.numel() for name, g in gradients.items() if name not in hold)
        now.compress += outcome.compress
        now.decode += outcome.decode
        self.per_parameter.update(outcome.counts)

    def straight(self, elements: int, volume: int) -> None:
        """A step whose gradients went by all-reduce, past the link."""
        self._now.entries += elements
        self._now.elements += elements
        self._now.bytes_sent += volume
        self._now.bytes_received += volume

    def spent(self, cpu: float) -> None:
        """Seconds that the link's thread computed, collectives included; they are taken off in the end."""
        self._now.cpu += cpu

    def end_step(self, channels: Sequence[Channel]) -> None:
        """The step's buckets are all counted."""
        now = self._now
        for channel in channels:  # another exchange may have others than the last one had
            sent, received, seconds, cpu = self._seen.get(channel, (0, 0, 0.0, 0.0))
            now.bytes_sent += channel.sent - sent
            now.bytes_received += channel.received - received
            now.exchange += channel.seconds - seconds
            now.cpu -= channel.cpu - cpu
            self._seen[channel] = channel.sent, channel.received, channel.seconds, channel.cpu
        for name, value in vars(now).items():
            setattr(self.total, name, getattr(self.total, name) + value)
        self.last, self._now = now, Counters()
        self.steps += 1

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            **self.total.report(),
            "last_step": self.last.report(),
            "per_parameter": dict(self.per_parameter),
        }
