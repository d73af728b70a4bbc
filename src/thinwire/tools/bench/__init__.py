"""Benchmarks of thinwire on this machine; their figures are medians and ratios within one run.

A module that measures on emulated hosts contains the benchmark and, started there by `-m`, its processes.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from thinwire.errors import LabError
from thinwire.tools.lab.links import DelayCost, LinkSettings, delay_json, delay_note
from thinwire.tools.options import verdict
from thinwire.tools.progress import WorkProgress, print_line

Record = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class BenchLab:
    """Emulated hosts of a benchmark: the settings of their links, and what delaying their packets has cost."""

    links: LinkSettings
    costs: list[DelayCost | None] = field(default_factory=list)

    def at(self, **settings: Any) -> "BenchLab":
        """Return a lab whose links have some other settings; its costs count here, too."""
        return BenchLab(replace(self.links, **settings), self.costs)

    @property
    def note(self) -> str:
        """What every table made here states about delayed packets."""
        return delay_note(self.links, DelayCost.worst(self.costs))

    def to_json(self) -> dict[str, Any]:
        """Return the links' settings and the delay line's figures for JSON."""
        return {**self.links.to_json(), "delay_line": delay_json(DelayCost.worst(self.costs))}

    def run(
        self,
        hosts: int,
        argv: list[str],
        kinds: tuple[str, ...],
        *,
        total: float | None = None,
        per_host: int = 1,
        progress: Callable[[str, dict[str, Any]], float] = lambda kind, record: 1.0,
    ) -> list[Record]:
        """Run a module on every host of a lab and return the records that its processes printed.

        Args:
            hosts: number of hosts.
            argv: the module's name and its arguments.
            kinds: the records to return; a record is a line with its kind and JSON, such as `ROW {...}`.
            total: the sum of what `progress` returns.
            per_host: processes on each host.
            progress: returns by how much a record advances the progress display.
        """
        records: list[Record] = []
        lab = self.links.lab(hosts)
        with WorkProgress(f"{hosts} hosts {self.links}", total) as display:

            def read(host: int, line: str) -> None:
                kind, _, rest = line.partition(" ")
                if kind in kinds:
                    records.append((kind, json.loads(rest)))
                    display.advance(progress(*records[-1]))

            with lab:
                result = lab.run([sys.executable, "-m", *argv], output=read, per_host=per_host)
                self.costs.append(DelayCost.of(lab.delay_figures()))
        if result.failure is not None:
            last = [host.lines[-1] for host in result.hosts if host.lines]
            error = next((line for line in last if "Error" in line), "no error message")
            raise LabError(f"the benchmark failed: {result.failure} ({error})")
        return records


def judge(
    parts: Iterable[tuple[LinkSettings, Mapping[str, tuple[float, float]]]],
    unit: str = "",
    others: Iterable[bool] = (),
    *,
    with_delay: bool = False,
) -> int:
    """Print measured values and their bars for each network; return the exit code 1 if a bar was missed.

    The bars hold without a delay: with one, values are printed and not judged, unless the bars are made `with_delay`.
    others: whether bars that the caller has printed were met.
    """
    met = list(others)
    for links, bars in parts:
        for what, (measured, bar) in bars.items():
            if links.delayed and not with_delay:
                word, said = links.delays, f"(bar {bar}{unit} without a delay)"
            else:
                met.append(measured >= bar)
                word, said = "met   " if met[-1] else "MISSED", f"(bar {bar}{unit})"
            print_line(Console(), f"{word} {what}: {measured:.2f}{unit} {said}")
    return verdict(met)
