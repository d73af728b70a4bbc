"""Dropout: workers that share one model, each in a thread of its own, draw their masks from generators of their own.

torch's dropout draws from the one generator of the process: workers would have to take turns, or give other numbers
in every run.
"""

import threading

import torch
from torch import Tensor, nn


class Draws(threading.local):
    """The generator of the thread that asks.

    `alone` says that something in the model draws from the process's generator, as attention does inside its
    operations: then only one thread may use the model.
    """

    generator: torch.Generator | None = None

    def __init__(self, alone: bool) -> None:
        self.alone = alone

    def seed(self, seed: int) -> None:
        """Begin a worker's draws of one step."""
        self.generator = torch.Generator().manual_seed(seed)
        if self.alone:
            torch.manual_seed(seed)


class DrawnDropout(nn.Module):
    """torch.nn.Dropout with the masks of the thread's own generator: the same ones that torch draws from that seed."""

    def __init__(self, p: float, draws: Draws) -> None:
        super().__init__()
        self.p, self._draws = p, draws

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        mask = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self._draws.generator)
        return x * (mask.div_(1.0 - self.p) if self.p < 1.0 else mask)


def drawn(model: nn.Module) -> Draws:
    """Replace every dropout of a model; seed what is returned before each forward pass."""
    draws = Draws(any(_draws_for_itself(module) for module in model.modules()))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Dropout):
            model.set_submodule(name, DrawnDropout(module.p, draws))
    return draws


def _draws_for_itself(module: nn.Module) -> bool:
    """Whether a module drops something where no mask can be given to it."""
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0.0
    others = nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
    return isinstance(module, others) and module.p > 0.0
