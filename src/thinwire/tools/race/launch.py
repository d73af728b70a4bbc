"""Start the workers of a training, in the lab or as local processes, log their events and show their progress."""

import math
import os
import socket
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from thinwire.errors import ThinwireError
from thinwire.tools.events import Eval, Event, EventLog, Step
from thinwire.tools.lab import Lab
from thinwire.tools.lab.check import check, ready
from thinwire.tools.lab.delay import DelayFigures
from thinwire.tools.lab.launching import PIPED, Launch
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.options import LINE_EVERY
from thinwire.tools.progress import duration, lines_every, print_line
from thinwire.tools.race.training import WARNING, Plan, parse
from thinwire.tools.recipes.recipe import DataOrder, Recipe


@dataclass(frozen=True)
class ClusterSpec:
    """Where a training runs: its workers, their links (local processes, if nothing is emulated), the command typed."""

    workers: int
    links: LinkSettings
    command: str

    def __str__(self) -> str:
        return f"{self.workers} workers {self.links}"


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
    **further: Any,
) -> Plan:
    """Return a plan with the recipe's defaults for what is None; ValueError names an impossible value.

    further: `checkpoint`, `resume` and `diagnose`, as in Plan.
    """
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
        raise ValueError(f"the number of epochs must be above 0, not {passes}")
    # Every quarter of an epoch, but not so often that evaluation takes longer than training.
    usual = defaults.evaluate_every or max(5, order.steps_per_epoch // 4)
    return Plan(
        batch=chosen,
        lr=lr if lr is not None else defaults.lr,
        momentum=defaults.momentum,
        max_steps=max_steps if max_steps is not None else max(1, round(passes * order.steps_per_epoch)),
        target=goal,
        evaluate_every=evaluate_every if evaluate_every is not None else usual,
        train_samples=defaults.evaluated or Plan.train_samples,
        test_samples=defaults.evaluated,
        **further,
    )


class WorkFailed(ThinwireError):
    """A worker failed; the message says which and why."""


def launch(
    argv: list[str],
    workers: int,
    links: LinkSettings,
    output: Callable[[int, str], None],
    *,
    started: Callable[[Lab], None] = lambda lab: None,
) -> None:
    """Run a command to its end as one process per worker, on emulated hosts if the links have any settings.

    `output` gets each line, `started` the lab when it runs.
    """
    failures: list[str] = []

    def read(host: int, line: str) -> None:
        if line.startswith("FAILED "):
            failures.append(line[7:])
        output(host, line)

    if links.emulated:
        abilities = check()
        if not ready(abilities):
            why = "; ".join(f"{a.name}: {a.detail}" for a in abilities if a.required and not a.works)
            hint = "run as root, or use --rate none for plain loopback"
            raise ThinwireError(f"this machine cannot emulate hosts {links} ({why}): {hint}")
        with links.lab(workers) as lab:
            started(lab)
            result = lab.run(argv, output=read)
        spoke = list(result.hosts[result.failed].lines) if result.failed is not None else []
        failure, last = result.failure, _last_line(spoke)
    else:
        failure, last = _local(argv, workers, read)
    if failure is not None:
        raise WorkFailed(failures[0] if failures else f"{failure}{last}")


def _local(argv: list[str], workers: int, read: Callable[[int, str], None]) -> tuple[str | None, str]:
    """Run the workers as processes of this machine; return what failed and that worker's last line."""
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
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            numbers = {name: str(number) for name, number in ranks.items()}
            env = {"OMP_NUM_THREADS": "1", **os.environ, **numbers, **place}
            run.add(rank, subprocess.Popen(argv, env=env, start_new_session=True, **PIPED))  # type: ignore[call-overload]
        run.wait()
    finally:
        run.stop()
    failure = run.failure()
    spoke = lines[run.failed] if run.failed is not None else ()
    return (failure.replace("host h", "worker ") if failure else None), _last_line(spoke)


def _last_line(lines: Sequence[str]) -> str:
    """Return the failed worker's last line that is not an event, as the end of a sentence."""
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith("EVENT ")), None)
    return f": {last}" if last else ""


class RunProgress:
    """Shows on stderr how far runs are: bars on a terminal, otherwise a line at the start and every few seconds."""

    def __init__(self, names: list[str], totals: list[int], metric: str, console: Console | None = None) -> None:
        self._names, self._totals, self._metric = names, totals, metric
        self.console = console if console is not None else Console(stderr=True)
        self._bars = self._make_bars() if self.console.is_terminal else None
        self._tasks = self._make_tasks(self._bars) if self._bars is not None else []
        self._lines = lines_every(LINE_EVERY, self._sentence, self.console)
        self._began: dict[int, float] = {}
        self._created = time.monotonic()
        self._latest: int | None = None  # the run that made the last event
        self._ended: dict[int, float] = {}
        self._step = [0] * len(names)
        self._first = [0] * len(names)  # step at which the clock of each run was set
        self._loss = [math.nan] * len(names)
        self._value: list[float | None] = [None] * len(names)
        self._sent = [0] * len(names)

    def _make_bars(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=8),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self.console,
        )

    def _make_tasks(self, bars: Progress) -> list[TaskID]:
        """Make a bar for each run; the runs without communication share one."""
        tasks: list[TaskID] = []
        for number, (name, total) in enumerate(zip(self._names, self._totals, strict=True)):
            first = self._names.index(name) if name == "infinite" else number
            shared = first != number
            tasks.append(tasks[first] if shared else bars.add_task(name, total=total, start=False, news="waiting"))
        return tasks

    def __enter__(self) -> "RunProgress":
        if self._bars is not None:
            self._bars.start()
        else:
            print_line(self.console, f"{', '.join(dict.fromkeys(self._names))}: starting the workers ...")
            self._lines.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        else:
            self._lines.__exit__(None, None, None)

    def watch(self, run: int, event: Event | str) -> None:
        """Take in an event of rank 0, or the reason of a run's end."""
        now, ended = time.monotonic(), isinstance(event, str)
        first = run not in self._began
        self._began.setdefault(run, now)
        if isinstance(event, Step):
            self._first[run] = self._first[run] or event.step
            self._step[run], self._loss[run] = event.step, event.loss
            self._sent[run] += event.bytes_sent
        elif isinstance(event, Eval) and event.split == "test":
            self._value[run] = event.value
        self._latest = run
        if ended:
            self._ended[run] = now
        if self._bars is not None:
            if first:
                self._bars.start_task(self._tasks[run])
            news = f"loss {self._loss[run]:.3f}{self._shown(run, ' ')} {self._sent[run] / 1e6:,.1f} MB"
            total = self._step[run] if ended else None  # None: as before
            self._bars.update(self._tasks[run], completed=self._step[run], total=total, news=news)
        elif ended:
            print_line(self.console, self.line(run, now, ended=True))

    def _sentence(self) -> str:
        """Return the line of the present moment."""
        now, run = time.monotonic(), self._latest
        if run is None:
            return f"starting the workers, {duration(now - self._created)} so far"
        if run not in self._ended:
            return self.line(run, now)
        what = f"starting {self._names[run + 1]}" if run + 1 < len(self._names) else "ending the workers"
        return f"{what}, {duration(now - self._ended[run])} so far"

    def _shown(self, run: int, before: str) -> str:
        value = self._value[run]
        # The loss of the training batch stands before it.
        name = "test" if self._metric == "loss" else self._metric[:8]
        return "" if value is None else f"{before}{name} {value:.3f}"

    def line(self, run: int, now: float, *, ended: bool = False) -> str:
        """Return the progress of one run as a sentence; the estimate assumes that it runs to its last step."""
        step, total = self._step[run], self._totals[run]
        place = f" (run {run + 1} of {len(self._names)})" if len(self._names) > 1 else ""
        figures = f"loss {self._loss[run]:.3f}{self._shown(run, ', ')}, {self._sent[run] / 1e6:,.1f} MB sent"
        seconds = now - self._began[run]
        if ended:
            return f"{self._names[run]}{place}: ended after {step} steps in {duration(seconds)}, {figures}"
        # The first step only sets the clock, so the others tell the pace.
        made, left = step - self._first[run], ""
        if made > 0 and step < total:
            left = f", at most {duration(seconds / made * (total - step))} left{' in this run' if place else ''}"
        return f"{self._names[run]}{place}: step {step} of {total}, {figures}{left}"


class Follower:
    """Writes the events of runs to their logs and shows rank 0's: the one way from workers to logs and displays."""

    def __init__(
        self, logs: Sequence[EventLog], progress: RunProgress | None = None, *, every_rank: bool = True
    ) -> None:
        self._logs, self._progress, self._every_rank = logs, progress, every_rank
        self._console = Console(stderr=True) if progress is None else progress.console
        self._lab: Lab | None = None
        self._delayed: DelayFigures | None = None  # what the delay line did up to the end of the last run

    def started(self, lab: Lab) -> None:
        """Take note of the lab in which the workers run: the cost of its delay line goes to the logs."""
        self._lab = lab

    def _delay_line(self) -> dict[str, float]:
        """Return the figures of the delay line since the last run for the end of a log; none where none runs."""
        if self._lab is None or (now := self._lab.delay_figures()) is None:
            return {}
        since, self._delayed = now - self._delayed if self._delayed is not None else now, now
        names = ("share", "p99_late_ms", "packets", "dropped")
        return {f"delay_line_{name}": getattr(since, name) for name in names}

    def read(self, host: int, line: str) -> None:
        """Take in a line that a worker printed: an event, or a warning, which is shown. Other lines are left out."""
        if (found := parse(line)) is not None:
            self.take(*found)
        elif line.startswith(f"{WARNING} "):
            self._console.print(line.removeprefix(f"{WARNING} "), highlight=False, markup=False, soft_wrap=True)

    def take(self, run: int, event: Event | str) -> None:
        """Take in an event, or the reason of a run's end."""
        first = not isinstance(event, Step) or event.rank == 0
        if isinstance(event, str):
            self._logs[run].end(event, **self._delay_line())
        elif first or self._every_rank:
            self._logs[run].write(event)
        if first and self._progress is not None:
            self._progress.watch(run, event)
