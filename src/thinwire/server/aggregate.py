"""Aggregation: the server's clock, and the optimizer steps that it makes of the gradients it receives.

Gradients of one step are added in the order of the workers' slots, whatever the order of arrival, so that the result
is the same bits every time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from thinwire.codec.feedback import first_not_finite
from thinwire.codec.frame import FrameReader, sum_frames
from thinwire.errors import MessageError
from thinwire.server.layout import Layout, flat, trained
from thinwire.server.replicas import ReceivedShards

log = logging.getLogger("thinwire.server")

Reduce = Literal["mean", "sum"]


@dataclass
class WorkerClock:
    """How far one worker is: its first step, and for each part the next step that it has to push."""

    first: int
    due: list[int]

    @property
    def reached(self) -> int:
        """The number of steps that the worker has pushed completely."""
        return min(self.due)

    @property
    def ahead(self) -> int:
        """The first step of which the worker has pushed nothing."""
        return max(self.due)


W = TypeVar("W", bound=WorkerClock)


class Clock(Generic[W]):
    """The steps of all workers, by part; parts are numbered through all layers.

    bound: how many steps the fastest worker may be ahead of the slowest; None for any number.
    phased: parameters may be used only when the whole step is complete, not when their own part is.
    """

    def __init__(self, parts: int, bound: int | None, start: int = 0, *, phased: bool = False) -> None:
        if bound is not None and bound < 0:
            raise ValueError(f"a staleness bound is 0 or more, not {bound}")
        self.bound, self.phased = bound, phased
        self.lowest = [start] * parts  # the number of complete steps of each part
        self.opened = [start] * parts  # the first step of each part that no worker, present or gone, has pushed
        self.workers: dict[int, W] = {}  # by session

    def join(self, session: int, make: Callable[[int, list[int]], W]) -> W:
        """Add the worker that `make` makes of its first step, of which nobody has pushed anything yet, and its due."""
        first = max(self.lowest) if self.bound is None else max([*self.lowest, *self.opened])
        if not self.workers:  # nobody is left to complete the steps before
            self.lowest = [first] * len(self.lowest)
        worker = self.workers[session] = make(first, [first] * len(self.lowest))
        return worker

    def leave(self, session: int) -> None:
        """Remove a worker: no step waits for it any more."""
        del self.workers[session]

    def push(self, session: int, part: int, clock: int) -> bool:
        """Note a push; return False if it was accepted before. MessageError if it comes out of turn."""
        worker = self.workers[session]
        due = worker.due[part]
        if clock < due:
            return False
        if clock > due:
            raise MessageError(f"step {clock} of part {part} was pushed before step {due}")
        if not self.may_use(part, clock):
            raise MessageError(f"step {clock} of part {part} exceeds the staleness bound of {self.bound}")
        worker.due[part] = clock + 1
        self.opened[part] = max(self.opened[part], clock + 1)
        return True

    def complete(self, part: int) -> bool:
        """Return whether all workers that take part in the lowest open step of a part have pushed it.

        A step in which no worker takes part any more is complete too. Otherwise workers that joined later would wait
        for it forever.
        """
        step = self.lowest[part]
        if step >= self.opened[part] and all(worker.first <= step for worker in self.workers.values()):
            return False
        return all(worker.due[part] > step for worker in self.workers.values() if worker.first <= step)

    def settle(self, part: int) -> None:
        """Without a bound: raise a part's lowest step to what all workers have reached. It never falls."""
        reached = min((worker.due[part] for worker in self.workers.values()), default=0)
        self.lowest[part] = max(self.lowest[part], reached)

    def may_use(self, part: int, clock: int) -> bool:
        """Return whether a worker may compute step `clock` with the part as it is now."""
        return self.bound is None or clock - (self.step if self.phased else self.lowest[part]) <= self.bound

    def holders(self, part: int) -> int:
        """Return how many workers have not pushed the lowest open step of a part."""
        step = self.lowest[part]
        return sum(worker.first <= step and worker.due[part] <= step for worker in self.workers.values())

    def late(self) -> dict[int, W]:
        """Return the workers that still owe the lowest open step, by session. Any thread may ask."""
        step, workers = self.step, dict(self.workers)
        return {session: w for session, w in workers.items() if w.first <= step and w.reached <= step}

    def blocking(self) -> set[int]:
        """Return the sessions of all workers that are late, if another worker waits for them."""
        step, bound = self.step, self.bound
        waits = bound is not None and any(worker.reached - step > bound for worker in self.workers.values())
        return set(self.late()) if waits else set()

    @property
    def step(self) -> int:
        """The number of steps that are complete in all parts."""
        return min(self.lowest)


class Aggregator:
    """Keeps received gradients until their step is complete, then applies them with the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, reduce: Reduce) -> None:
        if reduce not in ("mean", "sum"):
            raise ValueError(f'reduce is "mean" or "sum", not {reduce!r}')
        parameters = trained(model)
        unsupported = [n for n, p in parameters.items() if p.dtype != torch.float32 or p.device.type != "cpu"]
        if unsupported:
            raise ValueError(f"the server keeps its model in float32 on the CPU: {unsupported[0]} is not")
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in parameters.items() if id(p) not in owned]
        if missing:
            raise ValueError(f"the optimizer does not hold {missing[0]}: give it all parameters of the model")
        self._optimizer, self._reduce = optimizer, reduce
        self.updates = 0  # of parts
        # Flat views of the parameters, by layer, part and piece.
        self.values: list[list[list[Tensor]]] = [
            [[flat(parameters[p.parameter])[p.begin : p.end] for p in part] for part in layer.parts]
            for layer in layout.layers
        ]
        self._units: list[list[nn.Parameter]] = []  # what the optimizer updates, by part through all layers
        cut: dict[int, list[nn.Parameter]] = {}
        for layer, part in layout.places():
            self._units.append([])
            for piece, row in zip(layout.layers[layer].parts[part], self.values[layer][part], strict=True):
                whole = parameters[piece.parameter]
                unit = whole if len(piece) == whole.numel() else nn.Parameter(row)
                self._units[-1].append(unit)
                cut.setdefault(id(whole), []).append(unit)
        for group in optimizer.param_groups:  # the pieces share the storage of the parameters that they replace
            group["params"] = [unit for whole in group["params"] for unit in cut.get(id(whole), [whole])]
        self._gradients = [[torch.zeros(unit.numel()) for unit in units] for units in self._units]
        # By part and step: the gradients that wait for it, by slot.
        self._pending: dict[tuple[int, int], dict[int, FrameReader | ReceivedShards]] = {}

    def keep(self, slot: int, part: int, clock: int, frame: FrameReader | ReceivedShards) -> None:
        """Keep a gradient, which has been checked, until its step is applied."""
        self._pending.setdefault((part, clock), {})[slot] = frame

    def pending(self) -> list[list[Any]]:
        """Return the gradients that wait for their steps, as a checkpoint keeps them: part, step, slot and bytes."""
        return [
            [part, clock, slot, frame.data]
            for (part, clock), frames in self._pending.items()
            for slot, frame in frames.items()
        ]

    def apply(self, part: int, clock: int, workers: int | None = None) -> None:
        """Apply all gradients that are kept for a step to a part.

        workers: what a mean divides by; None: the number of gradients.
        """
        frames = self._pending.pop((part, clock), {})
        # A worker whose gradient is not finite counts as absent in this step.
        slots = sorted(slot for slot, frame in frames.items() if not frame.non_finite)
        if not slots:
            return
        gradients = self._gradients[part]
        whole = [frame for slot in slots if isinstance(frame := frames[slot], FrameReader)]
        if len(whole) == len(slots):
            sum_frames(whole, gradients)
        else:
            for gradient in gradients:
                gradient.zero_()
            for slot in slots:
                frames[slot].add_to(gradients)
        if self._reduce == "mean":
            share = len(slots) if workers is None else workers
            for gradient in gradients:
                gradient.div_(share)
        if first_not_finite(gradients) >= 0:
            log.warning("the server skips an update: the sum of the gradients exceeds the range of float32")
            return
        # The optimizer steps on this part alone, because it skips parameters without a gradient.
        for unit, gradient in zip(self._units[part], gradients, strict=True):
            unit.grad = gradient.view(unit.shape)
        self._optimizer.step()
        for unit in self._units[part]:
            unit.grad = None
        self.updates += 1
