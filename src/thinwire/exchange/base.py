"""Exchange: the interface between a link and the ways in which all ranks' tensors become their mean.

An exchange computes the mean in stages, between which its messages are under way, so that a link can have several
buckets under way at the same time. `Dense` is the simplest exchange: a plain all-reduce, for networks on which
compression does not pay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.encode import BucketViews, key_of
from thinwire.codec.frame import BLOCK
from thinwire.exchange.channel import Channel
from thinwire.exchange.rounds import Round

T = TypeVar("T")
Groups = Callable[[list[list[int]]], list[Channel]]


@dataclass
class Bucket:
    """Tensors that are averaged together, by parameter name. `outs` are flat float32 CPU tensors for the mean."""

    tensors: Mapping[str, Tensor]
    outs: list[Tensor]
    step: int
    hold: frozenset[str]  # parameters that took no part in this step: nothing is sent for them
    index: int = 0  # its place among the buckets of a step that are under way at the same time

    def lane(self, number: int) -> int:
        """The lane of its first or second round (0, 1); see `Channel`. Lane 0 is for agreements."""
        return 1 + 2 * self.index + number

    @property
    def numels(self) -> list[int]:
        return self.tensors.numels if isinstance(self.tensors, BucketViews) else [out.numel() for out in self.outs]

    @property
    def key(self) -> str:
        """Identifies the bucket by its parameters and their order, because DDP may renumber its buckets."""
        return self.tensors.key if isinstance(self.tensors, BucketViews) else key_of(self.tensors)


@dataclass
class Outcome:
    """The result of exchanging one bucket.

    undo: adds what this rank sent back to its residual, for a step that every rank is going to skip.
    sent: writes what this rank's codec sent to flat tensors of the bucket's sizes; call it before the next bucket.
    """

    non_finite: list[int] = field(default_factory=list)  # ranks whose tensors were not finite
    counts: Mapping[str, int] = field(default_factory=dict)  # entries that this rank sent, by parameter
    compress: float = 0.0  # seconds
    decode: float = 0.0  # seconds
    undo: Callable[[], None] | None = None
    sent: Callable[[list[Tensor]], None] | None = None


# Yields rounds of messages, is resumed with those that arrived, and returns the outcome.
Stages = Generator[Round, list[Tensor], Outcome]


class UnderWay(Generic[T]):
    """Stages that have begun; whoever has them waits for `round` and resumes them with its messages."""

    def __init__(self, stages: Generator[Round, list[Tensor], T]) -> None:
        self._stages = stages
        self.round: Round | None = None  # the messages under way; None when the last stage is finished
        self.result: T | None = None
        self._read: list[Round] = []
        self.resume(None)

    def resume(self, messages: list[Tensor] | None) -> None:
        """Run stages until one has to wait for messages."""
        while True:
            if self.round is not None:
                self._read.append(self.round)
                self.round = None
            try:
                self.round = next(self._stages) if messages is None else self._stages.send(messages)
            except StopIteration as end:
                self.result = end.value
                return
            self.release()
            if not self.round.done:
                return
            messages = self.round.wait()

    def release(self) -> None:
        """Let the next messages overwrite those of the finished stages."""
        for each in self._read:
            each.release()
        self._read.clear()


class Exchange(ABC):
    """A way to compute the mean of all ranks' tensors. One object serves one link."""

    @abstractmethod
    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        """Prepare for a model; called once, on all ranks.

        sizes: the number of elements of every parameter. groups: makes channels between some of the ranks.
        """

    @abstractmethod
    def stages(self, bucket: Bucket) -> Stages:
        """Write the mean to the bucket's outs, or report ranks that were not finite.

        A stage reads the messages that it is resumed with before it yields the next round. Stages of other buckets run
        in between, in an order that may differ between ranks.
        """

    def mean(self, bucket: Bucket) -> Outcome:
        """Run all stages, and wait for each round of messages."""
        under_way = UnderWay(self.stages(bucket))
        while under_way.round is not None:
            under_way.resume(under_way.round.wait())
        under_way.release()
        assert under_way.result is not None
        return under_way.result

    def channels(self) -> list[Channel]:
        """The channels that this exchange uses, whose traffic the link counts."""
        return []

    def weight(self) -> int:
        """The number of ranks whose changes this rank's residual holds; a mean of residuals is weighted by it."""
        return 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to send messages of the same sizes: plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; ValueError if it is not one."""


# A message counts as full if fewer than this many bytes of it are unused: the next entry may have been larger.
_NEARLY_FULL = 32


class AgreedSizes:
    """Message sizes per bucket, which all ranks compute alike from the messages that all of them received.

    Collectives need equal message sizes. A message is a little larger than the largest recent one. It grows by 30 %
    when one was full, and shrinks by at most 10 % a step. Entries that do not fit stay in the residual.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {}
        self._guessed: set[str] = set()
        self._used: dict[str, int] = {}

    def get(self, key: str, step: int, first: Callable[[], list[int]]) -> list[int]:
        """The sizes for a bucket; `first` estimates them before the bucket's first exchange."""
        if key not in self.sizes:
            self.sizes[key] = first()
            self._guessed.add(key)
        self._used[key] = step
        return self.sizes[key]

    def learn(self, key: str, largest: Sequence[int], slacks: Sequence[int]) -> None:
        """Adapt to the largest messages of a step. Up to `slack` bytes of a full message may be unused."""
        keep = 0.0 if key in self._guessed else 0.9
        self._guessed.discard(key)
        self.sizes[key] = [
            int(size * 1.3) + slack
            if most + _NEARLY_FULL > size - slack
            else max(int(keep * size), int(most * 1.04) + slack)
            for size, most, slack in zip(self.sizes[key], largest, slacks, strict=True)
        ]

    def state_dict(self) -> dict[str, list[int]]:
        """The sizes of the last step's buckets; those that DDP has regrouped since are left out."""
        latest = max(self._used.values(), default=0)
        return {key: list(self.sizes[key]) for key, step in self._used.items() if step == latest}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Load saved sizes; ValueError, and nothing changes, if they are not sizes of messages."""
        if not isinstance(state, Mapping) or not all(map(_is_sizes, state.values())):
            raise ValueError("the sizes of messages in the exchange's state are not lists of whole numbers")
        self.sizes = {key: list(sizes) for key, sizes in state.items()}
        self._guessed.clear()
        self._used = dict.fromkeys(self.sizes, 0)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and 0 <= size < 1 << 40 for size in value)


def first_size(codec: Codec, numels: list[int], step: int) -> int:
    """Bytes for a bucket's first message: room for 30 % more entries than the selection expects."""
    counts = codec.expected_counts(numels, step)
    many = [n if n == c else min(n, int(c * 1.3) + 16) for n, c in zip(numels, counts, strict=True)]
    return codec.frame_bound(numels, many) + slack(codec, numels)


def slack(codec: Codec, numels: list[int]) -> int:
    """Bytes that an encoder reserves for later sections and may leave unused.

    A message needs them on top of its entries, or the first tensors of a bucket could never be written.
    """
    blocks = sum(-(-n // BLOCK) for n in numels if n < codec.min_numel)
    return 32 + 2 * len(numels) + 2 * blocks


class Dense(Exchange):
    """Uncompressed all-reduce. A non-finite value reaches all ranks through the sum itself.

    A residual that was loaded from a compressing link's state is added to the first tensors and then cleared.
    """

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec

    def channels(self) -> list[Channel]:
        return [self._channel]

    def stages(self, bucket: Bucket) -> Stages:
        together = torch.cat([g.reshape(-1) for g in bucket.tensors.values()]).to(self._channel.device)
        parts = dict(zip(bucket.tensors, torch.split(together, bucket.numels), strict=True))
        loaded = {name: slots for name in parts if name not in bucket.hold and (slots := self._codec.residuals(name))}
        for name, slots in loaded.items():
            if "residual" in slots:
                parts[name] += slots["residual"].to(together)
        together *= 1.0 / self._channel.world
        yield self._channel.sum(together)
        for out, part in zip(bucket.outs, parts.values(), strict=True):
            out.copy_(part)
        if loaded and bool(together.isfinite().all()):
            for slots in loaded.values():
                for tensor in slots.values():
                    tensor.zero_()
        return Outcome(counts=dict(zip(bucket.tensors, bucket.numels, strict=True)))

    def __repr__(self) -> str:
        return "Dense()"
