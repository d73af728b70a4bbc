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
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.exchange.rounds import Ended, Lane, MessageRound


def hops(world: int) -> list[tuple[int, int]]:
    """(distance, count) of each message: a rank sends its first `count` messages to the rank `distance` before it.

    Its first messages are its own and those of the ranks after it.
    """
    return [(1 << k, min(1 << k, world - (1 << k))) for k in range((world - 1).bit_length())]


class DoublingRound(MessageRound):
    """An all-gather of messages whose `sizes` all ranks know."""

    def __init__(self, lane: Lane, message: Tensor, sizes: Sequence[int], ended: Ended) -> None:
        super().__init__(lane, ended)
        rank, world = lane.rank, lane.world
        self._message, self._hops = message, hops(world)
        # Messages count from this rank's own: message j is that of the rank j after it.
        self._sizes = [sizes[(rank + j) % world] for j in range(world)]
        self._ends = [0, *accumulate(self._sizes)]
        self._passed_on = max((count for _, count in self._hops), default=0)
        expected = {d: self._ends[d + count] - self._ends[d] for d, count in self._hops}
        by_distance = {d: lane.expect((rank + d) % world, size) for d, size in expected.items() if size}
        self._by_distance = by_distance
        self.incoming = list(by_distance.values())
        self.trips = sum(0.5 if d in by_distance and by_distance[d].head is None else 1.0 for d in expected)
        self._send(*self._hops[0], message)

    def _send(self, distance: int, count: int, first: Tensor) -> None:
        if self._ends[count]:
            peer = (self._lane.rank - distance) % self._lane.world
            self.sends += self._lane.send(peer, first[: self._ends[count]])

    def wait(self) -> list[Tensor]:
        rank, world, ends = self._lane.rank, self._lane.world, self._ends
        found = [self._message] * world
        first = self._message  # this rank's first messages, one after the other, as far as they are to be passed on
        if self._passed_on > 1:
            first = self._lane.copies(ends[self._passed_on])
            first[: ends[1]] = self._message
        for place, (distance, count) in enumerate(self._hops):
            if place:
                self._send(distance, count, first)
            incoming = self._by_distance.get(distance)
            arrived = incoming.wait() if incoming is not None else self._message[:0]
            if distance < self._passed_on:
                kept = first[ends[distance] : ends[distance + count]]
                kept.copy_(arrived[: kept.numel()])
            for j, part in enumerate(torch.split(arrived, self._sizes[distance : distance + count]), start=distance):
                found[(rank + j) % world] = part
        self._wait_for_sends()
        return found
