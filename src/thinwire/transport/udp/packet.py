"""Packets and envelopes of the udp transport: their layout, and the encryption of packets. See docs/server-protocol.md.

An envelope is one message, or one control message of the transport, with its number in the session and the acks that
travel with it. Envelopes travel over TCP; short ones also in packets. Packets are encrypted and authenticated by
AES-GCM with a key for each direction. The nonce is a counter that is sent in the clear; a window of recent counters
rejects replayed packets.
"""

import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.base import LARGEST_PACKET, MOST_PARTS, Buffer

# An envelope over TCP: magic, version, kind, whether acks follow, session, number in the session
_ENVELOPE = struct.Struct("<4sBBHIQ")
_MAGIC, _VERSION = b"TWUD", 2
# A record, which is a short envelope among others: kind, parts, number, bytes of acks; then the lengths of the parts
_RECORD = struct.Struct("<BBQH")
_LENGTH = struct.Struct("<H")
# A control packet, which holds records: kind, the number of the envelope that its sender expects next
_CONTROL = struct.Struct("<BQ")
# An ack: message, pieces, the sender's fair share of the receiver's link in bytes a second (0: no limit), bytes of the
# ranges (0: all pieces have arrived); in microseconds: ack delay, the least queueing delay, first to last arrival.
# Ranges of lost pieces follow: the pieces since the last range that arrived, then those that were lost, as LEB128.
_ACK = struct.Struct("<IHIIIII")
# An end marker: message, pieces, their bytes
_END = struct.Struct("<IHI")
_MOST = 0xFFFFFFFF
# Limits on what one envelope holds. An honest sender stays far below them.
_MOST_ACK_BYTES, _MOST_BATCH_BYTES, _MOST_RECORDS = 1 << 20, 1 << 15, 512
# The largest head of a message, which every packet repeats.
HEAD_BYTES = 48

# Kinds of packets.
DATA, CONTROL, PROBE = _native.DATA, 2, 3
DATA_BYTES, CONTROL_BYTES = _native.DATA_BYTES, _CONTROL.size
# Envelopes up to this size travel several together, and also in control packets where the network loses packets.
SHORT_BYTES = 600

# The first bytes of a packet: magic and version. The session and the counter follow in the clear, authenticated.
PREFIX = b"TWU\x01"
_SESSION_BYTES, _COUNTER_BYTES, _TAG_BYTES = 4, 8, 16
KEY_BYTES = 32
OVERHEAD = len(PREFIX) + _SESSION_BYTES + _COUNTER_BYTES + _TAG_BYTES
# How far a counter may be behind the newest: networks reorder packets by far less.
REPLAY_WINDOW = 1 << 14

SplitPacket = tuple[int, int, bytes, bytes, bytes]  # session, counter, nonce, header in the clear, encrypted contents


class EnvelopeKind(IntEnum):
    """What an envelope contains."""

    JOIN = 1  # worker: asks for a session
    KEY = 2  # server: session number, keys, port, mtu
    OPEN = 3  # server: the worker's packets arrive
    UNKNOWN = 4  # server: the session is unknown, the worker must ask for a new one
    PLAIN = 5  # a message
    WHOLE = 6  # a message in pieces, all of them in this envelope
    END = 7  # end marker: all packets of a message have left; takes the message's place in the order
    ACK = 8  # acks alone
    BATCH = 9  # several envelopes; its number is the one that its sender expects next


# Looking up a kind by IntEnum itself takes as long as everything else about a record.
_KINDS = {kind.value: kind for kind in EnvelopeKind}


@dataclass(slots=True)  # not frozen, because that would make its construction three times as slow
class MessageAck:
    """The acknowledgement of a message in pieces: which pieces were lost, and when the others arrived."""

    message: int
    count: int
    lost: tuple[range, ...] = ()  # ranges of pieces, in order
    delay: float = 0.0  # ack delay: seconds from the last packet to this ack
    queue: float = 0.0  # the least queueing delay of the packets, in seconds
    span: float = 0.0  # seconds from the first arrival to the last
    share: int = 0  # the sender's fair share of the receiver's link, bytes a second; 0 if it is the only sender

    def pack(self) -> bytes:
        ranges, at = bytearray(), 0
        for lost in self.lost:
            ranges += _leb128(lost.start - at) + _leb128(len(lost))
            at = lost.stop
        times = (min(int(max(0.0, seconds) * 1e6), _MOST) for seconds in (self.delay, self.queue, self.span))
        return _ACK.pack(self.message, self.count, min(self.share, _MOST), len(ranges), *times) + ranges


def missing_ranges(count: int, arrived: Iterable[int]) -> tuple[range, ...]:
    """Return the ranges of the pieces from 0 to `count` that have not arrived."""
    found: list[range] = []
    at = 0
    for index in (*sorted(arrived), count):
        if index > at:
            found.append(range(at, index))
        at = index + 1
    return tuple(found)


def _leb128(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _read_ranges(data: memoryview, count: int) -> tuple[range, ...]:
    """Read the ranges of lost pieces of a message with `count` pieces; raise TransportError if they are malformed."""
    numbers: list[int] = []
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            numbers.append(number)
            number = shift = 0
        elif shift > 14:
            raise TransportError("a range of an ack is malformed")
    found: list[range] = []
    at = 0
    for gap, length in zip(numbers[::2], numbers[1::2], strict=False):
        if not length or at + gap + length > count:
            raise TransportError("a range of an ack exceeds its message")
        found.append(range(at + gap, at + gap + length))
        at += gap + length
    if shift or len(numbers) % 2:
        raise TransportError("the ranges of an ack are cut off")
    return tuple(found)


def read_acks(data: Buffer, outstanding: Callable[[int], int | None]) -> list[MessageAck]:
    """Read the acks in a buffer that are of outstanding messages; raise TransportError if any of these is malformed.

    outstanding: returns the number of pieces of a message that waits for its ack, None for all others. What is read is
    thus bounded by what was sent, whatever a peer claims to have received.
    """
    view, at = memoryview(data), 0
    found: list[MessageAck] = []
    if len(view) > _MOST_ACK_BYTES:
        raise TransportError(f"{len(view)} bytes of acks are too many")
    seen: set[int] = set()
    while at < len(view):
        if at + _ACK.size > len(view):
            raise TransportError("an ack is cut off")
        message, count, share, length, delay, queue, span = _ACK.unpack_from(view, at)
        at += _ACK.size
        if length > len(view) - at:
            raise TransportError("the ranges of an ack are cut off")
        if outstanding(message) == count and message not in seen:
            seen.add(message)
            lost = _read_ranges(view[at : at + length], count)
            found.append(MessageAck(message, count, lost, delay * 1e-6, queue * 1e-6, span * 1e-6, share))
        at += length
    return found


class Envelope(NamedTuple):
    """One envelope. Its number is 0 if it has no place in the order of the session."""

    kind: EnvelopeKind
    session: int
    number: int
    parts: Sequence[Buffer]
    acks: Buffer = b""

    def as_parts(self) -> list[Buffer]:
        """Return the parts of a TCP message that carries this envelope alone."""
        head = _ENVELOPE.pack(_MAGIC, _VERSION, self.kind, bool(len(self.acks)), self.session, self.number)
        return [head, *([self.acks] if len(self.acks) else []), *self.parts]

    def as_record(self) -> bytes:
        """Return the bytes that carry this envelope among others, in a batch or in a control packet."""
        head = _RECORD.pack(self.kind, len(self.parts), self.number, len(self.acks))
        lengths = [_LENGTH.pack(len(part)) for part in self.parts]
        return b"".join([head, *lengths, self.acks, *self.parts])

    @property
    def size(self) -> int:
        return sum(map(len, self.parts)) + len(self.acks)


def read_envelope(parts: Sequence[Buffer]) -> Envelope | None:
    """Return the envelope in a TCP message, None if it is not one; raise TransportError if it is malformed."""
    if len(parts[0]) != _ENVELOPE.size or bytes(parts[0][:4]) != _MAGIC:
        return None
    _, version, kind, has_acks, session, number = _ENVELOPE.unpack(parts[0])
    if version != _VERSION:
        raise TransportError(f"the peer's udp protocol has version {version}, this thinwire's has {_VERSION}")
    if kind not in _KINDS or has_acks > 1 or len(parts) < 1 + has_acks:
        raise TransportError("an envelope is malformed")
    return Envelope(_KINDS[kind], session, number, list(parts[1 + has_acks :]), parts[1] if has_acks else b"")


def read_records(session: int, data: Buffer) -> list[Envelope]:
    """Return all envelopes in the records of a batch or a control packet."""
    view, at = memoryview(data), 0
    found: list[Envelope] = []
    if len(view) > _MOST_BATCH_BYTES:
        raise TransportError(f"a batch of {len(view)} bytes is too long")
    while at < len(view):
        if at + _RECORD.size > len(view):
            raise TransportError("a record is cut off")
        if len(found) == _MOST_RECORDS:
            raise TransportError("a batch has too many records")
        kind, count, number, ack_bytes = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        ends = at + count * _LENGTH.size
        if not EnvelopeKind.PLAIN <= kind <= EnvelopeKind.ACK or ends > len(view) or count > MOST_PARTS:
            raise TransportError("a record is malformed")
        lengths = [length for (length,) in _LENGTH.iter_unpack(view[at:ends])]
        at, pieces = ends, []
        for length in (ack_bytes, *lengths):
            if at + length > len(view):
                raise TransportError("the parts of a record are cut off")
            pieces.append(view[at : at + length])
            at += length
        found.append(Envelope(_KINDS[kind], session, number, pieces[1:], pieces[0]))
    return found


def pack_control(expected: int, records: Sequence[bytes]) -> bytes:
    """Return the contents of a control packet; `expected` is the number of the envelope that this side expects next."""
    return _CONTROL.pack(CONTROL, expected) + b"".join(records)


def read_control(session: int, data: bytes) -> tuple[int, list[Envelope]]:
    """Return what a control packet contains: (number of the envelope that its sender expects next, envelopes)."""
    if len(data) < _CONTROL.size:
        raise TransportError("a control packet is cut off")
    return _CONTROL.unpack_from(data)[1], read_records(session, memoryview(data)[_CONTROL.size :])


def pack_end(message: int, count: int, total: int, head: bytes) -> bytes:
    """Return the contents of an end marker."""
    return _END.pack(message, count, total) + head


def read_end(envelope: Envelope) -> tuple[int, int, int, bytes]:
    """Return what an end marker contains: (message, pieces, their bytes, head); raise TransportError if it is invalid.

    It takes the place of its message in the order of the session, so that both have the same number.
    """
    if len(envelope.parts) != 1 or not _END.size <= len(envelope.parts[0]) <= _END.size + HEAD_BYTES:
        raise TransportError("an end marker has the wrong size")
    data = envelope.parts[0]
    message, count, total = _END.unpack_from(data)
    if message != envelope.number or not count or total > count * LARGEST_PACKET:
        raise TransportError("an end marker is malformed")
    return message, count, total, bytes(data[_END.size :])


def new_keys() -> bytes:
    """Return new random keys for a session: the server's first, then the worker's."""
    return secrets.token_bytes(2 * KEY_BYTES)


def split_packet(packet: bytes) -> SplitPacket | None:
    """Return the parts of a packet, none of them authenticated yet; None if it is not one of thinwire's."""
    return _native.split_datagram(packet, PREFIX, OVERHEAD)


class PacketEncryptor:
    """Encrypts the packets of one direction of a session."""

    def __init__(self, session: int, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # of an extra that only udp needs

        self._session, self._cipher, self._counter = session, AESGCM(key), 0

    def encrypt(self, contents: list[bytes]) -> list[bytes]:
        """Return a packet for each of the contents. No two packets of a key have the same counter."""
        encrypt = self._cipher.encrypt
        labelled = _native.label_datagrams(contents, PREFIX, self._session, self._counter + 1)
        self._counter += len(contents)
        return [header + encrypt(nonce, plain, header) for nonce, plain, header in labelled]


class PacketDecryptor:
    """Authenticates and decrypts the packets of one direction; `rejected` counts the other packets by reason."""

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._invalid = AESGCM(key), InvalidTag
        # seen[counter % window]: whether that packet has come. It is allocated for the first genuine one.
        self._newest, self._seen = 0, bytearray()
        self.rejected: Counter[str] = Counter()

    def decrypt(self, packet: SplitPacket) -> bytes | None:
        """Return the contents of a packet; None, with no other effect, if it is forged or replayed."""
        _, counter, nonce, header, encrypted = packet
        age = self._newest - counter
        if age >= 0 and (age >= REPLAY_WINDOW or not self._seen or self._seen[counter % REPLAY_WINDOW]):
            self.rejected["replayed"] += 1
            return None
        try:
            contents = self._cipher.decrypt(nonce, encrypted, header)
        except self._invalid:
            self.rejected["forged"] += 1
            return None
        if not self._seen:
            self._seen = bytearray(REPLAY_WINDOW)
        if age < 0:
            if age < -1:
                for skipped in range(max(self._newest + 1, counter - REPLAY_WINDOW + 1), counter):
                    self._seen[skipped % REPLAY_WINDOW] = 0
            self._newest = counter
        self._seen[counter % REPLAY_WINDOW] = 1
        return contents
