"""Transport: the small interface between a parameter server, its workers, and what carries their messages.

A message is a few buffers that arrive together, whole, and in the order in which they were sent, or not at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Buffer = bytes | bytearray | memoryview
Parts = list[memoryview]
Peer = bytes  # names a connection to the server; a worker that reconnects by itself keeps its name

# The largest message that either side takes, checked before anything is allocated for it.
LARGEST = 1 << 28


class Listener(ABC):
    """The server's side: many peers. Used by one thread, except `wake`.

    Where `piece_bytes` is not None, `send_pieces` sends a message whose body may arrive in part.
    """

    piece_bytes: int | None = None
    # Told which pieces of a message were lost: the peer, the ticket, and the pieces.
    on_report: Callable[[Peer, int, frozenset[int]], None] = staticmethod(lambda peer, ticket, lost: None)
    # Told that something of a peer's, perhaps a report, was lost for good, with a connection.
    on_gap: Callable[[Peer], None] = staticmethod(lambda peer: None)

    @property
    @abstractmethod
    def address(self) -> str:
        """Where workers reach it, with the port that was really taken."""

    @abstractmethod
    def poll(self, timeout: float) -> list[tuple[Peer, Parts]]:
        """Messages that have arrived; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        """Queue a message without waiting; False if the peer is not reachable now. Buffers must not change after."""

    def send_pieces(self, peer: Peer, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        """Queue a message in pieces of at most `piece_bytes`, to arrive as head and `pieces.pack`.

        Returns its ticket, for the report; None if all of it will arrive.
        """
        raise NotImplementedError

    def figures(self, peer: Peer) -> dict[str, float]:
        """What the transport knows of the way to a peer, for people."""
        return {}

    @abstractmethod
    def forget(self, peer: Peer) -> None:
        """Let go of what is kept for a peer that is gone or was refused; it may come back with a new message."""

    @abstractmethod
    def wake(self) -> None:
        """Make a `poll` under way in another thread return at once."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, within a second, and let go of everything."""


class Connection(ABC):
    """A worker's side: one server. Used by one thread, except `wake`. Reconnects by itself. Pieces: as a listener's."""

    piece_bytes: int | None = None
    on_report: Callable[[int, frozenset[int]], None] = staticmethod(lambda ticket, lost: None)

    @abstractmethod
    def poll(self, timeout: float) -> list[Parts]:
        """Messages that have arrived; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Queue a message without waiting. Buffers must not change after."""

    def send_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        """As a listener's."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """What the transport knows of the way to the server, for people."""
        return {}

    @abstractmethod
    def wake(self) -> None:
        """Make a `poll` under way in another thread return at once."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, within a second, and let go of everything."""
