"""Live: one progress bar per run, with loss, metric, bytes and the time left."""

import math
import os
import socket
import subprocess
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from thinwire.errors import ThinwireError
from thinwire.tools.events import Eval, Event, Step
from thinwire.tools.lab import Lab
from thinwire.tools.lab.check import check, ready
from thinwire.tools.lab.launching import PIPED, Launch
from thinwire.tools.race.training import Plan
from thinwire.tools.recipes.recipe import DataOrder, Recipe


def rate_or_none(rate: str | None) -> str | None:
    """None where nothing is to be shaped; a bad rate is a ValueError here, before anything starts."""
    if rate is None or rate == "none":
        return None
    from thinwire.tools.lab.units import parse_rates

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


class WorkFailed(ThinwireError):
    """A worker failed; the message says which and why."""


def require_lab_for(rate: str) -> None:
    """One sentence, with the remedy, where the machine does not allow a lab."""
    abilities = check()
    if not ready(abilities):
        why = "; ".join(f"{a.name}: {a.detail}" for a in abilities if a.required and not a.works)
        raise ThinwireError(
            f"this machine cannot emulate hosts at {rate} ({why}): run as root, or use --rate none for plain loopback"
        )


def launch(
    argv: list[str], workers: int, rate: str | None, output: Callable[[int, str], None], *, loss: str | None = None
) -> None:
    """Run a command to its end as so many workers, each one's lines going to `output`; loss is the lab's."""
    told: list[str] = []

    def read(host: int, line: str) -> None:
        if line.startswith("FAILED "):
            told.append(line[7:])
        output(host, line)

    if rate is not None:
        require_lab_for(rate)
        with Lab(workers, rate=rate, loss=loss) as lab:
            result = lab.run(argv, output=read)
        spoke = list(result.hosts[result.failed].lines) if result.failed is not None else []
        failure, last = result.failure, _last_words(spoke)
    else:
        failure, last = _local(argv, workers, read)
    if failure is not None:
        raise WorkFailed(told[0] if told else f"{failure}{last}")


def _local(argv: list[str], workers: int, read: Callable[[int, str], None]) -> tuple[str | None, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=200))

    def keep(host: int, line: str) -> None:
        lines[host].append(line)
        read(host, line)

    run = Launch(timeout=None, output=keep, grace=5.0)
    try:
        for rank in range(workers):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": workers,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": workers,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }
            env = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            run.add(rank, subprocess.Popen(argv, env=env, start_new_session=True, **PIPED))  # type: ignore[call-overload]
        run.wait()
    finally:
        run.stop()
    failure = run.failure()
    spoke = lines[run.failed] if run.failed is not None else ()
    return (failure.replace("host h", "worker ") if failure else None), _last_words(spoke)


def _last_words(lines: Sequence[str]) -> str:
    """The last line that is not an event, as the end of a sentence: what the worker that failed said, if anything."""
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith("EVENT ")), None)
    return f": {last}" if last else ""


class LiveRuns:
    """Bars on stderr for a list of runs; `watch` is fed with the events of rank 0."""

    def __init__(self, names: list[str], totals: list[int], metric: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=8),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(stderr=True),
        )
        self._metric = metric
        # The turns on an infinite network share one bar; every other run has its own.
        self._tasks: list[TaskID] = []
        shared: TaskID | None = None
        for name, total in zip(names, totals, strict=True):
            if name == "infinite" and shared is not None:
                self._tasks.append(shared)
                continue
            task = self._progress.add_task(name, total=total, start=False, news="waiting")
            shared = task if name == "infinite" else shared
            self._tasks.append(task)
        self._started: set[int] = set()
        self._loss = [float("nan")] * len(names)
        self._value: list[float | None] = [None] * len(names)
        self._sent = [0] * len(names)

    def __enter__(self) -> "LiveRuns":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def watch(self, run: int, event: Event | str) -> None:
        """Show what happened."""
        task = self._tasks[run]
        if run not in self._started:
            self._started.add(run)
            self._progress.start_task(task)
        if isinstance(event, Step):
            self._loss[run], self._sent[run] = event.loss, self._sent[run] + event.bytes_sent
            self._progress.update(task, completed=event.step, news=self._news(run))
        elif isinstance(event, Eval) and event.split == "test":
            self._value[run] = event.value
            self._progress.update(task, news=self._news(run))
        elif isinstance(event, str):
            done = self._progress.tasks[task].completed
            self._progress.update(task, total=done, news=self._news(run))

    def _news(self, run: int) -> str:
        value = self._value[run]
        shown = "" if value is None else f" {self._metric[:8]} {value:.3f}"
        return f"loss {self._loss[run]:.3f}{shown} {self._sent[run] / 1e6:,.1f} MB"
