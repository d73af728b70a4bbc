"""Pacing: how fast datagrams leave, learned from the receiver's reports.

A window grows and shrinks like that of Linux's TCP (CUBIC, RFC 9438), and leaves evenly over a round trip, at about
the rate at which datagrams were seen to arrive. Loss without a standing queue is the link's own: going slower would
not help, and is not done. The rule is documented in docs/udp.md.
"""

import time
from collections import deque
from dataclasses import dataclass

# Datagrams that may leave at once, as TCP's first window.
BURST = 10
# Datagrams of the window: at the start, and at the least.
_START, _LEAST = 32, 4
_FIRST_TRIP = 0.005
_MOST = 1.25e9  # bytes a second
# CUBIC's own numbers: what is left after congestion, and how steeply the window grows.
_FALL, _STEEP = 0.7, 0.4
# Delay above the least that was seen lately, from which on a queue stands: several senders' short bursts make less.
QUEUE = 0.020
# Above the rate of arrival, so that a free link is found: while the window doubles, and after.
_PROBING, _STEADY = 2.0, 1.25
# Reports whose rates of arrival are remembered, and datagrams that one must be about to show a rate.
_RATES, _ENOUGH = 32, 8
# Weight of a report in the smoothed loss, for each datagram that it is about.
_SMOOTH = 1 / 256


@dataclass(frozen=True)
class Seen:
    """What a report says of one message: datagrams and bytes sent, datagrams lost; seconds."""

    sent: int
    size: int
    lost: int
    queue: float  # the least queueing delay
    span: float  # from the first arrival to the last
    took: float  # from the first departure to the last
    trip: float
    tried: bool  # whether the pacer was what it waited for
    grant: int = 0  # what the receiver has for this sender, bytes a second; 0: as much as there is


class Pacer:
    """A token bucket whose rate adapts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.window = float(_START)
        self.loss = 0.0  # smoothed share of datagrams
        self.trip = 0.0  # smoothed round trip
        self.falls = 0
        self.grant = 0
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._doubling = True
        self.rate = self._now_rate()  # bytes a second
        self._before, self._fell = float(_START), time.monotonic()  # the window at the last fall, and when
        self._tokens, self._filled = float(self._depth), time.monotonic()

    def _now_rate(self) -> float:
        found = self.window * self._size / max(self.trip or _FIRST_TRIP, 1e-3)
        if self._rates:
            found = min(found, (_PROBING if self._doubling else _STEADY) * max(self._rates))
        return min(found, self.grant or _MOST, _MOST)

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
        usual = self.loss
        share = seen.lost / seen.sent if seen.sent else 0.0
        self.loss += (1.0 - (1.0 - _SMOOTH) ** seen.sent) * (share - self.loss)
        trip = max(seen.trip, 2e-4)
        self.trip = trip if not self.trip else self.trip + (trip - self.trip) / 8
        self.grant = seen.grant
        arrived = seen.sent - seen.lost
        if arrived >= _ENOUGH and seen.span > 0.0:
            self._rates.append(seen.size * (arrived - 1) / seen.sent / seen.span)
        if (seen.lost and seen.queue > QUEUE) or self._overrun(seen, usual):
            if now - self._fell > self.trip:  # one round trip's losses are one sign
                self._fall(now)
        elif seen.tried:
            self._grow(seen, now)
        self.rate = self._now_rate()

    def _overrun(self, seen: Seen, usual: float) -> bool:
        """Far more was lost than usual and the rest came far apart: a queue too short to show as a delay."""
        expected = seen.sent * usual
        excess = seen.lost > expected + 4.0 * (expected * (1.0 - usual)) ** 0.5 + 4.0
        return excess and seen.span > 1.3 * seen.took

    def _fall(self, now: float) -> None:
        self._before, self._fell, self._doubling = self.window, now, False
        self.window = max(_LEAST, self.window * _FALL)
        self.falls += 1

    def _grow(self, seen: Seen, now: float) -> None:
        """Doubling until a queue is seen; then as CUBIC: fast towards where it fell, slowly around it, and faster."""
        if self._doubling:
            if seen.queue <= QUEUE:
                self.window = min(self.window + seen.sent, 1e6)
                return
            self._doubling, self._before, self._fell = False, self.window, now
        turn = (self._before * (1.0 - _FALL) / _STEEP) ** (1 / 3)
        since = now - self._fell
        target = _STEEP * (since + self.trip - turn) ** 3 + self._before
        # Where round trips are short, CUBIC grows like Reno: about half a datagram per round trip.
        friendly = self._before * _FALL + 3.0 * (1.0 - _FALL) / (1.0 + _FALL) * since / max(self.trip, 1e-3)
        self.window = max(self.window, min(max(target, friendly), 1.5 * self.window))

    def __str__(self) -> str:
        shared = f", {self.grant * 8e-6:.1f} mbit/s granted" if self.grant else ""
        return (
            f"{self.rate * 8e-6:.1f} mbit/s, {self.window:.0f} datagrams in a round trip of {self.trip * 1e3:.1f} ms, "
            f"loss {self.loss:.2%}, {self.falls} times slowed down{shared}"
        )
