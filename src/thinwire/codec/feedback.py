"""Feedback: what becomes of the entries that are not sent.

A feedback is a frozen dataclass that names the tensors it needs per parameter (its slots). The codec keeps these
tensors by parameter name, so that they survive a change of DDP's buckets and can be saved. A `Vector` is the sum of
gradient and residual that a selection chooses from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import _native

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# The largest float32. Sums are clamped to it, because a residual must never hold an infinity.
FLOAT_MAX = torch.finfo(torch.float32).max


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


class Feedback(ABC):
    """Base class: how entries that were not sent take part in later steps."""

    slots: ClassVar[tuple[str, ...]] = ()  # names of flat float32 tensors of the parameter's size

    @abstractmethod
    def prepare(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        """Return the vector to select from, for a finite gradient and this parameter's slots."""


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Entries that are not sent are lost, as in SparsifyGradients."""

    def prepare(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        return Vector(gradient, None, 1.0, None, None)


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Error feedback: what is not sent stays in a residual, which is added to the next gradient, times `decay`."""

    decay: float = 1.0
    slots: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"the decay of a residual must lie in (0, 1], not {self.decay}; to keep no residual use NoFeedback()"
            )

    def prepare(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        residual = slots["residual"]
        return Vector(gradient, residual, self.decay, residual, None)


@dataclass(frozen=True)
class Accumulated(Feedback):
    """Error feedback for changes that are in the residual already: the tensors given to the codec are not added."""

    slots: ClassVar[tuple[str, ...]] = ("residual",)

    def prepare(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        return Vector(slots["residual"], None, 1.0, slots["residual"], None)


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """DGC's momentum correction: momentum is applied before the selection, and the residual accumulates velocities.

    Momentum and residual are set to zero where an entry was sent. The optimizer's own momentum must be 0, or momentum
    would be applied twice.
    """

    momentum: float = 0.9
    nesterov: bool = False
    slots: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"the momentum must lie in [0, 1), not {self.momentum}")

    def prepare(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        u, v = slots["momentum"], slots["residual"]
        if gradient.device.type == "cpu":
            args = Vector(gradient, None, 1.0, None, None).args
            _native.accumulate_momentum(args, u.data_ptr(), v.data_ptr(), self.momentum, self.nesterov)
        else:
            self._accumulate_torch(gradient.reshape(-1).float(), u, v)
        return Vector(v, None, 1.0, v, u)

    def _accumulate_torch(self, g: Tensor, u: Tensor, v: Tensor) -> None:
        if self.nesterov:
            u.add_(g).clamp_(-FLOAT_MAX, FLOAT_MAX).mul_(self.momentum)
            v.add_(u + g).clamp_(-FLOAT_MAX, FLOAT_MAX)
        else:
            u.mul_(self.momentum).add_(g).clamp_(-FLOAT_MAX, FLOAT_MAX)
            v.add_(u).clamp_(-FLOAT_MAX, FLOAT_MAX)


def first_not_finite(tensors: Sequence[Tensor]) -> int:
    """Return the index of the first of these contiguous tensors that holds an infinity or a NaN, or -1."""
    if all(t.device.type == "cpu" for t in tensors):
        return _native.first_not_finite([array_args(t) for t in tensors])
    return next((i for i, t in enumerate(tensors) if not t.isfinite().all()), -1)


def array_args(tensor: Tensor) -> "_native.ArrayArgs":
    """Return a contiguous CPU tensor as the kernels take it."""
    return tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel()
