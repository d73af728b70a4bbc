"""Hierarchical: dense within a machine, sparse between machines.

The ranks of a machine add up their tensors; the first of them exchanges with the first ranks of the other machines and
broadcasts the mean. Only these first ranks have a residual.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.codec.codec import Codec
from thinwire.exchange.base import Bucket, Exchange, Groups, Outcome, Stages
from thinwire.exchange.channel import Channel
from thinwire.exchange.choose import choose_doubling
from thinwire.exchange.gather import Gather
from thinwire.exchange.rounds import Round


class Hierarchical(Exchange):
    """`between` is the exchange of the machines; `per_machine` defaults to torchrun's LOCAL_WORLD_SIZE."""

    def __init__(self, between: Exchange | None = None, *, per_machine: int | None = None) -> None:
        self._between = between if between is not None else Gather()
        self._size = per_machine if per_machine is not None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        world, size = channel.world, self._size
        if size < 1 or world % size:
            raise ValueError(f"Hierarchical needs the same number of ranks on every machine: {world} is not {size} x n")
        machines = [list(range(first, first + size)) for first in range(0, world, size)]
        self._inside, self._outside = tiers(channel, machines, groups)
        self._world = world
        self._leads = channel.rank % size == 0
        if self._leads:
            choose_doubling(self._outside)
            self._between.setup(self._outside, codec, sizes, groups)

    def channels(self) -> list[Channel]:
        return [self._inside, self._outside] if self._leads else [self._inside]

    def weight(self) -> int:
        return self._size if self._leads else 0

    def stages(self, bucket: Bucket) -> Stages:
        inside, numels = self._inside, bucket.numels
        # 1. Reduce the machine's mean to its first rank, and which parameters took part.
        together = torch.cat([g.reshape(-1).float() for g in bucket.tensors.values()]).to(inside.device)
        together /= inside.world
        used = torch.tensor([name not in bucket.hold for name in bucket.tensors], dtype=torch.float32)
        sums = inside.sum_to(together, 0), inside.sum_to(used := used.to(inside.device), 0)
        for each in sums:
            yield _within(each)
        outcome = Outcome()
        verdict = torch.zeros(1, device=inside.device)
        # 2. Exchange it between the machines, compressed.
        if self._leads:
            parts = dict(zip(bucket.tensors, torch.split(together.cpu(), numels), strict=True))
            hold = frozenset(name for name, used_by in zip(parts, used.tolist(), strict=True) if not used_by)
            between = Bucket(parts, bucket.outs, bucket.step, hold, bucket.index)
            outcome = yield from self._between.stages(between)
            verdict[0] = 1 + outcome.non_finite[0] * inside.world if outcome.non_finite else 0
            together = torch.cat(bucket.outs).to(inside.device)
        # 3. Broadcast the mean within the machine.
        messages = yield _within(inside.spread(torch.cat([verdict, together]), 0, bucket.lane(0)))
        found = messages[0].view(torch.float32)
        if found[0]:
            outcome.non_finite = [int(found[0]) - 1]
        for out, part in zip(bucket.outs, torch.split(found[1:], numels), strict=True):
            out.copy_(part)
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """Return the message sizes that the ranks agreed on."""
        return self._between.state_dict() if self._leads else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sizes that `state_dict` returned."""
        if self._leads:
            self._between.load_state_dict(state)

    def __repr__(self) -> str:
        return f"Hierarchical({self._between!r}, per_machine={self._size})"


def _within(found: Round) -> Round:
    """A round within a machine, which is no round trip between machines."""
    found.trips = 0.0
    return found


def tiers(channel: Channel, machines: list[list[int]], groups: Groups) -> tuple[Channel, Channel]:
    """The channel of this rank's machine, and that of the first ranks of all machines.

    The second, third, ... ranks of all machines get channels too, which stay unused: PyTorch names a group after
    the number of groups that a process is in, so that all ranks must be in equally many.
    """
    places = [list(ranks) for ranks in zip(*machines, strict=True)]
    made = groups([*machines, *places])
    return made[channel.rank // len(places)], made[len(machines)]
