"""Rounds: messages between ranks that are under way, so that several buckets can be exchanged at the same time.

Gloo's sender waits for its receiver: data leaves only after the notice of a posted receive has arrived. A receive that
is posted when the exchange begins therefore costs a whole round trip. Here the receive of a lane's next message is
posted as soon as the last one was read, usually a step ahead, so that a message takes half a round trip.

A posted receive belongs to no particular bucket: it takes the next message of its lane, whatever that is, up to the
size for which there is room. Both sides compute this size from the sizes of the messages before. The rest of a larger
message needs a receive of its own, and a round trip. Nothing is ever cancelled: the receives that stay posted when a
model has fewer buckets, or when a link is detached, take later messages of the same process group.
"""

import contextlib
import datetime
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Bytes for which a receive has room at least, and at most.
_LEAST, _MOST = 4096, 1 << 22
# A receive may be so many times as large as the last message. Messages of low-rank updates alternate between the two
# sides of the matrices, of which one may be many times as long as the other.
_SPARE = 32
# The tag of receives that nobody answers, see `DirectMessages.abort`; lanes count from 0.
_UNANSWERED = 1 << 20


# Called when a round is released: when it began, when its messages had arrived, and how many this rank sent itself.
Ended = Callable[[float, float, int], None]


class Round(ABC):
    """Messages that all ranks exchange, under way."""

    trips = 0.0  # round trips between sending and the result
    done = False  # whether `wait` returns at once

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """All ranks' messages, in rank order, when they have arrived; any thread may wait."""

    def release(self) -> None:
        """Let the next messages overwrite these, after they were read."""

    def finish(self) -> None:
        """Wait for a round of which nothing is read."""
        self.wait()
        self.release()


class Arrived(Round):
    """Messages that were exchanged by a collective which returned when they were there."""

    done = True

    def __init__(self, messages: list[Tensor], trips: float = 0.0) -> None:
        self._messages, self.trips = messages, trips

    def wait(self) -> list[Tensor]:
        return self._messages


class Collective(Round):
    """A collective that the process group's own threads run. Its results are in the given tensors."""

    def __init__(self, work: Any, results: list[Tensor], trips: float, ended: Ended) -> None:
        self._work, self._results, self.trips, self._ended = work, results, trips, ended
        self._began = self._arrived = time.perf_counter()

    def wait(self) -> list[Tensor]:
        self._work.wait()
        self._arrived = time.perf_counter()
        return self._results

    def release(self) -> None:
        self._ended(self._began, self._arrived, 0)


@lru_cache  # for all peers the same in an all-gather
def capacity(posted: int, size: int) -> int:
    """Bytes of the receive that follows a message of `size` bytes, if there was room for `posted`.

    There is room for the growth of one step (see `AgreedSizes`). Memory is kept while it fits, because newly allocated
    pages are slow.
    """
    if 4 * size // 3 + 64 <= posted <= max(_SPARE * size, _LEAST):
        return posted
    return min(max(-(-3 * size // 2) + 511 & ~511, _LEAST), _MOST)


@dataclass(slots=True)
class Incoming:
    """A message under way to this rank."""

    peer: int
    size: int
    message: Tensor
    works: list[Any]
    head: Tensor | None = None  # where the first part of a message in two parts arrives

    def wait(self) -> Tensor:
        """The message, when it has arrived."""
        for work in self.works:
            work.wait()
        if self.head is not None:
            self.message[: self.head.numel()] = self.head
        return self.message


class Lane:
    """Messages of one tag. Each rank's n-th message to another meets the n-th receive that the other has posted."""

    def __init__(self, backend: Any, tag: int, rank: int, world: int) -> None:
        self._backend, self._tag = backend, tag
        self.rank, self.world = rank, world
        # In different orders on all ranks, so that no link gets all messages at once. The first of them sends its
        # message to this rank last: when that has arrived, so have most of the others.
        self.peers = [(rank + i) % world for i in range(1, world)]
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * world  # of the posted receives
        self._sizes = [0] * world  # of the rooms
        self._posted: list[Any] = [None] * world
        self._there = [0] * world  # bytes of the receives that the other ranks have posted for this one
        self._copies = torch.empty(0, dtype=torch.uint8)
        self._failure: RuntimeError | None = None

    def check(self) -> None:
        """Raise the error of a receive that could not be posted."""
        if self._failure is not None:
            raise self._failure

    def expect(self, peer: int, size: int) -> Incoming:
        """The next message of a rank, of `size` bytes, which are at least 1."""
        room, there = self._rooms[peer], self._sizes[peer]
        works = [self._posted[peer]] if there else []
        if size <= there:
            return Incoming(peer, size, room[:size], works)
        # What is too large for the posted receive gets one of its own.
        whole = torch.empty(size, dtype=torch.uint8)
        works.append(self._backend.recv([whole[there:]], peer, self._tag))
        return Incoming(peer, size, whole, works, room)

    def send(self, peer: int, message: Tensor, size: int) -> list[Any]:
        """Send a message, in two parts if it is too large for the receive that the other rank has posted."""
        room = self._there[peer]
        self._there[peer] = capacity(room, size)
        if size <= room:
            return [self._backend.send([message], peer, self._tag)]
        parts = (message[:room], message[room:])
        return [self._backend.send([part], peer, self._tag) for part in parts if part.numel()]

    def fits(self, peer: int, size: int) -> bool:
        """Whether the other rank has posted a receive for a whole message, so that it need not wait for a notice."""
        return size <= self._there[peer]

    def copies(self, size: int) -> Tensor:
        """A buffer for messages that are passed on, the same in every step."""
        if self._copies.numel() < size:
            self._copies = torch.empty(size + size // 4, dtype=torch.uint8)
        return self._copies[:size]

    def post(self, read: Sequence[Incoming]) -> None:
        """Post the next receive from each of the ranks whose messages were read.

        A rank may be gone by now. Nobody may need it any more, so that the next round tells of it.
        """
        try:
            for each in read:
                peer, there = each.peer, self._sizes[each.peer]
                wanted = capacity(there, each.size)
                if wanted != there:
                    self._rooms[peer], self._sizes[peer] = torch.empty(wanted, dtype=torch.uint8), wanted
                self._posted[peer] = self._backend.recv([self._rooms[peer]], peer, self._tag)
        except RuntimeError as error:
            self._failure = error.with_traceback(None)


class MessageRound(Round):
    """A round of messages that ranks send to one another, without a collective of the process group.

    sent, received: bytes of this rank, known when the round begins.
    """

    sent = received = 0

    def __init__(self, lane: Lane, ended: Ended) -> None:
        lane.check()
        self._lane, self._ended = lane, ended
        self.incoming: list[Incoming] = []
        self.sends: list[Any] = []
        self._began = self._arrived = time.perf_counter()

    def _wait_for_sends(self) -> None:
        for work in self.sends:  # its message must stay as it is until it has left
            work.wait()
        self._arrived = time.perf_counter()

    def release(self) -> None:
        self._ended(self._began, self._arrived, len(self.sends))
        self._lane.post(self.incoming)


class DirectRound(MessageRound):
    """Every rank sends every other rank its message: world - 1 messages a rank, none of which waits for another.

    sizes: the bytes of the outgoing messages, by receiver. expected: the bytes of the other ranks' messages. A message
    of no bytes is not sent.
    """

    def __init__(
        self, lane: Lane, outgoing: Sequence[Tensor], sizes: Sequence[int], expected: Sequence[int], ended: Ended
    ) -> None:
        super().__init__(lane, ended)
        self._own = outgoing[lane.rank]
        noticed = True
        for peer in lane.peers:
            if size := expected[peer]:
                found = lane.expect(peer, size)
                self.incoming.append(found)
                self.received += size
                noticed &= found.head is None
        for peer in lane.peers:
            if size := sizes[peer]:
                noticed &= lane.fits(peer, size)
                self.sends += lane.send(peer, outgoing[peer], size)
                self.sent += size
        self.trips = 0.5 if noticed else 1.0

    def wait(self) -> list[Tensor]:
        messages = [self._own[:0]] * self._lane.world
        for each in self.incoming:
            messages[each.peer] = each.wait()
        self._wait_for_sends()
        messages[self._lane.rank] = self._own
        return messages


class DirectMessages:
    """The lanes between the ranks of a Gloo process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._rank, self._world = group.rank(), group.size()
        self._lanes: dict[int, Lane] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "DirectMessages":
        """Those of a group: receives that one channel has posted take the messages of the next one."""
        found = _of_groups.get(group)
        if found is None:
            found = _of_groups[group] = cls(group)
        return found

    def lane(self, tag: int) -> Lane:
        """A lane by its number; all ranks use the same for the same messages."""
        if tag not in self._lanes:
            self._lanes[tag] = Lane(self._backend, tag, self._rank, self._world)
        return self._lanes[tag]

    def abort(self) -> None:
        """Close the connections, so that everyone who waits for a message on either side gets an error.

        Gloo has no call for that, but it closes the connections to all ranks when a receive takes too long.
        """
        self._lanes.clear()
        for peer in range(self._world):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    unanswered = self._backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNANSWERED)
                    unanswered.wait(datetime.timedelta(milliseconds=1))


# A group that is freed takes its posted receives with it.
_of_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, DirectMessages]" = weakref.WeakKeyDictionary()
