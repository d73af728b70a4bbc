"""Gather: an all-gather of frames, which every rank decodes and adds up in rank order.

It takes a single round. The traffic of a rank grows linearly with the number of ranks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.encode import BucketEncoder, BucketViews, Part, Partition, encode_parts
from thinwire.codec.frame import Frame, FrameReader, Frames, read_frames
from thinwire.exchange.base import AgreedSizes, Bucket, Exchange, Groups, Outcome, Stages, first_size, slack
from thinwire.exchange.channel import Channel


@dataclass(frozen=True)
class _GatherPlan:
    """What is computed once for a bucket and used in every step."""

    names: list[str]
    numels: list[int]
    partitions: list[Partition]  # all tensors are in one frame
    reserves: list[int]
    slack: int
    encoder: BucketEncoder


class Gather(Exchange):
    """All-gather of frames of an agreed size, or of their exact size where the codec knows it beforehand."""

    def __init__(self) -> None:
        self._sizes = AgreedSizes()
        self._plans: dict[str, _GatherPlan] = {}

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec
        self._frames = Frames()

    def channels(self) -> list[Channel]:
        return [self._channel]

    def stages(self, bucket: Bucket) -> Stages:
        key = bucket.key
        plan = self._plans.get(key) or self._plans.setdefault(key, self._plan(bucket))
        known = self._codec.known_bytes(plan.names, plan.numels, bucket.step)
        size = known if known is not None else self._agreed_size(key, plan, bucket.step)
        # 1. Encode the selected entries; the rest stays in the residual.
        began = time.perf_counter()
        room = torch.empty(size, dtype=torch.uint8)
        frame, counts = self._encode(bucket, plan, room)
        compress = time.perf_counter() - began
        # 2. Send this rank's frame to all ranks, and receive theirs.
        messages = yield self._channel.gather(room, bucket.lane(0))
        # 3. Add the frames up in rank order: all ranks compute the same bits.
        began = time.perf_counter()
        frames = self._frames
        frames.read(messages, [plan.numels], trailing=True)
        if not frames.non_finite:
            if known is None:
                self._sizes.learn(key, [max(frames.lengths)], [plan.slack])
            frames.sum_to(bucket.outs, 1.0 / self._channel.world)
        decode = time.perf_counter() - began
        return Outcome(
            frames.non_finite,
            dict(zip(plan.names, counts, strict=True)) if frame.non_finite is None else {},
            compress,
            decode,
            undo=lambda: give_back(self._codec, plan.names, plan.numels, frame),
            sent=lambda outs: read_frames([frame], [plan.numels]).sum_to(outs),
        )

    def _agreed_size(self, key: str, plan: _GatherPlan, step: int) -> int:
        (size,) = self._sizes.get(key, step, lambda: [first_size(self._codec, plan.numels, step)])
        return size

    def _encode(self, bucket: Bucket, plan: _GatherPlan, room: Tensor) -> tuple[Frame, list[int]]:
        """Encode this rank's frame into `room`; returns the frame and the entries per tensor."""
        if isinstance(bucket.tensors, BucketViews) and not bucket.hold:
            found = plan.encoder.encode(bucket.tensors, room, step=bucket.step)
            if found is not None:
                return found
        part = Part(room, plan.numels, plan.reserves)
        (frame,), counts = encode_parts(
            self._codec, bucket.tensors, plan.partitions, [part], step=bucket.step, hold=bucket.hold
        )
        return frame, counts

    def _plan(self, bucket: Bucket) -> _GatherPlan:
        numels, codec = bucket.numels, self._codec
        names, partitions, reserves = list(bucket.tensors), [Partition(1, 0)] * len(numels), codec.reserves(numels)
        return _GatherPlan(names, numels, partitions, reserves, slack(codec, numels), BucketEncoder(codec, reserves))

    def volume(self, key: str) -> int | None:
        """Bytes that a rank sends for a bucket, the same on all ranks.

        None before the bucket's first step, and where every step has its own size (`Codec.known_bytes`).
        """
        return self._sizes.sizes[key][0] * (self._channel.world - 1) if key in self._sizes.sizes else None

    def state_dict(self) -> dict[str, Any]:
        """Return the message sizes that the ranks agreed on."""
        return {"sizes": self._sizes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sizes that `state_dict` returned."""
        self._sizes.load_state_dict(state.get("sizes", {}))

    def __repr__(self) -> str:
        return "Gather()"


def give_back(codec: Codec, names: list[str], numels: list[int], frame: Frame) -> None:
    """Add a frame's entries back to the residual."""
    reader = FrameReader(frame, numels)
    for section in reader.sections:
        codec.give_back(names[section.id], *reader.entries(section))


def gathered_bytes(codec: Codec, numels: list[int], world: int, step: int = 0) -> int:
    """Bytes that a rank is expected to send to all others together."""
    return codec.expected_bytes(numels, step) * (world - 1)
