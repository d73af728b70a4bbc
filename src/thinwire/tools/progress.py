"""Progress of long work on stderr: a bar on a terminal, otherwise a plain line every few seconds, for logs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.tools import options


@contextmanager
def lines_every(seconds: float, sentence: Callable[[], str], console: Console) -> Iterator[None]:
    """Print a sentence every so many seconds, in a thread, until the block ends; "" prints nothing."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            if line := sentence():
                print_line(console, line)

    thread = threading.Thread(target=run, name="thinwire-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: no colours, no markup, no line breaks."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a time for a line of progress: `42 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class WorkProgress:
    """Shows how far a piece of work is. Without a terminal, a line says so at the start, then every few seconds.

    Args:
        what: the work in a few words.
        total: its size in any unit; None if it is not known.
        console: where to show it; by default stderr.
        announce: whether to print a line at the start; False for work that may end at once.
    """

    def __init__(
        self, what: str, total: float | None = None, console: Console | None = None, *, announce: bool = True
    ) -> None:
        self.console = console if console is not None else Console(stderr=True)
        self._what, self._total, self._figures, self._announce = what, total, "", announce
        self._done, self._first = 0.0, 0.0
        self._began = self._since = time.monotonic()
        self._bar = self._make_bar() if self.console.is_terminal else None
        self._task = self._bar.add_task(what, total=total, figures="") if self._bar is not None else None
        self._lines: AbstractContextManager[None] = lines_every(options.LINE_EVERY, self.line, self.console)

    def _make_bar(self) -> Progress:
        text, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
        columns = (text, BarColumn(bar_width=16), TaskProgressColumn(), figures, TimeElapsedColumn())
        return Progress(*columns, TimeRemainingColumn(compact=True), console=self.console, transient=True)

    def __enter__(self) -> "WorkProgress":
        if self._bar is not None:
            self._bar.start()
        else:
            if self._announce:
                print_line(self.console, f"{self._what} ...")
            self._lines.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._lines.__exit__(None, None, None)

    def advance(self, by: float = 1.0, *, what: str | None = None, figures: str | None = None) -> None:
        """Add to what is done; `what` replaces the words, `figures` are shown beside them."""
        self.reach(self._done + by, what=what, figures=figures)

    def reach(self, done: float, *, what: str | None = None, figures: str | None = None) -> None:
        """Set how much is done. The first call only sets the clock: work of an earlier process tells no pace."""
        if self._done == 0.0:
            self._first, self._since = done, time.monotonic()
        self._done = done
        self._what = self._what if what is None else what
        self._figures = self._figures if figures is None else figures
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=self._what, figures=self._figures)

    def line(self) -> str:
        """Return the progress as a sentence."""
        now, made = time.monotonic(), self._done - self._first
        share = f"{min(self._done / self._total, 1.0):.0%} done" if self._total else ""
        left = ""
        if self._total and made > 0:
            left = f"about {duration(max(self._total - self._done, 0.0) * (now - self._since) / made)} left"
        parts = (share, self._figures, f"{duration(now - self._began)} so far", left)
        return f"{self._what}: {', '.join(filter(None, parts))}"
