"""Aggregation: gradients that have arrived become steps of the optimizer, part by part.

Contributions of one step are added in the order of the workers' slots, whatever the order of arrival, so that the
result is the same bits every time.
"""

import logging
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.codec.frame import FrameReader, sum_frames
from thinwire.codec.vectors import first_not_finite
from thinwire.server.layers import Layout, flat, trained
from thinwire.server.lossy import Arrived

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
