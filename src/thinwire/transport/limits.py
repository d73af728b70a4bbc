"""Mtu: how large a datagram may be; needs no library, so that a command line can be checked without one."""

from collections.abc import Iterable, Sequence

from thinwire.transport.base import LARGEST, Buffer

# Parts of one message. A handful is plenty, and a stranger's endless message ends somewhere.
MOST_PARTS = 8


def views(parts: Sequence[Buffer]) -> list[memoryview]:
    """The parts as bytes, checked: a ValueError for a message that no receiver would take."""
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"a message has 1 to {MOST_PARTS} parts, not {len(parts)}")
    found = [_as_bytes(memoryview(part)) for part in parts]
    size = sum(map(len, found))
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes is larger than {LARGEST}; cut it in pieces")
    return found


def _as_bytes(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # Python casts no empty views


def acceptable(sizes: Iterable[int]) -> bool:
    """Whether a message that has arrived keeps the limits."""
    known = list(sizes)
    return 1 <= len(known) <= MOST_PARTS and sum(known) <= LARGEST


MTU = 1400
LARGEST_DATAGRAM = 9216


def check_mtu(mtu: int) -> int:
    """Bytes of a datagram; ValueError if frames would not fit, or networks would cut it."""
    if not 256 <= mtu <= LARGEST_DATAGRAM:
        raise ValueError(f"--mtu is from 256 to {LARGEST_DATAGRAM} bytes, not {mtu}")
    return mtu
