"""Cluster: all workers of a data-parallel training in one process, exactly, with the codecs of production.

There is one model. A step computes every worker's gradient on it in turn, encodes it with that worker's own codec
and averages the frames as `Gather` does, in the order of the ranks; only the memories exist once per worker.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import MomentumCorrection
from thinwire.codec.frame import Frame, read_frames
from thinwire.errors import ThinwireError
from thinwire.tools.recipes.recipe import DataOrder, Recipe, Split, classify


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


Gradients = dict[str, Tensor]
# Sees all workers' gradients before they are encoded, next to the codecs that hold their memories.
Probe = Callable[[list[Gradients], list[Codec]], None]


@dataclass(frozen=True)
class Setting:
    """How a cluster trains; the codec is None for dense."""

    workers: int
    batch: int
    lr: float
    momentum: float = 0.0
    codec: Codec | None = None
    dense_steps: int = 0  # the first steps send everything, as Aji and Heafield's code does
    seed: int = 0


@dataclass(frozen=True)
class Stepped:
    """What one step was: the workers' mean loss, and of a worker's message the mean bytes and share of entries."""

    loss: float
    bytes: float
    density: float


class Diverged(ThinwireError):
    """A step whose loss is not finite."""


class Cluster:
    """A model and all its workers; `step` advances them by one."""

    def __init__(self, recipe: Recipe, train: Split, setting: Setting, *, threads: int = 2) -> None:
        self.recipe, self.setting, self._train = recipe, setting, train
        self.model = recipe.build(setting.seed)
        # DGC applies the momentum before sending: the optimizer must not apply it again.
        ours = setting.codec is not None and isinstance(setting.codec.feedback, MomentumCorrection)
        self.optimizer = recipe.optimizer(self.model, lr=setting.lr, momentum=0.0 if ours else setting.momentum)
        self.order = DataOrder(len(train), batch=setting.batch, workers=setting.workers, seed=setting.seed)
        self.codecs = [setting.codec.copy() for _ in range(setting.workers)] if setting.codec is not None else []
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.numels = [p.numel() for p in self.parameters]
        self.done = 0
        self.frames: list[Frame] = []  # of the last step, by worker
        self._draws = drawn(self.model)
        self._threads = 1 if self._draws.alone else threads
        # One thread for each of torch's operations: two were no faster on a GRU's small ones and took a third more.
        self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown(cancel_futures=True)

    def step(self, probe: Probe | None = None) -> Stepped:
        """One step of all workers."""
        if not self.codecs or (self.done < self.setting.dense_steps and probe is None):
            stepped = self._dense_step()
        else:
            stepped = self._encoded_step(probe)
        if not math.isfinite(stepped.loss):
            raise Diverged(f"the loss is {stepped.loss} at step {self.done + 1}: the learning rate is too high")
        self.optimizer.step()
        self.done += 1
        return stepped

    def gradients(self, workers: Sequence[int]) -> tuple[float, Gradients]:
        """Mean loss and mean gradient of some workers' batches, as one batch."""
        self._draws.seed((self.setting.seed * 1_000_003 + self.done + 1) * 4099 + workers[0])
        samples = [sample for worker in workers for sample in self.order.at(self.done, worker)]
        loss = self.recipe.loss(self.model, self._train.batch(samples))
        found = torch.autograd.grad(loss, self.parameters)
        return float(loss.detach()), dict(zip(self.names, found, strict=True))

    def _dense_step(self) -> Stepped:
        # The mean of equal batches' means is the mean of all: no need to tell the workers apart, one part a thread.
        # Other losses may be means over words, not samples: they are averaged worker by worker, as DDP would.
        everyone = range(self.setting.workers)
        equal = self.recipe.loss is classify
        parts = [list(everyone[i :: self._threads]) for i in range(self._threads)] if equal else [[w] for w in everyone]
        parts = [part for part in parts if part]
        found = list(self._pool.map(self.gradients, parts))
        shares = [len(part) / self.setting.workers for part in parts]
        for name, parameter in zip(self.names, self.parameters, strict=True):
            total = found[0][1][name] * shares[0]
            for share, (_, gradients) in zip(shares[1:], found[1:], strict=True):
                total.add_(gradients[name], alpha=share)
            parameter.grad = total
        loss = sum(share * loss for share, (loss, _) in zip(shares, found, strict=True))
        return Stepped(loss, 4.0 * sum(self.numels), 1.0)

    def _encoded_step(self, probe: Probe | None) -> Stepped:
        workers = range(self.setting.workers)
        if probe is not None:
            found = list(self._pool.map(lambda worker: self.gradients([worker]), workers))
            probe([gradients for _, gradients in found], self.codecs)
            sent = [(loss, self._encode(worker, g)) for worker, (loss, g) in zip(workers, found, strict=True)]
        else:
            sent = list(self._pool.map(self._compute_and_encode, workers))
        self.frames = [frame for _, frame in sent]
        together = read_frames(self.frames, [self.numels])
        outs = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in self.parameters]
        if together.non_finite:
            return Stepped(math.nan, 0.0, 0.0)
        together.sum_to(outs, 1.0 / len(workers))
        for parameter, out in zip(self.parameters, outs, strict=True):
            parameter.grad = out
        count = len(workers)
        kept = sum(sum(frame.counts) for _, frame in sent)
        loss = sum(loss for loss, _ in sent) / count
        return Stepped(loss, sum(len(frame) for _, frame in sent) / count, kept / count / sum(self.numels))

    def _compute_and_encode(self, worker: int) -> tuple[float, Frame]:
        loss, gradients = self.gradients([worker])
        return loss, self._encode(worker, gradients)

    def _encode(self, worker: int, gradients: Gradients) -> Frame:
        return self.codecs[worker].encode(gradients, step=self.done)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "codecs": [codec.state_dict() for codec in self.codecs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        if len(state["codecs"]) != len(self.codecs):
            raise ValueError(f"the state is of {len(state['codecs'])} codecs, the cluster has {len(self.codecs)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for codec, held in zip(self.codecs, state["codecs"], strict=True):
            codec.load_state_dict(held)
        self.done = int(state["step"])
