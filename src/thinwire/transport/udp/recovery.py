"""Dispatch: messages in pieces on their way out: in the pacer's queue, then until the receiver has reported on them."""

import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.base import Buffer
from thinwire.transport.udp.congestion import Pacer, Seen
from thinwire.transport.udp.packet import Report, pack_end

# Whether the transport reports on them; pieces that were sent, and their bytes.
_HEAD = struct.Struct("<?HI")
_PIECE = struct.Struct("<HH")
MOST_PIECES = 0xFFFF


@dataclass(frozen=True)
class Pieces:
    """What has arrived of a message: by index, of `count` pieces with `total` bytes."""

    count: int
    total: int
    arrived: dict[int, memoryview]
    reported: bool = False  # whether the sender hears of it without being told


def pack(count: int, total: int, arrived: Iterable[tuple[int, Buffer]], *, reported: bool = False) -> bytes:
    """One buffer with the pieces that arrived."""
    rows: list[Buffer] = [_HEAD.pack(reported, count, total)]
    for index, piece in arrived:
        rows += [_PIECE.pack(index, len(piece)), piece]
    return b"".join(rows)


def pack_all(pieces: Sequence[Buffer]) -> bytes:
    """One buffer with all pieces of a message."""
    return pack(len(pieces), sum(map(len, pieces)), enumerate(pieces))


def unpack(body: Buffer) -> Pieces:
    """What `pack` made; TransportError if it is not that."""
    view = memoryview(body)
    if len(view) < _HEAD.size:
        raise TransportError("a message in pieces is too short")
    reported, count, total = _HEAD.unpack_from(view)
    arrived: dict[int, memoryview] = {}
    at = _HEAD.size
    while at < len(view):
        if at + _PIECE.size > len(view):
            raise TransportError("a message in pieces ends within a piece")
        index, length = _PIECE.unpack_from(view, at)
        at += _PIECE.size
        if index >= count or index in arrived or at + length > len(view):
            raise TransportError(f"piece {index} of {count} makes no sense")
        arrived[index] = view[at : at + length]
        at += length
    return Pieces(count, total, arrived, reported)


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


# Messages one after the other of which nothing arrived, and for how long datagrams are not tried after them.
_DEAF, _REST = 8, 10.0
# Datagrams that are sealed before the first of them leaves.
_AT_ONCE = 64
# Of IP and UDP, in front of every datagram.
_HEADERS = 28
# Bytes by which a piece may be padded to be as long as the longest next to it: datagrams of one length leave together.
_PADDING = 32


@dataclass
class Sending:
    """A message whose datagrams are under way."""

    number: int
    head: bytes
    pieces: Sequence[Buffer]
    total: int
    next: int = 0
    waited: bool = False
    began: float = 0.0  # when the first datagram went
    left: float = 0.0  # when the last one did

    def packed(self, count: int) -> list[bytes]:
        """The contents of the next so many datagrams."""
        first, pieces = self.next, self.pieces
        now = [bytes(piece) for piece in pieces[first : first + count]]
        return _native.pack_data(self.number, first, len(pieces), self.head, now, time.time(), _PADDING)

    def word(self) -> bytes:
        """What is said after its datagrams."""
        return pack_end(self.number, len(self.pieces), self.total, self.head)


class Outcome(NamedTuple):
    """What became of a message that was sent in pieces."""

    ticket: int
    lost: frozenset[int]


class Dispatch:
    """One path's messages in pieces."""

    def __init__(self, mtu: int) -> None:
        self._mtu, self.pacer = mtu, Pacer(mtu, time.monotonic())
        self.queue: deque[Sending] = deque()  # waits for the pacer
        self.counts: Counter[str] = Counter()
        self.rests_until = 0.0  # datagrams are not worth trying before
        self._unreported: dict[int, Sending] = {}
        self._deaf = 0

    def submit(self, number: int, head: bytes, pieces: Sequence[Buffer]) -> None:
        """A message of that number waits for the pacer."""
        self._unreported[number] = sending = Sending(number, head, pieces, sum(map(len, pieces)))
        self.queue.append(sending)

    def next(self, now: float) -> tuple[Sending, int, float]:
        """The message in turn, how many of its datagrams may leave now, and if none, the seconds until one may."""
        sending = self.queue[0]
        count, delay = self.pacer.allowed(now)
        if count < len(sending.pieces) - sending.next:
            sending.waited = True
        if count:
            sending.began = sending.began or now
        return sending, min(count, len(sending.pieces) - sending.next, _AT_ONCE), delay

    def left(self, sending: Sending, count: int, size: int, now: float) -> bool:
        """So many of its datagrams, of so many bytes, have left; whether these were the last."""
        sending.next += count
        self.counts["sent"] += count
        self.pacer.spend(size + count * _HEADERS)
        if sending.next < len(sending.pieces):
            return False
        self.queue.popleft()
        sending.left = now
        return True

    def learn(self, report: Report, now: float) -> Outcome | None:
        """Take in a report; None if nothing waits for it."""
        sending = self._unreported.get(report.message)
        if sending is None or report.count != len(sending.pieces) or not sending.left:
            return None
        del self._unreported[report.message]
        lost = len(report.lost)
        self.counts["lost"] += lost
        self.pacer.learn(
            Seen(
                sent=report.count,
                size=sending.total,
                lost=lost,
                queue=report.queue,
                span=report.span,
                took=sending.left - sending.began,
                trip=now - sending.left - report.hold,
                tried=sending.waited,
                grant=report.grant,
            ),
            now,
        )
        self._deaf = self._deaf + 1 if report.count and lost == report.count else 0
        if self._deaf >= _DEAF:
            self._deaf, self.rests_until = 0, now + _REST
        return Outcome(report.message, report.lost)

    def clear(self) -> None:
        """Forget what is under way."""
        self.queue.clear()
        self._unreported.clear()
