"""Units: notices when learning rates or the loss scale change, so that the memory can follow.

What is held back is in units of gradient x loss scale, and is meant to be applied at the rate of its own step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class UnitWatch:
    """Compares rates and loss scale with those of the step before."""

    def __init__(
        self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None = None, scaler: Any = None
    ) -> None:
        self._names = {id(p): name for name, p in parameters.items()}
        self._optimizer = optimizer
        self._scaler = scaler
        self._rates = self._present_rates()
        self._scale = self._present_scale()

    def _present_rates(self) -> dict[str, float]:
        if self._optimizer is None:
            return {}
        rates: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    rates[self._names[id(parameter)]] = float(group["lr"])
        return rates

    def _present_scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def factors(self) -> dict[str, float]:
        """By what each parameter's memory must be multiplied before this step; rates of zero change nothing."""
        if self._optimizer is None and self._scaler is None:
            return {}
        rates, scale = self._present_rates(), self._present_scale()
        factors = {}
        for name in self._names.values():
            factor = scale / self._scale
            before, now = self._rates.get(name, 0.0), rates.get(name, 0.0)
            if before > 0.0 and now > 0.0:
                factor *= before / now
            elif before > 0.0:
                rates[name] = before  # the rate will come back: the memory waits in the old unit
            if factor != 1.0:
                factors[name] = factor
        self._rates, self._scale = rates, scale
        return factors

    def state_dict(self) -> dict[str, Any]:
        """The units of the memory as it is; the scaler and the optimizer may have moved on already."""
        scale = self._scale if self._scaler is not None else None
        return {"scale": scale, "rates": dict(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The memory that was loaded is in these units; the next step converts it to the present ones."""
        if self._scaler is not None and state.get("scale") is not None:
            self._scale = float(state["scale"])
        if self._optimizer is not None:
            known = {name: float(rate) for name, rate in state.get("rates", {}).items() if name in self._rates}
            self._rates = {**self._rates, **known}
