"""Confirming: one training of all hosts in the lab against (steps to target) x (time of a step)."""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from papers.cluster import Setting
from papers.runs import Goal
from papers.study import Claim, Table, number
from papers.workshop import Workshop
from thinwire.codec.codec import Codec
from thinwire.tools.events import RunLog, Step, read_log
from thinwire.tools.race.launch import ClusterSpec, launch, make_plan
from thinwire.tools.race.race import Result, run_race
from thinwire.tools.race.served import ServedWork, ServerSettings
from thinwire.tools.race.train import ServedTraining
from thinwire.tools.race.training import Plan, Work, with_infinite
from thinwire.tools.recipes import get_recipe
from thinwire.tools.report.summary import reached


@dataclass(frozen=True)
class Bed:
    """Emulated hosts that train a recipe with DDP."""

    recipe: str
    data: Path | None
    hosts: int
    rate: str | None  # None: local processes
    batch: int
    lr: float

    def __str__(self) -> str:
        return f"{self.hosts} hosts at {self.rate or 'no limit'}"

    @property
    def setup(self) -> str:
        """All but where the data lies, which is no part of what is measured."""
        return f"{self.recipe} {self} batch={self.batch} lr={self.lr:g}"


def step_times(bed: Bed, methods: Sequence[str], *, steps: int) -> dict[str, Any]:
    """Median milliseconds of a step and bytes a host sends, by method; "infinite" is the network that costs nothing."""
    result = _race(bed, methods, steps=steps, target=None, evaluate_every=steps + 1, test_samples=10)
    figures: dict[str, Any] = {"infinite": {"ms": result.infinite_ms, "bytes": 0.0}}
    for log in result.logs:
        sent = [step.bytes_sent for step in log.steps if step.rank == 0][2:]
        figures[log.run.method] = {"ms": 1e3 * statistics.median(_durations(log)), "bytes": statistics.mean(sent)}
    return figures


def end_to_end(
    bed: Bed, method: str, *, target: float, max_steps: int, evaluate_every: int, test_samples: int
) -> dict[str, Any]:
    """Steps and seconds that a run of all hosts took until the metric on the test split met the target."""
    result = _race(
        bed, [method], steps=max_steps, target=target, evaluate_every=evaluate_every, test_samples=test_samples
    )
    (log,) = result.logs
    hit = reached(log)
    values = [[e.step, e.value] for e in log.evals if e.split == "test"]
    return {"steps": hit.step if hit else None, "seconds": hit.wall if hit else None, "values": values}


def served_phases(bed: Bed, push: str, pull: str, *, steps: int) -> dict[str, float]:
    """Milliseconds of a step of a parameter server and of its phases; one of the bed's hosts is the master.

    As in SparsifyGradients: bulk synchronous, nothing overlaps. Medians over the steps, means over the workers.
    """
    recipe, workers = get_recipe(bed.recipe), bed.hosts - 1
    plan = replace(_plan(replace(bed, hosts=workers), steps, steps + 1), target=None, test_samples=10, train_samples=10)
    terms = ServerSettings(
        plan, workers=workers, method=push, pull_method=pull, overlap=False, phased=True, timeout=60.0
    )
    place = ClusterSpec(workers, bed.rate, "thinwire reproduce")
    with tempfile.TemporaryDirectory() as folder:
        training = ServedTraining(recipe, ServedWork(bed.recipe, bed.data, terms), place, Path(folder) / "log.jsonl")
        training.run()
        log = read_log(training.log)
    by_step: dict[int, list[Step]] = {}
    for step in log.steps:
        by_step.setdefault(step.step, []).append(step)
    full = [steps for number, steps in sorted(by_step.items()) if number > 2 and len(steps) == workers]

    def median(name: str) -> float:
        means = [statistics.mean(getattr(step, name) for step in steps) for steps in full]
        return 1e3 * float(statistics.median(means))

    phases = {name: median(name) for name in ("compute", "aggregate", "synchronise")}
    ends = [max(step.wall for step in steps) for steps in full]
    return {**phases, "ms": 1e3 * statistics.median(after - before for before, after in pairwise(ends))}


def broadcast_phases(bed: Bed, methods: Sequence[str], *, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step and its phases when the master broadcasts the model along a chain, by method.

    `moved` is how far the steps took the model, `sent` the bytes of a gradient, `alone` what the slowest host's
    computation takes while the others, who have no cores of their own here, wait.
    """
    seen: dict[str, list[dict[str, float]]] = {}
    alone: dict[str, list[float]] = {}

    def read(host: int, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind in ("STEP", "ALONE"):
            told = json.loads(rest)
            method = told.pop("method")
            if kind == "STEP":
                seen.setdefault(method, []).append(told)
            else:
                alone.setdefault(method, []).append(told["seconds"])

    options = {"methods": list(methods), "batch": bed.batch, "steps": steps}
    launch([sys.executable, "-m", "papers.sparsify_gradients.process", json.dumps(options)], bed.hosts, bed.rate, read)
    moments = {"synchronise": ("began", "synchronised"), "compute": ("synchronised", "computed")}
    moments |= {"aggregate": ("computed", "ended"), "ms": ("began", "ended")}

    def medians(told: list[dict[str, float]]) -> dict[str, float]:
        return {
            name: 1e3 * statistics.median(step[end] - step[begin] for step in told[2:])
            for name, (begin, end) in moments.items()
        }

    return {
        method: medians(told)
        | {"moved": told[-1]["moved"], "sent": statistics.median(step["sent"] for step in told[2:])}
        | {"alone": 1e3 * statistics.median(alone[method])}
        for method, told in seen.items()
    }


def _durations(log: RunLog) -> list[float]:
    """Seconds of rank 0's steps, without the first quarter: memories and connections are new then."""
    walls = [step.wall for step in sorted((s for s in log.steps if s.rank == 0), key=lambda s: s.step)]
    return [after - before for before, after in pairwise(walls[max(1, len(walls) // 4) :])]


def _race(
    bed: Bed,
    methods: Sequence[str],
    *,
    steps: int,
    target: float | None,
    evaluate_every: int,
    test_samples: int,
) -> Result:
    recipe = get_recipe(bed.recipe)
    plan = replace(_plan(bed, steps, evaluate_every), target=target, test_samples=test_samples, train_samples=10)
    work = Work(bed.recipe, bed.data, tuple(with_infinite([(method, 0) for method in methods])), plan)
    place = ClusterSpec(bed.hosts, bed.rate, "thinwire reproduce")
    with tempfile.TemporaryDirectory() as folder:
        return run_race(recipe, work, place, Path(folder))


def _plan(bed: Bed, steps: int, evaluate_every: int) -> Plan:
    return make_plan(
        get_recipe(bed.recipe),
        workers=bed.hosts,
        data=bed.data,
        batch=bed.batch,
        lr=bed.lr,
        max_steps=steps,
        evaluate_every=evaluate_every,
    )


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
