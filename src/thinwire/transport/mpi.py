"""The mpi transport: messages between the ranks of an MPI job. Rank 0 is the server, all others are workers.

Only the thread that polls and sends calls MPI. A process has one listener or one connection at a time.
"""

import logging
import os
import struct
import threading
import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from mpi4py import MPI

from thinwire.errors import TransportError
from thinwire.limits import LogLimit
from thinwire.transport.base import LARGEST, MOST_PARTS, Buffer, Connection, Listener, Parts, Peer, Side, T, views

log = logging.getLogger("thinwire.transport")

SERVER = 0  # the server's rank
MESSAGE, GOODBYE = 1, 0
NAME_BYTES, RANK_BYTES = 8, 4
ALL_CONNECTIONS = bytes(NAME_BYTES)  # the connection name in the server's goodbye
_HEADER = struct.Struct(f"<BB{NAME_BYTES}s")
# The largest packed message in bytes.
MOST_BYTES = _HEADER.size + 4 * MOST_PARTS + LARGEST
TAG = 0  # one tag for all messages, so that MPI keeps their order
SHORTEST, LONGEST = 50e-6, 2e-3  # seconds to sleep between two checks for messages
AT_ONCE = 256  # the most messages that one check accepts
TO_SEND = 1000  # the most messages in flight to one rank
LINGER = 1.0  # seconds that `close` gives messages in flight to arrive


def pack(name: bytes, parts: Sequence[Buffer]) -> bytes:
    """Pack a message that belongs to the connection of this name."""
    found = views(parts)
    lengths = struct.pack(f"<{len(found)}I", *map(len, found))
    return b"".join((_HEADER.pack(MESSAGE, len(found), name), lengths, *found))


def goodbye(name: bytes) -> bytes:
    """Pack the last message of a connection."""
    return _HEADER.pack(GOODBYE, 0, name)


def unpack(data: Buffer) -> tuple[bytes, Parts]:
    """Return the connection's name and the parts, none for a goodbye; raise ValueError for malformed bytes."""
    whole = memoryview(data)
    if len(whole) < _HEADER.size:
        raise ValueError("it is shorter than its header")
    kind, count, name = _HEADER.unpack_from(whole)
    if kind not in (MESSAGE, GOODBYE) or not (count == 0 if kind == GOODBYE else 1 <= count <= MOST_PARTS):
        raise ValueError(f"it has kind {kind} and {count} parts")
    begin = _HEADER.size + 4 * count
    if len(whole) < begin:
        raise ValueError("it is shorter than the list of its parts' lengths")
    lengths = struct.unpack_from(f"<{count}I", whole, _HEADER.size)
    if begin + sum(lengths) != len(whole) or sum(lengths) > LARGEST:
        raise ValueError(f"it has {len(whole)} bytes for parts of {sum(lengths)}")
    parts = []
    for length in lengths:
        parts.append(whole[begin : begin + length])
        begin += length
    return name, parts


_opening: tuple[MPI.Intracomm, MPI.Request] | None = None


def communicator() -> MPI.Intracomm | None:
    """Return thinwire's own communicator, made once per process; None until all ranks have asked for it.

    It carries no other messages than thinwire's. Unlike COMM_WORLD it may hold unread messages when the job ends.
    """
    global _opening
    if _opening is None:
        _opening = MPI.COMM_WORLD.Idup()
    made, request = _opening
    return made if request.Test() else None


def _completed(request: MPI.Request) -> bool | None:
    """Return whether a request succeeded, None while it is in progress. It fails if the other process is gone."""
    try:
        return True if request.Test() else None
    except MPI.Exception:
        return False


def rank_of(peer: Peer) -> int:
    """Return the rank with which a peer's name begins."""
    return int.from_bytes(peer[:RANK_BYTES], "big")


_in_use = False  # whether this process has an open listener or connection


class _MpiSide(Side[T]):
    """What the two sides share: packed messages are sent and received without blocking."""

    def __init__(self, *, server: bool) -> None:
        global _in_use
        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if size == 1:
            raise TransportError(
                "mpi:// needs a server and at least one worker: start it with mpirun -n and the number of ranks"
            )
        if server != (rank == SERVER):
            role = "server" if server else "worker"
            raise TransportError(f"rank {rank} cannot be a {role}: over MPI rank 0 is the server")
        if _in_use:
            raise TransportError(f"rank {rank} is connected over MPI already, and can have one connection at a time")
        _in_use = True
        self.discarded = 0  # messages that were malformed or too large, or whose sender died
        self._warnings = LogLimit(log, logging.WARNING)
        self._closed = False
        self._communicator = communicator()
        self._early: list[tuple[int, bytes]] = []  # messages sent before there was a communicator
        self._sending: defaultdict[int, deque[tuple[MPI.Request, int]]] = defaultdict(deque)
        self._arriving: list[tuple[int, MPI.Request, bytearray]] = []  # the sender's rank, the request, its buffer
        self._woken = threading.Event()
        self._status = MPI.Status()

    def poll(self, timeout: float) -> list[T]:
        """Check for messages, often at first, then every two milliseconds."""
        deadline, sleep = time.monotonic() + timeout, SHORTEST
        while not (found := self._receive()):
            left = deadline - time.monotonic()
            if self._woken.wait(max(0.0, min(left, sleep))) or left <= 0:
                self._woken.clear()
                return self._receive()
            sleep = min(2 * sleep, LONGEST)
        return found

    @abstractmethod
    def _receive(self) -> list[T]:
        """Return the messages that have arrived."""

    def _send(self, rank: int, data: bytes) -> bool:
        """Begin to send a message; return False if too much is in flight to that rank already."""
        comm = self._open()
        if comm is None:
            self._early.append((rank, data))
            return sum(len(each) for _, each in self._early) <= LARGEST
        queue = self._in_flight(rank)
        if queue and (len(queue) >= TO_SEND or sum(size for _, size in queue) + len(data) > LARGEST):
            return False
        try:
            queue.append((comm.Isend([data, MPI.BYTE], rank, TAG), len(data)))
        except MPI.Exception:
            return False
        return True

    def _in_flight(self, rank: int) -> deque[tuple[MPI.Request, int]]:
        queue = self._sending[rank]
        while queue and _completed(queue[0][0]) is not None:
            queue.popleft()
        return queue

    def _open(self) -> MPI.Intracomm | None:
        """Return the communicator once there is one, and send the messages that waited for it."""
        if self._communicator is None:
            self._communicator = communicator()
            if self._communicator is not None:
                early, self._early = self._early, []
                for rank, data in early:
                    self._send(rank, data)
        return self._communicator

    def _messages(self) -> Iterator[tuple[Peer, Parts]]:
        """Yield what has arrived, by the sender's rank and the connection's name; a goodbye has no parts."""
        for rank, data in self._receive_packed():
            try:
                name, parts = unpack(data)
            except ValueError as error:
                self.discarded += 1
                self._warnings.say(time.monotonic(), "Discarded a malformed message of rank %d: %s", rank, error)
            else:
                yield rank.to_bytes(RANK_BYTES, "big") + name, parts

    def _receive_packed(self) -> list[tuple[int, bytearray]]:
        """Return the messages that have arrived, as (rank, bytes), in the order in which each rank sent them."""
        comm = self._open()
        if comm is not None:
            self._accept(comm)
        found, behind, rest = [], set(), []
        for source, request, data in self._arriving:
            completed = _completed(request) if source not in behind else None
            if completed is None:
                behind.add(source)  # a small message may be complete before a large one that was sent earlier
                rest.append((source, request, data))
            elif completed:
                found.append((source, data))
            else:
                self.discarded += 1
        self._arriving = rest
        return found

    def _accept(self, comm: MPI.Intracomm) -> None:
        """Allocate buffers for announced messages, until the messages being received exceed LARGEST bytes."""
        room = LARGEST - sum(len(data) for _, _, data in self._arriving)
        for _ in range(AT_ONCE):
            message = comm.Improbe(MPI.ANY_SOURCE, TAG, self._status) if room >= 0 else None
            if message is None:
                return
            size = self._status.Get_count(MPI.BYTE)
            if not 0 <= size <= MOST_BYTES:
                self._refuse(message)
                continue
            data = bytearray(size)
            self._arriving.append((self._status.Get_source(), message.Irecv([data, MPI.BYTE]), data))
            room -= size

    def _refuse(self, message: MPI.Message) -> None:
        """Discard a message by receiving it into an empty buffer; MPI then reports that it was truncated."""
        self.discarded += 1
        try:
            message.Recv([bytearray(), MPI.BYTE])
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise

    def wake(self) -> None:
        self._woken.set()

    def _close(self, goodbyes: Iterable[int], name: bytes) -> None:
        """Say goodbye to some ranks and wait for messages in flight, once; receive so that others can close as well."""
        global _in_use
        if self._closed:
            return
        self._closed = True
        for rank in goodbyes:
            self._send(rank, goodbye(name))
        deadline = time.monotonic() + LINGER
        while (self._early or any([self._in_flight(rank) for rank in self._sending])) and time.monotonic() < deadline:
            self._receive_packed()
            time.sleep(SHORTEST)
        for queue in self._sending.values():
            for request, _ in queue:
                request.Free()  # the receiver is gone; MPI drops the message when the job ends
        _in_use = False


class MpiListener(_MpiSide[tuple[Peer, Parts]], Listener):
    """The server's side over MPI. A peer is a rank and the name that its connection chose."""

    address = "mpi://"

    def __init__(self) -> None:
        super().__init__(server=True)
        # The present connection of each rank. It can be reached until its goodbye, so that `forget` does nothing.
        self._peers: dict[int, Peer] = {}

    def _receive(self) -> list[tuple[Peer, Parts]]:
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
        return self._peers.get(rank_of(peer)) == peer and self._send(rank_of(peer), data)

    def close(self) -> None:
        self._close(range(1, MPI.COMM_WORLD.Get_size()), ALL_CONNECTIONS)  # also to ranks that never sent anything


class MpiConnection(_MpiSide[Parts], Connection):
    """A worker's side over MPI."""

    def __init__(self) -> None:
        super().__init__(server=False)
        # The random name keeps answers to an earlier connection of this process apart from answers to this one.
        self._name = os.urandom(NAME_BYTES)
        self._ended = False  # whether the server said goodbye; over MPI it cannot come back

    def poll(self, timeout: float) -> list[Parts]:
        found = super().poll(0.0 if self._ended else timeout)
        if self._ended and not found:
            raise TransportError("the server, rank 0 of this MPI job, has ended")
        return found

    def _receive(self) -> list[Parts]:
        found: list[Parts] = []
        for peer, parts in self._messages():
            if rank_of(peer) == SERVER and peer[RANK_BYTES:] == (self._name if parts else ALL_CONNECTIONS):
                if parts:
                    found.append(parts)
                else:
                    self._ended = True
                    self._woken.set()  # nothing more comes, so do not wait for it
        return found

    def send(self, parts: Sequence[Buffer]) -> None:
        data = pack(self._name, parts)
        if not self._ended and not self._send(SERVER, data):
            raise TransportError("too much is queued for the server, rank 0, which does not read it")

    def close(self) -> None:
        self._close(() if self._ended else (SERVER,), self._name)
