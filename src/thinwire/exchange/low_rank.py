"""LowRankMean: averages the coordinates of matrices in bases that all ranks share, and expands the mean.

The coordinates of all tensors travel in one frame per rank by Gather, in the codec's values. Beyond `_GATHERED` ranks a
32-bit all-reduce of them moves fewer bytes. What a rank's coordinates did not express stays in its residual.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import NoFeedback, first_not_finite
from thinwire.codec.low_rank import Basis, LowRank, matrix_shape
from thinwire.codec.selection import Rotate
from thinwire.exchange.base import Bucket, Dense, Exchange, Groups, Outcome
from thinwire.exchange.channel import Channel
from thinwire.exchange.gather import Gather

# An all-reduce moves 2 x 32 bits per number and rank, an all-gather of 2-bit values 2 bits for each other rank.
_GATHERED = 32


@dataclass
class _Part:
    """One tensor of a bucket on its way through an exchange."""

    basis: Basis | None  # None: the tensor is sent whole, and its coordinates are its elements
    total: Tensor | None  # the residual with the tensor added; None where nothing of it is sent
    coordinates: Tensor

    def subtract(self, matrix: Tensor, coordinates: Tensor) -> None:
        """Subtract what coordinates stand for."""
        if self.basis is None:
            matrix -= coordinates.to(matrix)
        else:
            self.basis.subtract(matrix, coordinates)


class LowRankMean(Exchange):
    """The mean of low-rank projections. `shapes` are the shapes of all parameters, by name."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = dict(shapes)

    def setup(self, channel: Channel, codec: Codec, sizes: Mapping[str, int], groups: Groups) -> None:
        selection = codec.selection
        assert isinstance(selection, LowRank)
        self._codec = codec
        # A window of everything: no positions, zeros included, and a size that all ranks know.
        inner = Codec(Rotate(1.0), codec.values, NoFeedback(), kernels=codec.kernels)
        self._inner: Exchange = Gather() if channel.world <= _GATHERED else Dense()
        self._inner.setup(channel, inner, sizes, groups)
        ranks = {name: selection.rank(*matrix_shape(shape)) for name, shape in self._shapes.items()}
        self._bases = {name: Basis.first(name, self._shapes[name], rank) for name, rank in ranks.items() if rank}

    def channels(self) -> list[Channel]:
        return self._inner.channels()

    def mean(self, bucket: Bucket) -> Outcome:
        # 1. Add the tensors to the residuals and project the sums.
        began = time.perf_counter()
        parts = self._parts(bucket)
        compress = time.perf_counter() - began
        # 2. Average the coordinates. Their names tell the side of the basis, because it determines their number.
        keys = {self._key(name, part.basis): part.coordinates for name, part in parts.items()}
        means = [torch.empty(c.numel()) for c in keys.values()]
        hold = frozenset(self._key(name, parts[name].basis) for name in bucket.hold)
        outcome = self._inner.mean(Bucket(keys, means, bucket.step, hold))
        compress += outcome.compress
        if outcome.non_finite:
            return Outcome(outcome.non_finite, compress=compress)
        # 3. Leave in the residual what was not sent, expand the mean, and take it as the next basis.
        began = time.perf_counter()
        sent = _sent(parts, outcome)
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
        active = {name: codec.checked(name, t) for name, t in bucket.tensors.items() if name not in bucket.hold}
        finite = first_not_finite(list(active.values())) < 0
        parts = {}
        for name, numel in zip(bucket.tensors, bucket.numels, strict=True):
            basis = self._bases.get(name)
            if name in active and finite:
                vector = codec.feedback.prepare(active[name], codec.ensure_residuals(name, active[name]))
                total = vector.accumulate().gradient.view(-1)
                plain = total.float()
                parts[name] = _Part(basis, total, plain.cpu() if basis is None else basis.project(plain))
            else:
                size = numel if basis is None else basis.size
                parts[name] = _Part(basis, None, torch.full((size,), 0.0 if finite else torch.nan))
        return parts

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
        return "LowRankMean()"


def _sent(parts: Mapping[str, _Part], outcome: Outcome) -> list[Tensor]:
    """The coordinates as all ranks read them; an all-reduce sends them without rounding."""
    sent = [part.coordinates.clone() for part in parts.values()]
    if outcome.sent is not None:
        outcome.sent(sent)
    return sent


def _leave(parts: Mapping[str, _Part], sent: Sequence[Tensor], sign: float) -> None:
    """Subtract what was sent from the residuals; a sign of -1 adds it back."""
    for part, coordinates in zip(parts.values(), sent, strict=True):
        if part.total is not None:
            part.subtract(part.total, sign * coordinates)


def _write_sent(parts: Mapping[str, _Part], sent: Sequence[Tensor], targets: list[Tensor]) -> None:
    for part, coordinates, target in zip(parts.values(), sent, targets, strict=True):
        target.zero_()
        if part.total is not None:
            part.subtract(target, -coordinates)
