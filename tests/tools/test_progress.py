"""Progress without a terminal is plain lines: at the start, and every few seconds what is done and what is left."""

import io
import re
import time

import pytest
from rich.console import Console

from thinwire.tools import options
from thinwire.tools.progress import WorkProgress, duration


def lines_of(console: Console) -> list[str]:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_work_is_announced_and_followed_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "LINE_EVERY", 0.02)
    console = Console(file=io.StringIO(), width=40)

    def said(pattern: str) -> None:
        until = time.monotonic() + 60
        while not any(re.fullmatch(pattern, line) for line in lines_of(console)):
            assert time.monotonic() < until, lines_of(console)
            time.sleep(0.01)

    with WorkProgress("4 hosts at [100mbit], a long description of the work", 10, console) as progress:
        said(r"4 hosts at \[100mbit\].*: 0% done, \d+ s so far")
        progress.advance()
        progress.advance(4, figures="loss 1.5")
        said(r"4 hosts at .*: 50% done, loss 1.5, \d+ s so far, about \d+ s left")
        progress.reach(10, what="the end")
        said(r"the end: 100% done, loss 1.5, \d+ s so far, about 0 s left")
    assert lines_of(console)[0] == "4 hosts at [100mbit], a long description of the work ..."


def test_short_work_need_not_be_announced() -> None:
    console = Console(file=io.StringIO())
    with WorkProgress("short", console=console, announce=False) as progress:
        assert re.fullmatch(r"short: \d+ s so far", progress.line())
    assert lines_of(console) == []


def test_on_a_terminal_there_is_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with WorkProgress("work", 2, console) as progress:
        progress.advance(figures="half")
    shown = "\n".join(lines_of(console))
    assert "work" in shown and "half" in shown and "50%" in shown and "so far" not in shown


def test_durations() -> None:
    assert [duration(seconds) for seconds in (4.4, 119, 1800, 9000)] == ["4 s", "119 s", "30 min", "2.5 h"]
