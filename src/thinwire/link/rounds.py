"""Rounds: how long optimizers step between two exchanges of updates, and how outer optimizers apply the mean.

A round takes a number of steps, or a time. In a round by time a slower rank takes fewer steps. All ranks learn in each
exchange how many samples the others have seen, and when all of them had arrived: from then on the next round counts.
An outer optimizer computes the same bits on all ranks: the mean is the same everywhere, and every operation rounds each
element once.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.channel import Channel


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


def check_pace(state: Any) -> None:
    """ValueError unless this is the state of a `Pace`, or None."""
    if state is not None:
        whole = isinstance(state, Mapping) and set(state) == {"weight", "samples"}
        weight, samples = (state["weight"], state["samples"]) if whole else (None, None)
        if not isinstance(weight, float) or not 0.0 <= weight < float("inf") or type(samples) is not int or samples < 0:
            raise ValueError("the state of a round by time is not a weight and a number of samples")


def change_of(start: Tensor, local: Tensor) -> Tensor:
    """What a round changed in a parameter: where it began, in the parameter's type, minus what that holds now."""
    return start.to(local.dtype).float() - local.reshape(-1).float()


@dataclass(frozen=True)
class Rounds:
    """The setting of local steps. The default exchanges the change of every step and applies its mean at once."""

    every: int | str = 1  # steps between exchanges, or a time such as "30s"
    outer: Outer = field(default_factory=SGD)
    overlap: bool = False  # whether the exchange runs while the next round computes, and is applied at its end

    def __post_init__(self) -> None:
        steps = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if not steps and not (isinstance(self.every, str) and self.seconds > 0.0):
            raise ValueError(f'every is a number of steps from 1, or a time such as "30s", not {self.every!r}')
        if not isinstance(self.outer, Outer):
            raise ValueError(f"outer is an outer optimizer, thinwire.SGD or thinwire.Nesterov, not {self.outer!r}")

    @property
    def seconds(self) -> float:
        """The time of a round; 0 if it is a number of steps."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*s", self.every) if isinstance(self.every, str) else None
        return float(found.group(1)) if found is not None else 0.0

    def __str__(self) -> str:
        often = f"every {self.every} steps" if isinstance(self.every, int) else f"every {self.seconds:g} s"
        late = ", while the next ones compute" if self.overlap else ""
        return f"exchanged {often}{late}, the mean applied by {self.outer!r}"

    @property
    def single(self) -> bool:
        """Whether every step is exchanged before the next begins."""
        return self.every == 1 and not self.overlap

    @property
    def corrects(self) -> bool:
        """Whether Adam's second moments are corrected for the number of ranks.

        In longer rounds a rank follows the noise of its own batches for several steps, which longer steps make worse.
        """
        return self.every == 1

    def ends(self, taken: int) -> bool:
        """Return whether a round ends after so many steps. One by time does not: its `Pace` tells."""
        return isinstance(self.every, int) and taken >= self.every


class Pace:
    """Ends rounds by time, and weights this rank by its share of the samples."""

    def __init__(self, seconds: float, channel: Channel) -> None:
        self.weight = 1.0  # this rank's samples in the round before, divided by the mean of all ranks
        self._seconds, self._channel = seconds, channel
        self._samples = 0
        self._met: float | None = time.monotonic()  # when all ranks were at the last exchange; None before they are

    def state_dict(self) -> dict[str, Any]:
        """The weight of this rank in the present round, and the samples that it has seen in it."""
        return {"weight": self.weight, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved weight and number of samples; an empty state is that of the first round."""
        self.weight, self._samples = float(state.get("weight", 1.0)), int(state.get("samples", 0))

    def count(self, samples: int) -> None:
        """Count the samples of a step."""
        self._samples += samples

    def over(self) -> bool:
        """Return whether the time of the round is over."""
        return self._met is not None and time.monotonic() >= self._met + self._seconds

    def begin(self) -> Callable[[], None]:
        """End this rank's round; returns the function that exchanges the numbers of samples with the other ranks.

        Weights hold from the next round on, because a rank must not wait for the others to go on.
        """
        mine, self._samples, self._met = self._samples, 0, None

        def exchange() -> None:
            message = torch.tensor([mine], dtype=torch.int64).view(torch.uint8).to(self._channel.device)
            counts = [int(t.cpu().view(torch.int64)) for t in self._channel.all_gather(message)]
            self.weight = mine * len(counts) / sum(counts) if sum(counts) else 1.0
            self._met = time.monotonic()

        return exchange
