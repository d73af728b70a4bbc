"""Measurements on emulated hosts: the time of a step, and runs to a target that confirm predicted times."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from papers.simulation import Curve, Goal, TrainingSetting
from papers.study import Claim, Figure, Series, Table, number, percent
from papers.workspace import Workspace
from thinwire.codec.codec import Codec
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.race.launch import ClusterSpec, RunProgress
from thinwire.tools.race.race import Result, run_race
from thinwire.tools.race.training import Plan, Work, with_infinite
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Splits
from thinwire.tools.report.summary import reached

TOLERANCE = 0.15  # of a predicted time


@dataclass(frozen=True)
class LabTestbed:
    """Emulated hosts that train a recipe with DDP."""

    recipe: str
    data: Path | None
    hosts: int
    rate: str | None  # None: local processes without a limit
    batch: int
    lr: float

    def __str__(self) -> str:
        return f"{self.hosts} hosts at {self.rate or 'no limit'}"

    @property
    def setup(self) -> str:
        """The identity of a measurement: everything but the folder of the data."""
        return f"{self.recipe} {self} batch={self.batch} lr={self.lr:g}"

    def plan(self, steps: int, every: int, target: float | None = None, test_samples: int = 10) -> Plan:
        """Return the plan of a training on these hosts, with an evaluation at every so many steps."""
        return Plan(
            batch=self.batch,
            lr=self.lr,
            momentum=get_recipe(self.recipe).defaults.momentum,
            max_steps=steps,
            target=target,
            evaluate_every=every,
            train_samples=10,
            test_samples=test_samples,
        )


@dataclass(frozen=True)
class ConfirmationRun:
    """A short training that is both simulated and run on emulated hosts until it reaches a target."""

    testbed: LabTestbed
    method: str
    codec: Codec | None
    target: float
    max_steps: int
    evaluate_every: int
    test_samples: int = 1000

    @property
    def setup(self) -> str:
        goal = f"target={self.target:g} steps={self.max_steps} every={self.evaluate_every} test={self.test_samples}"
        return f"{self.testbed.setup} {self.method} {goal}"


def step_times(testbed: LabTestbed, methods: Sequence[str], *, steps: int) -> dict[str, Any]:
    """Measure the median milliseconds of a step and the bytes that a host sends, by method.

    The method "infinite" is a step without communication.
    """
    result = _race(testbed, methods, testbed.plan(steps, steps + 1))
    times: dict[str, Any] = {"infinite": {"ms": result.infinite_ms, "bytes": 0.0}}
    for log in result.logs:
        steps_of_first = [step for step in log.steps if step.rank == 0]
        walls = [step.wall for step in sorted(steps_of_first, key=lambda step: step.step)]
        settled = walls[max(1, len(walls) // 4) :]  # in the first quarter, buffers and connections are new
        ms = 1e3 * statistics.median(after - before for before, after in pairwise(settled))
        sent = statistics.mean(step.bytes_sent for step in steps_of_first[2:])
        times[log.run.method] = {"ms": ms, "bytes": sent}
    return times


def step_times_part(
    workspace: Workspace, name: str, testbed: LabTestbed, methods: Sequence[str], steps: int, splits: Splits
) -> Any | None:
    """Return what `step_times` returns, as a part of a study; None without the lab."""
    setup = f"{testbed.setup} {', '.join(methods)} steps={steps}"
    make = partial(step_times, testbed, methods, steps=steps)
    return workspace.lab_part(name, make, setup=setup, data=splits)


def end_to_end(run: ConfirmationRun) -> dict[str, Any]:
    """Train until the metric on the test split reaches the target; return the steps and the seconds that it took."""
    plan = run.testbed.plan(run.max_steps, run.evaluate_every, run.target, run.test_samples)
    (log,) = _race(run.testbed, [run.method], plan).logs
    hit = reached(log)
    values = [[e.step, e.value] for e in log.evals if e.split == "test"]
    return {"steps": hit.step if hit else None, "seconds": hit.wall if hit else None, "values": values}


def _race(testbed: LabTestbed, methods: Sequence[str], plan: Plan) -> Result:
    work = Work(testbed.recipe, testbed.data, tuple(with_infinite([(method, 0) for method in methods])), plan)
    place = ClusterSpec(testbed.hosts, LinkSettings(testbed.rate), "thinwire reproduce")
    recipe, names = get_recipe(testbed.recipe), [method for method, _ in work.runs]
    totals = [min(work.infinite_steps, plan.max_steps) if name == "infinite" else plan.max_steps for name in names]
    with tempfile.TemporaryDirectory() as folder, RunProgress(names, totals, recipe.metric) as progress:
        return run_race(recipe, work, place, Path(folder), progress)


def confirm(workspace: Workspace, run: ConfirmationRun, times: Any | None = None) -> tuple[list[Claim], list[Table]]:
    """Compare a predicted time (simulated steps x the lab's time of a step) with an end-to-end run in the lab.

    `times` are the testbed's step times by method if the study has measured them already. Without the lab there is
    no claim and no table.
    """
    testbed, recipe = run.testbed, get_recipe(run.testbed.recipe)
    setting = TrainingSetting(testbed.hosts, testbed.batch, testbed.lr, recipe.defaults.momentum, run.codec)
    goal = Goal(run.max_steps, run.evaluate_every, 0, run.test_samples, target=run.target, split="test")
    splits = workspace.load(recipe)
    curve = workspace.train("confirm", recipe, splits, setting, goal)
    times = times or step_times_part(workspace, "confirm-step", testbed, [run.method], 25, splits)
    measured = workspace.lab_part("confirm-run", lambda: end_to_end(run), setup=run.setup, data=splits)
    if curve is None or times is None or measured is None:
        return [], []
    steps, ms = curve.reached, times[run.method]["ms"]
    predicted = steps * ms / 1e3 if steps else None
    ratio = predicted / measured["seconds"] if predicted and measured["seconds"] else None
    what = f"end to end: {run.method}, {testbed}, to {run.target:.4g} {recipe.metric}"
    row = {
        "Run": what,
        "Simulated steps": number(steps),
        "Step in the lab": number(ms, "ms"),
        "Product": number(predicted, "s"),
        "Steps in the lab": number(measured["steps"]),
        "Seconds in the lab": number(measured["seconds"], "s"),
        "Product / measured": number(ratio, "x"),
    }
    holds = ratio is not None and abs(ratio - 1.0) <= TOLERANCE
    note = f"within {TOLERANCE:.0%} is asked for; {what}"
    claim = "predicted time (simulated steps x lab step) over an end-to-end run in the lab"
    return [Claim(claim, 1.0, ratio, "x", holds, note)], [Table("The product, confirmed end to end", [row])]


def accuracy_row(curve: Curve, target: float, ms: float | None) -> dict[str, str]:
    """Return the cells of a run in a table of accuracies; `ms` is the time of a step in the lab."""
    steps = curve.first_at(target)
    return {
        "Best accuracy": percent(curve.best_test),
        "MB sent": number(curve.megabytes[-1]),
        "Steps to target": number(steps),
        "Step in the lab": number(ms, "ms"),
        "Time to target": number(steps * ms / 1e3 if steps and ms else None, "s"),
    }


def accuracy_figures(
    curves: dict[str, Curve], ms: dict[str, float], titles: tuple[str, str, str], hosts: str
) -> list[Figure]:
    """Plot the test accuracy over steps, over seconds on these hosts, and over the megabytes that a worker sent.

    `ms` has the milliseconds of a step by run; runs without a time are not plotted over seconds.
    """
    over_steps = {name: curve.step for name, curve in curves.items()}
    over_seconds = {name: [step * ms[name] / 1e3 for step in steps] for name, steps in over_steps.items() if name in ms}
    over_sent = {name: curve.megabytes for name, curve in curves.items()}

    def figure(title: str, axis: str, places: Mapping[str, Sequence[float]], log: str = "") -> Figure:
        series = [Series(name, list(x), [100 * v for v in curves[name].test]) for name, x in places.items()]
        return Figure(title, axis, "test accuracy (%)", series, log=log)

    timed = [figure(titles[1], f"seconds, {hosts}", over_seconds)] if over_seconds else []
    return [figure(titles[0], "step", over_steps), *timed, figure(titles[2], "MB", over_sent, "x")]
