"""Plans: a recipe's defaults, what the user changed, and what follows for the number of workers."""

import math
from pathlib import Path

from thinwire.race.training import Plan
from thinwire.recipes.recipe import DataOrder, Recipe


def rate_or_none(rate: str | None) -> str | None:
    """None where nothing is to be shaped; a bad rate is a ValueError here, before anything starts."""
    if rate is None or rate == "none":
        return None
    from thinwire.lab.units import parse_rates

    parse_rates(rate)
    return rate


def make_plan(
    recipe: Recipe,
    *,
    workers: int,
    data: Path | None = None,
    batch: int | None = None,
    lr: float | None = None,
    target: float | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    evaluate_every: int | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    diagnose: int = 0,
) -> Plan:
    """Fill in defaults; ValueError says what cannot be."""
    defaults = recipe.defaults
    chosen = batch if batch is not None else defaults.batch
    order = DataOrder(len(recipe.load(data).train), batch=chosen, workers=workers, seed=0)
    goal = target if target is not None else defaults.target
    if recipe.metric == "accuracy" and not 0.0 < goal <= 1.0:
        raise ValueError(f"a target accuracy lies in (0, 1], not {goal}")
    if lr is not None and not 0.0 < lr < math.inf:
        raise ValueError(f"a learning rate is positive, not {lr}")
    passes = epochs if epochs is not None else defaults.epochs
    if not 0.0 < passes < math.inf:
        raise ValueError(f"--epochs is a number above 0, not {passes}")
    steps = max_steps if max_steps is not None else max(1, round(passes * order.steps_per_epoch))
    # Every quarter of an epoch, but not so often that evaluation takes longer than training.
    usual = max(5, order.steps_per_epoch // 4)
    return Plan(
        batch=chosen,
        lr=lr if lr is not None else defaults.lr,
        momentum=defaults.momentum,
        max_steps=steps,
        target=goal,
        evaluate_every=evaluate_every if evaluate_every is not None else usual,
        checkpoint=checkpoint,
        resume=resume,
        diagnose=diagnose,
    )
