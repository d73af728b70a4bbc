"""ScatterReduce: every rank owns a share of the index space; the volume per rank does not grow with the ranks.

Entries go to their owner, which adds them up, selects again and makes the result known. What the second selection
rejects goes to the owner's own memory: there it counts for the mean as much as it did in the sum.
"""

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codec.codec import Codec, empty_frame
from thinwire.codec.frame import Frame, FrameReader
from thinwire.codec.memory import Drop
from thinwire.codec.parts import Piece, encode_leftover, encode_parts
from thinwire.codec.selection import RandomK, Threshold
from thinwire.exchange.base import AgreedSizes, Bucket, Exchange, Groups, Outcome, first_size, padded, slack
from thinwire.exchange.channel import Channel

# Smaller tensors have one owner: cutting them up would cost more in headers than it balances.
_CUT_FROM = 1 << 15
# Before a result: the largest part that its owner received, and 1 + a rank that was not finite.
_PREFIX = struct.Struct("<QQ")


def share_out(
    sizes: Mapping[str, int], world: int, smallest: int = 1, cost: Callable[[int], float] = float
) -> dict[str, list[tuple[int, int, int]]]:
    """Who owns what: (owner, begin, end) ranges of every parameter, the same on every rank and for all buckets.

    Large tensors are cut so that every rank's shares cost the same; no share is cut below `smallest` elements on
    average, because tensors that small travel whole.
    """
    load = [0.0] * world
    owners: dict[str, list[tuple[int, int, int]]] = {}
    cut = {name: n for name, n in sizes.items() if n >= max(_CUT_FROM, 2 * smallest * world)}
    for name, n in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if name not in cut:
            lightest = load.index(min(load))
            load[lightest] += cost(n)
            owners[name] = [(lightest, 0, n)]
    even = (sum(load) + sum(map(cost, cut.values()))) / world
    room = [max(even - taken, 0.0) for taken in load]
    for name, n in cut.items():
        # At least half an even share each: what is left over is split by the room that ranks have.
        parts = [0.5 / world + 0.5 * free / max(sum(room), 1e-9) for free in room]
        bounds = [int(n * sum(parts[:r]) / sum(parts)) for r in range(world)] + [n]
        owners[name] = [(r, bounds[r], bounds[r + 1]) for r in range(world)]
    return owners


@dataclass(frozen=True)
class _Plan:
    """A bucket's pieces by owner, and the views of the outs that they are."""

    owned: list[list[Piece]]
    sizes: list[list[int]]  # of the pieces, by owner
    room: int  # bytes for the part that stays on this rank
    slacks: list[int]  # by owner, see `slack`

    def views(self, outs: Sequence[Tensor], owner: int) -> list[Tensor]:
        return [outs[p.tensor][p.begin : p.end] for p in self.owned[owner]]


def _cost(codec: Codec, n: int) -> float:
    """About the bytes that a tensor of n elements takes."""
    return float(codec.frame_bound([n], codec.expected_counts([n])))


class ScatterReduce(Exchange):
    """All-to-all of parts, a second selection by the owners, all-gather of the results."""

    def __init__(self) -> None:
        self._parts = AgreedSizes()
        self._results = AgreedSizes()
        self._plans: dict[str, _Plan] = {}

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        self._channel, self._codec = channel, codec
        self._owners = share_out(sizes, channel.world, codec.min_numel, lambda n: _cost(codec, n))
        # Random positions are the same on all ranks: selecting again would thin out what has no fill-in.
        selection = Threshold(0.0) if isinstance(codec.selection, RandomK) else codec.selection
        self._second = Codec(
            selection, codec.values, Drop(), scope=codec.scope, min_numel=codec.min_numel, kernels=codec.kernels
        )

    def channels(self) -> list[Channel]:
        return [self._channel]

    def mean(self, bucket: Bucket) -> Outcome:
        channel, key = self._channel, bucket.key
        if key not in self._plans:
            self._plans[key] = self._plan(bucket)
        plan = self._plans[key]
        budgets = self._parts.get(key, bucket.step, lambda: self._first_parts(bucket, plan))
        (size,) = self._results.get(key, bucket.step, lambda: [self._first_result(bucket, plan)])
        # 1. Split what travels by owner; the rest stays in the memory.
        began = time.perf_counter()
        room = [plan.room if r == channel.rank else n for r, n in enumerate(budgets)]
        parts = encode_parts(self._codec, bucket.gradients, plan.owned, room, step=bucket.step, hold=bucket.hold)
        compress = time.perf_counter() - began
        # 2. To the owners.
        sent = [part.data if r == channel.rank else padded(part, budgets[r]) for r, part in enumerate(parts)]
        received = channel.all_to_all(sent, budgets[channel.rank])
        # 3. Add up the own share in rank order, select again; what is rejected stays here.
        began = time.perf_counter()
        result, news = self._reduce(bucket, plan, received)
        compress += time.perf_counter() - began
        # 4. Results, to everybody.
        prefix = torch.frombuffer(bytearray(_PREFIX.pack(*news)), dtype=torch.uint8)
        messages = channel.all_gather(torch.cat([prefix, padded(result, size)]))
        # 5. Read them: the same bits everywhere.
        began = time.perf_counter()
        bad = self._read(bucket, plan, messages)
        decode = time.perf_counter() - began
        names = list(bucket.gradients)
        counts = dict(zip(names, map(sum, zip(*(part.counts for part in parts), strict=True)), strict=False))
        return Outcome(bad, counts, compress, decode, lambda: self._give_back(names, plan.owned[channel.rank], result))

    def _plan(self, bucket: Bucket) -> _Plan:
        owned: list[list[Piece]] = [[] for _ in range(self._channel.world)]
        for i, name in enumerate(bucket.gradients):
            for owner, begin, end in self._owners[name]:
                owned[owner].append(Piece(i, begin, end))
        sizes = [[p.end - p.begin for p in pieces] for pieces in owned]
        # The part that stays here goes over no wire, so that it may hold everything.
        mine, numels = owned[self._channel.rank], bucket.numels
        room = self._codec.frame_bound([numels[p.tensor] for p in mine], [p.end - p.begin for p in mine])
        return _Plan(owned, sizes, room, [slack(self._codec, each) for each in sizes])

    def _first_parts(self, bucket: Bucket, plan: _Plan) -> list[int]:
        """Entries may crowd in one share: room for twice as many as an even spread gives."""
        numels = bucket.numels
        return [
            first_size(self._codec, [min(2 * (p.end - p.begin), numels[p.tensor]) for p in pieces], bucket.step)
            for pieces in plan.owned
        ]

    def _first_result(self, bucket: Bucket, plan: _Plan) -> int:
        return max(first_size(self._second, [p.end - p.begin for p in pieces], bucket.step) for pieces in plan.owned)

    def _reduce(self, bucket: Bucket, plan: _Plan, received: list[Tensor]) -> tuple[Frame, tuple[int, int]]:
        """The own share's result, and what its prefix says."""
        names, rank = list(bucket.gradients), self._channel.rank
        readers = [FrameReader(message, bucket.numels, trailing=True) for message in received]
        pieces, views = plan.owned[rank], plan.views(bucket.outs, rank)
        for view in views:  # parts hold nothing outside of the own share
            view.zero_()
        for reader in readers:
            reader.add_to(bucket.outs)
        bad = next((r for r, reader in enumerate(readers) if reader.non_finite), -1)
        if bad >= 0:
            result = empty_frame(str(bad))
        else:
            sums = {names[p.tensor]: view for p, view in zip(pieces, views, strict=True)}
            budget = self._results.sizes[bucket.key][0]
            result = encode_leftover(self._second, sums, step=bucket.step, budget=budget)
        for piece, view in zip(pieces, views, strict=True):
            name = names[piece.tensor]
            held = self._codec.open_slots(name, bucket.gradients[name]).get("residual")
            if held is not None:
                held[piece.begin : piece.end] += view.to(held.device)
        largest = max((reader.length for r, reader in enumerate(readers) if r != rank), default=0)
        return result, (largest, bad + 1)

    def _read(self, bucket: Bucket, plan: _Plan, messages: list[Tensor]) -> list[int]:
        """Write the mean to the outs; or the ranks that were not finite."""
        key, world = bucket.key, self._channel.world
        prefixes = [_PREFIX.unpack(message[: _PREFIX.size].numpy().tobytes()) for message in messages]
        bad = {culprit - 1 for _, culprit in prefixes if culprit}
        if bad:
            return sorted(bad)
        readers = []
        for owner, message in enumerate(messages):
            self._parts.learn(key, owner, prefixes[owner][0], plan.slacks[owner])
            readers.append(FrameReader(message[_PREFIX.size :], plan.sizes[owner], trailing=True))
        self._results.learn(key, 0, max(reader.length for reader in readers), max(plan.slacks))
        for out in bucket.outs:
            out.zero_()
        for owner, reader in enumerate(readers):
            reader.add_to(plan.views(bucket.outs, owner), 1.0 / world)
        return []

    def _give_back(self, names: list[str], pieces: list[Piece], result: Frame) -> None:
        reader = FrameReader(result, [p.end - p.begin for p in pieces])
        for section in reader.sections:
            positions, values = reader.entries(section)
            piece = pieces[section.id]
            self._codec.give_back(names[piece.tensor], positions + piece.begin, values)

    def state_dict(self) -> dict[str, Any]:
        parts, results = self._parts.state_dict(), self._results.state_dict()
        return {"parts": parts, "results": results, "second": self._second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parts.load_state_dict(state.get("parts", {}))
        self._results.load_state_dict(state.get("results", {}))
        self._second.load_state_dict(state.get("second", self._second.fresh().state_dict()))

    def __repr__(self) -> str:
        return "ScatterReduce()"
