"""Races: the same training on the same emulated network with each method, or over each transport.

Every method has the same seeds, data order and stopping rule. Steps without communication are measured in the same
race; communication overhead = step time / step time without communication - 1.
"""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import thinwire
from thinwire.server.protocol import check_on_loss
from thinwire.tools.events import EventLog, RunLog, read_log
from thinwire.tools.lab.links import delay_json, delay_note
from thinwire.tools.lab.units import parse_loss
from thinwire.tools.options import listed
from thinwire.tools.race.launch import ClusterSpec, Follower, RunProgress, launch
from thinwire.tools.race.methods import UPDATES
from thinwire.tools.race.served import ServedWork
from thinwire.tools.race.train import MethodResult, ServedTraining, describe_run
from thinwire.tools.race.training import Plan, Work
from thinwire.tools.recipes.metric import metric_title, name_metric, reaches, show_metric
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.markup import Row
from thinwire.tools.report.page import megabytes
from thinwire.tools.report.summary import (
    MethodSummary,
    bytes_per_host_step,
    delay_cost,
    last_value,
    settled,
    step_seconds,
    summarise,
)

WORTH = 1.1  # a smaller gain in the time to the target does not pay for a changed training script


@dataclass(frozen=True)
class Result:
    """The results of a race between methods."""

    place: ClusterSpec
    recipe: str
    metric: str
    target: float | None
    infinite_ms: float  # a step without communication
    methods: list[MethodResult]
    logs: list[RunLog]
    higher_is_better: bool = True  # of the metric

    @property
    def note(self) -> str:
        """What the table states about delayed packets."""
        return delay_note(self.place.links, delay_cost(self.logs))

    def to_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        methods = [asdict(method) for method in self.methods]
        return {"target": self.target, "infinite_ms": self.infinite_ms, "methods": methods, **_common(self)}

    def verdict(self) -> str:
        """Say whether compression is worth it here, as far as that was measured."""
        where = f"with {self.place}"
        dense = next((m for m in self.methods if m.name == "dense"), None)
        others = [m for m in self.methods if m.name not in ("dense", "fp16", "powersgd")]
        if dense is None or not others:
            return f"Not decided {where}: a comparison needs dense and a compressed method in the same race."
        arrived = [m for m in others if m.seconds_to_target is not None]
        if self.target is None or not (arrived or dense.seconds_to_target):
            return self._undecided(where, dense, min(others, key=lambda m: m.step_ms))
        goal = name_metric(self.target, self.metric)
        if not arrived:
            return f"Not worth it {where}: dense reaches {goal} and no compressed method does."
        best = min(arrived, key=lambda m: m.seconds_to_target or 0.0)
        if best.speedup is not None and best.speedup < WORTH:
            gain = f"reaches {goal} {best.speedup:.2f}x as fast as dense"
            return f"Not worth it {where}: the best compressed method, {best.name}, {gain}; stay with dense."
        codec, _, exchange = best.name.partition("+")
        setting = f"{codec!r}, exchange={exchange!r}" if exchange else f"{codec!r}"
        setting += ", optimizer=optimizer" if codec in UPDATES else ""
        sooner = f"{best.speedup:.1f}x sooner than dense" if best.speedup else "and dense does not"
        said = f"Worth it {where}: {best.name} reaches {goal} {sooner}"
        return f"{said}; use thinwire.attach(model, {setting})."

    def _undecided(self, where: str, dense: MethodResult, best: MethodResult) -> str:
        if self.target is None:
            why = f"no target was set, so the time to {_article(self.metric)} was not measured"
        else:
            why = f"no method reached {name_metric(self.target, self.metric)}"
        took = f"A step with {best.name} takes {best.step_ms:,.0f} ms, with dense {dense.step_ms:,.0f} ms"
        said = f"Not decided {where}: {why}. {took}"
        ours, theirs = best.test_metric, dense.test_metric
        if ours is not None and theirs is not None:
            up = self.higher_is_better
            worse = not reaches(ours, theirs, higher_is_better=up)
            has = ("has only" if up else "still has") if worse else "has"
            said += f"; after the same number of steps {best.name} {has} {name_metric(ours, self.metric)}, "
            said += f"dense {show_metric(theirs, self.metric)}"
        return f"{said}. Give a --target that dense reaches."


def _article(metric: str) -> str:
    return f"an {metric}" if metric == "accuracy" else f"a {metric_title(metric)}"


def _common(result: "Result | LossResult") -> dict[str, Any]:
    return {
        "workers": result.place.workers,
        **result.place.links.to_json(),
        "delay_line": delay_json(delay_cost(result.logs)),
        "recipe": result.recipe,
        "metric": result.metric,
        "higher_is_better": result.higher_is_better,
        "verdict": result.verdict(),
        "version": thinwire.__version__,
        "python": platform.python_version(),  # its standard library is the text of the recipe gpt
        "command": result.place.command,
    }


class RaceStopped(KeyboardInterrupt):
    """Ctrl-C ended a race; `result` holds the methods that were finished, None if there are none."""

    def __init__(self, result: Result | None, finished: int, runs: int) -> None:
        super().__init__(f"the race was stopped: {finished} of {runs} runs were finished")
        self.result = result


def run_race(recipe: Recipe, work: Work, place: ClusterSpec, logs: Path, progress: RunProgress | None = None) -> Result:
    """Run all methods and write a log for each into the folder `logs`; RaceStopped if Ctrl-C ends it."""
    runs = [describe_run(recipe, work.plan, place, method, seed) for method, seed in work.runs]
    writers = [EventLog(logs / f"{run.method.replace('+', '-')}-{run.seed}.jsonl", run) for run in runs]
    try:
        follower = Follower(writers, progress)
        launch(work.command(), place.workers, place.links, follower.read, started=follower.started)
    except KeyboardInterrupt as error:
        done = [writer.log for writer in writers if writer.log.end is not None]
        raced = [log for log in done if log.run.method != "infinite"]
        result = summed_up(recipe, work.plan, place, done) if raced else None
        total = sum(method != "infinite" for method, _ in work.runs)
        raise RaceStopped(result, len(raced), total) from error
    finally:
        for writer in writers:
            if writer.log.end is None and writer.log.steps:
                writer.end("interrupted")
            writer.close()
    return summed_up(recipe, work.plan, place, [writer.log for writer in writers])


def summed_up(recipe: Recipe, plan: Plan, place: ClusterSpec, logs: list[RunLog]) -> Result:
    """Return the results that the logs of a race amount to."""
    infinite = summarise([log for log in logs if log.run.method == "infinite"])[0].step_ms
    assert infinite is not None, "every race measures steps without communication"
    raced = [log for log in logs if log.run.method != "infinite"]
    methods = [_method_result(summary, infinite) for summary in summarise(raced)]
    up = recipe.higher_is_better
    return Result(place, recipe.name, recipe.metric, plan.target, infinite, methods, raced, up)


def _method_result(summary: MethodSummary, infinite: float) -> MethodResult:
    step, sent = summary.step_ms or 0.0, summary.bytes_per_host_step or 0.0
    target = (summary.steps_to_target, summary.seconds_to_target, summary.speedup)
    return MethodResult(
        summary.method, step, step / infinite - 1.0, step - infinite, sent, *target, summary.train, summary.test
    )


@dataclass(frozen=True)
class Way:
    """A transport, what is done about lost gradients, and the share of packets that the links lose."""

    transport: str
    on_loss: str
    loss: str

    @property
    def name(self) -> str:
        """The name in tables and logs, without the loss."""
        return f"udp-{self.on_loss}" if self.transport == "udp" else self.transport


def ways(transports: str, losses: str, on_loss: str) -> list[Way]:
    """Return all runs that comma-separated options ask for; ValueError for an unknown item."""
    names, shares, policies = listed(transports, "--transport"), listed(losses, "--loss"), listed(on_loss, "--on-loss")
    if not set(names) <= {"tcp", "udp"}:
        raise ValueError(f"--transport takes tcp and udp, not {transports!r}")
    for share in shares:
        parse_loss(share)
    for policy in policies:
        check_on_loss(policy)
    return [
        Way(name, policy, share)
        for share in shares
        for name in names
        for policy in (policies if name == "udp" else ["restore"])
    ]


@dataclass(frozen=True)
class TransportResult:
    """The figures of one run over a transport."""

    transport: str
    on_loss: str | None
    loss: str
    step_ms: float
    wait_ms: float  # mean over steps and workers of the time that a step waits for communication
    bytes_per_host_step: float
    test_metric: float | None
    train_metric: float | None
    datagrams: int  # that carried gradients
    datagrams_lost: int
    restored: float  # sum of the magnitudes that returned to the workers' residuals
    curve: list[tuple[float, float]]  # seconds of training, the metric on the test split


@dataclass(frozen=True)
class LossResult:
    """The results of a race between transports."""

    place: ClusterSpec
    recipe: str
    metric: str
    runs: list[TransportResult]
    logs: list[RunLog]
    higher_is_better: bool = True  # of the metric

    @property
    def note(self) -> str:
        """What the table states about delayed packets."""
        return delay_note(self.place.links, delay_cost(self.logs))

    def to_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        common = _common(self)
        del common["packet_loss"]  # each run has its own
        return {"runs": [asdict(run) for run in self.runs], **common}

    def verdict(self) -> str:
        """Say at which loss a step waits less over udp than over tcp."""
        waits = {(r.transport, r.loss): r.wait_ms for r in self.runs if r.on_loss in (None, "restore")}
        losses = [loss for way, loss in waits if way == "udp" and ("tcp", loss) in waits]
        gains = {loss: waits["tcp", loss] / waits["udp", loss] for loss in losses}
        if not gains:
            return "Not decided: a comparison needs both tcp and udp in the race."
        each = ", ".join(f"{gain:.2f}x at {loss}" for loss, gain in gains.items())
        better = [loss for loss, gain in gains.items() if gain > 1.0]
        where = f"udp waits less than tcp at {' and '.join(better)} loss" if better else "udp waits longer than tcp"
        where += f" with {self.place.links.delays} one way" if self.place.links.delayed else ""
        return f"{where}: tcp's wait over udp's is {each}."

    def rows(self) -> list[Row]:
        """Return the results table."""
        return [
            {
                "run": log.run.method,
                "step": f"{r.step_ms:,.0f} ms",
                "waiting": f"{r.wait_ms:,.0f} ms",
                "sent": megabytes(r.bytes_per_host_step),
                "lost": f"{r.datagrams_lost / r.datagrams:.2%}" if r.datagrams else "-",
                "restored": f"{r.restored:,.3g}" if r.datagrams else "-",
                f"test {metric_title(self.metric)}": show_metric(r.test_metric, self.metric),
            }
            for r, log in zip(self.runs, self.logs, strict=True)
        ]


def race_transports(
    recipe: Recipe, work: ServedWork, place: ClusterSpec, ways: Sequence[Way], logs: Path
) -> LossResult:
    """Run one training after the other, with a log for each in the folder `logs`."""
    found, runs = [], []
    for way in ways:
        settings = replace(work.settings, transport=way.transport, on_loss=way.on_loss)
        path = logs / f"{way.name}-{way.loss.rstrip('%')}.jsonl"
        lossy = replace(place, links=replace(place.links, loss=way.loss))
        label = " ".join(filter(None, (way.name, way.loss, place.links.delays)))
        ServedTraining(recipe, replace(work, settings=settings), lossy, path, label).run()
        found.append(read_log(path))
        runs.append(_transport_result(way, found[-1]))
    return LossResult(place, recipe.name, recipe.metric, runs, found, recipe.higher_is_better)


def _transport_result(way: Way, log: RunLog) -> TransportResult:
    steps = settled(log)
    return TransportResult(
        way.transport,
        way.on_loss if way.transport == "udp" else None,
        way.loss,
        1e3 * (step_seconds(log) or 0.0),
        1e3 * mean(step.exchange for step in steps) if steps else 0.0,
        bytes_per_host_step(log) or 0.0,
        last_value(log, "test"),
        last_value(log, "train"),
        sum(step.datagrams for step in log.steps),
        sum(step.datagrams_lost for step in log.steps),
        sum(step.restored for step in log.steps),
        [(round(e.wall, 3), e.value) for e in log.evals if e.split == "test"],
    )
