"""Mpi: messages between the ranks of an MPI job; rank 0 is the server and all others are workers.

Only the thread that polls and sends enters MPI. A process has one listener or one connection at a time.
"""

import logging
import os
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpi4py import MPI

from thinwire.errors import TransportError
from thinwire.transport.base import LARGEST, Buffer, Connection, Listener, Parts, Peer
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


TAG = 0  # of all messages, so that they keep their order
SHORTEST, LONGEST = 50e-6, 2e-3  # seconds of sleep between two looks
AT_ONCE = 256
TO_SEND = 1000  # messages on their way to one rank


_opening: tuple[MPI.Intracomm, MPI.Request] | None = None


def communicator() -> MPI.Intracomm | None:
    """A communicator of thinwire's own, made once; None until all ranks have asked for it.

    Nobody else's messages are on it, and unlike COMM_WORLD it may hold some at the end that nobody has read.
    """
    global _opening
    if _opening is None:
        _opening = MPI.COMM_WORLD.Idup()
    made, request = _opening
    return made if request.Test() else None


@dataclass
class _Arriving:
    source: int
    request: MPI.Request
    data: bytearray


def _ended(request: MPI.Request) -> bool | None:
    """Whether what was begun went well; None while it is under way. It fails if the other process is gone."""
    try:
        return True if request.Test() else None
    except MPI.Exception:
        return False


class Mailbox:
    """What one process sends and receives."""

    def __init__(self) -> None:
        self.discarded = 0  # messages that were too large, or whose sender died
        self._communicator = communicator()
        self._early: list[tuple[int, bytes]] = []  # before there was a communicator
        self._sending: defaultdict[int, deque[tuple[MPI.Request, int]]] = defaultdict(deque)
        self._arriving: list[_Arriving] = []
        self._woken = threading.Event()
        self._status = MPI.Status()

    def send(self, rank: int, data: bytes) -> bool:
        """Begin to send; False if too much is on its way to that rank already."""
        comm = self._open()
        if comm is None:
            self._early.append((rank, data))
            return sum(len(each) for _, each in self._early) <= LARGEST
        queue = self._sending[rank]
        while queue and _ended(queue[0][0]) is not None:
            queue.popleft()
        if queue and (len(queue) >= TO_SEND or sum(size for _, size in queue) + len(data) > LARGEST):
            return False
        try:
            queue.append((comm.Isend([data, MPI.BYTE], rank, TAG), len(data)))
        except MPI.Exception:
            return False
        return True

    def _open(self) -> MPI.Intracomm | None:
        """The communicator, once there is one; then what was sent before goes out."""
        if self._communicator is None:
            self._communicator = communicator()
            if self._communicator is not None:
                early, self._early = self._early, []
                for rank, data in early:
                    self.send(rank, data)
        return self._communicator

    def receive(self) -> list[tuple[int, bytearray]]:
        """Messages that are here, whole: (rank, bytes), in the order in which each rank sent them."""
        comm = self._open()
        if comm is not None:
            self._accept(comm)
        found, behind, rest = [], set(), []
        for each in self._arriving:
            ended = _ended(each.request) if each.source not in behind else None
            if ended is None:
                behind.add(each.source)  # a small message may be complete before a large one that was sent earlier
                rest.append(each)
            elif ended:
                found.append((each.source, each.data))
            else:
                self.discarded += 1
        self._arriving = rest
        return found

    def _accept(self, comm: MPI.Intracomm) -> None:
        """Make room for messages that were announced, as long as no more than one large one's worth is under way."""
        room = LARGEST - sum(len(each.data) for each in self._arriving)
        for _ in range(AT_ONCE):
            message = comm.Improbe(MPI.ANY_SOURCE, TAG, self._status) if room >= 0 else None
            if message is None:
                return
            size = self._status.Get_count(MPI.BYTE)
            if not 0 <= size <= MOST_BYTES:
                self._refuse(message)
                continue
            data = bytearray(size)
            self._arriving.append(_Arriving(self._status.Get_source(), message.Irecv([data, MPI.BYTE]), data))
            room -= size

    def _refuse(self, message: MPI.Message) -> None:
        """Let go of a message without room for it: MPI calls it truncated, and it is gone."""
        self.discarded += 1
        try:
            message.Recv([bytearray(), MPI.BYTE])
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise

    def wait(self, seconds: float, sleep: float) -> bool:
        """Sleep once; False if the time is over or somebody called `wake`."""
        if self._woken.wait(max(0.0, min(seconds, sleep))):
            self._woken.clear()
            return False
        return seconds > 0

    def wake(self) -> None:
        """End a `wait` under way, or the next one. For any thread."""
        self._woken.set()

    def close(self, seconds: float) -> None:
        """Give what is on its way some time to arrive, and take what others still send: they want to end as well."""
        deadline = time.monotonic() + seconds
        while self._under_way() and time.monotonic() < deadline:
            self.receive()
            time.sleep(SHORTEST)
        for queue in self._sending.values():
            for request, _ in queue:
                request.Free()  # its receiver is gone; MPI forgets it at the end

    def _under_way(self) -> bool:
        for queue in self._sending.values():
            while queue and _ended(queue[0][0]) is not None:
                queue.popleft()
        return bool(self._early) or any(self._sending.values())


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
