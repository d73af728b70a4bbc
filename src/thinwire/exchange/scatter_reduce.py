"""ScatterReduce: every rank owns a share of the index space; the volume per rank does not grow with the ranks.

Entries go to their owner, which adds them up, selects again and makes the result known. What the second selection
rejects goes to the owner's own memory: there it counts for the mean as much as it did in the sum.
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
from thinwire.exchange.base import AgreedSizes, Bucket, Exchange, Groups, Outcome, first_size, slack
from thinwire.exchange.channel import Channel
from thinwire.exchange.gather import Gather, gathered_bytes

# Smaller tensors have one owner: cutting them up would cost more in headers than it balances.
_CUT_FROM = 1 << 15
# Before a result: the largest part that its owner received, and 1 + a rank that was not finite.
_PREFIX = struct.Struct("<QQ")


def share_out(numels: Sequence[int], world: int, smallest: int = 1) -> list[Partition]:
    """Who owns what of a bucket's tensors, the same on every rank.

    Large tensors are partitioned among all ranks; no share is below `smallest` elements, because tensors that small
    travel whole. The others have one owner each, who has the least of them so far.
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
class _Plan:
    """What a bucket's tensors, their owners and this rank make certain for all steps."""

    names: list[str]
    partitions: list[Partition]
    shares: list[list[int]]  # by owner: elements of every tensor
    reserves: list[list[int]]  # by owner: see Codec.reserves
    slacks: list[int]  # by owner: see `slack`
    own: Tensor  # room for the part that stays here: it goes over no wire, so that it may hold everything
    sums: list[Tensor]  # this rank's share of every tensor
    split: list[tuple[int, int]]  # the partitions as the kernels take them
    places: dict[int, Tensor] = field(default_factory=dict)  # of the sums' elements in the whole tensors, if asked for


class ScatterReduce(Exchange):
    """All-to-all of parts, a second selection by the owners, all-gather of the results.

    Buckets for which a rank would send less than `gather_below` bytes to all others together are gathered instead:
    one round, not two. Their volume grows with the ranks, up to that.
    """

    def __init__(self, *, gather_below: int = 0) -> None:
        if not isinstance(gather_below, int) or gather_below < 0:
            raise ValueError(f"gather_below is a number of bytes, not {gather_below!r}")
        self._gather_below = gather_below
        self._gather = Gather()
        self._parts = AgreedSizes()
        self._results = AgreedSizes()
        self._plans: dict[str, _Plan] = {}

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec
        self._gather.setup(channel, codec, sizes, groups)
        self._received, self._answers = Frames(), Frames()
        # A rank sends (world - 1) / world of its entries to others: the results fill that up to twice the entries,
        # so that few ranks keep more of the sum, and the volume is the same for any number of them.
        world = channel.world
        selection = codec.selection.for_sums(2.0 * world / (world - 1) - 1.0 if world > 1 else 1.0)
        self._second = codec.copy(selection=selection, feedback=NoFeedback())

    def channels(self) -> list[Channel]:
        return [self._channel]

    def mean(self, bucket: Bucket) -> Outcome:
        channel, key = self._channel, bucket.key
        if self._gather_below and self._is_small(bucket, key):
            return self._gather.mean(bucket)
        if key not in self._plans:
            self._plans[key] = self._plan(bucket)
        plan = self._plans[key]
        budgets = self._parts.get(key, bucket.step, lambda: self._first_parts(bucket, plan))
        sizes = self._results.get(key, bucket.step, lambda: self._first_results(bucket, plan))
        # 1. Split what travels by owner; the rest stays in the memory.
        began = time.perf_counter()
        wire = [0 if r == channel.rank else n for r, n in enumerate(budgets)]
        messages = torch.empty(sum(wire), dtype=torch.uint8)
        rooms = list(torch.split(messages, wire))
        rooms[channel.rank] = plan.own
        parts = [Part(*part) for part in zip(rooms, plan.shares, plan.reserves, strict=True)]
        frames, sent = encode_parts(
            self._codec, bucket.gradients, plan.partitions, parts, step=bucket.step, hold=bucket.hold
        )
        compress = time.perf_counter() - began
        # 2. To the owners.
        received = channel.all_to_all(messages, wire, budgets[channel.rank])
        received[channel.rank] = frames[channel.rank].data
        # 3. Add up the own share in rank order, select again; what is rejected stays here.
        began = time.perf_counter()
        answer = torch.empty(_PREFIX.size + sizes[channel.rank], dtype=torch.uint8)
        result = self._reduce(bucket, plan, received, answer)
        compress += time.perf_counter() - began
        # 4. Results, to everybody.
        answers = channel.all_gather_uneven(answer, [_PREFIX.size + size for size in sizes])
        # 5. Read them: the same bits everywhere.
        began = time.perf_counter()
        bad = self._read(bucket, plan, answers)
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
        """Whether a bucket is gathered: what all ranks know decides, a saved state included.

        It begins as expected at its first step, and is scattered for good once it has become twice too large.
        """
        if key in self._parts.sizes:
            return False
        volume = self._gather.volume(key)
        if volume is not None:
            return volume <= 2 * self._gather_below
        return gathered_bytes(self._codec, bucket.numels, self._channel.world, bucket.step) < self._gather_below

    def _plan(self, bucket: Bucket) -> _Plan:
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
        return _Plan(list(bucket.gradients), partitions, shares, reserves, slacks, own, sums, split)

    def _first_parts(self, bucket: Bucket, plan: _Plan) -> list[int]:
        """Entries may crowd in one share: room for twice as many as an even spread gives."""
        numels = bucket.numels
        return [
            first_size(self._codec, [min(2 * n, whole) for n, whole in zip(each, numels, strict=True)], bucket.step)
            for each in plan.shares
        ]

    def _first_results(self, bucket: Bucket, plan: _Plan) -> list[int]:
        return [first_size(self._second, each, bucket.step) for each in plan.shares]

    def _reduce(self, bucket: Bucket, plan: _Plan, received: list[Tensor], answer: Tensor) -> Frame:
        """Fill the answer with the own share's result, after a prefix."""
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
            result = encode_sums(self._second, sums, plan.names, room, step=bucket.step)
        _PREFIX.pack_into(answer.numpy().data, 0, largest, 1 + frames.non_finite[0] if frames.non_finite else 0)
        self._keep(bucket, plan)
        return result

    def _keep(self, bucket: Bucket, plan: _Plan) -> None:
        """Add what is left of the sums to the memory."""
        rank = self._channel.rank
        for i, (gradient, left) in enumerate(zip(bucket.gradients.values(), plan.sums, strict=True)):
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

    def _places(self, plan: _Plan, i: int, n: int) -> Tensor:
        if i not in plan.places:
            plan.places[i] = plan.partitions[i].places(n, self._channel.rank)
        return plan.places[i]

    def _read(self, bucket: Bucket, plan: _Plan, answers: list[Tensor]) -> list[int]:
        """Write the mean to the outs; or the ranks that were not finite."""
        key, world = bucket.key, self._channel.world
        prefixes = [_PREFIX.unpack_from(answer.numpy().data) for answer in answers]
        bad = {culprit - 1 for _, culprit in prefixes if culprit}
        if bad:
            return sorted(bad)
        frames = self._answers
        frames.read([answer[_PREFIX.size :] for answer in answers], plan.shares, trailing=True)
        self._parts.learn(key, [largest for largest, _ in prefixes], plan.slacks)
        self._results.learn(key, frames.lengths, plan.slacks)
        frames.sum_to(bucket.outs, 1.0 / world, plan.split)
        return []

    def _give_back(self, plan: _Plan, numels: list[int], result: Frame) -> None:
        reader = FrameReader(result, plan.shares[self._channel.rank])
        for section in reader.sections:
            positions, values = reader.entries(section)
            places = self._places(plan, section.id, numels[section.id])
            self._codec.give_back(plan.names[section.id], places[positions], values)

    def state_dict(self) -> dict[str, Any]:
        parts, results = self._parts.state_dict(), self._results.state_dict()
        gathered = {"gather": self._gather.state_dict()} if self._gather_below else {}
        return {"parts": parts, "results": results, "second": self._second.state_dict(), **gathered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._gather.load_state_dict(state.get("gather", {}))
        self._parts.load_state_dict(state.get("parts", {}))
        self._results.load_state_dict(state.get("results", {}))
        self._second.load_state_dict(state.get("second", self._second.copy().state_dict()))

    def __repr__(self) -> str:
        return f"ScatterReduce(gather_below={self._gather_below})" if self._gather_below else "ScatterReduce()"


def _write_sent(plan: _Plan, frames: Sequence[Frame], outs: list[Tensor]) -> None:
    """All owners' parts of what a rank sent."""
    read_frames(frames, plan.shares).sum_to(outs, 1.0, plan.split)
