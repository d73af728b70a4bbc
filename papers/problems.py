"""Problems: small training tasks that the theory papers use: a strongly convex one and a small network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Batch, Defaults, Recipe, Split, classify

RIDGE = 1e-3  # makes logistic regression strongly convex


def regularised(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy plus half the squared norm of all parameters times the ridge."""
    squares = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    return classify(model, batch) + 0.5 * RIDGE * squares


def _linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def logistic() -> Recipe:
    """Multinomial logistic regression on MNIST with a ridge: 7,850 parameters, strongly convex."""
    return Recipe(
        "logistic",
        description="Logistic regression on handwritten digits.",
        data=get_recipe("mnist").data,
        model=_linear,
        load=get_recipe("mnist").load,
        loss=regularised,
        defaults=Defaults(batch=16, lr=0.05, momentum=0.0, epochs=5, target=0.9),
    )


@dataclass(frozen=True)
class Optimum:
    """The least objective on the first samples of a split, and the objective's smoothness there."""

    value: float
    smoothness: float


def optimum(recipe: Recipe, split: Split, samples: int) -> Optimum:
    """By L-BFGS on all samples; the smoothness is a bound from the largest eigenvalue of the inputs' covariance."""
    inputs, labels = split.batch(range(min(samples, len(split))))
    model = recipe.build(0)
    solver = torch.optim.LBFGS(model.parameters(), max_iter=400, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> float:
        solver.zero_grad()
        loss = recipe.loss(model, (inputs, labels))
        loss.backward()
        return float(loss.detach())

    solver.step(closure)
    flat = inputs.flatten(1)
    x = torch.cat([flat, torch.ones(len(flat), 1)], dim=1)
    vector = torch.ones(x.shape[1])
    for _ in range(50):
        vector = x.T @ (x @ vector) / len(x)
        vector /= vector.norm()
    largest = float((x @ vector).square().sum() / len(x))
    with torch.no_grad():
        value = float(recipe.loss(model, (inputs, labels)))
    return Optimum(value, 0.5 * largest + RIDGE)
