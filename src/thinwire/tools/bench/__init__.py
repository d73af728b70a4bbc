"""Benchmarks of thinwire on this machine; their figures are medians and ratios within one run.

A module that measures on emulated hosts contains the benchmark and, started there by `-m`, its processes.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.errors import LabError
from thinwire.tools.lab import Lab
from thinwire.tools.options import verdict

Record = tuple[str, dict[str, Any]]


def progress_bar() -> Progress:
    """Return a progress bar on stderr that shows the elapsed and the remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def run_in_lab(
    hosts: int,
    rate: str | None,
    argv: list[str],
    kinds: tuple[str, ...],
    *,
    loss: str | None = None,
    total: float | None = None,
    progress: Callable[[str, dict[str, Any]], float] = lambda kind, record: 1.0,
) -> list[Record]:
    """Run a module on every host of a lab and return the records that its processes printed.

    Args:
        hosts: number of hosts, each with one process.
        rate: rate of every link.
        argv: the module's name and its arguments.
        kinds: the records to return; a record is a line with its kind and JSON, such as `ROW {...}`.
        loss: share of packets lost between any two hosts.
        total: length of the progress bar.
        progress: returns by how much a record advances the progress bar.
    """
    records: list[Record] = []
    bar = progress_bar()
    task = bar.add_task(f"{hosts} hosts at {rate}", total=total)

    def read(host: int, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind in kinds:
            records.append((kind, json.loads(rest)))
            bar.advance(task, progress(*records[-1]))

    with bar, Lab(hosts, rate=rate, loss=loss) as lab:
        result = lab.run([sys.executable, "-m", *argv], output=read)
    if result.failure is not None:
        last = [host.lines[-1] for host in result.hosts if host.lines]
        error = next((line for line in last if "Error" in line), "no error message")
        raise LabError(f"the benchmark failed: {result.failure} ({error})")
    return records


def judge(bars: Mapping[str, tuple[float, float]], unit: str = "") -> int:
    """Print measured values and the bars that they must reach; return the exit code 1 if a bar was missed."""
    for what, (measured, bar) in bars.items():
        word = "met   " if measured >= bar else "MISSED"
        Console().print(f"{word} {what}: {measured:.2f}{unit} (bar {bar}{unit})", highlight=False)
    return verdict(measured >= bar for measured, bar in bars.values())
