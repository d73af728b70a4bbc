"""A recipe: model, data, loss, metric and default settings of a training task, independent of the network.

A training loop uses `build`, `load`, `loss`, `optimizer`, `evaluate` and a `DataOrder`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

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
    epochs: int  # an upper bound: a run stops at the target if one is given
    target: float  # the metric on the test split at which a race ends


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
    make_optimizer: Callable[[Iterable[nn.Parameter], float, float], Optimizer] = field(kw_only=True, default=sgd)

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
