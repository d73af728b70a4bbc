"""Messages in pieces: how they are sent in packets and acknowledged, and how the receiver reassembles what arrives.

A message in pieces may arrive in part. Its sender learns from the ack which pieces were lost; they are not
retransmitted.
"""

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.base import LARGEST, Buffer
from thinwire.transport.udp.congestion import AckSample, Pacer
from thinwire.transport.udp.packet import MessageAck

# A received body: whether the transport acknowledges the message, the pieces that were sent, and their bytes
_HEAD = struct.Struct("<?HI")
_PIECE = struct.Struct("<HH")
MOST_PIECES = 0xFFFF


@dataclass(frozen=True)
class Pieces:
    """What has arrived of a message: pieces by index, of `count` pieces with `total` bytes."""

    count: int
    total: int
    arrived: dict[int, memoryview]
    reported: bool = False  # whether the transport itself tells the sender what was lost


def pack(count: int, total: int, arrived: Iterable[tuple[int, Buffer]], *, reported: bool = False) -> bytes:
    """Pack the pieces that arrived into one buffer."""
    rows: list[Buffer] = [_HEAD.pack(reported, count, total)]
    for index, piece in arrived:
        rows += [_PIECE.pack(index, len(piece)), piece]
    return b"".join(rows)


def pack_all(pieces: Sequence[Buffer]) -> bytes:
    """Pack all pieces of a message into one buffer."""
    return pack(len(pieces), sum(map(len, pieces)), enumerate(pieces))


def unpack(body: Buffer) -> Pieces:
    """Read a buffer that `pack` made; raise TransportError if it is malformed."""
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
            raise TransportError(f"piece {index} of a message of {count} pieces is malformed")
        arrived[index] = view[at : at + length]
        at += length
    return Pieces(count, total, arrived, reported)


# After so many messages in a row of which nothing arrived, no packets are tried for so many seconds.
_ALL_LOST, _BACKOFF = 8, 10.0
# Packets that are encrypted before the first of them leaves.
_AT_ONCE = 64
# Bytes of IP and UDP headers in front of every packet.
_HEADERS = 28
# Bytes by which a piece may be padded to the length of its longest neighbour: packets of equal length leave together.
_PADDING = 32


@dataclass
class OutgoingMessage:
    """A message in pieces that is being sent or waits for its ack."""

    number: int
    head: bytes
    pieces: Sequence[Buffer]
    total: int
    next: int = 0  # index of the next piece to send
    limited: bool = False  # whether it had to wait for the pacer
    began: float = 0.0  # when the first packet left
    left: float = 0.0  # when the last packet left

    def packet_contents(self, count: int, wall: float) -> list[bytes]:
        """Return the contents of the next `count` packets, which leave at this time of day (time.time)."""
        pieces = [bytes(piece) for piece in self.pieces[self.next : self.next + count]]
        return _native.pack_data(self.number, self.next, len(self.pieces), self.head, pieces, wall, _PADDING)


class PieceSender:
    """Sends the messages in pieces of one session: they wait for the pacer, then for their acks."""

    def __init__(self, mtu: int, now: float) -> None:
        self.pacer = Pacer(mtu, now)
        self.queue: deque[OutgoingMessage] = deque()  # messages that wait for the pacer
        self.counts: Counter[str] = Counter()
        self.blocked_until = 0.0  # no packets are tried before this time
        self._unacked: dict[int, OutgoingMessage] = {}
        self._all_lost = 0  # messages in a row of which nothing arrived

    def submit(self, number: int, head: bytes, pieces: Sequence[Buffer]) -> None:
        """Queue a message with this number."""
        self._unacked[number] = message = OutgoingMessage(number, head, pieces, sum(map(len, pieces)))
        self.queue.append(message)

    def next(self, now: float) -> tuple[OutgoingMessage, int, float]:
        """Return the first message, how many of its packets may leave now, and if none, the seconds until one may."""
        message = self.queue[0]
        count, delay = self.pacer.allowed(now)
        if count < len(message.pieces) - message.next:
            message.limited = True
        if count:
            message.began = message.began or now
        return message, min(count, len(message.pieces) - message.next, _AT_ONCE), delay

    def on_sent(self, message: OutgoingMessage, count: int, size: int, now: float) -> bool:
        """Account for `count` packets of `size` bytes that left; return whether they were the message's last."""
        message.next += count
        self.counts["sent"] += count
        self.pacer.spend(size + count * _HEADERS)
        if message.next < len(message.pieces):
            return False
        self.queue.popleft()
        message.left = now
        return True

    def outstanding(self, number: int) -> int | None:
        """Return the number of pieces of a message that has left and waits for its ack; None for any other."""
        message = self._unacked.get(number)
        return len(message.pieces) if message is not None and message.left else None

    def on_ack(self, ack: MessageAck, now: float) -> None:
        """Take the ack of an outstanding message into account."""
        message = self._unacked.pop(ack.message)
        lost = sum(map(len, ack.lost))
        self.counts["lost"] += lost
        took, rtt, limited = message.left - message.began, now - message.left - ack.delay, message.limited
        sample = AckSample(ack.count, message.total, lost, ack.queue, ack.span, took, rtt, limited, ack.share)
        self.pacer.on_ack(sample, now)
        self._all_lost = self._all_lost + 1 if ack.count and lost == ack.count else 0
        if self._all_lost >= _ALL_LOST:
            self._all_lost, self.blocked_until = 0, now + _BACKOFF

    def clear(self) -> None:
        """Drop all messages that are queued or wait for their acks."""
        self.queue.clear()
        self._unacked.clear()


# Closed messages that are remembered, and messages that may be open at once and their bytes: a sender's window is far
# below these.
_CLOSED, _OPEN, _OPEN_BYTES = 1024, 512, LARGEST
# Seconds added to the measured delays, because timers and threads are that coarse.
_GRANULARITY = 0.002
_LONGEST = 1.0

# Packets of one message that came one after the other: number, pieces of the message, head; the pieces by index, how
# many came twice; the least one-way delay, by two clocks, and the times of the first and the last arrival.
PacketGroup = tuple[int, int, bytes, dict[int, bytes], int, float, float, float]


class LossTimer:
    """Measures how long after the end marker packets still arrive, to set when missing packets count as lost."""

    def __init__(self) -> None:
        self._mean, self._deviation = 0.0, 0.005

    @property
    def timeout(self) -> float:
        """Seconds after the end marker when missing packets count as lost."""
        return min(_LONGEST, self._mean + 4 * self._deviation + _GRANULARITY)

    def on_delay(self, seconds: float) -> None:
        """Take into account how long after the end marker a message's last packet came; 0 if it came before."""
        late = min(max(0.0, seconds), _LONGEST)
        self._deviation += (abs(late - self._mean) - self._deviation) / 16
        self._mean += (late - self._mean) / 16


@dataclass
class PartialMessage:
    """A message in pieces as far as it has arrived."""

    number: int
    count: int
    head: bytes
    pieces: dict[int, bytes] = field(default_factory=dict)
    last: float = 0.0  # when the newest piece came
    queue: float = 0.0  # the least queueing delay of its packets, in seconds
    stamps: tuple[float, float] = (0.0, 0.0)  # the first and the last arrival, by the kernel's clock
    ended: float | None = None  # when the end marker came
    total: int = 0

    @property
    def complete(self) -> bool:
        return len(self.pieces) == self.count

    @property
    def size(self) -> int:
        """Bytes of the pieces that have arrived."""
        return sum(map(len, self.pieces.values()))


class Reassembly:
    """Reassembles the messages in pieces of one sender."""

    def __init__(self) -> None:
        self.open: dict[int, PartialMessage] = {}
        self.closed: OrderedDict[int, float | None] = OrderedDict()  # recent messages, and when their end markers came
        self.loss_timer = LossTimer()
        self._span = -1
        self._least: list[float] = []  # the least one-way delay, by two clocks, in each of the last three spans
        self.received = self.repeated = self.lost = 0
        self._bytes = 0  # of the pieces of all open messages

    def add(self, group: PacketGroup, now: float) -> bool:
        """Add packets of one message; return whether the message is complete now."""
        message, count, head, pieces, repeated, flight, first, last = group
        if message in self.closed:
            ended = self.closed[message]
            if ended is not None:
                self.loss_timer.on_delay(now - ended)
            return False
        found = self.open.get(message)
        if found is None:
            while len(self.open) >= _OPEN or (self.open and self._bytes > _OPEN_BYTES):
                self.close(next(iter(self.open)))
            found = self.open[message] = PartialMessage(message, count, head)
        if found.count != count or found.head != head:
            self.repeated += len(pieces)
            return False
        self.repeated += repeated
        if not found.pieces.keys().isdisjoint(pieces):
            pieces = {index: piece for index, piece in pieces.items() if index not in found.pieces}
            self.repeated += len(group[3]) - len(pieces)
            if not pieces:
                return False
        delay = self._queueing_delay(flight, last)
        if found.pieces:
            found.queue, found.stamps = min(delay, found.queue), (found.stamps[0], last)
        else:
            found.queue, found.stamps = delay, (first, last)
        found.pieces.update(pieces)
        self._bytes += sum(map(len, pieces.values()))
        found.last = now
        self.received += len(pieces)
        return found.complete

    def end(self, message: int, count: int, total: int, head: bytes, now: float) -> PartialMessage | None:
        """Note that a message's end marker came; return the message, None if it is closed already."""
        if message in self.closed:
            if self.closed[message] is None:  # it was complete before its end marker came
                self.closed[message] = now
                self.loss_timer.on_delay(0.0)
            return None
        found = self.open.get(message)
        if found is None or found.count != count or found.head != head:
            self._bytes -= found.size if found is not None else 0
            found = self.open[message] = PartialMessage(message, count, head)
        found.total = total
        if found.ended is None:
            found.ended = now
        return found

    def close(self, number: int) -> PartialMessage:
        """Close a message: what is missing counts as lost."""
        message = self.open.pop(number)
        self._bytes -= message.size
        self.closed[number] = message.ended
        while len(self.closed) > _CLOSED:
            self.closed.popitem(last=False)
        self.lost += message.count - len(message.pieces)
        if message.pieces and message.ended is not None:
            self.loss_timer.on_delay(message.last - message.ended)
        return message

    def _queueing_delay(self, flight: float, now: float) -> float:
        """Return by how much a one-way delay exceeds the least of the last 20 to 30 seconds."""
        span = int(now / 10.0)
        if span != self._span:
            self._span = span
            self._least = [flight, *self._least[:2]]
        if flight < self._least[0]:
            self._least[0] = flight
        return flight - min(self._least)
