"""Mpi: messages between the ranks of an MPI job; rank 0 is the server and all others are workers.

Only the thread that polls and sends enters MPI. A process has one listener or one connection at a time.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from mpi4py import MPI

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer, Connection, Listener, Parts, Peer
from thinwire.transport.mailbox import LONGEST, SHORTEST, Mailbox
from thinwire.transport.packing import NAME_BYTES, goodbye, pack, unpack

log = logging.getLogger("thinwire.transport")

T = TypeVar("T")

SERVER = 0
LINGER = 1.0  # seconds
RANK_BYTES = 4
EVERYBODY = bytes(NAME_BYTES)  # the name on the server's goodbye
_open = False


def rank_of(peer: Peer) -> int:
    """The rank that a peer's name begins with."""
    return int.from_bytes(peer[:RANK_BYTES], "big")


def _mailbox(*, server: bool) -> Mailbox:
    """This process's mailbox, if it may have one."""
    global _open
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if size == 1:
        raise TransportError("mpi:// needs a server and workers: start it with mpirun -n and their number")
    if server != (rank == SERVER):
        raise TransportError(
            f"rank {rank} cannot be a {'server' if server else 'worker'}: over MPI rank 0 is the server"
        )
    if _open:
        raise TransportError(f"rank {rank} is connected over MPI already, and can be so once at a time")
    _open = True
    return Mailbox()


def _poll(mailbox: Mailbox, arrived: Callable[[], list[T]], timeout: float) -> list[T]:
    """Look for messages, at first often and then every two milliseconds."""
    deadline, sleep = time.monotonic() + timeout, SHORTEST
    while True:
        found = arrived()
        if found or not mailbox.wait(deadline - time.monotonic(), sleep):
            return found or arrived()
        sleep = min(2 * sleep, LONGEST)


class _Side:
    """What both sides have: a mailbox, which they close once."""

    def __init__(self, *, server: bool) -> None:
        self._mailbox = _mailbox(server=server)
        self._closed = False
        self._malformed = 0

    @property
    def discarded(self) -> int:
        """Messages beyond the limits, or that nobody can read."""
        return self._malformed + self._mailbox.discarded

    def _messages(self) -> Iterator[tuple[Peer, Parts]]:
        """What has arrived, by the sender's rank and the connection's name; a goodbye has no parts."""
        for rank, data in self._mailbox.receive():
            try:
                name, parts = unpack(data)
            except ValueError as error:
                self._malformed += 1
                log.warning("discarded a message of rank %d: %s", rank, error)
            else:
                yield rank.to_bytes(RANK_BYTES, "big") + name, parts

    def wake(self) -> None:
        self._mailbox.wake()

    def _close(self, goodbyes: Iterable[int], name: bytes) -> None:
        global _open
        if self._closed:
            return
        self._closed = True
        for rank in goodbyes:
            self._mailbox.send(rank, goodbye(name))
        self._mailbox.close(LINGER)
        _open = False


class MpiListener(_Side, Listener):
    """The server's side over MPI: a peer is a rank and the name that its connection chose."""

    def __init__(self) -> None:
        super().__init__(server=True)
        self._peers: dict[int, Peer] = {}  # by rank: the connection that it has now

    @property
    def address(self) -> str:
        return "mpi://"

    def poll(self, timeout: float) -> list[tuple[Peer, Parts]]:
        return _poll(self._mailbox, self._arrived, timeout)

    def _arrived(self) -> list[tuple[Peer, Parts]]:
        found = []
        for peer, parts in self._messages():
            if parts:
                self._peers[rank_of(peer)] = peer
                found.append((peer, parts))
            elif self._peers.get(rank_of(peer)) == peer:
                del self._peers[rank_of(peer)]
        return found

    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        data = pack(peer[RANK_BYTES:], parts)
        return self._peers.get(rank_of(peer)) == peer and self._mailbox.send(rank_of(peer), data)

    def forget(self, peer: Peer) -> None:
        """Nothing is kept but a name for each rank, which its goodbye removes; until then it can be reached."""

    def close(self) -> None:
        self._close(range(1, MPI.COMM_WORLD.Get_size()), EVERYBODY)  # also to those that never spoke


class MpiConnection(_Side, Connection):
    """A worker's side over MPI."""

    def __init__(self) -> None:
        super().__init__(server=False)
        # Answers to an earlier connection of this process must not be taken for answers to this one.
        self._name = os.urandom(NAME_BYTES)
        self._ended = False  # the server, which over MPI cannot come back

    def poll(self, timeout: float) -> list[Parts]:
        found = _poll(self._mailbox, self._arrived, 0.0 if self._ended else timeout)
        if self._ended and not found:
            raise TransportError("the server, rank 0 of this MPI job, has ended")
        return found

    def _arrived(self) -> list[Parts]:
        found: list[Parts] = []
        for peer, parts in self._messages():
            if rank_of(peer) == SERVER and peer[RANK_BYTES:] == (self._name if parts else EVERYBODY):
                found += [parts] if parts else []
                if not parts:
                    self._ended = True
                    self._mailbox.wake()  # nothing more comes: no reason to wait for it
        return found

    def send(self, parts: Sequence[Buffer]) -> None:
        data = pack(self._name, parts)
        if not self._ended and not self._mailbox.send(SERVER, data):
            raise TransportError("too much is queued for the server, rank 0, which does not read it")

    def close(self) -> None:
        self._close(() if self._ended else (SERVER,), self._name)
