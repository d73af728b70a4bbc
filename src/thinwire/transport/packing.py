"""Packing: several parts as one run of bytes, for transports that know no parts.

A header of a kind, a number of parts, the connection's name and the parts' lengths comes first, all of it checked.
"""

import struct
from collections.abc import Sequence

from thinwire.transport.base import LARGEST, Buffer, Parts
from thinwire.transport.limits import MOST_PARTS, views

MESSAGE, GOODBYE = 1, 0
NAME_BYTES = 8
_HEADER = struct.Struct(f"<BB{NAME_BYTES}s")
# The largest run of bytes that can be a message.
MOST_BYTES = _HEADER.size + 4 * MOST_PARTS + LARGEST


def pack(name: bytes, parts: Sequence[Buffer]) -> bytes:
    """A message of some parts, on a connection of that name."""
    found = views(parts)
    lengths = struct.pack(f"<{len(found)}I", *map(len, found))
    return b"".join((_HEADER.pack(MESSAGE, len(found), name), lengths, *found))


def goodbye(name: bytes) -> bytes:
    """The last message of a connection."""
    return _HEADER.pack(GOODBYE, 0, name)


def unpack(data: Buffer) -> tuple[bytes, Parts]:
    """The connection's name and the parts, none for a goodbye; a ValueError for what `pack` does not make."""
    whole = memoryview(data)
    if len(whole) < _HEADER.size:
        raise ValueError("shorter than its header")
    kind, count, name = _HEADER.unpack_from(whole)
    if kind not in (MESSAGE, GOODBYE) or not (count == 0 if kind == GOODBYE else 1 <= count <= MOST_PARTS):
        raise ValueError(f"kind {kind} with {count} parts")
    begin = _HEADER.size + 4 * count
    if len(whole) < begin:
        raise ValueError("shorter than its lengths")
    lengths = struct.unpack_from(f"<{count}I", whole, _HEADER.size)
    if begin + sum(lengths) != len(whole) or sum(lengths) > LARGEST:
        raise ValueError(f"{len(whole)} bytes for parts of {sum(lengths)}")
    parts = []
    for length in lengths:
        parts.append(whole[begin : begin + length])
        begin += length
    return name, parts
