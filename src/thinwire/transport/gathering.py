"""Gathering: datagrams become messages again; whoever waits for a missing one knows for how long.

A message is closed when all its datagrams are there, or at a deadline after the sender's word that all have left: as
late as datagrams were seen to come after that word, and four deviations. Late ones are counted and teach the deadline.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field

# What is remembered of closed messages, and what may be open at once: a sender's window is far below it.
_CLOSED, _OPEN = 1024, 512
# Added to what was measured: timers and threads are that coarse.
_GRAIN = 0.002
_LONGEST = 1.0

# Datagrams of one message that came one after the other: its number, how many pieces it has, its head; the pieces by
# index, how many came twice; the least time of flight, by two clocks, and the first and the last arrival.
Group = tuple[int, int, bytes, dict[int, bytes], int, float, float, float]


class Lateness:
    """How long after the sender's last word datagrams still come."""

    def __init__(self) -> None:
        self._mean, self._deviation = 0.0, 0.005

    @property
    def wait(self) -> float:
        """Seconds after which a datagram is taken for lost."""
        return min(_LONGEST, self._mean + 4 * self._deviation + _GRAIN)

    def learn(self, seconds: float) -> None:
        """A message's last datagram came so long after the last word; 0 if before it."""
        late = min(max(0.0, seconds), _LONGEST)
        self._deviation += (abs(late - self._mean) - self._deviation) / 16
        self._mean += (late - self._mean) / 16


@dataclass
class Message:
    """One message in pieces, as far as it has come."""

    number: int
    count: int
    head: bytes
    pieces: dict[int, bytes] = field(default_factory=dict)
    last: float = 0.0  # when the newest piece came
    queue: float = 0.0  # the shortest queueing delay of its datagrams, in seconds
    stamps: tuple[float, float] = (0.0, 0.0)  # of the first and the last arrival, by the kernel's clock
    ended: float | None = None  # when the sender's last word came
    total: int = 0

    @property
    def whole(self) -> bool:
        return len(self.pieces) == self.count


class Gathering:
    """All messages from one sender that are not closed yet."""

    def __init__(self) -> None:
        self.open: dict[int, Message] = {}
        self._closed: OrderedDict[int, float | None] = OrderedDict()
        self.lateness = Lateness()
        self._span = -1
        self._fastest: list[float] = []  # the least one-way delays of the last spans, by two clocks
        self.received = self.late = self.repeated = self.lost = 0

    def knows(self, message: int) -> bool:
        """Whether this message was closed lately: a datagram of it is late."""
        return message in self._closed

    def add(self, group: Group) -> bool:
        """Take datagrams of one message in; True if it is complete."""
        message, count, head, pieces, repeated, flight, first, last = group
        if message in self._closed:
            self.late += len(pieces)
            ended = self._closed[message]
            if ended is not None:
                self.lateness.learn(time.monotonic() - ended)
            return False
        found = self.open.get(message)
        if found is None:
            if len(self.open) >= _OPEN:
                self.close(next(iter(self.open)))
            found = self.open[message] = Message(message, count, head)
        if found.count != count or found.head != head:
            self.repeated += len(pieces)
            return False
        self.repeated += repeated
        if not found.pieces.keys().isdisjoint(pieces):
            pieces = {index: piece for index, piece in pieces.items() if index not in found.pieces}
            self.repeated += len(group[3]) - len(pieces)
            if not pieces:
                return False
        delay = self._delay(flight, last)
        if found.pieces:
            found.queue, found.stamps = min(delay, found.queue), (found.stamps[0], last)
        else:
            found.queue, found.stamps = delay, (first, last)
        found.pieces.update(pieces)
        found.last = time.monotonic()
        self.received += len(pieces)
        return found.whole

    def end(self, message: int, count: int, total: int, head: bytes, now: float) -> Message | None:
        """The sender's last word on a message; None if it is closed already."""
        if message in self._closed:
            if self._closed[message] is None:  # it was complete before its last word
                self._closed[message] = now
                self.lateness.learn(0.0)
            return None
        found = self.open.get(message)
        if found is None or found.count != count or found.head != head:
            found = self.open[message] = Message(message, count, head)
        found.total = total
        if found.ended is None:
            found.ended = now
        return found

    def close(self, number: int) -> Message:
        """Give up on what is missing."""
        message = self.open.pop(number)
        self._closed[number] = message.ended
        while len(self._closed) > _CLOSED:
            self._closed.popitem(last=False)
        self.lost += message.count - len(message.pieces)
        if message.pieces and message.ended is not None:
            self.lateness.learn(message.last - message.ended)
        return message

    def _delay(self, flight: float, now: float) -> float:
        """A delay above the least of the last half minute."""
        span = int(now / 10.0)
        if span != self._span:
            self._span = span
            self._fastest = [flight, *self._fastest[:2]]
        if flight < self._fastest[0]:
            self._fastest[0] = flight
        return flight - min(self._fastest)
