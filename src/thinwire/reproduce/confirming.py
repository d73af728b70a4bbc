"""Confirming: one training of all hosts in the lab against (steps to target) x (time of a step)."""

from dataclasses import dataclass
from typing import Any

from thinwire.codec.codec import Codec
from thinwire.recipes import get_recipe
from thinwire.reproduce.cluster import Setting
from thinwire.reproduce.labs import Bed, end_to_end, step_times
from thinwire.reproduce.runs import Goal
from thinwire.reproduce.study import Claim, Table, number
from thinwire.reproduce.workshop import Workshop

WITHIN = 0.15  # that the product may be off


@dataclass(frozen=True)
class Trial:
    """A short training that both the simulation and the lab can run to its end."""

    bed: Bed
    method: str
    codec: Codec | None
    target: float
    max_steps: int
    evaluate_every: int
    test_samples: int = 1000

    @property
    def setup(self) -> str:
        goal = f"target={self.target:g} steps={self.max_steps} every={self.evaluate_every} test={self.test_samples}"
        return f"{self.bed.setup} {self.method} {goal}"


def confirm(workshop: Workshop, trial: Trial, times: Any | None = None) -> tuple[list[Claim], list[Table]]:
    """Simulated steps x the lab's time of a step against the lab's own run; nothing where the lab is left out.

    times: the bed's step times by method, where the study has measured them already.
    """
    bed, recipe = trial.bed, get_recipe(trial.bed.recipe)
    setting = Setting(bed.hosts, bed.batch, bed.lr, recipe.defaults.momentum, trial.codec)
    goal = Goal(
        trial.max_steps,
        trial.evaluate_every,
        train_samples=0,
        test_samples=trial.test_samples,
        target=trial.target,
        split="test",
    )
    splits = workshop.load(recipe)
    curve = workshop.train("confirm", recipe, splits, setting, goal)
    step = f"{bed.setup} {trial.method} steps=25"
    times = times or workshop.lab_part(
        "confirm-step", lambda: step_times(bed, [trial.method], steps=25), setup=step, data=splits
    )
    run = workshop.lab_part("confirm-run", lambda: _run(trial), setup=trial.setup, data=splits)
    if curve is None or times is None or run is None:
        return [], []
    return _compare(trial, curve.reached, times[trial.method]["ms"], run)


def _run(trial: Trial) -> dict[str, Any]:
    return end_to_end(
        trial.bed,
        trial.method,
        target=trial.target,
        max_steps=trial.max_steps,
        evaluate_every=trial.evaluate_every,
        test_samples=trial.test_samples,
    )


def _compare(trial: Trial, steps: int | None, ms: float, run: dict[str, Any]) -> tuple[list[Claim], list[Table]]:
    product = steps * ms / 1e3 if steps else None
    off = product / run["seconds"] if product and run["seconds"] else None
    what = f"end to end: {trial.method}, {trial.bed}, to {trial.target:.4g} {get_recipe(trial.bed.recipe).metric}"
    row = {
        "Run": what,
        "Simulated steps": number(steps),
        "Step in the lab": number(ms, "ms"),
        "Product": number(product, "s"),
        "Steps in the lab": number(run["steps"]),
        "Seconds in the lab": number(run["seconds"], "s"),
        "Product / measured": number(off, "x"),
    }
    claim = Claim(
        "predicted time (simulated steps x lab step) over an end-to-end run in the lab",
        1.0,
        off,
        "x",
        off is not None and abs(off - 1.0) <= WITHIN,
        f"within {WITHIN:.0%} is asked for; {what}",
    )
    return [claim], [Table("The product, confirmed end to end", [row])]
