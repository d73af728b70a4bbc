"""ScatterReduce: a sparse reduce-scatter followed by an all-gather; a rank's traffic does not grow with the ranks.

Every rank owns a share of the index space. Entries go to their owner, which adds them up, selects again and sends the
result to all ranks. What the second selection rejects goes to the owner's residual, where it has the same weight in
the mean as it had in the sum.
"""

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.encode import Part, Partition, empty_frame, encode_parts, encode_sums, fill
from thinwire.codec.feedback import NoFeedback
from thinwire.codec.frame import Frame, FrameReader, Frames, read_frames
from thinwire.codec.selection import Window
from thinwire.exchange.base import AgreedSizes, Bucket, Exchange, Groups, Outcome, Stages, first_size, slack
from thinwire.exchange.channel import Channel
from thinwire.exchange.gather import Gather, gathered_bytes

# Smaller tensors have one owner: cutting them up would cost more in headers than it balances.
_CUT_FROM = 1 << 15
# Precedes a result: bytes of the largest part that its owner received, and 1 + the first non-finite rank, or 0.
_PREFIX = struct.Struct("<QQ")


def share_out(numels: Sequence[int], world: int, smallest: int = 1) -> list[Partition]:
    """The owners of a bucket's tensors, the same on every rank.

    Large tensors are divided among all ranks, in shares of at least `smallest` elements, because smaller tensors are
    sent whole. Each of the others is owned by the rank with the fewest elements so far.
    """
    load = [0] * world
    partitions = [Partition(world, 0)] * len(numels)
    for n, i in sorted(((n, i) for i, n in enumerate(numels)), key=lambda item: (-item[0], item[1])):
        if world == 1 or n < max(_CUT_FROM, 2 * smallest * world):
            lightest = load.index(min(load))
            load[lightest] += n
            partitions[i] = Partition(1, lightest)
    return partitions


@dataclass
class _ScatterPlan:
    """What is computed once for a bucket and used in every step."""

    names: list[str]
    partitions: list[Partition]
    shares: list[list[int]]  # by owner: elements of every tensor
    reserves: list[list[int]]  # by owner: see Codec.reserves
    slacks: list[int]  # by owner: see `slack`
    own: Tensor  # buffer for the part that this rank owns, which is not sent and may hold everything
    sums: list[Tensor]  # this rank's share of every tensor
    split: list[tuple[int, int]]  # the owners as the kernels take them
    places: dict[int, Tensor] = field(default_factory=dict)  # positions of the sums' elements in the tensors
    whole: list[Window] | None = None  # the last windows that all ranks sent
    windows: list[list[Window]] = field(default_factory=list)  # by owner: its part of these
    budgets: list[int] = field(default_factory=list)  # by owner: the bytes of a frame of its part


class ScatterReduce(Exchange):
    """All-to-all of parts, a second selection by the owners, all-gather of the results.

    Where all ranks send the same windows (`Rotate`), there is no second selection: the results are the sums of these
    windows, and the sizes of all messages are known beforehand.

    Buckets for which a rank would send fewer than `gather_below` bytes to all others together use `Gather` instead,
    which takes one round in place of two. Then only these gathers may go by recursive doubling, otherwise the gathers
    of the results: ranks could start gathers of both kinds in different orders.
    """

    def __init__(self, *, gather_below: int = 0) -> None:
        if not isinstance(gather_below, int) or gather_below < 0:
            raise ValueError(f"gather_below is a number of bytes, not {gather_below!r}")
        self._gather_below = gather_below
        self._gather = Gather()
        self._parts = AgreedSizes()
        self._results = AgreedSizes()
        self._plans: dict[str, _ScatterPlan] = {}

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec
        self._gather.setup(channel, codec, sizes, groups)
        self._received, self._answers = Frames(), Frames()
        # A rank sends (world - 1) / world of its entries to others. The results may have as many entries as bring the
        # total to twice the entries of a rank, so that the traffic is the same for any number of ranks.
        world = channel.world
        selection = codec.selection.for_sums(2.0 * world / (world - 1) - 1.0 if world > 1 else 1.0)
        self._second = codec.copy(selection=selection, feedback=NoFeedback())

    def channels(self) -> list[Channel]:
        return [self._channel]

    def stages(self, bucket: Bucket) -> Stages:
        channel, key = self._channel, bucket.key
        if self._gather_below and self._is_small(bucket, key):
            return (yield from self._gather.stages(bucket))
        if key not in self._plans:
            self._plans[key] = self._plan(bucket)
        plan = self._plans[key]
        windows = self._windows(bucket, plan)
        if windows is not None:  # a result has the windows of a part
            budgets = sizes = plan.budgets
        else:
            budgets = self._parts.get(key, bucket.step, lambda: self._first_parts(bucket, plan))
            sizes = self._results.get(key, bucket.step, lambda: self._first_results(bucket, plan))
        # 1. Encode the selected entries, one part per owner; the rest stays in the residual.
        began = time.perf_counter()
        wire = [0 if r == channel.rank else n for r, n in enumerate(budgets)]
        messages = torch.empty(sum(wire), dtype=torch.uint8)
        rooms = list(torch.split(messages, wire))
        rooms[channel.rank] = plan.own
        parts = [Part(*part) for part in zip(rooms, plan.shares, plan.reserves, strict=True)]
        frames, sent = encode_parts(
            self._codec, bucket.tensors, plan.partitions, parts, step=bucket.step, hold=bucket.hold
        )
        compress = time.perf_counter() - began
        # 2. Send the parts to their owners.
        received = yield channel.scatter(messages, wire, budgets[channel.rank], bucket.lane(0))
        received[channel.rank] = frames[channel.rank].data
        # 3. Add up this rank's share in rank order and select again; rejected entries stay in this rank's residual.
        began = time.perf_counter()
        answer = torch.empty(_PREFIX.size + sizes[channel.rank], dtype=torch.uint8)
        result = self._reduce(bucket, plan, received, answer, windows[channel.rank] if windows is not None else None)
        compress += time.perf_counter() - began
        # 4. Send the result to all ranks.
        answers = yield channel.gather_uneven(
            answer, [_PREFIX.size + size for size in sizes], bucket.lane(1), doubling=not self._gather_below
        )
        # 5. Decode the results: all ranks compute the same bits.
        began = time.perf_counter()
        bad = self._read(bucket, plan, answers, learn=windows is None)
        decode = time.perf_counter() - began
        counts = dict(zip(plan.names, sent, strict=True))
        return Outcome(
            bad,
            counts,
            compress,
            decode,
            undo=lambda: self._give_back(plan, bucket.numels, result),
            sent=lambda outs: _write_sent(plan, frames, outs),
        )

    def _is_small(self, bucket: Bucket, key: str) -> bool:
        """Whether a bucket uses Gather; decided by what all ranks know, so that they decide alike.

        Its first step uses the expected size. A bucket that grows to twice the limit uses ScatterReduce from then on.
        """
        if key in self._parts.sizes:
            return False
        volume = self._gather.volume(key)
        if volume is not None:
            return volume <= 2 * self._gather_below
        return gathered_bytes(self._codec, bucket.numels, self._channel.world, bucket.step) < self._gather_below

    def _plan(self, bucket: Bucket) -> _ScatterPlan:
        codec, channel, numels = self._codec, self._channel, bucket.numels
        partitions = share_out(numels, channel.world, codec.min_numel)
        shares = [
            [partition.share(n, r) for partition, n in zip(partitions, numels, strict=True)]
            for r in range(channel.world)
        ]
        mine = shares[channel.rank]
        reserves = [codec.reserves(each) for each in shares]
        room = codec.frame_bound(mine, mine) + slack(codec, mine)
        sums = list(torch.split(torch.empty(sum(mine)), mine))
        slacks = [slack(codec, [n for n in each if n]) for each in shares]
        own = torch.empty(room, dtype=torch.uint8)
        split = [(partition.world, partition.first) for partition in partitions]
        return _ScatterPlan(list(bucket.tensors), partitions, shares, reserves, slacks, own, sums, split)

    def _windows(self, bucket: Bucket, plan: _ScatterPlan) -> list[list[Window]] | None:
        """The windows that all ranks send of every tensor, by owner; None if the selection depends on the values."""
        windows = self._codec.windows(plan.names, bucket.numels, bucket.step)
        if windows is None:
            return None
        if windows != plan.whole:
            plan.windows = [
                [partition.window(window, r) for partition, window in zip(plan.partitions, windows, strict=True)]
                for r in range(self._channel.world)
            ]
            plan.whole, plan.budgets = windows, list(map(self._codec.windows_bytes, plan.shares, plan.windows))
        return plan.windows

    def _first_parts(self, bucket: Bucket, plan: _ScatterPlan) -> list[int]:
        """First sizes of the parts: room for twice the entries of an even distribution over the shares."""
        numels = bucket.numels
        return [
            first_size(self._codec, [min(2 * n, whole) for n, whole in zip(each, numels, strict=True)], bucket.step)
            for each in plan.shares
        ]

    def _first_results(self, bucket: Bucket, plan: _ScatterPlan) -> list[int]:
        return [first_size(self._second, each, bucket.step) for each in plan.shares]

    def _reduce(
        self,
        bucket: Bucket,
        plan: _ScatterPlan,
        received: list[Tensor],
        answer: Tensor,
        windows: list[Window] | None,
    ) -> Frame:
        """Write the prefix and the result of this rank's share to `answer`."""
        rank = self._channel.rank
        frames = self._received
        frames.read(received, [plan.shares[rank]], trailing=True)
        largest = max((length for r, length in enumerate(frames.lengths) if r != rank), default=0)
        frames.sum_to(plan.sums)
        room = answer[_PREFIX.size :]
        if frames.non_finite:
            result = fill(room, empty_frame(str(frames.non_finite[0])))
        else:
            sums = {i: total for i, total in enumerate(plan.sums) if total.numel()}
            result = encode_sums(self._second, sums, plan.names, room, step=bucket.step, windows=windows)
        _PREFIX.pack_into(answer.numpy().data, 0, largest, 1 + frames.non_finite[0] if frames.non_finite else 0)
        self._keep(bucket, plan)
        return result

    def _keep(self, bucket: Bucket, plan: _ScatterPlan) -> None:
        """Add what was not selected of the sums to the residual."""
        rank = self._channel.rank
        for i, (gradient, left) in enumerate(zip(bucket.tensors.values(), plan.sums, strict=True)):
            held = self._codec.ensure_residuals(plan.names[i], gradient).get("residual") if left.numel() else None
            if held is None:
                continue
            partition = plan.partitions[i]
            if held.device.type == "cpu":
                owner = rank if partition.world > 1 else 0
                _native.add_share(
                    held.data_ptr(), held.numel(), partition.world, partition.first, owner, left.data_ptr()
                )
            else:
                held.index_add_(0, self._places(plan, i, held.numel()).to(held.device), left.to(held.device))

    def _places(self, plan: _ScatterPlan, i: int, n: int) -> Tensor:
        if i not in plan.places:
            plan.places[i] = plan.partitions[i].places(n, self._channel.rank)
        return plan.places[i]

    def _read(self, bucket: Bucket, plan: _ScatterPlan, answers: list[Tensor], *, learn: bool) -> list[int]:
        """Write the mean to the outputs and `learn` the messages' sizes; returns the ranks that were not finite."""
        key, world = bucket.key, self._channel.world
        prefixes = [_PREFIX.unpack_from(answer.numpy().data) for answer in answers]
        bad = {culprit - 1 for _, culprit in prefixes if culprit}
        if bad:
            return sorted(bad)
        frames = self._answers
        frames.read([answer[_PREFIX.size :] for answer in answers], plan.shares, trailing=True)
        if learn:
            self._parts.learn(key, [largest for largest, _ in prefixes], plan.slacks)
            self._results.learn(key, frames.lengths, plan.slacks)
        frames.sum_to(bucket.outs, 1.0 / world, plan.split)
        return []

    def _give_back(self, plan: _ScatterPlan, numels: list[int], result: Frame) -> None:
        reader = FrameReader(result, plan.shares[self._channel.rank])
        for section in reader.sections:
            positions, values = reader.entries(section)
            places = self._places(plan, section.id, numels[section.id])
            self._codec.give_back(plan.names[section.id], places[positions], values)

    def state_dict(self) -> dict[str, Any]:
        """Return the message sizes that the ranks agreed on."""
        parts, results = self._parts.state_dict(), self._results.state_dict()
        gathered = {"gather": self._gather.state_dict()} if self._gather_below else {}
        return {"parts": parts, "results": results, "second": self._second.state_dict(), **gathered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sizes that `state_dict` returned."""
        self._gather.load_state_dict(state.get("gather", {}))
        self._parts.load_state_dict(state.get("parts", {}))
        self._results.load_state_dict(state.get("results", {}))
        self._second.load_state_dict(state.get("second", self._second.copy().state_dict()))

    def __repr__(self) -> str:
        return f"ScatterReduce(gather_below={self._gather_below})" if self._gather_below else "ScatterReduce()"


def _write_sent(plan: _ScatterPlan, frames: Sequence[Frame], outs: list[Tensor]) -> None:
    """Write what this rank sent to all owners to flat tensors."""
    read_frames(frames, plan.shares).sum_to(outs, 1.0, plan.split)
