"""The interface of a transport, which carries messages between a parameter server and its workers.

A message is a few buffers. They arrive together and complete, in the order in which messages were sent, or not at all.
The limits on messages and packets are here, too; they need no library, so that a command line can be checked without
one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Buffer = bytes | bytearray | memoryview
Parts = list[memoryview]
Peer = bytes  # names a connection to the server; a worker that reconnects by itself keeps its name

# The largest message that either side takes, checked before anything is allocated for it.
LARGEST = 1 << 28

T = TypeVar("T")


class Side(ABC, Generic[T]):
    """What both sides share; `poll` returns messages of type T. One thread uses a side; others may only call `wake`.

    Where `piece_bytes` is not None, `send_pieces` sends a message whose body may arrive in part.
    """

    piece_bytes: int | None = None

    @abstractmethod
    def poll(self, timeout: float) -> list[T]:
        """Return the messages that have arrived; wait up to `timeout` seconds for the first."""

    @abstractmethod
    def wake(self) -> None:
        """Make the present `poll` of another thread, or the next one, return at once."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, within a second, and free all resources."""


class Listener(Side[tuple[Peer, Parts]]):
    """The server's side, which has many peers."""

    address: str  # to which workers connect, with the actual port
    # Called with the pieces of a message that were lost: the peer, the ticket, and the pieces.
    on_report: Callable[[Peer, int, frozenset[int]], None] = staticmethod(lambda peer, ticket, lost: None)
    # Called when messages of a peer, perhaps with such reports, were lost together with a connection.
    on_gap: Callable[[Peer], None] = staticmethod(lambda peer: None)

    @abstractmethod
    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        """Queue a message; return False if the peer cannot be reached now. The buffers must not change afterwards."""

    def send_pieces(self, peer: Peer, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        """Queue a message in pieces of at most `piece_bytes`; it arrives as the head and the packed pieces.

        Return the ticket that `on_report` gets; None if all of it will arrive.
        """
        raise NotImplementedError

    def figures(self, peer: Peer) -> dict[str, float]:
        """Return statistics of the connection to a peer, for people."""
        return {}

    def keep(self, peer: Peer) -> None:
        """Keep what belongs to a peer until `forget`: the server has admitted it. What strangers need expires."""

    @abstractmethod
    def forget(self, peer: Peer) -> None:
        """Free what is kept for a peer that is gone or was refused; it may come back with a new message."""


class Connection(Side[Parts]):
    """A worker's side, which has one server and reconnects by itself."""

    on_report: Callable[[int, frozenset[int]], None] = staticmethod(lambda ticket, lost: None)

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Queue a message without waiting. The buffers must not change afterwards."""

    def send_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        """Queue a message in pieces, as `Listener.send_pieces` does."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Return statistics of the connection to the server, for people."""
        return {}


# The largest number of parts of a message. It bounds what a hostile peer can make the receiver collect.
MOST_PARTS = 8
# The default and the largest size of a UDP packet in bytes, without IP and UDP headers.
MTU = 1400
LARGEST_PACKET = 9216
# The most messages that one poll returns, so that a peer that never stops sending cannot keep the server in it.
AT_ONCE = 256


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
