"""Pacing: how fast datagrams leave, learned from the receiver's reports.

The rate grows like TCP's and falls when datagrams are lost while a queue stands on the path. Loss without a queue is
the link's own: going slower would not help, and is not done. The rule is documented in docs/udp.md.
"""

import time
from dataclasses import dataclass

# Datagrams that may leave at once, as TCP's first window.
BURST = 10
_START = 2.5e6  # bytes a second before anything is known
_LEAST, _MOST = 1.25e5, 1.25e9
_FALL = 0.7
# Delay above the least that was seen lately, from which on a queue stands.
QUEUE = 0.005
# So many lost are too many for a link of its own: the path is overrun even if no delay shows it.
_OVERRUN = 0.4
# Weight of a report in the smoothed loss, for each datagram that it is about.
_SMOOTH = 1 / 256


@dataclass(frozen=True)
class Seen:
    """What a report says of one message: datagrams sent and lost, the queueing delay and the round trip in seconds."""

    sent: int
    lost: int
    queue: float
    trip: float
    tried: bool  # whether it left at about the rate, or something else was slower


class Pacer:
    """A token bucket whose rate adapts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.rate = _START
        self.loss = 0.0  # smoothed share of datagrams
        self.trip = 0.0  # smoothed round trip
        self.falls = 0
        self._doubling = True
        self._changed = time.monotonic()
        self._tokens, self._filled = float(self._depth), time.monotonic()

    @property
    def _depth(self) -> float:
        # A timer of a millisecond's resolution must be able to keep a fast link busy.
        return max(BURST * self._size, 0.002 * self.rate)

    def delay(self, size: int, now: float) -> float:
        """Seconds until a datagram of this size may leave; 0 if now."""
        self._tokens = min(self._depth, self._tokens + (now - self._filled) * self.rate)
        self._filled = now
        return 0.0 if self._tokens >= size else (size - self._tokens) / self.rate

    def spend(self, size: int) -> None:
        """A datagram leaves."""
        self._tokens -= size

    def learn(self, seen: Seen, now: float) -> None:
        """Take in a report."""
        share = seen.lost / seen.sent if seen.sent else 0.0
        weight = 1.0 - (1.0 - _SMOOTH) ** seen.sent
        self.loss += weight * (share - self.loss)
        trip = max(seen.trip, 2e-4)
        self.trip = trip if not self.trip else self.trip + (trip - self.trip) / 8
        crowded = seen.lost > 0 and seen.queue > QUEUE
        overrun = seen.sent >= BURST and share > max(_OVERRUN, 2 * self.loss)
        if crowded or overrun:
            if now - self._changed > self.trip:  # one round trip's losses are one sign
                self.rate = max(_LEAST, self.rate * _FALL)
                self._doubling, self._changed = False, now
                self.falls += 1
        elif seen.tried:
            rounds = min((now - self._changed) / self.trip, 4.0)
            grown = 2 * self.rate if self._doubling else self.rate + rounds * self._size / self.trip
            if self._doubling and seen.queue > QUEUE:
                self._doubling, grown = False, self.rate
            self.rate = min(_MOST, grown, 2 * self.rate)
            self._changed = now

    def __str__(self) -> str:
        return (
            f"{self.rate * 8e-6:.1f} mbit/s, round trip {self.trip * 1e3:.1f} ms, loss {self.loss:.2%}, "
            f"{self.falls} times slowed down"
        )
