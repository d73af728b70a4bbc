"""Figures per method from event logs: step time, bytes, time to target, speed-up; medians over the runs.

A race and a report compute them here, so that both say the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from thinwire.events import PHASES, Eval, Run, RunLog, Step


@dataclass(frozen=True)
class MethodSummary:
    """What a method's runs amount to; None means that it is not known or was not reached."""

    method: str
    runs: int
    step_ms: float | None
    bytes_per_host_step: float | None
    steps_to_target: float | None
    seconds_to_target: float | None
    speedup: float | None  # of the time to target, against the baseline
    train: float | None  # the last value of the metric
    test: float | None


def by_method(logs: Sequence[RunLog]) -> dict[str, list[RunLog]]:
    """The runs of each method, in the order of their first log."""
    groups: dict[str, list[RunLog]] = {}
    for log in logs:
        groups.setdefault(log.run.method, []).append(log)
    return groups


def told_apart(logs: Sequence[RunLog]) -> list[RunLog]:
    """The logs; where they are of different recipes or networks, a method's name says of which."""
    words: tuple[Callable[[Run], str], ...] = (
        lambda run: run.recipe,
        lambda run: f"{run.workers} workers",
        lambda run: run.rate if run.rate != "none" else "no limit",
    )
    telling = [word for word in words if len({word(log.run) for log in logs}) > 1]
    return [
        replace(log, run=replace(log.run, method=", ".join([log.run.method, *(word(log.run) for word in telling)])))
        for log in logs
    ]


def baseline(methods: Sequence[str]) -> str:
    """The method that the others are compared with: dense, else the first."""
    return next((method for method in methods if method.split(",")[0] == "dense"), methods[0])


def settled(log: RunLog) -> list[Step]:
    """The steps without the first, which pays for warming up, unless it is the only one."""
    later = [step for step in log.steps if step.step > 1]
    return later or log.steps


def step_seconds(log: RunLog) -> float | None:
    """The median time of a step; of a step's ranks the slowest counts, since all wait for it."""
    slowest: dict[int, float] = {}
    for step in settled(log):
        slowest[step.step] = max(slowest.get(step.step, 0.0), step.seconds)
    return median(slowest.values()) if slowest else None


def phase_ms(logs: Sequence[RunLog]) -> dict[str, float] | None:
    """Median milliseconds of each phase over all settled steps and ranks."""
    steps = [step for log in logs for step in settled(log)]
    if not steps:
        return None
    return {phase: 1000 * median(getattr(step, phase) for step in steps) for phase in PHASES}


def bytes_per_host_step(log: RunLog) -> float | None:
    """Mean bytes that a host sends in a step."""
    steps = settled(log)
    return mean(step.bytes_sent for step in steps) if steps else None


def reached(log: RunLog, target: float | None = None) -> Eval | None:
    """The first evaluation on the test split at or above the target (the run's own by default)."""
    goal = log.run.target if target is None else target
    return next((e for e in log.evals if e.split == "test" and e.value >= goal), None)


def last_value(log: RunLog, split: str) -> float | None:
    """The last value of the metric on a split."""
    values = [e.value for e in log.evals if e.split == split]
    return values[-1] if values else None


def _median(logs: Sequence[RunLog], figure: Callable[[RunLog], float | None]) -> float | None:
    """The median over runs; a run without the figure leaves the method without it."""
    values = [value for log in logs if (value := figure(log)) is not None]
    return median(values) if values and len(values) == len(logs) else None


def summarise(logs: Sequence[RunLog], target: float | None = None) -> list[MethodSummary]:
    """One summary per method, in the order of the logs."""
    groups = by_method(logs)
    if not groups:
        return []

    def seconds(log: RunLog) -> float | None:
        hit = reached(log, target)
        return hit.wall if hit else None

    def steps(log: RunLog) -> float | None:
        hit = reached(log, target)
        return float(hit.step) if hit else None

    reference = _median(groups[baseline(list(groups))], seconds)
    summaries = []
    for method, runs in groups.items():
        step, to_target = _median(runs, step_seconds), _median(runs, seconds)
        summaries.append(
            MethodSummary(
                method=method,
                runs=len(runs),
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


def headline(summaries: Sequence[MethodSummary], *, metric: str, target: float) -> str:
    """One sentence that says what the runs showed, for a report whose maker gave none."""
    if not summaries:
        return "There are no runs."
    if math.isnan(target):
        fastest = min(summaries, key=lambda s: math.inf if s.step_ms is None else s.step_ms)
        took = "" if fastest.step_ms is None else f"; {fastest.method} had the fastest step ({fastest.step_ms:.3g} ms)"
        return f"The runs had no target to reach{took}."
    goal = f"the target of {show_metric(target, metric)}"
    base = next(s for s in summaries if s.method == baseline([x.method for x in summaries]))
    arrived = [s for s in summaries if s.seconds_to_target is not None]
    if not arrived:
        return f"None of the {len(summaries)} methods reached {goal}."
    best = min(arrived, key=lambda s: s.seconds_to_target or 0.0)
    first = f"{best.method} reached {goal} in {best.seconds_to_target:.3g} s"
    if best.method == base.method:
        return f"{first}; no other method was faster."
    if best.speedup is None:
        return f"{first}; {base.method} did not reach it."
    return f"{first}, {best.speedup:.1f} times sooner than {base.method} ({base.seconds_to_target:.3g} s)."


def show_metric(value: float | None, metric: str) -> str:
    """A metric as people write it: accuracy in per cent, others with one decimal."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.1f}"
