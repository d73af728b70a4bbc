"""Transport: the small interface between a parameter server, its workers, and what carries their messages.

A message is a few buffers that arrive together, whole, and in the order in which they were sent, or not at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview
Parts = list[memoryview]
Peer = bytes  # names a connection to the server; a worker that reconnects by itself keeps its name

# The largest message that either side takes, checked before anything is allocated for it.
LARGEST = 1 << 28


class Listener(ABC):
    """The server's side: many peers. Used by one thread, except `wake`."""

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
    """A worker's side: one server. Used by one thread, except `wake`. Reconnects by itself."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Parts]:
        """Messages that have arrived; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Queue a message without waiting. Buffers must not change after."""

    @abstractmethod
    def wake(self) -> None:
        """Make a `poll` under way in another thread return at once."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, within a second, and let go of everything."""
