"""LowRankMean: averages the coordinates of matrices in bases that all ranks share, and expands the mean.

The coordinates of all tensors travel in the codec's values, by ScatterReduce, whose traffic does not grow with the
number of ranks, or by Gather, which takes one round instead of two. What the coordinates as sent do not express stays
in the residual: the part outside of the basis, and all rounding errors.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.encode import BucketViews
from thinwire.codec.feedback import ErrorFeedback, first_not_finite
from thinwire.codec.frame import Outs
from thinwire.codec.low_rank import Basis, LowRank, matrix_shape
from thinwire.codec.selection import Rotate
from thinwire.exchange.base import Bucket, Exchange, Groups, Outcome, Stages
from thinwire.exchange.channel import Channel


class _Plan:
    """Memory for the coordinates of a bucket whose bases have certain sides, the same in every step.

    The coordinates of all tensors lie one after the other, so that one operation serves all of them.
    """

    def __init__(self, keys: list[str], sizes: list[int]) -> None:
        self.keys = keys
        self.coordinates, parts = _aligned(sizes)
        self.kept, kept = _aligned(sizes)
        _, means = _aligned(sizes)
        self.views = BucketViews(zip(keys, parts, strict=True))
        self.slots = {key: {"residual": part} for key, part in zip(keys, kept, strict=True)}
        self.means = Outs(means)
        self.places = [(part, part.data_ptr()) for part in parts]
        self.means_at = [mean.data_ptr() for mean in means]


def _aligned(sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Zeros, and parts of these sizes that begin at multiples of 64 bytes, as torch's own tensors do.

    What matrix products round to may depend on the alignment of their results.
    """
    rooms = [-(-size // 16) * 16 for size in sizes]
    whole = torch.zeros(sum(rooms))
    return whole, [room[:size] for room, size in zip(whole.split_with_sizes(rooms), sizes, strict=True)]


@dataclass
class _Part:
    """One tensor of a bucket on its way through an exchange."""

    basis: Basis | None  # None: the tensor is sent whole, and its coordinates are its elements
    total: Tensor  # the residual, with the tensor added unless it is on hold
    coordinates: Tensor
    at: int  # address of the coordinates

    @property
    def in_kernels(self) -> bool:
        """Whether kernels can write to the residual."""
        return self.total.is_cpu and self.total.dtype == torch.float32

    @property
    def args(self) -> tuple[int, int, int, bool, int]:
        """The basis as the kernels take it; they take a tensor without one as a matrix of one row."""
        return (1, self.total.numel(), 0, True, 0) if self.basis is None else self.basis.args

    def subtract(self, matrix: Tensor) -> None:
        """Subtract what the coordinates stand for."""
        if self.basis is None:
            matrix -= self.coordinates.to(matrix)
        else:
            self.basis.subtract(matrix, self.coordinates)


class LowRankMean(Exchange):
    """The mean of low-rank projections, whose coordinates `inner` averages. `shapes` are those of all parameters."""

    def __init__(self, inner: Exchange, shapes: Mapping[str, Sequence[int]]) -> None:
        self._inner, self._shapes = inner, dict(shapes)
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        selection = codec.selection
        assert isinstance(selection, LowRank)
        self._codec = codec
        # A window of everything: no positions, zeros included, and a size that all ranks know.
        self._inner_codec = Codec(Rotate(1.0), codec.values, ErrorFeedback(), kernels=codec.kernels)
        self._inner.setup(channel, self._inner_codec, sizes, groups)
        ranks = {name: selection.rank(*matrix_shape(shape)) for name, shape in self._shapes.items()}
        self._bases = {name: Basis.first(name, self._shapes[name], rank) for name, rank in ranks.items() if rank}

    def channels(self) -> list[Channel]:
        return self._inner.channels()

    def stages(self, bucket: Bucket) -> Stages:
        # 1. Add the tensors to the residuals and project the sums.
        began = time.perf_counter()
        plan = self._plan(bucket)
        parts = self._parts(bucket, plan)
        self._inner_codec.place_residuals(plan.slots)
        compress = time.perf_counter() - began
        # 2. Average the coordinates.
        hold = frozenset(key for key, name in zip(plan.keys, bucket.tensors, strict=True) if name in bucket.hold)
        outcome = yield from self._inner.stages(Bucket(plan.views, plan.means, bucket.step, hold, bucket.index))
        compress += outcome.compress
        if outcome.non_finite:
            plan.kept.zero_()
            return Outcome(outcome.non_finite, compress=compress)
        # 3. What took effect of the coordinates is all but what the inner codec kept, which is forgotten there:
        # rounding errors, and where ScatterReduce rounds sums, those of the sums that this rank owns. The next
        # coordinates refer to another basis, so that the outer residual must hold these errors.
        began = time.perf_counter()
        plan.coordinates -= plan.kept
        plan.kept.zero_()
        _leave(parts)
        # 4. Expand the mean, and take it as the next basis.
        self._finish(bucket, plan, parts)
        counts = {name: outcome.counts.get(key, 0) for key, name in zip(plan.keys, bucket.tensors, strict=True)}
        decode = time.perf_counter() - began + outcome.decode
        return Outcome(
            [],
            counts,
            compress,
            decode,
            undo=lambda: _undo(plan, parts),
            sent=lambda targets: _write_sent(plan, parts, targets),
        )

    def _plan(self, bucket: Bucket) -> _Plan:
        """The memory for a bucket's coordinates, whose number depends on the sides of the bases."""
        keys = tuple(self._key(name) for name in bucket.tensors)
        found = self._plans.get(keys)
        if found is None:
            bases = [self._bases.get(name) for name in bucket.tensors]
            sizes = [n if basis is None else basis.size for n, basis in zip(bucket.numels, bases, strict=True)]
            found = self._plans[keys] = _Plan(list(keys), sizes)
        return found

    def _key(self, name: str) -> str:
        """The name of a tensor's coordinates, which tells the side of its basis."""
        basis = self._bases.get(name)
        return name if basis is None else f"{name} {'rows' if basis.of_rows else 'columns'}"

    def _parts(self, bucket: Bucket, plan: _Plan) -> list[_Part]:
        """The tensors' sums and coordinates; NaN if a tensor is not finite, which tells all ranks."""
        codec = self._codec
        added = {name for name, tensor in bucket.tensors.items() if codec.is_accumulated(name, tensor)}
        changes = {name: codec.checked(name, t) for name, t in bucket.tensors.items() if name not in added}
        finite = first_not_finite([t for name, t in changes.items() if name not in bucket.hold]) < 0
        parts = []
        for name, (coordinates, at) in zip(bucket.tensors, plan.places, strict=True):
            basis, change = self._bases.get(name), changes.get(name, bucket.tensors[name])
            slots = codec.ensure_residuals(name, change)
            if name in bucket.hold or not finite:
                held = slots.get("residual")
                total = torch.zeros(change.numel()) if held is None else held
                coordinates.fill_(0.0 if finite else torch.nan)
            else:
                total = (
                    slots["residual"] if name in added else codec.feedback.prepare(change, slots).accumulate().gradient
                )
                total = total.view(-1)
                if basis is None:
                    coordinates.copy_(total)
                else:
                    basis.project(total, coordinates)
            parts.append(_Part(basis, total, coordinates, at))
        return parts

    def _finish(self, bucket: Bucket, plan: _Plan, parts: Sequence[_Part]) -> None:
        """Write what the mean coordinates stand for to the bucket's outputs, and advance the bases."""
        following = [None if part.basis is None else part.basis.following() for part in parts]
        calls = []
        for part, after, mean, out in zip(parts, following, plan.means_at, bucket.outs, strict=True):
            seed, there = (0, 0) if after is None else (after.seed, after.vectors.data_ptr())
            calls.append((*part.args, mean, out.data_ptr(), seed, there))
        advanced = _native.expand_low_rank(calls)
        for name, after, moved in zip(bucket.tensors, following, advanced, strict=True):
            if after is not None and moved:
                self._bases[name] = after

    def state_dict(self) -> dict[str, Any]:
        """Return the bases by parameter name."""
        return {name: basis.state_dict() for name, basis in self._bases.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the bases that `state_dict` returned; ValueError, and nothing changes, if they do not fit."""
        if unknown := next((name for name in state if name not in self._bases), None):
            raise ValueError(f"the exchange's state has a basis for {unknown!r}, which has none here")
        self._bases |= {name: self._bases[name].loaded(saved) for name, saved in state.items()}

    def __repr__(self) -> str:
        return f"LowRankMean({self._inner!r})"


def _leave(parts: Sequence[_Part]) -> None:
    """Subtract what the coordinates stand for from the residuals."""
    _native.subtract_low_rank([(*part.args, part.at, part.total.data_ptr()) for part in parts if part.in_kernels])
    for part in parts:
        if not part.in_kernels:
            part.subtract(part.total)


def _undo(plan: _Plan, parts: Sequence[_Part]) -> None:
    """Add what was sent to the residuals again."""
    plan.coordinates.neg_()
    _leave(parts)
    plan.coordinates.neg_()


def _write_sent(plan: _Plan, parts: Sequence[_Part], targets: list[Tensor]) -> None:
    plan.coordinates.neg_()
    for part, target in zip(parts, targets, strict=True):
        target.zero_()
        part.subtract(target)
    plan.coordinates.neg_()
