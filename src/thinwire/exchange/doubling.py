"""Recursive doubling: an all-gather in which ranks pass on what they have received (Bruck's algorithm).

A rank sends ceil(log2(world)) messages in place of world - 1, with the same bytes in all: first its own message, then
two, four, ... messages of its neighbours. Each of its messages waits for the one before, so that the last one arrives
after ceil(log2(world)) times the latency of a message. It works for any number of ranks, and only the way of the bytes
differs from a direct all-gather.

A message is passed on by the thread that waits for the round. Ranks must therefore wait for their rounds of this kind
in the same order, or two of them could each wait for what the other has to pass on later. A link starts such rounds
only at one place of an exchange's stages, where all ranks start them in the order of the buckets, and waits for rounds
in the order in which it started them; all other rounds are complete without anybody's waiting.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from torch import Tensor

from thinwire.exchange.rounds import Ended, Incoming, Lane, MessageRound


@cache
def hops(world: int) -> tuple[tuple[int, int], ...]:
    """(distance, count) of each message: a rank sends its first `count` messages to the rank `distance` before it.

    Its first messages are its own and those of the ranks after it.
    """
    return tuple((1 << k, min(1 << k, world - (1 << k))) for k in range((world - 1).bit_length()))


@cache
def _passed_on(world: int) -> int:
    """The most messages that a rank passes on at once."""
    return max((count for _, count in hops(world)), default=0)


class DoublingRound(MessageRound):
    """An all-gather of messages whose `sizes` all ranks know."""

    def __init__(self, lane: Lane, message: Tensor, sizes: Sequence[int], ended: Ended) -> None:
        super().__init__(lane, ended)
        rank, world = lane.rank, lane.world
        self._message, self._hops = message, hops(world)
        # Messages count from this rank's own: message j is that of the rank j after it.
        self._sizes = [*sizes[rank:], *sizes[:rank]]
        self._ends = ends = [0, *accumulate(self._sizes)]
        self._arriving: list[Incoming | None] = []  # by hop; None where there are no bytes
        self.received = ends[-1] - ends[1]
        for distance, count in self._hops:
            size = ends[distance + count] - ends[distance]
            found = lane.expect((rank + distance) % world, size) if size else None
            self._arriving.append(found)
            if found is not None:
                self.incoming.append(found)
            self.trips += 0.5 if found is not None and found.head is None else 1.0
            self.sent += ends[count]
        self._send(1, 1, message)

    def _send(self, distance: int, count: int, messages: Tensor) -> None:
        if size := self._ends[count]:
            self.sends += self._lane.send((self._lane.rank - distance) % self._lane.world, messages, size)

    def wait(self) -> list[Tensor]:
        rank, world, ends = self._lane.rank, self._lane.world, self._ends
        ordered = [self._message]  # this rank's own message, then those of the ranks after it
        passed_on = _passed_on(world)
        first = self._message  # this rank's first messages, one after the other, as far as they are to be passed on
        if passed_on > 1:
            first = self._lane.copies(ends[passed_on])
            first[: ends[1]] = self._message
        for (distance, count), incoming in zip(self._hops, self._arriving, strict=True):
            if distance > 1:
                self._send(distance, count, first[: ends[count]])
            arrived = incoming.wait() if incoming is not None else self._message[:0]
            if distance < passed_on:
                kept = min(distance + count, passed_on)  # the end of those among them that are passed on
                first[ends[distance] : ends[kept]] = arrived[: ends[kept] - ends[distance]]
            if count == 1:
                ordered.append(arrived)
            else:
                ordered += arrived.split_with_sizes(self._sizes[distance : distance + count])
        self._wait_for_sends()
        return [*ordered[world - rank :], *ordered[: world - rank]]
