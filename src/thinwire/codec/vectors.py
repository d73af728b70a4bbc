"""Vectors: what a selection may ask of gradient + residual, answered by the native kernels or by torch operations.

A group is one or several tensors that share a threshold; both implementations give the same answers to exact
questions, and answers of the same quality to sampled ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire import _native

# (address of the gradient, dtype code, address of the residual or 0, decay, numel), as the kernels take it
Described = tuple[int, int, int, float, int]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# The largest float32: a residual must never hold an infinity.
MOST = torch.finfo(torch.float32).max

# Bins of a histogram: the exponent and six bits of the fraction, as native/histogram.hpp has them.
_BIN_SHIFT = 17


@dataclass(frozen=True)
class Moments:
    """Of a sample: its size and the sums of x, x^2 and |x|."""

    count: int
    sum: float
    squares: float
    magnitudes: float

    @property
    def deviation(self) -> float:
        if not self.count:
            return 0.0
        mean = self.sum / self.count
        return float(max(self.squares / self.count - mean * mean, 0.0) ** 0.5)


@dataclass(frozen=True)
class Histogram:
    """Magnitudes of a sample in narrow bins from the largest down; bins that hold nothing, and zeros, are left out."""

    taken: int  # elements of the sample, zeros included
    counts: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]  # each bin's smallest magnitude
    high: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Vector:
    """One tensor on its way out: decay * residual + gradient, or the gradient alone where residual is None.

    `kept` receives what is not sent; `mask` is cleared where something was sent. Both may be None.
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
    def described(self) -> Described:
        residual = self.residual.data_ptr() if self.residual is not None else 0
        gradient = self.gradient
        return (gradient.data_ptr(), DTYPES[gradient.dtype], residual, self.decay, gradient.numel())

    def accumulated(self) -> Tensor:
        """Gradient + residual as a new float32 tensor; the residual is not touched."""
        gradient = self.gradient.reshape(-1).float()
        if self.residual is None:
            return gradient
        total = (self.residual if self.decay == 1.0 else self.residual * self.decay) + gradient
        return total.clamp_(-MOST, MOST)  # sums of finite values stay finite

    def settled(self) -> "Vector":
        """The same vector, after writing the sum to the residual."""
        if self.residual is None:
            return self
        if self.gradient.device.type == "cpu":
            _native.accumulate(self.described)
        else:
            self.residual.copy_(self.accumulated())
        return self.written()

    def written(self) -> "Vector":
        """The same vector whose sum is in the residual already."""
        return self if self.residual is None else replace(self, gradient=self.residual, residual=None, decay=1.0)


class Group(ABC):
    """Vectors that share one threshold."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self.vectors = list(vectors)
        self.n = sum(v.n for v in vectors)

    def settle(self) -> None:
        """Add the gradients to the residuals now: worth it where every element is read more than once."""
        self.vectors = [v.settled() for v in self.vectors]

    @abstractmethod
    def sampled(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        """For each density the sample's magnitude of that rank, and the share of the sample that exceeds it.

        The share is less than the density where many magnitudes are equal: then ties must make up the difference.
        """

    @abstractmethod
    def moments(self, wanted: int, seed: int) -> Moments:
        """Moments of about `wanted` sampled elements, or of all."""

    @abstractmethod
    def histogram(self, wanted: int, seed: int) -> Histogram:
        """The magnitudes of about `wanted` sampled elements, or of all, in bins about 1 % wide."""

    @abstractmethod
    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        """The magnitude of a rank (0 = largest), exactly, how many are greater and how many are equal."""


class NativeGroup(Group):
    """CPU tensors, by the kernels."""

    def sampled(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        return _native.sampled_thresholds([v.described for v in self.vectors], list(densities), wanted, seed)

    def moments(self, wanted: int, seed: int) -> Moments:
        total = [0.0] * 4
        for i, vector in enumerate(self.vectors):
            share = -(-wanted * vector.n // max(self.n, 1))
            for j, part in enumerate(_native.moments(vector.described, share, _native.mix(seed + i))):
                total[j] += part
        return Moments(int(total[0]), *total[1:])

    def histogram(self, wanted: int, seed: int) -> Histogram:
        rows = torch.empty(min(self.n, _native.BINS) + 1, 3, dtype=torch.float64)
        taken, bins = _native.histogram([v.described for v in self.vectors], wanted, seed, rows.data_ptr())
        counts, low, high = rows[:bins].numpy().T
        return Histogram(taken, counts, low, high)

    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        value, greater, equal, settled = _native.order_statistic([v.described for v in self.vectors], rank)
        if settled:
            self.vectors = [v.written() for v in self.vectors]
        return value, greater, equal


class TorchGroup(Group):
    """Any device, by torch operations: serves GPUs and is the oracle of the kernels' tests."""

    def _sample(self, wanted: int, seed: int) -> Tensor:
        if wanted >= self.n:
            return torch.cat([v.accumulated() for v in self.vectors])
        stride = max(1, self.n // max(wanted, 1))
        return torch.cat([_one_of_each(v, stride, seed) for v in self.vectors])

    def sampled(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
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

    def histogram(self, wanted: int, seed: int) -> Histogram:
        magnitudes = self._sample(wanted, seed).abs()
        places = magnitudes.view(torch.int32).long() >> _BIN_SHIFT
        # Everything so small that it adds nothing shares the first bin, which is left out.
        bottom = max(int(places.max()) - _native.BINS, 0) if len(places) else 0
        places = places.clamp(min=bottom) - bottom
        counts = torch.bincount(places, minlength=_native.BINS + 1)
        low = torch.full_like(counts, torch.inf, dtype=torch.float32).scatter_reduce_(0, places, magnitudes, "amin")
        high = torch.zeros_like(counts, dtype=torch.float32).scatter_reduce_(0, places, magnitudes, "amax")
        used = counts[1:].nonzero().flatten().flip(0) + 1
        parts = [t[used].double().cpu().numpy() for t in (counts, low, high)]
        return Histogram(len(magnitudes), *parts)

    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        self.settle()
        magnitudes = torch.cat([v.accumulated() for v in self.vectors]).abs()
        value = magnitudes.topk(rank + 1).values[-1]
        return float(value), int((magnitudes > value).sum()), int((magnitudes == value).sum())


def _one_of_each(vector: Vector, stride: int, seed: int) -> Tensor:
    """One element at a random place of each `stride`: a fixed place would follow the columns of a matrix."""
    device = vector.gradient.device
    starts = torch.arange(0, max(vector.n - stride, 0) + 1, stride, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    # One tensor of a group may have fewer elements than a stride of all: then any of them.
    places = starts + torch.randint(min(stride, vector.n), starts.shape, generator=generator, device=device)
    residual = vector.residual[places] if vector.residual is not None else None
    return replace(vector, gradient=vector.gradient.reshape(-1)[places], residual=residual).accumulated()


def first_not_finite(tensors: Sequence[Tensor]) -> int:
    """Which of some contiguous tensors is the first that holds an infinity or a NaN; -1 if none does."""
    if all(t.device.type == "cpu" for t in tensors):
        return _native.first_not_finite([plain(t) for t in tensors])
    return next((i for i, t in enumerate(tensors) if not t.isfinite().all()), -1)


def plain(tensor: Tensor) -> tuple[int, int, int]:
    """A contiguous CPU tensor as the kernels take it."""
    return tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel()
