"""Outer optimizers: how the mean change of all ranks moves the parameters that they share.

All ranks compute the same bits: the mean is the same everywhere, and every operation here rounds each element once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Outer(ABC):
    """Base class. An outer optimizer is a frozen setting; its state lives with the shared parameters."""

    @abstractmethod
    def step(self, shared: Tensor, mean: Tensor, state: dict[str, Tensor]) -> None:
        """Move a shared parameter by the mean change of all ranks, which is subtracted. `mean` may be overwritten."""


@dataclass(frozen=True)
class SGD(Outer):
    """Subtract `alpha` times the mean change: with 1.0 the shared parameters become the mean of the ranks'."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def step(self, shared: Tensor, mean: Tensor, state: dict[str, Tensor]) -> None:
        shared -= mean if self.alpha == 1.0 else mean.mul_(self.alpha)


@dataclass(frozen=True)
class Nesterov(Outer):
    """SGD with Nesterov momentum over exchanges, as DiLoCo uses it: velocity = momentum * velocity + mean change."""

    alpha: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"the momentum of an outer optimizer lies in [0, 1), not {self.momentum}")

    def step(self, shared: Tensor, mean: Tensor, state: dict[str, Tensor]) -> None:
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(shared)
        velocity = state["velocity"]
        # Products and sums are operations of their own: a fused one would round differently on other processors.
        velocity.mul_(self.momentum)
        velocity += mean
        mean += velocity * self.momentum
        shared -= mean.mul_(self.alpha)


def _check_alpha(alpha: float) -> None:
    if not 0.0 < alpha < float("inf"):
        raise ValueError(f"the rate of an outer optimizer is a number above 0, not {alpha}")


def check_state(state: Any, shared: Mapping[str, Tensor]) -> None:
    """ValueError unless this is the state of an outer optimizer of these parameters: flat tensors by name."""
    whole = isinstance(state, Mapping) and all(isinstance(slots, Mapping) for slots in state.values())
    if not whole or not all(isinstance(t, Tensor) for slots in state.values() for t in slots.values()):
        raise ValueError("the state of the outer optimizer is not a dict of tensors for each parameter")
    for name, slots in state.items():
        for key, tensor in slots.items():
            if name in shared and (tensor.numel() != shared[name].numel() or not bool(tensor.isfinite().all())):
                raise ValueError(f"{name}: the outer optimizer's {key} has another size, or is not finite")
