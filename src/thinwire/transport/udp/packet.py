"""Sealing: datagrams that only the other side of a session can have made, and that count once.

AES-GCM with a key for each direction; the nonce is a counter that travels in the clear, and a window of recent
counters finds what is sent again. See docs/udp.md.
"""

import secrets
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.base import Buffer

# magic, version, kind, whether reports follow, session, number in the session's order
_ENVELOPE = struct.Struct("<4sBBHIQ")
_MAGIC, _VERSION = b"TWUD", 1
# A short envelope among others: kind, parts, number, bytes of reports; then the lengths of the parts
_RECORD = struct.Struct("<BBQH")
_LENGTH = struct.Struct("<H")
# A datagram of records: kind, the number that its sender waits for
_CONTROL = struct.Struct("<BQ")
# message, pieces, bytes a second that its sender may use of the receiver's link (0: all), bytes of the bitmap (none:
# all have arrived); in microseconds: hold, the least queueing delay, from the first to the last arrival
_REPORT = struct.Struct("<IHIHIII")
# message, pieces, their bytes
_END = struct.Struct("<IHI")
_MOST = 0xFFFFFFFF

DATA, CONTROL, PROBE = _native.DATA, 2, 3
DATA_BYTES, CONTROL_BYTES = _native.DATA_BYTES, _CONTROL.size
# Envelopes up to this size travel several together, and also as a datagram where the path loses packets.
EXPRESS = 600


class Kind(IntEnum):
    """What an envelope holds."""

    JOIN = 1  # worker: give me a session
    KEY = 2  # server: session, keys, port, mtu
    OPEN = 3  # server: your datagrams arrive
    AGAIN = 4  # server: I do not know this session
    PLAIN = 5  # a message
    WHOLE = 6  # a message in pieces, all of them here
    WORD = 7  # a message's datagrams have all left; stands for them in the order
    REPORT = 8  # nothing but reports
    BATCH = 9  # several envelopes; its number is the one that its sender waits for


# An IntEnum's own look-up takes as long as all else about a record.
_KINDS = {kind.value: kind for kind in Kind}


@dataclass(slots=True)  # one a message: frozen would take three times as long to make
class Report:
    """What became of one message."""

    message: int
    count: int
    lost: frozenset[int]
    hold: float = 0.0  # seconds from the last datagram to this report
    queue: float = 0.0  # the least queueing delay of its datagrams, in seconds
    span: float = 0.0  # seconds from the first to the last of them
    grant: int = 0  # bytes a second that the receiver has for this sender; 0 if it is the only one

    def pack(self) -> bytes:
        bits = sum(1 << i for i in range(self.count) if i not in self.lost) if self.lost else 0
        bitmap = bits.to_bytes((self.count + 7) // 8, "little") if self.lost else b""
        times = (min(int(max(0.0, seconds) * 1e6), _MOST) for seconds in (self.hold, self.queue, self.span))
        return _REPORT.pack(self.message, self.count, min(self.grant, _MOST), len(bitmap), *times) + bitmap


def read_reports(data: Buffer) -> list[Report]:
    """All reports in a buffer."""
    view, at, found = memoryview(data), 0, []
    while at < len(view):
        if at + _REPORT.size > len(view):
            raise TransportError("a report is cut off")
        message, count, grant, length, hold, queue, span = _REPORT.unpack_from(view, at)
        at += _REPORT.size
        bitmap = view[at : at + length]
        at += length
        if length not in (0, (count + 7) // 8) or len(bitmap) != length:
            raise TransportError("a report's bitmap has the wrong size")
        bits = int.from_bytes(bitmap, "little")
        lost = frozenset(i for i in range(count) if not bits >> i & 1) if length else frozenset()
        found.append(Report(message, count, lost, hold * 1e-6, queue * 1e-6, span * 1e-6, grant))
    return found


class Envelope(NamedTuple):
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

    def as_record(self) -> bytes:
        """For a batch or a datagram, with others."""
        head = _RECORD.pack(self.kind, len(self.parts), self.number, len(self.reports))
        lengths = [_LENGTH.pack(len(part)) for part in self.parts]
        return b"".join([head, *lengths, self.reports, *self.parts])

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
    if kind not in _KINDS or reported > 1 or len(parts) < 1 + reported:
        raise TransportError("an envelope makes no sense")
    return Envelope(_KINDS[kind], session, number, list(parts[1 + reported :]), parts[1] if reported else b"")


def read_records(session: int, data: Buffer) -> list[Envelope]:
    """All envelopes in the records of a batch or a datagram."""
    view, at, found = memoryview(data), 0, []
    while at < len(view):
        if at + _RECORD.size > len(view):
            raise TransportError("a record is cut off")
        kind, count, number, reported = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        ends = at + count * _LENGTH.size
        if not Kind.PLAIN <= kind <= Kind.REPORT or ends > len(view):
            raise TransportError("a record makes no sense")
        lengths = [length for (length,) in _LENGTH.iter_unpack(view[at:ends])]
        at, pieces = ends, []
        for length in (reported, *lengths):
            if at + length > len(view):
                raise TransportError("a record's parts are cut off")
            pieces.append(view[at : at + length])
            at += length
        found.append(Envelope(_KINDS[kind], session, number, pieces[1:], pieces[0]))
    return found


def pack_control(due: int, records: Sequence[bytes]) -> bytes:
    """A datagram of records; `due` is the number that its sender waits for."""
    return _CONTROL.pack(CONTROL, due) + b"".join(records)


def read_control(session: int, data: bytes) -> tuple[int, list[Envelope]]:
    """(the number that the sender waits for, its envelopes)."""
    if len(data) < _CONTROL.size:
        raise TransportError("a datagram is cut off")
    return _CONTROL.unpack_from(data)[1], read_records(session, memoryview(data)[_CONTROL.size :])


def pack_end(message: int, count: int, total: int, head: bytes) -> bytes:
    return _END.pack(message, count, total) + head


def read_end(data: Buffer) -> tuple[int, int, int, bytes]:
    """(message, pieces, their bytes, head)."""
    if len(data) < _END.size:
        raise TransportError("a last word is cut off")
    return (*_END.unpack_from(data), bytes(data[_END.size :]))


# magic and version; in the clear, and authenticated, follow the session and the counter
PREFIX = b"TWU\x01"
_SESSION_BYTES, _COUNTER_BYTES, _TAG_BYTES = 4, 8, 16
KEY_BYTES = 32
OVERHEAD = len(PREFIX) + _SESSION_BYTES + _COUNTER_BYTES + _TAG_BYTES
# Counters behind the newest that may still come: reordering on a path is far below it.
WINDOW = 1 << 14

Split = tuple[int, int, bytes, bytes, bytes]  # session, counter, nonce, what is in the clear, what is sealed


def new_keys() -> bytes:
    """A key for each direction: the server's first."""
    return secrets.token_bytes(2 * KEY_BYTES)


def split(datagram: bytes) -> Split | None:
    """A datagram's parts, none of them believed yet; None if it is none of thinwire's."""
    return _native.split_datagram(datagram, PREFIX, OVERHEAD)


class Sealer:
    """One direction's sender."""

    def __init__(self, session: int, key: bytes) -> None:
        self._session, self._cipher, self._counter = session, AESGCM(key), 0

    def seal(self, plain: bytes) -> bytes:
        """A datagram; no two have the same counter."""
        return self.seal_all([plain])[0]

    def seal_all(self, plains: list[bytes]) -> list[bytes]:
        """A datagram for each."""
        encrypt = self._cipher.encrypt
        labelled = _native.label_datagrams(plains, PREFIX, self._session, self._counter + 1)
        self._counter += len(plains)
        return [clear + encrypt(nonce, plain, clear) for nonce, plain, clear in labelled]


class Opener:
    """One direction's receiver; `rejected` counts what was not believed, by reason."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._newest, self._seen = 0, bytearray(WINDOW)  # of the newest counters, each at its remainder: has it come?
        self.rejected: Counter[str] = Counter()

    def open(self, datagram: Split) -> bytes | None:
        """What was sealed; None, and nothing changes, for a datagram that is forged or has come before."""
        _, counter, nonce, clear, sealed = datagram
        age = self._newest - counter
        if age >= 0 and (age >= WINDOW or self._seen[counter % WINDOW]):
            self.rejected["replayed"] += 1
            return None
        try:
            plain = self._cipher.decrypt(nonce, sealed, clear)
        except InvalidTag:
            self.rejected["forged"] += 1
            return None
        if age < 0:
            if age < -1:
                for skipped in range(max(self._newest + 1, counter - WINDOW + 1), counter):
                    self._seen[skipped % WINDOW] = 0
            self._newest = counter
        self._seen[counter % WINDOW] = 1
        return plain
