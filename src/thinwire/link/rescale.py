"""Rescaling: keeps the residual consistent when the learning rate or the loss scale changes.

The residual is a sum of gradients times the loss scale. When the learning rate rises, it is multiplied by
lr_old / lr_new, so that lr x residual stays constant; when the loss scale changes, by scale_new / scale_old. When the
learning rate falls, the residual stays as it is: multiplied by lr_old / lr_new it would grow without bound as a
schedule approaches zero, and clipping would act on every step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class ResidualUnits:
    """The learning rates and the loss scale that the residual refers to, and how they changed since the last step."""

    def __init__(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer] = (), scaler: Any = None
    ) -> None:
        self._names = {id(p): name for name, p in parameters.items()}
        self._optimizers = list(optimizers)
        self._scaler = scaler
        self._rates = self._present_rates()
        self._scale = self._present_scale()

    def _present_rates(self) -> dict[str, float]:
        rates: dict[str, float] = {}
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    rates[self._names[id(parameter)]] = float(group["lr"])
        return rates

    def _present_scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def changes(self) -> dict[str, float]:
        """Take over the present rates and scale; returns the factor for each parameter's residual where it is not 1.

        A rate of zero changes nothing: the residual keeps its unit until the rate is positive again.
        """
        if not self._optimizers and self._scaler is None:
            return {}
        rates, scale = self._present_rates(), self._present_scale()
        factors = {}
        for name in self._names.values():
            factor = scale / self._scale
            before, now = self._rates.get(name, 0.0), rates.get(name, 0.0)
            if before > 0.0 and now > 0.0:
                factor *= min(1.0, before / now)
            elif before > 0.0:
                rates[name] = before
            if factor != 1.0:
                factors[name] = factor
        self._rates, self._scale = rates, scale
        return factors

    def state_dict(self) -> dict[str, Any]:
        """The units of the residual as it is; the scaler and the optimizer may have changed theirs already."""
        scale = self._scale if self._scaler is not None else None
        return {"scale": scale, "rates": dict(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the units of a loaded residual; the next step converts it to the present ones."""
        if not isinstance(state, Mapping) or not isinstance(state.get("rates", {}), Mapping):
            raise ValueError("the units in the link's state are not a table of learning rates and a loss scale")
        if self._scaler is not None and state.get("scale") is not None:
            self._scale = float(state["scale"])
        if self._optimizers:
            known = {name: float(rate) for name, rate in state.get("rates", {}).items() if name in self._rates}
            self._rates = {**self._rates, **known}
