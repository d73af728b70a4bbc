"""A recipe: model, data, loss, metric and default settings of a training task, independent of the network.

A training loop uses `build`, `load`, `loss`, `optimizer`, `set_rate`, `clip_gradients`, `evaluate` and a `DataOrder`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.tools.recipes.metric import reaches

Batch = tuple[Tensor, ...]
Optimizer = torch.optim.Optimizer


class Split(Protocol):
    """Samples that a training loop can access by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the tensors of these samples on the CPU, as `loss` takes them."""
        ...


@dataclass(frozen=True)
class Splits:
    """The training and test samples of a recipe."""

    train: Split
    test: Split


@dataclass(frozen=True)
class TensorSplit:
    """Samples as tensors with one row per sample; `prepare` is applied to the inputs of each batch."""

    inputs: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the prepared inputs and the labels of these samples."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self.prepare(self.inputs[chosen]), self.labels[chosen]


@dataclass(frozen=True)
class Defaults:
    """Default settings of a recipe; the command line can override all but the momentum."""

    batch: int  # samples per worker and step
    lr: float
    momentum: float
    epochs: float  # an upper bound: a run stops at the target if one is given
    target: float  # the metric on the test split at which a race ends
    evaluate_every: int | None = None  # steps; None: a quarter of an epoch
    evaluated: int | None = None  # samples of a split in each evaluation; None: all of the test split


@dataclass(frozen=True)
class DataOrder:
    """The samples of every worker and step, which depend only on the seed and are the same for every method.

    In each epoch the workers share one shuffle of the samples. Samples that do not fill a step of all workers are
    left out of the epoch.
    """

    samples: int
    batch: int = field(kw_only=True)
    workers: int = field(kw_only=True)
    seed: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.samples < self.batch * self.workers:
            raise ValueError(
                f"{self.samples} samples are too few for {self.workers} workers with a batch of "
                f"{self.batch}: use fewer workers or a smaller batch."
            )

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in one pass over the data."""
        return self.samples // (self.batch * self.workers)

    def epoch(self, step: int) -> float:
        """Return the number of passes over the data after `step` steps."""
        return step / self.steps_per_epoch

    def at(self, step: int, rank: int) -> list[int]:
        """Return the samples of worker `rank` at `step`; both count from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = (place * self.workers + rank) * self.batch
        return _shuffle(self.samples, self.seed, epoch)[start : start + self.batch]


@lru_cache(maxsize=2)
def _shuffle(samples: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return [int(index) for index in torch.randperm(samples, generator=generator)]


def sgd(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> Optimizer:
    """Return stochastic gradient descent with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def adam(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> Optimizer:
    """Return Adam, with the momentum as its first beta."""
    return torch.optim.Adam(parameters, lr=lr, betas=(momentum, 0.98), eps=1e-9)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch of (inputs, labels)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, split: Split, samples: int) -> float:
    """Return the share of the first `samples` samples that the model classifies correctly."""
    device = next(model.parameters()).device
    right = 0
    for start in range(0, samples, 250):
        inputs, labels = split.batch(range(start, min(start + 250, samples)))
        right += int((model(inputs.to(device)).argmax(1) == labels.to(device)).sum())
    return right / samples


def mean_loss(model: nn.Module, split: Split, samples: int) -> float:
    """Return the mean of `classify` over the first `samples` samples."""
    device = next(model.parameters()).device
    total = 0.0
    for start in range(0, samples, 64):
        inputs, labels = split.batch(range(start, min(start + 64, samples)))
        total += len(inputs) * float(classify(model, (inputs.to(device), labels.to(device))))
    return total / samples


WARM_UP = 100  # steps


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: 100 steps of linear warm-up, then a cosine down to 10 %."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))


@dataclass(frozen=True)
class Recipe:
    """A training task with a name; a user's own recipe is called `module:function` or `file.py:function`."""

    name: str
    description: str = field(kw_only=True)
    data: str = field(kw_only=True)  # description of the data for the list of recipes
    model: Callable[[], nn.Module] = field(kw_only=True)
    load: Callable[[Path | None], Splits] = field(kw_only=True)  # None: use the cache, and download what is missing
    defaults: Defaults = field(kw_only=True)
    loss: Callable[[nn.Module, Batch], Tensor] = field(kw_only=True, default=classify)
    score: Callable[[nn.Module, Split, int], float] = field(kw_only=True, default=accuracy)
    metric: str = field(kw_only=True, default="accuracy")
    higher_is_better: bool = field(kw_only=True, default=True)  # of the metric; False for a loss
    make_optimizer: Callable[[Iterable[nn.Parameter], float, float], Optimizer] = field(kw_only=True, default=sgd)
    clip: float | None = field(kw_only=True, default=None)  # the largest norm of all gradients together; None: no limit
    # The factor on the learning rate, of the number of steps done and the number of all; None: a constant rate.
    schedule: Callable[[int, int], float] | None = field(kw_only=True, default=None)

    def build(self, seed: int) -> nn.Module:
        """Return a new model whose weights depend only on the seed; the global random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def parameter_count(self) -> int:
        """Return the number of parameters of the recipe's model."""
        try:
            with torch.device("meta"):
                model = self.model()
        except Exception:  # a constructor that reads values needs a real device
            model = self.build(0)
        return sum(parameter.numel() for parameter in model.parameters())

    def optimizer(self, model: nn.Module, *, lr: float | None = None, momentum: float | None = None) -> Optimizer:
        """Return the recipe's optimizer, by default with the recipe's learning rate and momentum."""
        rate = self.defaults.lr if lr is None else lr
        return self.make_optimizer(model.parameters(), rate, self.defaults.momentum if momentum is None else momentum)

    def set_rate(self, optimizer: Optimizer, step: int, steps: int) -> None:
        """Set the learning rates of the next step, after `step` steps of `steps`, if the recipe has a schedule.

        Call it before the backward pass, so that a link that watches the rates rescales its residual in time.
        """
        if self.schedule is None:
            return
        factor = self.schedule(step, steps)
        for group in optimizer.param_groups:  # torch's schedulers keep the rate without the factor under this name too
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])

    def clip_gradients(self, model: nn.Module) -> None:
        """Scale the gradients down to the recipe's largest norm, if it has one."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value of the metric is at the target or better."""
        return reaches(value, target, higher_is_better=self.higher_is_better)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, limit: int | None = None) -> float:
        """Return the metric on the first `limit` samples of a split (by default all), in evaluation mode."""
        samples = len(split) if limit is None else min(limit, len(split))
        if samples < 1:
            raise ValueError("there are no samples to evaluate: the limit must be at least 1.")
        was_training = model.training
        model.eval()
        try:
            return self.score(model, split, samples)
        finally:
            model.train(was_training)
