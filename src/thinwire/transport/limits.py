"""Limits on the size of messages and packets. Needs no library, so that a command line can be checked without one."""

from collections.abc import Iterable, Sequence

from thinwire.transport.base import LARGEST, Buffer

# The largest number of parts of a message. It bounds what a hostile peer can make the receiver collect.
MOST_PARTS = 8
# The default and the largest size of a UDP packet in bytes, without IP and UDP headers.
MTU = 1400
LARGEST_PACKET = 9216


def views(parts: Sequence[Buffer]) -> list[memoryview]:
    """Return the parts of a message as byte views; raise ValueError if the message exceeds the limits."""
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"a message has 1 to {MOST_PARTS} parts, not {len(parts)}")
    found = [_as_bytes(memoryview(part)) for part in parts]
    size = sum(map(len, found))
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes is larger than {LARGEST}; cut it in pieces")
    return found


def _as_bytes(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # Python cannot cast an empty view


def acceptable(sizes: Iterable[int]) -> bool:
    """Return whether a received message, given the sizes of its parts, keeps the limits."""
    known = list(sizes)
    return 1 <= len(known) <= MOST_PARTS and sum(known) <= LARGEST


def check_mtu(mtu: int) -> int:
    """Return `mtu`; raise ValueError if frames would not fit into such packets, or networks would not carry them."""
    if not 256 <= mtu <= LARGEST_PACKET:
        raise ValueError(f"--mtu is from 256 to {LARGEST_PACKET} bytes, not {mtu}")
    return mtu
