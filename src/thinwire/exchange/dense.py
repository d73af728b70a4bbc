"""Dense: no compression; the all-reduce that DDP itself would do.

For networks where compression does not pay, and as the yardstick in tests.
"""

from collections.abc import Mapping

import torch

from thinwire.codec.codec import Codec
from thinwire.exchange.base import Bucket, Exchange, Groups, Outcome
from thinwire.exchange.channel import Channel


class Dense(Exchange):
    """Sum everything, divide by the number of ranks; a non-finite value spreads by itself."""

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel = channel

    def channels(self) -> list[Channel]:
        return [self._channel]

    def mean(self, bucket: Bucket) -> Outcome:
        together = torch.cat([g.reshape(-1) for g in bucket.gradients.values()]).to(self._channel.device)
        together /= self._channel.world
        self._channel.all_reduce(together)
        for out, part in zip(bucket.outs, torch.split(together, bucket.numels), strict=True):
            out.copy_(part)
        return Outcome(counts=dict(zip(bucket.gradients, bucket.numels, strict=True)))

    def __repr__(self) -> str:
        return "Dense()"
