"""Feedback: what becomes of the entries that do not travel.

A memory is a frozen value that names its tensors; the codec keeps them per parameter name, so that they survive
regrouping and can be saved. `open` turns a gradient and its tensors into the vector that is selected from.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import _native
from thinwire.codec.vectors import DTYPES, MOST, Vector


class Feedback(ABC):
    """How held-back entries come back."""

    slots: ClassVar[tuple[str, ...]] = ()  # float32 tensors of the parameter's size

    @abstractmethod
    def open(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        """Take in a finite gradient; the returned vector says what to select from and where the rest stays."""


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """What does not travel is lost, as in SparsifyGradients."""

    def open(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        return Vector(gradient, None, 1.0, None, None)


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Error feedback: what does not travel is added to the next gradient, times `decay`."""

    decay: float = 1.0
    slots: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"a residual's decay must lie in (0, 1], not {self.decay}; to keep nothing use NoFeedback()"
            )

    def open(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        residual = slots["residual"]
        return Vector(gradient, residual, self.decay, residual, None)


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """DGC's momentum correction: velocities accumulate, and both tensors are cleared where an entry travelled.

    The optimizer's own momentum must be off, or it would be applied twice.
    """

    momentum: float = 0.9
    nesterov: bool = False
    slots: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"a momentum must lie in [0, 1), not {self.momentum}")

    def open(self, gradient: Tensor, slots: dict[str, Tensor]) -> Vector:
        u, v = slots["momentum"], slots["residual"]
        if gradient.device.type == "cpu":
            described = (gradient.data_ptr(), DTYPES[gradient.dtype], 0, 1.0, gradient.numel())
            _native.accumulate_momentum(described, u.data_ptr(), v.data_ptr(), self.momentum, self.nesterov)
        else:
            self._by_torch(gradient.reshape(-1).float(), u, v)
        return Vector(v, None, 1.0, v, u)

    def _by_torch(self, g: Tensor, u: Tensor, v: Tensor) -> None:
        if self.nesterov:
            u.add_(g).clamp_(-MOST, MOST).mul_(self.momentum)
            v.add_(u + g).clamp_(-MOST, MOST)
        else:
            u.mul_(self.momentum).add_(g).clamp_(-MOST, MOST)
            v.add_(u).clamp_(-MOST, MOST)
