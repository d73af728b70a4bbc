"""Keeping: what a codec remembers from step to step, by parameter name, and how that is saved.

These are the memory's tensors, what the selection learned, and the step; plain tensors and numbers all of them.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.codec.memory import Memory
from thinwire.codec.selection import Selection

State = dict[str, Any]


class Keeper:
    """The part of a codec that has a state."""

    def __init__(self, selection: Selection, memory: Memory) -> None:
        self.selection = selection
        self.memory = memory
        self.step = 0
        self.generation = 0  # changes when the memory's tensors are others than before
        self._slots: dict[str, dict[str, Tensor]] = {}
        self._learned: dict[str, dict[str, float]] = {}

    def open_slots(self, name: str, gradient: Tensor) -> dict[str, Tensor]:
        """The memory's tensors of a parameter, made if they are not there yet."""
        held = self._slots.setdefault(name, {})
        for slot in self.memory.slots:
            tensor = held.get(slot)
            if tensor is None:
                held[slot] = torch.zeros(gradient.numel(), device=gradient.device)
            elif tensor.device != gradient.device:
                held[slot] = tensor.to(gradient.device)
                self.generation += 1
        return held

    def held(self, name: str) -> dict[str, Tensor]:
        """The memory's tensors of one parameter, flat; empty before its first encode."""
        return self._slots.get(name, {})

    @property
    def learned(self) -> dict[str, dict[str, float]]:
        """What the selection remembers, by the first parameter of each group."""
        return self._learned

    def give_back(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Put entries back into the memory that were sent and did not count, or that another rank's memory lost."""
        residual = self._slots.get(name, {}).get("residual")
        if residual is not None:
            residual.index_add_(0, positions.to(residual.device), values.to(residual.device))

    def rescale(self, factor: float, names: Collection[str] | None = None) -> None:
        """Multiply the memory (of some parameters, or of all), when the unit of the gradients changes.

        After a change of the loss scale call it with new / old. After a change of the learning rate call it with
        old / new, so that what is held back is applied at the rate it was computed for.
        """
        if not (0.0 < factor < float("inf")):
            raise ValueError(f"a memory is rescaled by a positive finite factor, not {factor}")
        for name in self._slots if names is None else names:
            for tensor in self._slots.get(name, {}).values():
                tensor.mul_(factor)
            self.selection.rescale(factor, self._learned.get(name, {}))

    def state_dict(self) -> State:
        """Plain tensors and numbers by parameter name, loadable with `torch.load(weights_only=True)`."""
        memory = {name: {slot: t.clone() for slot, t in slots.items()} for name, slots in self._slots.items()}
        learned = {label: dict(values) for label, values in self._learned.items() if values}
        return {"version": 1, "step": self.step, "memory": memory, "selection": learned}

    def load_state_dict(self, state: State) -> None:
        """Take over a saved state; raises ValueError and changes nothing if it is not one of this memory."""
        if state.get("version") != 1:
            raise ValueError(f"the codec's state has version {state.get('version')!r}, this thinwire reads 1")
        missing = {"step", "memory", "selection"} - set(state)
        if missing:
            raise ValueError(f"the codec's state lacks {', '.join(sorted(missing))}")
        for name, slots in state["memory"].items():
            self._check_slots(name, slots)
        self.step = int(state["step"])
        self.generation += 1
        self._slots = {
            name: {slot: t.detach().clone().float().reshape(-1) for slot, t in slots.items()}
            for name, slots in state["memory"].items()
        }
        self._learned = {label: dict(values) for label, values in state["selection"].items()}

    def _check_slots(self, name: str, slots: Mapping[str, Tensor]) -> None:
        if set(slots) != set(self.memory.slots):
            raise ValueError(f"{name}: the state holds {sorted(slots)}, {self.memory} needs {list(self.memory.slots)}")
        if len({tensor.numel() for tensor in slots.values()}) > 1:
            raise ValueError(f"{name}: the tensors {sorted(slots)} of the state differ in size")
        for slot, tensor in slots.items():
            if not tensor.isfinite().all():
                raise ValueError(f"{name}: the state's {slot} holds a value that is not finite")
