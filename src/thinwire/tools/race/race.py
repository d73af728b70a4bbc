"""Race: the same training over the same thin network with each method, and what came of it.

Every method has the same seeds, data order and stopping rule; the step on an infinite network is measured in the
same run, and a method's tax is what its step takes beyond that.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import thinwire
from thinwire.tools.events import Event, EventLog, Run, RunLog, Step
from thinwire.tools.observe import describe_machine, now
from thinwire.tools.race.launch import launch
from thinwire.tools.race.worker import Work, parse
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.summary import MethodSummary, summarise

Watch = Callable[[int, Event | str], None]


@dataclass(frozen=True)
class Field:
    """The network and the machine that a race runs on."""

    hosts: int
    rate: str | None
    command: str


@dataclass(frozen=True)
class Standing:
    """One method's figures in the end."""

    name: str
    step_ms: float
    tax: float
    aggregation_ms: float  # of a step, beyond the step on an infinite network
    bytes_per_host_step: float
    steps_to_target: float | None
    seconds_to_target: float | None
    speedup: float | None
    train_accuracy: float | None
    test_accuracy: float | None


@dataclass(frozen=True)
class Result:
    """A finished race."""

    field: Field
    recipe: str
    metric: str
    target: float | None
    infinite_ms: float
    standings: list[Standing]
    logs: list[RunLog]

    def to_json(self) -> dict[str, Any]:
        """The figures under the names that machines rely on."""
        return {
            "hosts": self.field.hosts,
            "rate": self.field.rate or "none",
            "recipe": self.recipe,
            "target": self.target,
            "infinite_ms": self.infinite_ms,
            "methods": [asdict(standing) for standing in self.standings],
            "verdict": self.verdict(),
            "version": thinwire.__version__,
            "command": self.field.command,
        }

    def verdict(self) -> str:
        """Whether it is worth it here, and with which setting."""
        where = f"at {self.field.hosts} hosts and {self.field.rate or 'no limit'}"
        dense = next((s for s in self.standings if s.name == "dense"), None)
        others = [s for s in self.standings if s.name not in ("dense", "fp16", "powersgd")]
        if dense is None or not others:
            return f"Without dense and a compressed method in the race there is nothing to compare {where}."
        if self.target is not None and any(s.seconds_to_target for s in others):
            best = min((s for s in others if s.seconds_to_target), key=lambda s: s.seconds_to_target or 0.0)
            gain = best.speedup
            goal = f"{self.target:.4g} {self.metric}" if self.target > 1 else f"{100 * self.target:.4g} % {self.metric}"
            what = f"reaches {goal} {f'{gain:.1f}x sooner than dense' if gain else 'and dense does not'}"
        else:
            best = min(others, key=lambda s: s.step_ms)
            gain = dense.step_ms / best.step_ms
            what = f"makes a step {gain:.1f}x faster than dense (no time to a target was measured)"
        if gain is not None and gain < 1.1:
            return f"Not worth it {where}: the best compressed method, {best.name}, gains {gain:.2f}x; stay with dense."
        codec, _, exchange = best.name.partition("+")
        setting = f"{codec!r}, exchange={exchange!r}" if exchange else f"{codec!r}"
        return f"Worth it {where}: {best.name} {what}; use thinwire.attach(model, {setting})."


def describe_run(recipe: Recipe, work: Work, place: Field, method: str, seed: int) -> Run:
    """The first record of a run's log."""
    return Run(
        command=place.command,
        recipe=recipe.name,
        method=method,
        workers=place.hosts,
        batch=work.plan.batch,
        parameters=recipe.parameter_count(),
        seed=seed,
        rate=place.rate or "none",
        metric=recipe.metric,
        target=work.plan.target if work.plan.target is not None else float("nan"),
        version=thinwire.__version__,
        machine=describe_machine(),
        date=now(),
    )


def run_race(recipe: Recipe, work: Work, place: Field, logs: Path, watch: Watch) -> Result:
    """Run all methods, writing a log each into the folder `logs`; `watch` sees every event of rank 0."""
    writers = [
        EventLog(logs / f"{method.replace('+', '-')}-{seed}.jsonl", describe_run(recipe, work, place, method, seed))
        for method, seed in work.runs
    ]

    def read(host: int, line: str) -> None:
        found = parse(line)
        if found is None:
            return
        number, event = found
        if isinstance(event, str):
            writers[number].end(event)
        else:
            writers[number].write(event)
        if not isinstance(event, Step) or event.rank == 0:
            watch(number, event)

    try:
        launch(work.command(), place.hosts, place.rate, read)
    finally:
        for writer in writers:
            if writer.log.end is None and writer.log.steps:
                writer.end("interrupted")
            writer.close()
    return sum_up(recipe, work, place, [writer.log for writer in writers])


def sum_up(recipe: Recipe, work: Work, place: Field, logs: list[RunLog]) -> Result:
    """Figures from logs."""
    infinite_logs = [log for log in logs if log.run.method == "infinite"]
    raced = [log for log in logs if log.run.method != "infinite"]
    infinite = summarise(infinite_logs)[0].step_ms if infinite_logs else None
    assert infinite is not None, "every race measures the infinite network"
    standings = [_standing(summary, infinite) for summary in summarise(raced)]
    return Result(place, recipe.name, recipe.metric, work.plan.target, infinite, standings, raced)


def _standing(s: MethodSummary, infinite: float) -> Standing:
    step = s.step_ms or 0.0
    return Standing(
        s.method,
        step,
        step / infinite - 1.0,
        step - infinite,
        s.bytes_per_host_step or 0.0,
        s.steps_to_target,
        s.seconds_to_target,
        s.speedup,
        s.train,
        s.test,
    )
