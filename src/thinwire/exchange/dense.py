"""Dense: no compression; the all-reduce that DDP itself would do.

For networks where compression does not pay, and as the yardstick in tests.
"""

from collections.abc import Mapping

import torch

from thinwire.codec.codec import Codec
from thinwire.exchange.base import Bucket, Exchange, Groups, Outcome
from thinwire.exchange.channel import Channel


class Dense(Exchange):
    """Sum everything, divide by the number of ranks; a non-finite value spreads by itself.

    A memory that was loaded from a compressing link's state travels with the first gradients.
    """

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec

    def channels(self) -> list[Channel]:
        return [self._channel]

    def mean(self, bucket: Bucket) -> Outcome:
        together = torch.cat([g.reshape(-1) for g in bucket.gradients.values()]).to(self._channel.device)
        parts = dict(zip(bucket.gradients, torch.split(together, bucket.numels), strict=True))
        loaded = {name: slots for name in parts if name not in bucket.hold and (slots := self._codec.held(name))}
        for name, slots in loaded.items():
            if "residual" in slots:
                parts[name] += slots["residual"].to(together)
        together *= 1.0 / self._channel.world
        self._channel.all_reduce(together)
        for out, part in zip(bucket.outs, parts.values(), strict=True):
            out.copy_(part)
        if loaded and bool(together.isfinite().all()):
            for slots in loaded.values():
                for held in slots.values():
                    held.zero_()
        return Outcome(counts=dict(zip(bucket.gradients, bucket.numels, strict=True)))

    def __repr__(self) -> str:
        return "Dense()"
