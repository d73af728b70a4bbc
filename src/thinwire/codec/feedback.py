"""Feedback: what becomes of the entries that are not sent.

A feedback is a frozen dataclass that names the tensors it needs per parameter (its slots). The codec keeps these
tensors by parameter name, so that they survive a change of DDP's buckets and can be saved.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import _native
from thinwire.codec.vectors import FLOAT_MAX, Vector


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
