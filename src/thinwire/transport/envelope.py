"""Envelope: what the udp transport writes around messages, on the reliable way and in datagrams; checked on arrival."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer

# magic, version, kind, whether reports follow, session, number in the session's order
_ENVELOPE = struct.Struct("<4sBBHIQ")
_MAGIC, _VERSION = b"TWUD", 1
# kind, parts; then the length of each
_CONTROL = struct.Struct("<BB")
_LENGTH = struct.Struct("<H")
# kind, length of the head, index, count, message, time of sending
_DATA = struct.Struct("<BBHHId")
# message, pieces, hold and the least queueing delay in microseconds, bytes of the bitmap (none: all have arrived)
_REPORT = struct.Struct("<IHIIH")
# message, pieces, their bytes
_END = struct.Struct("<IHI")

DATA, CONTROL, PROBE = 1, 2, 3
DATA_BYTES = _DATA.size
# Messages up to this size also travel as a datagram where the path loses packets.
EXPRESS = 600


class Kind(IntEnum):
    """What an envelope holds."""

    JOIN = 1  # worker: give me a session
    KEY = 2  # server: session, keys, port, mtu
    OPEN = 3  # server: your datagrams arrive
    AGAIN = 4  # server: I do not know this session
    PLAIN = 5  # a message
    WHOLE = 6  # a message in pieces, all of them here
    BEGIN = 7  # a message in datagrams: its place in the order
    REPORT = 8  # nothing but reports
    END = 9  # a message's datagrams have all left; outside of the order


@dataclass(frozen=True)
class Report:
    """What became of one message."""

    message: int
    count: int
    hold: float  # seconds from the last datagram to this report
    queue: float  # the least queueing delay of its datagrams, in seconds
    lost: frozenset[int]

    def pack(self) -> bytes:
        bits = sum(1 << i for i in range(self.count) if i not in self.lost) if self.lost else 0
        bitmap = bits.to_bytes((self.count + 7) // 8, "little") if self.lost else b""
        times = (min(int(max(0.0, seconds) * 1e6), 0xFFFFFFFF) for seconds in (self.hold, self.queue))
        return _REPORT.pack(self.message, self.count, *times, len(bitmap)) + bitmap


def read_reports(data: Buffer) -> list[Report]:
    """All reports in a buffer."""
    view, at, found = memoryview(data), 0, []
    while at < len(view):
        if at + _REPORT.size > len(view):
            raise TransportError("a report is cut off")
        message, count, hold, queue, length = _REPORT.unpack_from(view, at)
        at += _REPORT.size
        bitmap = view[at : at + length]
        at += length
        if length not in (0, (count + 7) // 8) or len(bitmap) != length:
            raise TransportError("a report's bitmap has the wrong size")
        bits = int.from_bytes(bitmap, "little")
        lost = frozenset(i for i in range(count) if not bits >> i & 1) if length else frozenset()
        found.append(Report(message, count, hold * 1e-6, queue * 1e-6, lost))
    return found


@dataclass(frozen=True)
class Envelope:
    """One envelope; `number` is 0 outside of the session's order."""

    kind: Kind
    session: int
    number: int
    parts: Sequence[Buffer]
    reports: Buffer = b""

    def as_parts(self) -> list[Buffer]:
        """For the reliable way."""
        head = _ENVELOPE.pack(_MAGIC, _VERSION, self.kind, bool(len(self.reports)), self.session, self.number)
        return [head, *([self.reports] if len(self.reports) else []), *self.parts]

    def as_control(self) -> bytes:
        """For a datagram."""
        parts = self.as_parts()
        lengths = b"".join(_LENGTH.pack(len(part)) for part in parts)
        return b"".join([_CONTROL.pack(CONTROL, len(parts)), lengths, *parts])

    @property
    def size(self) -> int:
        return sum(map(len, self.parts)) + len(self.reports)


def read_envelope(parts: Sequence[Buffer]) -> Envelope | None:
    """The envelope in these parts; None if it is none, TransportError if it is broken."""
    if len(parts[0]) != _ENVELOPE.size or bytes(parts[0][:4]) != _MAGIC:
        return None
    _, version, kind, reported, session, number = _ENVELOPE.unpack(parts[0])
    if version != _VERSION:
        raise TransportError(f"the peer's datagrams have version {version}, this thinwire's {_VERSION}")
    if kind not in Kind.__members__.values() or reported > 1 or len(parts) < 1 + reported:
        raise TransportError("an envelope makes no sense")
    return Envelope(Kind(kind), session, number, list(parts[1 + reported :]), parts[1] if reported else b"")


def read_control(data: bytes) -> Envelope | None:
    """The envelope in a datagram."""
    _, count = _CONTROL.unpack_from(data)
    at = _CONTROL.size + count * _LENGTH.size
    if not count or at > len(data):
        raise TransportError("a datagram is cut off")
    view, parts = memoryview(data), []
    for (length,) in _LENGTH.iter_unpack(data[_CONTROL.size : at]):
        parts.append(view[at : at + length])
        at += length
    if at != len(data):
        raise TransportError("a datagram's length is not what it says")
    return read_envelope(parts)


def pack_data(message: int, index: int, count: int, head: bytes, piece: Buffer, now: float) -> bytes:
    """A piece as a datagram, with the head of its message: it needs no other to be understood."""
    return b"".join([_DATA.pack(DATA, len(head), index, count, message, now), head, piece])


def read_data(data: bytes) -> tuple[int, int, int, bytes, bytes, float]:
    """(message, index, count, head, piece, time of sending)."""
    if len(data) < _DATA.size:
        raise TransportError("a datagram is cut off")
    _, length, index, count, message, sent = _DATA.unpack_from(data)
    at = _DATA.size + length
    if at > len(data) or index >= count or not abs(sent) < 1e12:
        raise TransportError("a datagram makes no sense")
    return message, index, count, data[_DATA.size : at], data[at:], sent


def pack_end(message: int, count: int, total: int, head: bytes) -> bytes:
    return _END.pack(message, count, total) + head


def read_end(data: Buffer) -> tuple[int, int, int, bytes]:
    """(message, pieces, their bytes, head)."""
    if len(data) < _END.size:
        raise TransportError("a last word is cut off")
    return (*_END.unpack_from(data), bytes(data[_END.size :]))
