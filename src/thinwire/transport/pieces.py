"""Pieces: a message whose body may arrive in part, as one buffer: which pieces are there, and how long all were.

Made by the receiver from datagrams, or by a sender that has no other way than the reliable one.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer

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
