"""Gather: everybody gets everybody's frame and adds them up in rank order.

The least latency, one collective; the volume grows with the number of ranks.
"""

import time
from collections.abc import Mapping
from typing import Any

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader, sum_frames
from thinwire.exchange.base import AgreedSizes, Bucket, Exchange, Groups, Outcome, first_size, padded, slack
from thinwire.exchange.channel import Channel


class Gather(Exchange):
    """All-gather of frames of an agreed size."""

    def __init__(self) -> None:
        self._sizes = AgreedSizes()

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec

    def channels(self) -> list[Channel]:
        return [self._channel]

    def mean(self, bucket: Bucket) -> Outcome:
        numels = bucket.numels
        (size,) = self._sizes.get(bucket.key, bucket.step, lambda: [first_size(self._codec, numels, bucket.step)])
        # 1. Encode what travels; the rest stays in the memory.
        began = time.perf_counter()
        frame = self._codec.encode(bucket.gradients, step=bucket.step, budget=size, hold=bucket.hold)
        compress = time.perf_counter() - began
        # 2. Everybody's frame, to everybody.
        messages = self._channel.all_gather(padded(frame, size))
        # 3. Add them up, in rank order: the same bits everywhere.
        began = time.perf_counter()
        readers = [FrameReader(message, numels, trailing=True) for message in messages]
        bad = [rank for rank, reader in enumerate(readers) if reader.non_finite]
        if not bad:
            largest = max(reader.length for reader in readers)
            self._sizes.learn(bucket.key, 0, largest, slack(self._codec, numels))
            sum_frames(readers, bucket.outs, 1.0 / self._channel.world)
        decode = time.perf_counter() - began
        names = list(bucket.gradients)
        counts = dict(zip(names, frame.counts, strict=True)) if frame.counts else {}
        return Outcome(
            bad,
            counts,
            compress,
            decode,
            undo=lambda: give_back(self._codec, names, numels, frame),
            sent=lambda outs: sum_frames([FrameReader(frame, numels)], outs),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self._sizes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sizes.load_state_dict(state.get("sizes", {}))

    def __repr__(self) -> str:
        return "Gather()"


def give_back(codec: Codec, names: list[str], numels: list[int], frame: Frame) -> None:
    """Return a frame's entries to the memory they were taken from."""
    reader = FrameReader(frame, numels)
    for section in reader.sections:
        codec.give_back(names[section.id], *reader.entries(section))
