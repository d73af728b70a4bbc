"""The interface of a transport, which carries messages between a parameter server and its workers.

A message is a few buffers. They arrive together and complete, in the order in which messages were sent, or not at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
