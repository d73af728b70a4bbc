"""Shares: a receiver that many send to at once gives each of them a share of its link.

Senders cannot know of one another, and by the time that each has found out by losses the queue before the receiver
is long full. The receiver sees what its link carries and who uses it, and says so with every report.
"""

from collections import deque
from typing import NamedTuple


class Largest:
    """The largest of the last so many numbers, none of them negative; 0 if there is none yet."""

    def __init__(self, count: int) -> None:
        self._count, self._number = count, 0
        self._falling: deque[tuple[int, float]] = deque()  # those that no later one exceeds, and their numbers

    def add(self, value: float) -> None:
        """One more."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        self._number += 1
        falling.append((self._number, value))
        if falling[0][0] <= self._number - self._count:
            falling.popleft()

    @property
    def largest(self) -> float:
        return self._falling[0][1] if self._falling else 0.0


# Smoothed loss from which on it is tried, and by how much it must have grown since it was found to be the link's own.
_WORTH, _GROWN = 0.02, 1.5
# What is left of the window meanwhile; the share of the loss that remains at most if there were too many.
_HALF, _FEWER = 0.5, 0.6
# How long a trial takes: round trips, and datagrams. How long a verdict holds: seconds.
_TRIPS, _ENOUGH, _HOLDS = 4.0, 128, 10.0


class Trial:
    """One sender's."""

    def __init__(self) -> None:
        self.running = False
        self._loss = self._excused = 0.0
        self._until = self._began = 0.0
        self._before = (0.0, 0.0)  # loss and window
        self._sent = self._lost = 0

    def due(self, sent: int, lost: int, now: float) -> bool:
        """Take a report in while no trial runs; whether it is time for one."""
        self._loss += (lost / max(sent, 1) - self._loss) / 4
        known = now < self._until and self._loss < _GROWN * self._excused + _WORTH
        return self._loss > _WORTH and not known

    def begin(self, window: float, now: float) -> float:
        """Begin; returns the window meanwhile."""
        self.running, self._began, self._before = True, now, (self._loss, window)
        self._sent = self._lost = 0
        return window * _HALF

    def learn(self, sent: int, lost: int, trip: float, now: float) -> float | None:
        """Take a report in while it runs; the window afterwards (the old one if nothing changed), or None to go on."""
        if now - self._began < 1.5 * trip:  # on what had left before
            return None
        self._sent, self._lost = self._sent + sent, self._lost + lost
        if now - self._began < _TRIPS * trip or self._sent < _ENOUGH:
            return None
        self.running = False
        before, window = self._before
        self._loss = after = self._lost / self._sent
        if after < _FEWER * before:
            return window * _HALF
        self._excused, self._until = max(after, before), now + _HOLDS
        return window


# Datagrams that may leave at once, as TCP's first window.
BURST = 10
# Datagrams of the window: at the start, and at the least.
_START, _LEAST = 32, 4
_FIRST_TRIP = 0.005
_MOST = 1.25e9  # bytes a second
# CUBIC's own numbers: what is left after congestion, and how steeply the window grows.
_FALL, _STEEP = 0.7, 0.4
# What is left where nothing of ours was lost yet.
_EASE = 0.82
# Delay above the least that was seen lately, from which on a queue stands: several senders' short bursts make less.
QUEUE = 0.020
# The same for a sender that the pacer holds back: then it is no burst, and the link is busy.
_BUSY = 0.007
# As near to the longest queue of late as this, its end is reached: others lose datagrams there even if we do not.
# Below the second it has gone away from there.
_TOP, _AWAY = 0.85, 0.75
# A sender of more than this share of what is under way makes a queue shorter; one of less leaves that to the others.
# What the link carries is taken to be the highest rate of arrival, half of it after so many seconds.
_SHARE, _FADES = 0.4, 30.0
# A queue that stands next to less than that share is that of others. For so many seconds it is left to them, and the
# window grows by so many datagrams in a round trip.
_COMPETES, _CATCH_UP = 10.0, 2.0
# More than this is no link's own loss, whatever the delays say: a queue may have been there from the beginning.
_TOO_MUCH = 0.3
# Above the rate of arrival, so that a free link is found: while the window doubles, and after.
_PROBING, _STEADY = 2.0, 1.25
# Reports whose rates of arrival are remembered, and datagrams that one must be about to show a rate.
_RATES, _ENOUGH = 32, 8
# Seconds of its share that a sender may have saved for a burst.
_SAVED = 0.05
# Weight of a report in the smoothed loss, for each datagram that it is about.
_SMOOTH = 1 / 256


class Seen(NamedTuple):
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


class Bucket:
    """A token bucket."""

    def __init__(self, rate: float, depth: float, now: float) -> None:
        self.rate, self.depth = rate, depth
        self._tokens, self._filled = depth, now

    def tokens(self, now: float) -> float:
        """Bytes that may leave now; fewer than none if too many have left."""
        self._tokens = min(self.depth, self._tokens + (now - self._filled) * self.rate)
        self._filled = now
        return self._tokens

    def spend(self, size: int) -> None:
        """They leave."""
        self._tokens -= size


class Pacer:
    """Three token buckets: a window in a round trip, evenly as datagrams arrive, and the share that is given."""

    def __init__(self, size: int, now: float) -> None:
        self._size = size
        self.window = float(_START)
        self.loss = 0.0  # smoothed share of datagrams
        self.trip = 0.0  # smoothed round trip
        self.falls = 0
        self.grant = 0
        self._rates = Largest(_RATES)
        self._doubling = True
        self._before, self._fell = float(_START), now  # the window at the last fall, and when
        self._longest = Largest(256)  # queueing delays of late
        self._topped = False
        self._competes_until = 0.0  # others fill the link
        self._carries = 0.0, now  # the highest rate of arrival, fading, and when that was computed
        self._trial = Trial()
        self._even = Bucket(_MOST, BURST * size, now)
        self._windows = Bucket(self.rate, self.window * size, now)
        self._shared = Bucket(_MOST, _MOST, now)
        self._buckets = (self._even, self._windows, self._shared)

    @property
    def rate(self) -> float:
        """Bytes a second in the long run, the receiver's share aside."""
        return self._rate(self._arriving)

    def _rate(self, arriving: float) -> float:
        return min(self.window * self._size / max(self.trip or _FIRST_TRIP, 1e-3), arriving)

    @property
    def _arriving(self) -> float:
        gain = _PROBING if self._doubling else _STEADY
        return min(gain * self._rates.largest, _MOST) if self._rates.largest else _MOST

    def allowed(self, now: float) -> tuple[int, float]:
        """Datagrams of full size that may leave now; if none, the seconds until one may."""
        tokens = [bucket.tokens(now) for bucket in self._buckets]
        count = int(min(tokens) // self._size)
        if count > 0:
            return count, 0.0
        return 0, max((self._size - there) / bucket.rate for there, bucket in zip(tokens, self._buckets, strict=True))

    def spend(self, size: int) -> None:
        """So many bytes leave."""
        for bucket in self._buckets:
            bucket.spend(size)

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
            rate = seen.size * (arrived - 1) / seen.sent / seen.span
            self._rates.add(rate)
            highest, since = self._carries
            self._carries = max(rate, highest * 0.5 ** ((now - since) / _FADES)), now
        self._longest.add(seen.queue)
        if self._trial.running:
            self._end_trial(seen, now)
        elif self._crowded(seen) or self._overrun(seen, usual) or self._fills(seen, now):
            if now - self._fell > 2 * self.trip:  # one round trip's losses are one sign, and it shows one later
                self._fall(now, _FALL if seen.lost else _EASE)
        elif seen.tried and self._trial.due(seen.sent, seen.lost, now):
            self.window = max(_LEAST, self._trial.begin(self.window, now))
        elif seen.tried:
            self._grow(seen, now)
        self._fit(seen.grant)

    def _fit(self, grant: int) -> None:
        """What was learned becomes rates and depths."""
        arriving, burst, shared = self._arriving, BURST * self._size, grant or _MOST
        # A timer of a millisecond's resolution must be able to keep a fast link busy.
        self._even.rate, self._even.depth = arriving, max(burst, 0.002 * arriving)
        self._windows.rate, self._windows.depth = self._rate(arriving), self.window * self._size
        self._shared.rate, self._shared.depth = shared, max(burst, _SAVED * shared)

    def _crowded(self, seen: Seen) -> bool:
        """A queue stands, and its end was reached."""
        before, level = self._topped, seen.queue / max(self._longest.largest, 1e-9)
        self._topped = level > (_AWAY if before else _TOP)
        full = seen.lost > 0 or (self._topped and not before)  # it may stay there for a while: that is one sign
        return (seen.queue > (_BUSY if seen.tried else QUEUE) and full) or self.loss > _TOO_MUCH

    def _fills(self, seen: Seen, now: float) -> bool:
        """A queue stands that is mostly ours. A TCP that keeps its own queue short (BBR) would starve behind it."""
        if not seen.tried or seen.queue <= _BUSY:
            self._competes_until = 0.0 if seen.queue <= _BUSY else self._competes_until
            return False
        if self.window > _SHARE * self._under_way:
            return now >= self._competes_until
        if seen.queue > QUEUE:
            self._competes_until = now + _COMPETES
        return False

    @property
    def _under_way(self) -> float:
        """Datagrams that everybody together has on the link."""
        return self._carries[0] * self.trip / self._size

    def _overrun(self, seen: Seen, usual: float) -> bool:
        """Far more was lost than usual and the rest came far apart: a queue too short to show as a delay."""
        if not seen.lost:
            return False
        expected = seen.sent * usual
        excess = seen.lost > expected + 4.0 * (expected * (1.0 - usual)) ** 0.5 + 4.0
        return excess and seen.span > 1.3 * seen.took

    def _end_trial(self, seen: Seen, now: float) -> None:
        window = self._trial.learn(seen.sent, seen.lost, self.trip, now)
        if window is None:
            return
        if window <= self.window:
            self._before, self._fell, self._doubling = self.window, now, False
            self.falls += 1
        self.window = max(window, _LEAST)

    def _fall(self, now: float, to: float) -> None:
        self._before, self._fell, self._doubling = self.window, now, False
        self.window = max(_LEAST, self.window * to)
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
        if now < self._competes_until:
            self.window += _CATCH_UP * seen.sent / self.window

    def __str__(self) -> str:
        shared = f", {self.grant * 8e-6:.1f} mbit/s granted" if self.grant else ""
        return (
            f"{self.rate * 8e-6:.1f} mbit/s, {self.window:.0f} datagrams in a round trip of {self.trip * 1e3:.1f} ms, "
            f"loss {self.loss:.2%}, {self.falls} times slowed down{shared}"
        )


# Seconds over which arrivals are counted, and how many such spans are remembered.
SPAN, _SPANS = 0.020, 500
# Who sent within so many seconds counts as a sender.
_ACTIVE = 0.2
# All shares together, of what the link was seen to carry: more while it shows no sign of being full.
_MORE, _LESS = 1.5, 0.95
# Delay above the least, and share of datagrams lost, from which on the link is taken for full.
_QUEUE, _LOSS = 0.020, 0.02
_SMOOTH_SHARE = 1 / 16


class Shares:
    """What one receiver's link carries."""

    def __init__(self) -> None:
        self._span, self._bytes = 0, 0
        self._rates = Largest(_SPANS)
        self._heard: dict[int, float] = {}
        self._queue = self._loss = 0.0

    def note(self, session: int, size: int, stamp: float) -> None:
        """A datagram of a session came at this time, by the kernel's clock."""
        span = int(stamp / SPAN)
        if span != self._span:
            if self._bytes:
                self._rates.add(self._bytes / SPAN)
            self._span, self._bytes = span, 0
        self._bytes += size
        self._heard[session] = stamp

    def learn(self, queue: float, loss: float) -> None:
        """A message came with this least queueing delay and this share lost."""
        self._queue += (queue - self._queue) * _SMOOTH_SHARE
        self._loss += (loss - self._loss) * _SMOOTH_SHARE

    def grant(self, stamp: float) -> int:
        """Bytes a second for each sender; 0 where there is only one, or nothing is known yet."""
        self._heard = {session: when for session, when in self._heard.items() if when > stamp - _ACTIVE}
        if len(self._heard) < 2 or not self._rates.largest:
            return 0
        full = self._queue > _QUEUE or self._loss > _LOSS
        return int(self._rates.largest * (_LESS if full else _MORE) / len(self._heard))
