"""Figures per method from event logs: step time, bytes, time to target and speed-up, as medians over the runs.

Races and reports both use these figures.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median

from thinwire.errors import LogError
from thinwire.tools.events import PHASES, Eval, Run, RunLog, Step
from thinwire.tools.lab.links import DelayCost
from thinwire.tools.recipes.metric import name_metric, reaches, show_metric


def prepare(logs: Sequence[RunLog], *, named: bool = False) -> list[RunLog]:
    """Check that the logs fit into one report and return them with distinct names of methods.

    With `named`, the names of the methods stay as they are. LogError if the logs do not fit together.
    """
    if not logs:
        raise LogError("a report needs at least one event log.")
    for log in logs:
        if field := next(_not_finite(log), None):
            name = f"the log {log.path}" if log.path else f"the log of {log.run.method}, seed {log.run.seed}"
            raise LogError(f"{name}: {field} is no finite number: the log is damaged, leave it out.")
    metrics = dict.fromkeys((log.run.metric, log.run.higher_is_better) for log in logs)
    if len(metrics) > 1:
        names = ", ".join(name for name, _ in metrics)
        raise LogError(f"the logs have different metrics ({names}): make a report of each.")
    return list(logs) if named else told_apart(logs)


def _not_finite(log: RunLog) -> Iterator[str]:
    """Yield the names of times and targets that are not finite; a metric may be, and a run may have no target."""
    if math.isinf(log.run.target):
        yield "run.target"
    timed: tuple[tuple[str, Sequence[Step | Eval], Sequence[str]], ...] = (
        ("step", log.steps, ("epoch", "wall", *PHASES)),
        ("eval", log.evals, ("epoch", "wall")),
    )
    for kind, events, names in timed:
        for event, name in product(events, names):
            if not math.isfinite(getattr(event, name)):
                yield f"{kind}.{name} (step {event.step})"
    for histogram in log.histograms:
        if not all(map(math.isfinite, histogram.edges)):
            yield f"histogram.edges (step {histogram.step})"


def target_of(run: Run) -> float | None:
    """Return the run's target, or None if it has none."""
    return None if math.isnan(run.target) else run.target


def _target(run: Run) -> str:
    goal = target_of(run)
    if goal is None:
        return "no target"
    return f"target {100 * goal:.4g} %" if run.metric == "accuracy" else f"target {goal:.4g}"


# Properties of a run. Those that differ between logs are added to the names of methods, unless they are empty.
_WORDS: tuple[Callable[[Run], str], ...] = (
    lambda run: run.recipe,
    lambda run: f"{run.workers} workers",
    lambda run: run.rate if run.rate != "none" else "no limit",
    lambda run: run.delay or "no delay",
    lambda run: f"batch {run.batch}",
    lambda run: run.transport,
    lambda run: f"{100 * run.packet_loss:.4g}% loss",
    _target,
)


def setting(run: Run) -> tuple[str, ...]:
    """Return the properties that must be equal for a comparison of two methods."""
    return tuple(word(run) for word in _WORDS)


def told_apart(logs: Sequence[RunLog]) -> list[RunLog]:
    """Return the logs with the properties in which they differ added to the names of their methods."""
    telling = [word for word in _WORDS if len({word(log.run) for log in logs}) > 1]

    def name(run: Run) -> str:
        # A name such as "tcp 5%" or "bsp:topk1/topk1:udp-restore" already has some of the properties.
        said = run.method.replace(":", " ").split()
        words = (word(run) for word in telling)
        return ", ".join([run.method, *(word for word in words if word and word.removesuffix(" loss") not in said)])

    return [replace(log, run=replace(log.run, method=name(log.run))) for log in logs]


@dataclass(frozen=True)
class MethodSummary:
    """Figures of a method over its runs; None means unknown or not reached."""

    method: str
    runs: int
    target: float | None
    baseline: str | None
    step_ms: float | None
    bytes_per_host_step: float | None
    steps_to_target: float | None
    seconds_to_target: float | None
    speedup: float | None  # of the time to target, against the baseline
    train: float | None  # the last value of the metric
    test: float | None


def by_method(logs: Sequence[RunLog]) -> dict[str, list[RunLog]]:
    """Return the runs of each method, in the order of their first log."""
    methods = dict.fromkeys(log.run.method for log in logs)
    return {method: [log for log in logs if log.run.method == method] for method in methods}


def baseline_of(run: Run, groups: Mapping[str, Sequence[RunLog]]) -> str | None:
    """Return the method that a run is compared with: dense with the same properties, or None."""
    dense = {name: logs[0].run for name, logs in groups.items() if name.split(",")[0] == "dense"}  # then properties
    return next((name for name, other in dense.items() if setting(other) == setting(run)), None)


def settled(log: RunLog) -> list[Step]:
    """Return the steps without the first, which includes the warm-up, unless it is the only one."""
    return [step for step in log.steps if step.step > 1] or log.steps


def step_seconds(log: RunLog) -> float | None:
    """Return the median step time; the slowest rank counts, because all others wait for it."""
    slowest: dict[int, float] = {}
    for step in settled(log):
        slowest[step.step] = max(slowest.get(step.step, 0.0), step.seconds)
    return median(slowest.values()) if slowest else None


def phase_ms(logs: Sequence[RunLog]) -> dict[str, float] | None:
    """Return the milliseconds of each phase: the median over the runs of the median over steps and ranks."""

    def of(phase: str) -> float | None:
        return _median(logs, lambda log: median(getattr(s, phase) for s in settled(log)) if log.steps else None)

    found = {phase: 1000 * value for phase in PHASES if (value := of(phase)) is not None}
    return found if len(found) == len(PHASES) else None


def bytes_per_host_step(log: RunLog) -> float | None:
    """Return the mean bytes that a host sends in a step."""
    steps = settled(log)
    return mean(step.bytes_sent for step in steps) if steps else None


def reached(log: RunLog, target: float | None = None) -> Eval | None:
    """Return the first evaluation on the test split that reaches the target (by default the run's), or None."""
    goal = log.run.target if target is None else target
    up = log.run.higher_is_better
    return next((e for e in log.evals if e.split == "test" and reaches(e.value, goal, higher_is_better=up)), None)


def last_value(log: RunLog, split: str) -> float | None:
    """Return the last value of the metric on a split, or None."""
    return next((e.value for e in reversed(log.evals) if e.split == split), None)


def _median(logs: Sequence[RunLog], figure: Callable[[RunLog], float | None]) -> float | None:
    """Return the median of a figure over the runs, or None if a run does not have it or it is not finite."""
    values = [value for log in logs if (value := figure(log)) is not None and math.isfinite(value)]
    return median(values) if values and len(values) == len(logs) else None


def delay_cost(logs: Sequence[RunLog]) -> DelayCost | None:
    """Return the largest figures of the lab's delay line in these runs; None where it delayed nothing."""
    ends = [log.end for log in logs if log.end is not None and math.isfinite(log.end.delay_line_share)]
    names = ("share", "p99_late_ms", "packets", "dropped")
    return DelayCost.worst(DelayCost(*(getattr(end, f"delay_line_{name}") for name in names)) for end in ends)


def summarise(logs: Sequence[RunLog], target: float | None = None) -> list[MethodSummary]:
    """Return a summary of each method, in the order of the logs."""
    groups = by_method(logs)

    def seconds(log: RunLog) -> float | None:
        return hit.wall if (hit := reached(log, target)) else None

    def steps(log: RunLog) -> float | None:
        return float(hit.step) if (hit := reached(log, target)) else None

    summaries = []
    for method, runs in groups.items():
        base = baseline_of(runs[0].run, groups)
        reference = None if base is None else _median(groups[base], seconds)
        step, to_target = _median(runs, step_seconds), _median(runs, seconds)
        summaries.append(
            MethodSummary(
                method=method,
                runs=len(runs),
                target=target_of(runs[0].run) if target is None else target,
                baseline=base,
                step_ms=None if step is None else 1000 * step,
                bytes_per_host_step=_median(runs, bytes_per_host_step),
                steps_to_target=_median(runs, steps),
                seconds_to_target=to_target,
                speedup=reference / to_target if reference is not None and to_target else None,
                train=_median(runs, lambda log: last_value(log, "train")),
                test=_median(runs, lambda log: last_value(log, "test")),
            )
        )
    return summaries


def headline(summaries: Sequence[MethodSummary], *, metric: str) -> str:
    """Return one sentence about the result of the runs."""
    if not summaries:
        return "There are no runs."
    target, *others = targets = list(dict.fromkeys(s.target for s in summaries))
    if others:
        words = ", ".join("none" if each is None else show_metric(each, metric) for each in targets)
        return f"The runs had different targets ({words}), so their times to target are not compared."
    if target is None:
        fastest = min(summaries, key=lambda s: math.inf if s.step_ms is None else s.step_ms)
        took = "" if fastest.step_ms is None else f"; {fastest.method} had the fastest step ({fastest.step_ms:.3g} ms)"
        return f"The runs had no target to reach{took}."
    goal = f"the target of {name_metric(target, metric)}"
    arrived = [s for s in summaries if s.seconds_to_target is not None]
    if not arrived:
        return f"None of the {len(summaries)} methods reached {goal}."
    return _winner(arrived, summaries, goal)


def _winner(arrived: Sequence[MethodSummary], summaries: Sequence[MethodSummary], goal: str) -> str:
    best = min(arrived, key=lambda s: s.seconds_to_target or 0.0)
    first = f"{best.method} reached {goal} in {best.seconds_to_target:.3g} s"
    base = next((s for s in summaries if s.method == best.baseline), None)
    if base is None:
        return f"{first}; there is no dense run to compare it with."
    if best.method == base.method:
        return f"{first}; no other method was faster."
    if best.speedup is None:
        return f"{first}; {base.method} did not reach it."
    return f"{first}, {best.speedup:.1f} times sooner than {base.method} ({base.seconds_to_target:.3g} s)."
