"""The recipe digits while the learning rate falls to zero: two rules for the residual's unit, and dense training.

`python -m tests.link.falling_rates` prints, for each seed, the largest norm of the mean gradient in the last ten steps
and the test accuracy. All ranks are simulated exactly in one process. It takes about a minute on a quiet machine.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.link.rescale import ResidualUnits
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import DataOrder, Recipe
from thinwire.tools.simulate.ranks import DenseTraining, GradientTraining

WORKERS = 4
RULES = ("dense", "residual as it is", "residual x old / new rate")


def cosine(step: int, steps: int) -> float:
    """The factor on the learning rate, which is zero after the last step."""
    return 0.5 + 0.5 * math.cos(math.pi * step / steps)


class Watched(DenseTraining):
    """Dense training that notes the norm of the mean gradient before clipping."""

    norm = 0.0

    def combine(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        means = super().combine(gradients)
        self.norm = float(torch.nn.utils.get_total_norm(list(means.values())))
        return means


class WatchedGradients(Watched, GradientTraining):
    """Top 1 % of gradients. The residual's unit follows the library's rule, or the rate whenever it changes."""

    def __init__(self, rule: str, recipe: Recipe, seed: int, workers: int, lr: float, steps: int) -> None:
        GradientTraining.__init__(self, "topk1", recipe, seed, workers, lr, steps)
        self._rescales = rule == RULES[2]
        self._units = ResidualUnits(self.named, [self.optimizer])
        self._before = lr

    def combine(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        rate = float(self.optimizer.param_groups[0]["lr"])
        factors = dict.fromkeys(self.named, self._before / rate) if self._rescales else self._units.changes()
        self._before = rate
        for codec in self.codecs:
            for name, factor in factors.items():
                codec.rescale(factor, [name])
        return super().combine(gradients)


def train(rule: str, seed: int, steps: int) -> tuple[float, float]:
    """Train; return the largest norm of the last ten steps and the accuracy."""
    recipe = replace(get_recipe("digits"), schedule=cosine, clip=5.0)
    splits = recipe.load(None)
    order = DataOrder(len(splits.train), batch=recipe.defaults.batch, workers=WORKERS, seed=seed)
    rest = (recipe, seed, WORKERS, recipe.defaults.lr, steps)
    training = Watched(*rest) if rule == "dense" else WatchedGradients(rule, *rest)
    norms = []
    for step in range(steps):
        training.step([splits.train.batch(order.at(step, rank)) for rank in range(WORKERS)])
        norms.append(training.norm)
    return max(norms[-10:]), recipe.evaluate(training.model, splits.test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for rule in RULES:
        for seed in range(asked.seeds):
            norm, accuracy = train(rule, seed, asked.steps)
            print(f"{rule}, seed {seed}: largest norm {norm:,.1f}, accuracy {100 * accuracy:.1f} %", flush=True)
