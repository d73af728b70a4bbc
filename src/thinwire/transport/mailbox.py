"""Mailbox: runs of bytes between the ranks of an MPI job, without ever waiting inside MPI.

One thread uses it, except `wake`. MPI's own waiting burns a core; this one asks, and sleeps longer each time.
"""

import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

from mpi4py import MPI

from thinwire.transport.base import LARGEST
from thinwire.transport.packing import MOST_BYTES

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
