"""Dense: no compression; the all-reduce that DDP itself would do.

For networks where compression does not pay, and as the yardstick in tests.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.frame import BLOCK
from thinwire.exchange.channel import Channel

Groups = Callable[[list[list[int]]], list[Channel]]


@dataclass(frozen=True)
class Bucket:
    """Gradients to be averaged together. `outs` are flat float32 CPU tensors that receive the mean."""

    gradients: Mapping[str, Tensor]
    outs: list[Tensor]
    step: int
    hold: frozenset[str]  # parameters that took no part in this step: nothing is sent for them

    @property
    def numels(self) -> list[int]:
        return [out.numel() for out in self.outs]

    @property
    def key(self) -> str:
        """Names the bucket by what is in it, and in which order: agreed sizes belong to that, whatever its number."""
        names = "\n".join(self.gradients).encode()
        return f"{next(iter(self.gradients), '')}+{len(self.outs)}+{zlib.crc32(names):08x}"


@dataclass
class Outcome:
    """What came of one bucket. `undo` puts what this rank made known back into its memory.

    `sent` writes what this rank's codec sent to flat tensors of the bucket's sizes; ask before the next bucket.
    """

    non_finite: list[int] = field(default_factory=list)  # ranks whose gradient was not finite
    counts: Mapping[str, int] = field(default_factory=dict)  # entries that this rank sent, by parameter
    compress: float = 0.0
    decode: float = 0.0
    undo: Callable[[], None] | None = None
    sent: Callable[[list[Tensor]], None] | None = None


class Exchange(ABC):
    """How everybody's gradients become the mean. One object serves one link."""

    @abstractmethod
    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        """Called once, on all ranks. `sizes` are all parameters' sizes; `groups` makes channels of some ranks."""

    @abstractmethod
    def mean(self, bucket: Bucket) -> Outcome:
        """Write the mean to the bucket's outs, or report ranks that were not finite."""

    def channels(self) -> list[Channel]:
        """All channels whose traffic is this exchange's."""
        return []

    def weight(self) -> int:
        """How many ranks' gradients this rank's memory stands for: a mean of memories weighs it by that."""
        return 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


# A message that lacks entries is filled up to about this many bytes.
_NEARLY = 32


class AgreedSizes:
    """Sizes of messages, per bucket, that every rank derives from what every rank has seen.

    A message is a little larger than the largest of late, and grows quickly when one was full; entries that do not
    fit wait in the memory. It shrinks slowly, so that a step in which little was sent does not choke the next.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {}
        self._guessed: set[str] = set()
        self._used: dict[str, int] = {}

    def get(self, key: str, step: int, first: Callable[[], list[int]]) -> list[int]:
        """The sizes for a bucket; `first` guesses them before anything was seen."""
        if key not in self.sizes:
            self.sizes[key] = first()
            self._guessed.add(key)
        self._used[key] = step
        return self.sizes[key]

    def learn(self, key: str, largest: Sequence[int], slacks: Sequence[int]) -> None:
        """Note the largest messages of a step, which all ranks know; full ones may lack `slack` bytes."""
        keep = 0.0 if key in self._guessed else 0.9
        self._guessed.discard(key)
        self.sizes[key] = [
            int(size * 1.3) + slack
            if most + _NEARLY > size - slack
            else max(int(keep * size), int(most * 1.04) + slack)
            for size, most, slack in zip(self.sizes[key], largest, slacks, strict=True)
        ]

    def state_dict(self) -> dict[str, list[int]]:
        """The sizes of the last step's buckets; those of buckets that DDP has regrouped since are out of date."""
        latest = max(self._used.values(), default=0)
        return {key: list(self.sizes[key]) for key, step in self._used.items() if step == latest}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        self.sizes = {key: list(sizes) for key, sizes in state.items()}
        self._guessed.clear()
        self._used = dict.fromkeys(self.sizes, 0)


def first_size(codec: Codec, numels: list[int], step: int) -> int:
    """A generous guess of a frame's size: 30 % more entries than expected."""
    counts = codec.expected_counts(numels, step)
    many = [n if n == c else min(n, int(c * 1.3) + 16) for n, c in zip(numels, counts, strict=True)]
    return codec.frame_bound(numels, many) + slack(codec, numels)


def slack(codec: Codec, numels: list[int]) -> int:
    """Bytes that an encoder keeps free for sections to come and then does not need.

    A message must have them to spare, or its first tensors would never find room.
    """
    blocks = sum(-(-n // BLOCK) for n in numels if n < codec.min_numel)
    return 32 + 2 * len(numels) + 2 * blocks


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
        loaded = {name: slots for name in parts if name not in bucket.hold and (slots := self._codec.residuals(name))}
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
