"""Dropout: workers that share one model, each in a thread of its own, draw their masks from generators of their own.

torch's dropout draws from the one generator of the process: workers would have to take turns, or give other numbers
in every run.
"""

import threading

import torch
from torch import Tensor, nn


class Draws(threading.local):
    """The generator of the thread that asks."""

    generator: torch.Generator | None = None

    def seed(self, seed: int) -> None:
        """Begin a worker's draws of one step."""
        self.generator = torch.Generator().manual_seed(seed)


class DrawnDropout(nn.Module):
    """torch.nn.Dropout with the masks of the thread's own generator: the same ones that torch draws from that seed."""

    def __init__(self, p: float, draws: Draws) -> None:
        super().__init__()
        self.p, self._draws = p, draws

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        mask = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self._draws.generator)
        return x * mask.div_(1.0 - self.p)


def drawn(model: nn.Module) -> Draws:
    """Replace every dropout of a model; seed what is returned before each forward pass."""
    draws = Draws()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, DrawnDropout(child.p, draws))
    return draws
