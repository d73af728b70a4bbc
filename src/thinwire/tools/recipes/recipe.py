"""What a recipe is: model + data + loss + metric + defaults, and nothing of networks or compression.

A training loop needs `build`, `load`, `loss`, `optimizer`, `evaluate` and a `DataOrder`; see docs/recipes.md.
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
    """Samples in memory that a loop can index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """The tensors of these samples, on the CPU, ready for `loss`."""
        ...


@dataclass(frozen=True)
class Splits:
    """The two halves of a recipe's data."""

    train: Split
    test: Split


@dataclass(frozen=True)
class TensorSplit:
    """Samples as tensors whose first dimension counts them; `prepare` runs on each batch of inputs."""

    inputs: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The prepared inputs and the labels of these samples."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self.prepare(self.inputs[chosen]), self.labels[chosen]


@dataclass(frozen=True)
class Defaults:
    """Settings that train the recipe well; the command line can override all but the momentum."""

    batch: int  # samples per worker and step
    lr: float
    momentum: float
    epochs: int  # an upper bound: a run stops at the target if one is given
    target: float  # the metric on the test split at which a race ends


@dataclass(frozen=True)
class DataOrder:
    """Which samples a worker takes at a step: a pure function of the seed, the same for every method.

    Each epoch is one shuffle that all workers share; a tail that does not fill a step of all is left out.
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
        """How many steps one pass of the data takes."""
        return self.samples // (self.batch * self.workers)

    def epoch(self, step: int) -> float:
        """How many passes of the data are done after `step` steps."""
        return step / self.steps_per_epoch

    def at(self, step: int, rank: int) -> list[int]:
        """The samples of worker `rank` at `step` (both count from 0)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = (place * self.workers + rank) * self.batch
        return _shuffle(self.samples, self.seed, epoch)[start : start + self.batch]


@lru_cache(maxsize=2)
def _shuffle(samples: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return [int(index) for index in torch.randperm(samples, generator=generator)]


def sgd(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> Optimizer:
    """Plain stochastic gradient descent with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def adam(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> Optimizer:
    """Adam; the momentum is its first beta."""
    return torch.optim.Adam(parameters, lr=lr, betas=(momentum, 0.98), eps=1e-9)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a batch of (inputs, labels)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, split: Split, samples: int) -> float:
    """Share of the first `samples` that the model labels right."""
    device = next(model.parameters()).device
    right = 0
    for start in range(0, samples, 250):
        inputs, labels = split.batch(range(start, min(start + 250, samples)))
        right += int((model(inputs.to(device)).argmax(1) == labels.to(device)).sum())
    return right / samples


@dataclass(frozen=True)
class Recipe:
    """A training task under one name; users make their own and refer to it as `module:function`."""

    name: str
    description: str = field(kw_only=True)
    data: str = field(kw_only=True)  # what the data is and where it comes from, for the list of recipes
    model: Callable[[], nn.Module] = field(kw_only=True)
    load: Callable[[Path | None], Splits] = field(kw_only=True)  # None: download to the cache, if need be
    defaults: Defaults = field(kw_only=True)
    loss: Callable[[nn.Module, Batch], Tensor] = field(kw_only=True, default=classify)
    score: Callable[[nn.Module, Split, int], float] = field(kw_only=True, default=accuracy)
    metric: str = field(kw_only=True, default="accuracy")
    make_optimizer: Callable[[Iterable[nn.Parameter], float, float], Optimizer] = field(kw_only=True, default=sgd)

    def build(self, seed: int) -> nn.Module:
        """A new model whose weights depend on the seed alone; the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def parameter_count(self) -> int:
        """How many numbers a gradient of this recipe's model has."""
        try:
            with torch.device("meta"):
                model = self.model()
        except Exception:  # a constructor that looks at values needs a real device
            model = self.build(0)
        return sum(parameter.numel() for parameter in model.parameters())

    def optimizer(self, model: nn.Module, *, lr: float | None = None, momentum: float | None = None) -> Optimizer:
        """The recipe's optimiser with its default rate and momentum, unless others are given."""
        rate = self.defaults.lr if lr is None else lr
        return self.make_optimizer(model.parameters(), rate, self.defaults.momentum if momentum is None else momentum)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, limit: int | None = None) -> float:
        """The metric on the first `limit` samples of a split (all by default), in evaluation mode."""
        samples = len(split) if limit is None else min(limit, len(split))
        if samples < 1:
            raise ValueError("there are no samples to evaluate: the limit must be at least 1.")
        was_training = model.training
        model.eval()
        try:
            return self.score(model, split, samples)
        finally:
            model.train(was_training)
