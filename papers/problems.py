"""The strongly convex problem that the theory papers use: logistic regression with a ridge, and its optimum."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from papers.workspace import Workspace
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Batch, Defaults, Recipe, Split, Splits, classify

RIDGE = 1e-3  # makes logistic regression strongly convex


def ridge_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy plus RIDGE / 2 times the squared norm of all parameters."""
    squares = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    return classify(model, batch) + 0.5 * RIDGE * squares


def _linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def logistic() -> Recipe:
    """Return multinomial logistic regression on MNIST with a ridge: 7,850 parameters, strongly convex."""
    return Recipe(
        "logistic",
        description="Logistic regression on handwritten digits.",
        data=get_recipe("mnist").data,
        model=_linear,
        load=get_recipe("mnist").load,
        loss=ridge_loss,
        defaults=Defaults(batch=16, lr=0.05, momentum=0.0, epochs=5, target=0.9),
    )


def optimum_part(workspace: Workspace, recipe: Recipe, splits: Splits, samples: int) -> Any:
    """Return what `optimum` returns for the training split, as a part of a study that is always made."""
    setup = f"{recipe.name} samples={samples}"
    make = partial(optimum, recipe, splits.train, samples)
    return workspace.part("optimum", make, setup=setup, data=splits, needed=True)


def optimum(recipe: Recipe, split: Split, samples: int) -> dict[str, float]:
    """Return the least objective on the first samples of a split ("value") and its smoothness constant ("smoothness").

    L-BFGS on all samples finds the optimum. The smoothness is bounded by the largest eigenvalue of the inputs'
    covariance, which power iteration finds.
    """
    inputs, labels = split.batch(range(min(samples, len(split))))
    model = recipe.build(0)
    solver = torch.optim.LBFGS(model.parameters(), max_iter=400, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> float:
        solver.zero_grad()
        loss = recipe.loss(model, (inputs, labels))
        loss.backward()
        return float(loss.detach())

    solver.step(closure)
    x = torch.cat([inputs.flatten(1), torch.ones(len(inputs), 1)], dim=1)
    vector = torch.ones(x.shape[1])
    for _ in range(50):
        vector = x.T @ (x @ vector) / len(x)
        vector /= vector.norm()
    largest = float((x @ vector).square().sum() / len(x))
    with torch.no_grad():
        value = float(recipe.loss(model, (inputs, labels)))
    return {"value": value, "smoothness": 0.5 * largest + RIDGE}
