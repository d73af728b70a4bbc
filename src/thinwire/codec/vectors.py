"""Vectors: the sums of gradient and residual that selections choose from, and the statistics of these sums.

A group holds one or several vectors that share a threshold. `NativeGroup` computes its statistics with the kernels,
`TorchGroup` with torch operations. Exact statistics are equal in both; sampled ones are equally accurate.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire import _native

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# The largest float32. Sums are clamped to it, because a residual must never hold an infinity.
FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Moments:
    """The size of a sample and the sums of x, x^2 and |x| over it."""

    count: int
    sum: float
    squares: float
    magnitudes: float

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        if not self.count:
            return 0.0
        mean = self.sum / self.count
        return float(max(self.squares / self.count - mean * mean, 0.0) ** 0.5)


@dataclass(frozen=True)
class MagnitudeHistogram:
    """The magnitudes of a sample in narrow bins, largest first. Empty bins and zeros are left out."""

    taken: int  # elements of the sample, zeros included
    counts: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]  # the smallest magnitude in each bin
    high: npt.NDArray[np.float64]  # the largest


@dataclass(frozen=True)
class Vector:
    """What a tensor selects from: decay * residual + gradient, or the gradient alone where `residual` is None.

    `kept` receives what is not sent. `mask` is set to zero where an entry was sent. Both may be None.
    """

    gradient: Tensor
    residual: Tensor | None
    decay: float
    kept: Tensor | None
    mask: Tensor | None

    @property
    def n(self) -> int:
        return self.gradient.numel()

    @property
    def args(self) -> "_native.VectorArgs":
        """The vector as the kernels take it."""
        residual = self.residual.data_ptr() if self.residual is not None else 0
        gradient = self.gradient
        return (gradient.data_ptr(), DTYPES[gradient.dtype], residual, self.decay, gradient.numel())

    def accumulated(self) -> Tensor:
        """Return gradient + decay * residual as a new float32 tensor; the residual does not change."""
        gradient = self.gradient.reshape(-1).float()
        if self.residual is None:
            return gradient
        total = (self.residual if self.decay == 1.0 else self.residual * self.decay) + gradient
        return total.clamp_(-FLOAT_MAX, FLOAT_MAX)  # sums of finite values stay finite

    def accumulate(self) -> "Vector":
        """Write the sum to the residual, and return the vector that reads it from there."""
        if self.residual is None:
            return self
        if self.gradient.device.type == "cpu":
            _native.accumulate(self.args)
        else:
            self.residual.copy_(self.accumulated())
        return self.after_accumulation()

    def after_accumulation(self) -> "Vector":
        """Return the same vector for the case that its sum has been written to the residual."""
        return self if self.residual is None else replace(self, gradient=self.residual, residual=None, decay=1.0)


class Group(ABC):
    """One or several vectors that share a threshold."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self.vectors = list(vectors)
        self.n = sum(v.n for v in vectors)

    def accumulate(self) -> None:
        """Add the gradients to the residuals now. This pays where every element is read more than once."""
        self.vectors = [v.accumulate() for v in self.vectors]

    @abstractmethod
    def sampled_thresholds(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        """Return a threshold for each density, from about `wanted` elements, and the share of them that exceeds it.

        The share is less than the density where many magnitudes are equal. Ties then make up the difference.
        """

    @abstractmethod
    def moments(self, wanted: int, seed: int) -> Moments:
        """Return the moments of about `wanted` sampled elements, or of all."""

    @abstractmethod
    def histogram(self, wanted: int, seed: int) -> MagnitudeHistogram:
        """Return the magnitudes of about `wanted` sampled elements, or of all, in bins about 1 % wide."""

    @abstractmethod
    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        """Return the exact magnitude of a rank (0 is the largest), how many are greater and how many are equal."""


class NativeGroup(Group):
    """A group of CPU tensors; the kernels compute its statistics."""

    def sampled_thresholds(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        return _native.sampled_thresholds([v.args for v in self.vectors], list(densities), wanted, seed)

    def moments(self, wanted: int, seed: int) -> Moments:
        total = [0.0] * 4
        for i, vector in enumerate(self.vectors):
            share = -(-wanted * vector.n // max(self.n, 1))
            for j, part in enumerate(_native.moments(vector.args, share, _native.mix(seed + i))):
                total[j] += part
        return Moments(int(total[0]), *total[1:])

    def histogram(self, wanted: int, seed: int) -> MagnitudeHistogram:
        rows = torch.empty(min(self.n, _native.BINS) + 1, 3, dtype=torch.float64)
        taken, bins = _native.histogram([v.args for v in self.vectors], wanted, seed, rows.data_ptr())
        counts, low, high = rows[:bins].numpy().T
        return MagnitudeHistogram(taken, counts, low, high)

    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        value, greater, equal, accumulated = _native.order_statistic([v.args for v in self.vectors], rank)
        if accumulated:
            self.vectors = [v.after_accumulation() for v in self.vectors]
        return value, greater, equal


class TorchGroup(Group):
    """A group on any device; torch operations compute its statistics. It serves GPUs and tests the kernels."""

    def _sample(self, wanted: int, seed: int) -> Tensor:
        if wanted >= self.n:
            return torch.cat([v.accumulated() for v in self.vectors])
        stride = max(1, self.n // max(wanted, 1))
        return torch.cat([_stratified_sample(v, stride, seed) for v in self.vectors])

    def sampled_thresholds(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        magnitudes = self._sample(wanted, seed).abs().sort(descending=True).values
        found = []
        for density in densities:
            rank = int(density * len(magnitudes))
            if rank >= len(magnitudes):
                found.append((0.0, 1.0))
            else:
                above = int((magnitudes > magnitudes[rank]).sum())
                found.append((float(magnitudes[rank]), above / len(magnitudes)))
        return found

    def moments(self, wanted: int, seed: int) -> Moments:
        x = self._sample(wanted, seed).double()
        return Moments(x.numel(), float(x.sum()), float(x.square().sum()), float(x.abs().sum()))

    def histogram(self, wanted: int, seed: int) -> MagnitudeHistogram:
        magnitudes = self._sample(wanted, seed).abs()
        places = magnitudes.view(torch.int32).long() >> _native.BIN_SHIFT
        # Magnitudes too small to contribute share the first bin, which is left out.
        bottom = max(int(places.max()) - _native.BINS, 0) if len(places) else 0
        places = places.clamp(min=bottom) - bottom
        counts = torch.bincount(places, minlength=_native.BINS + 1)
        low = torch.full_like(counts, torch.inf, dtype=torch.float32).scatter_reduce_(0, places, magnitudes, "amin")
        high = torch.zeros_like(counts, dtype=torch.float32).scatter_reduce_(0, places, magnitudes, "amax")
        used = counts[1:].nonzero().flatten().flip(0) + 1
        parts = [t[used].double().cpu().numpy() for t in (counts, low, high)]
        return MagnitudeHistogram(len(magnitudes), *parts)

    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        self.accumulate()
        magnitudes = torch.cat([v.accumulated() for v in self.vectors]).abs()
        value = magnitudes.topk(rank + 1).values[-1]
        return float(value), int((magnitudes > value).sum()), int((magnitudes == value).sum())


def _stratified_sample(vector: Vector, stride: int, seed: int) -> Tensor:
    """Return one element at a random position of every `stride` elements.

    A fixed position would pick the same columns of a matrix again and again.
    """
    device = vector.gradient.device
    starts = torch.arange(0, max(vector.n - stride, 0) + 1, stride, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    # A tensor of the group may have fewer elements than the stride.
    positions = starts + torch.randint(min(stride, vector.n), starts.shape, generator=generator, device=device)
    residual = vector.residual[positions] if vector.residual is not None else None
    return replace(vector, gradient=vector.gradient.reshape(-1)[positions], residual=residual).accumulated()


def first_not_finite(tensors: Sequence[Tensor]) -> int:
    """Return the index of the first of these contiguous tensors that holds an infinity or a NaN, or -1."""
    if all(t.device.type == "cpu" for t in tensors):
        return _native.first_not_finite([array_args(t) for t in tensors])
    return next((i for i, t in enumerate(tensors) if not t.isfinite().all()), -1)


def array_args(tensor: Tensor) -> "_native.ArrayArgs":
    """Return a contiguous CPU tensor as the kernels take it."""
    return tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel()
