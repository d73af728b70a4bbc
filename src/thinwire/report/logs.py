"""What the logs of one report must have in common, and the words that tell their runs apart.

A page and `--json` begin with `prepare`, so that both speak of the same methods.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from thinwire.errors import LogError
from thinwire.events import PHASES, Run, RunLog


def prepare(logs: Sequence[RunLog], *, named: bool = False) -> list[RunLog]:
    """The logs, checked, with methods' names that tell runs apart; LogError if they do not go into one report.

    `named`: the names are their maker's and stay as they are.
    """
    if not logs:
        raise LogError("a report needs at least one event log.")
    for log in logs:
        for field in _not_finite(log):
            raise LogError(f"{_name(log)}: {field} is no finite number: the log is damaged, leave it out.")
    metrics = dict.fromkeys(log.run.metric for log in logs)
    if len(metrics) > 1:
        raise LogError(f"the logs have different metrics ({', '.join(metrics)}): make a report of each.")
    return list(logs) if named else told_apart(logs)


def _name(log: RunLog) -> str:
    return f"the log {log.path}" if log.path else f"the log of {log.run.method}, seed {log.run.seed}"


def _not_finite(log: RunLog) -> Iterator[str]:
    """Times and the target; a metric or a loss may diverge, and a run may have no target."""
    if math.isinf(log.run.target):
        yield "run.target"
    for step in log.steps:
        for name in ("epoch", "wall", *PHASES):
            if not math.isfinite(getattr(step, name)):
                yield f"step.{name} (step {step.step})"
    for event in log.evals:
        for name in ("epoch", "wall"):
            if not math.isfinite(getattr(event, name)):
                yield f"eval.{name} (step {event.step})"
    for histogram in log.histograms:
        if not all(map(math.isfinite, histogram.edges)):
            yield f"histogram.edges (step {histogram.step})"


def target_of(run: Run) -> float | None:
    """What the run was to reach, if anything."""
    return None if math.isnan(run.target) else run.target


def _target(run: Run) -> str:
    goal = target_of(run)
    if goal is None:
        return "no target"
    return f"target {100 * goal:.4g} %" if run.metric == "accuracy" else f"target {goal:.4g}"


# Of these, the words that differ between the logs follow a method's name. An empty word is left out.
_WORDS: tuple[Callable[[Run], str], ...] = (
    lambda run: run.recipe,
    lambda run: f"{run.workers} workers",
    lambda run: run.rate if run.rate != "none" else "no limit",
    lambda run: f"batch {run.batch}",
    lambda run: run.transport,
    lambda run: f"{100 * run.packet_loss:.4g}% loss",
    _target,
)


def setting(run: Run) -> tuple[str, ...]:
    """All that must be equal for two methods to be compared."""
    return tuple(word(run) for word in _WORDS)


def told_apart(logs: Sequence[RunLog]) -> list[RunLog]:
    """The logs; where they differ in recipe, network, batch, transport or target, a method's name says in what."""
    telling = [word for word in _WORDS if len({word(log.run) for log in logs}) > 1]

    def name(run: Run) -> str:
        # Runs with a server are called "tcp 5%" or "bsp:topk1/topk1:udp-restore": that is said once.
        said = run.method.replace(":", " ").split()
        words = (word(run) for word in telling)
        return ", ".join([run.method, *(word for word in words if word and word.removesuffix(" loss") not in said)])

    return [replace(log, run=replace(log.run, method=name(log.run))) for log in logs]
