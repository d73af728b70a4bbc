"""Aggregation: gradients that have arrived become steps of the optimizer, part by part.

Contributions of one step are added in the order of the workers' slots, whatever the order of arrival, so that the
result is the same bits every time.
"""

import logging
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.codec.frame import FrameReader, sum_frames
from thinwire.codec.vectors import first_not_finite
from thinwire.errors import MessageError
from thinwire.server.layout import Layout, flat, trained
from thinwire.server.replicas import Arrived


@dataclass
class Pushed:
    """One worker as the clock sees it: its first step, and the next that is due of each part."""

    first: int
    due: list[int]

    @property
    def reached(self) -> int:
        """Steps of which everything has been pushed."""
        return min(self.due)

    @property
    def ahead(self) -> int:
        """The first step of which nothing has been pushed."""
        return max(self.due)


class Clock:
    """The clocks of all workers, by part; parts are numbered through all layers."""

    def __init__(self, parts: int, bound: int | None, start: int = 0, *, phased: bool = False) -> None:
        if bound is not None and bound < 0:
            raise ValueError(f"a staleness bound is 0 or more, not {bound}")
        self.bound, self.phased = bound, phased
        self.lowest = [start] * parts  # steps of a part that are complete
        self.opened = [start] * parts  # the first step of which nobody has pushed anything, whoever it was
        self.members: dict[int, Pushed] = {}

    def join(self, worker: int) -> int:
        """Admit a worker; returns its first step, of which nobody has pushed anything yet."""
        first = max(self.lowest) if self.bound is None else max([*self.lowest, *self.opened])
        if not self.members:  # nobody is left to complete the steps before
            self.lowest = [first] * len(self.lowest)
        self.members[worker] = Pushed(first, [first] * len(self.lowest))
        return first

    def leave(self, worker: int) -> None:
        """From now on nobody waits for this worker."""
        self.members.pop(worker, None)

    def push(self, worker: int, part: int, clock: int) -> bool:
        """Note a push; False if it has been counted before. MessageError if it comes out of turn."""
        member = self.members[worker]
        due = member.due[part]
        if clock < due:
            return False
        if clock > due:
            raise MessageError(f"step {clock} of part {part} was pushed before step {due}")
        if not self.may_use(part, clock):
            raise MessageError(f"step {clock} of part {part} exceeds the staleness bound of {self.bound}")
        member.due[part] = clock + 1
        self.opened[part] = max(self.opened[part], clock + 1)
        return True

    def complete(self, part: int) -> bool:
        """Whether the lowest open step of a part has been pushed by all who take part in it.

        A step in which nobody takes part any more is complete too, or those who came later would wait for ever.
        """
        step = self.lowest[part]
        if step >= self.opened[part] and all(m.first <= step for m in self.members.values()):
            return False
        return all(m.due[part] > step for m in self.members.values() if m.first <= step)

    def advance(self, part: int) -> None:
        """The lowest open step of a part has been applied."""
        self.lowest[part] += 1

    def settle(self, part: int) -> None:
        """Asynchronous: the lowest is what all have reached; it never falls when somebody joins."""
        self.lowest[part] = max(self.lowest[part], min((m.due[part] for m in self.members.values()), default=0))

    def may_use(self, part: int, clock: int) -> bool:
        """Whether a worker at this clock may use the part as it is now."""
        return self.bound is None or clock - (self.step if self.phased else self.lowest[part]) <= self.bound

    def holders(self, part: int) -> int:
        """How many workers still owe the lowest open step."""
        step = self.lowest[part]
        return sum(m.first <= step and m.due[part] <= step for m in self.members.values())

    @property
    def step(self) -> int:
        """Steps that are complete in all parts."""
        return min(self.lowest)


log = logging.getLogger("thinwire.server")

Reduce = Literal["mean", "sum"]


class Aggregator:
    """Frames that wait for their step to be complete, and the optimizer that they are for."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, reduce: Reduce) -> None:
        if reduce not in ("mean", "sum"):
            raise ValueError(f'reduce is "mean" or "sum", not {reduce!r}')
        parameters = trained(model)
        strange = [n for n, p in parameters.items() if p.dtype != torch.float32 or p.device.type != "cpu"]
        if strange:
            raise ValueError(f"the server keeps its model in float32 on the CPU: {strange[0]} is not")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, _ in layout.shapes if id(parameters[name]) not in held]
        if missing:
            raise ValueError(f"the optimizer does not hold {missing[0]}: give it all parameters of the model")
        self._optimizer, self._reduce = optimizer, reduce
        self.updates = 0  # of parts
        self.values: list[list[list[Tensor]]] = []  # views of the parameters, by layer, part and piece
        self._units: list[list[nn.Parameter]] = []  # what the optimizer updates, by part through all layers
        cut: dict[int, list[nn.Parameter]] = {}
        for layer in layout.layers:
            self.values.append([])
            for part in layer.parts:
                rows = [flat(parameters[p.parameter])[p.begin : p.end] for p in part]
                self.values[-1].append(rows)
                self._units.append([])
                for piece, row in zip(part, rows, strict=True):
                    whole = parameters[piece.parameter]
                    unit = whole if len(piece) == whole.numel() else nn.Parameter(row)
                    self._units[-1].append(unit)
                    cut.setdefault(id(whole), []).append(unit)
        _replace(optimizer, cut)
        self._gradients = [[torch.zeros(unit.numel()) for unit in units] for units in self._units]
        self._waiting: dict[tuple[int, int], dict[int, FrameReader | Arrived]] = {}  # by part and clock: frames by slot

    def keep(self, slot: int, part: int, clock: int, frame: FrameReader | Arrived) -> None:
        """A checked frame that waits for its step."""
        self._waiting.setdefault((part, clock), {})[slot] = frame

    def apply(self, part: int, clock: int) -> None:
        """Apply all contributions to a step."""
        self._apply(part, self._waiting.pop((part, clock), {}), None)

    def apply_one(self, slot: int, part: int, clock: int, workers: int) -> None:
        """Apply one worker's contribution at once; its share in a mean is one of so many."""
        waiting = self._waiting.get((part, clock), {})
        mine = {slot: waiting.pop(slot)} if slot in waiting else {}
        if not waiting:
            self._waiting.pop((part, clock), None)
        self._apply(part, mine, workers)

    def _apply(self, part: int, frames: dict[int, FrameReader | Arrived], workers: int | None) -> None:
        # A gradient that was not finite is no gradient: its worker counts as absent in this step.
        slots = sorted(slot for slot, frame in frames.items() if not frame.non_finite)
        if not slots:
            return
        gradients = self._gradients[part]
        _add_up([frames[slot] for slot in slots], gradients)
        if self._reduce == "mean":
            share = len(slots) if workers is None else max(workers, 1)
            for gradient in gradients:
                gradient.div_(share)
        if first_not_finite(gradients) >= 0:
            log.warning("the gradients of a step add up to more than a float32 holds: they are left out")
            return
        # One step of the optimizer on this part: it passes over parameters without a gradient.
        for unit, gradient in zip(self._units[part], gradients, strict=True):
            unit.grad = gradient.view(unit.shape)
        self._optimizer.step()
        for unit in self._units[part]:
            unit.grad = None
        self.updates += 1


def _add_up(frames: list[FrameReader | Arrived], outs: list[Tensor]) -> None:
    """The sum of all frames, in their order."""
    whole = [frame for frame in frames if isinstance(frame, FrameReader)]
    if len(whole) == len(frames):
        sum_frames(whole, outs)
        return
    for out in outs:
        out.zero_()
    for frame in frames:
        frame.add_to(outs)


def _replace(optimizer: torch.optim.Optimizer, cut: dict[int, list[nn.Parameter]]) -> None:
    """Let an optimizer hold the pieces of parameters in place of those that are cut; they share their memory."""
    for group in optimizer.param_groups:
        group["params"] = [unit for whole in group["params"] for unit in cut.get(id(whole), [whole])]
