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

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import ErrorFeedback, first_not_finite
from thinwire.codec.low_rank import Basis, LowRank, matrix_shape
from thinwire.codec.selection import Rotate
from thinwire.exchange.base import Bucket, Exchange, Groups, Outcome, Stages
from thinwire.exchange.channel import Channel


@dataclass
class _Part:
    """One tensor of a bucket on its way through an exchange."""

    basis: Basis | None  # None: the tensor is sent whole, and its coordinates are its elements
    total: Tensor  # the residual, with the tensor added unless it is on hold
    coordinates: Tensor

    def subtract(self, matrix: Tensor, coordinates: Tensor) -> None:
        """Subtract what coordinates stand for."""
        if self.basis is None:
            matrix -= coordinates.to(matrix)
        else:
            self.basis.subtract(matrix, coordinates)


class LowRankMean(Exchange):
    """The mean of low-rank projections, whose coordinates `inner` averages. `shapes` are those of all parameters."""

    def __init__(self, inner: Exchange, shapes: Mapping[str, Sequence[int]]) -> None:
        self._inner, self._shapes = inner, dict(shapes)

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
        parts = self._parts(bucket)
        compress = time.perf_counter() - began
        # 2. Average the coordinates. Their names tell the side of the basis, because it determines their number.
        keys = {self._key(name, part.basis): part.coordinates for name, part in parts.items()}
        means = [torch.empty(c.numel()) for c in keys.values()]
        hold = frozenset(self._key(name, parts[name].basis) for name in bucket.hold)
        outcome = yield from self._inner.stages(Bucket(keys, means, bucket.step, hold, bucket.index))
        compress += outcome.compress
        if outcome.non_finite:
            self._forget(keys)
            return Outcome(outcome.non_finite, compress=compress)
        # 3. Leave in the residual what was not sent, expand the mean, and take it as the next basis.
        began = time.perf_counter()
        sent = self._sent(keys)
        _leave(parts, sent, 1.0)
        for name, mean, out in zip(parts, means, bucket.outs, strict=True):
            self._finish(name, mean, out)
        counts = dict(zip(parts, (outcome.counts.get(key, 0) for key in keys), strict=True))
        decode = time.perf_counter() - began + outcome.decode
        return Outcome(
            [],
            counts,
            compress,
            decode,
            undo=lambda: _leave(parts, sent, -1.0),
            sent=lambda targets: _write_sent(parts, sent, targets),
        )

    def _parts(self, bucket: Bucket) -> dict[str, _Part]:
        """The tensors' sums and coordinates; NaN if a tensor is not finite, which tells all ranks."""
        codec = self._codec
        checked = {name: codec.checked(name, tensor) for name, tensor in bucket.tensors.items()}
        finite = first_not_finite([t for name, t in checked.items() if name not in bucket.hold]) < 0
        parts = {}
        for name, tensor in checked.items():
            basis, slots = self._bases.get(name), codec.ensure_residuals(name, tensor)
            size = tensor.numel() if basis is None else basis.size
            if name in bucket.hold or not finite:
                total, coordinates = slots.get("residual"), torch.full((size,), 0.0 if finite else torch.nan)
                total = torch.zeros(tensor.numel()) if total is None else total
            else:
                total = codec.feedback.prepare(tensor, slots).accumulate().gradient.view(-1)
                plain = total.float()
                coordinates = plain.cpu().clone() if basis is None else basis.project(plain)
            parts[name] = _Part(basis, total, coordinates)
        return parts

    def _sent(self, keys: Mapping[str, Tensor]) -> list[Tensor]:
        """What took effect of each tensor's coordinates: all but what the inner codec kept, which is forgotten there.

        It kept rounding errors, and where ScatterReduce rounds sums, those of the sums that this rank owns. The next
        coordinates refer to another basis, so that the outer residual must hold these errors.
        """
        kept = [self._inner_codec.residuals(key).get("residual") for key in keys]
        sent = [c if k is None else c - k for c, k in zip(keys.values(), kept, strict=True)]
        self._forget(keys)
        return sent

    def _forget(self, keys: Mapping[str, Tensor]) -> None:
        for key in keys:
            if (kept := self._inner_codec.residuals(key).get("residual")) is not None:
                kept.zero_()

    @staticmethod
    def _key(name: str, basis: Basis | None) -> str:
        return name if basis is None else f"{name} {'rows' if basis.of_rows else 'columns'}"

    def _finish(self, name: str, mean: Tensor, out: Tensor) -> None:
        basis = self._bases.get(name)
        if basis is None:
            out.copy_(mean)
        else:
            basis.expand(mean, out)
            self._bases[name] = basis.advanced(mean)

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


def _leave(parts: Mapping[str, _Part], sent: Sequence[Tensor], sign: float) -> None:
    """Subtract what was sent from the residuals; a sign of -1 adds it back."""
    for part, coordinates in zip(parts.values(), sent, strict=True):
        part.subtract(part.total, sign * coordinates)


def _write_sent(parts: Mapping[str, _Part], sent: Sequence[Tensor], targets: list[Tensor]) -> None:
    for part, coordinates, target in zip(parts.values(), sent, targets, strict=True):
        target.zero_()
        part.subtract(target, -coordinates)
