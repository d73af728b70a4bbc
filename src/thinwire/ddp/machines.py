"""Machines: which ranks share one, what that costs and gains, and where memories go when an exchange makes use of it.

In a hierarchical exchange the first rank of a machine holds back for all of its ranks; else every rank for itself.
"""

import os
from collections.abc import Mapping

import torch

from thinwire.codec.codec import Codec
from thinwire.ddp.probe import gather_line, measured_line, share
from thinwire.exchange.base import Groups
from thinwire.exchange.channel import Channel
from thinwire.exchange.hierarchical import tiers
from thinwire.tune.network import Line, Tiers


class Machines:
    """The machine of this rank, and the first ranks of all machines."""

    def __init__(self, channel: Channel, size: int, groups: Groups) -> None:
        blocks = [list(range(first, first + size)) for first in range(0, channel.world, size)]
        self.size = size
        self._everybody = channel
        self._inside, self._outside = tiers(channel, blocks, groups)
        self._leads = channel.rank % size == 0

    @classmethod
    def found(cls, channel: Channel, groups: Groups) -> "Machines | None":
        """As torchrun says; None where all ranks are on one machine, each on its own, or machines differ."""
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        alike = {row[0] for row in share(channel, [float(size)])} == {float(size)}
        several = alike and 1 < size < channel.world and channel.world % size == 0
        return cls(channel, size, groups) if several else None

    def probe(self, elements: int) -> Tiers:
        """Call it on all ranks; the slowest machine's figures come back everywhere."""
        within = measured_line(self._inside, self._to_first_and_back, 4 * elements)
        between = gather_line(self._outside, elements // 4) if self._leads else Line(0.0, 0.0)
        rows = share(self._everybody, [within.fixed, within.per_byte, between.fixed, between.per_byte])
        slowest = [max(column) for column in zip(*rows, strict=True)]
        return Tiers(self.size, Line(*slowest[:2]), Line(*slowest[2:]))

    def _to_first_and_back(self, size: int) -> None:
        vector = torch.zeros(size // 4, device=self._inside.device)
        self._inside.reduce(vector, 0)
        self._inside.broadcast(vector, 0)

    def to_first(self, codec: Codec, sizes: Mapping[str, int]) -> None:
        """The first rank takes over the mean of its machine's memories: they count as much as before."""
        for name, numel in sizes.items():
            held = codec.held(name).get("residual")
            mean = torch.zeros(numel) if held is None else held.cpu() / self.size
            mean = mean.to(self._inside.device)
            self._inside.reduce(mean, 0)
            if self._leads:
                codec.open_slots(name, mean if held is None else held)["residual"].copy_(mean)
            elif held is not None:
                held.zero_()

    def from_first(self, codec: Codec) -> None:
        """The first rank's memory counts for one rank from now on, not for its machine's."""
        if self._leads:
            codec.rescale(float(self.size))
