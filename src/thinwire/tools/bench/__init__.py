"""Benchmarks of thinwire on this machine; their figures are medians and ratios within one run.

A module that measures on emulated hosts contains the benchmark and, started there by `-m`, its processes.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from thinwire.errors import LabError
from thinwire.tools.lab import Lab

Record = tuple[str, dict[str, Any]]


def run_in_lab(
    hosts: int,
    rate: str | None,
    argv: list[str],
    kinds: tuple[str, ...],
    *,
    loss: str | None = None,
    on_record: Callable[[str, dict[str, Any]], None] | None = None,
) -> list[Record]:
    """Run a module on every host of a lab and return the records that its processes printed.

    Args:
        hosts: number of hosts, each with one process.
        rate: rate of every link.
        argv: the module's name and its arguments.
        kinds: the records to return; a record is a line with its kind and JSON, such as `ROW {...}`.
        loss: share of packets lost between any two hosts.
        on_record: called with each record when it arrives.
    """
    records: list[Record] = []

    def read(host: int, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind in kinds:
            records.append((kind, json.loads(rest)))
            if on_record is not None:
                on_record(*records[-1])

    with Lab(hosts, rate=rate, loss=loss) as lab:
        result = lab.run([sys.executable, "-m", *argv], output=read)
    if result.failure is not None:
        last = [host.lines[-1] for host in result.hosts if host.lines]
        error = next((line for line in last if "Error" in line), "no error message")
        raise LabError(f"the benchmark failed: {result.failure} ({error})")
    return records
