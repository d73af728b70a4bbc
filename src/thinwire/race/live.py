"""Live: one progress bar per run, with loss, metric, bytes and the time left."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from thinwire.events import Eval, Event, Step


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
