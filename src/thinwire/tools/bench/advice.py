"""`thinwire bench advice`: how far the predictions of `thinwire advise --probe` are from what is then measured.

Prediction and measurement take turns in one run on an emulated cluster; figures are medians over the rounds.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.tools.options import JsonFile, verdict, write_json

METHODS = "dense,fp16,percentile90,topk1"
BAR = 0.20


@dataclass(frozen=True)
class Cell:
    """One method at one number of hosts and one rate."""

    hosts: int
    rate: str
    method: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1.0


def advice_command(
    hosts: Annotated[str, typer.Option(help="Numbers of emulated hosts, comma-separated.")] = "4,14",
    rates: Annotated[str, typer.Option(help="Rates, comma-separated.")] = "100mbit,500mbit",
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = METHODS,
    batch: Annotated[int, typer.Option(min=1, help="Samples per worker and step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps per method and round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Predictions and measurements in turn.")] = 3,
    json_file: JsonFile = None,
) -> int:
    """Predicted against measured step times on emulated hosts."""
    from thinwire.tools.race.methods import check_method

    names = [name.strip() for name in methods.split(",")]
    for name in names:
        check_method(name)
    places = _places(hosts, rates)
    options = {"methods": names, "batch": batch, "steps": steps, "rounds": rounds, "warmup": 3}
    cells = [cell for number, rate in places for cell in measure(number, rate, options)]
    _show(cells)
    write_json(json_file, {**options, "cells": [{**asdict(cell), "error": cell.error} for cell in cells]})
    return verdict(abs(cell.error) <= BAR for cell in cells)


def _places(hosts: str, rates: str) -> list[tuple[int, str]]:
    """All labs that are to be built; ValueError for a word that the last of them would refuse."""
    from thinwire.tools.lab import Lab

    if not all(number.strip().isdecimal() and int(number) >= 2 for number in hosts.split(",")):
        raise ValueError(f"--hosts: numbers of at least 2, comma-separated, not {hosts!r}")
    places = [(int(number), rate.strip()) for number in hosts.split(",") for rate in rates.split(",")]
    for number, rate in places:
        Lab(number, rate=rate)  # checks its words; it is built when it is entered
    return places


def measure(hosts: int, rate: str, options: dict[str, Any]) -> list[Cell]:
    """One number of hosts at one rate."""
    from thinwire.errors import LabError
    from thinwire.tools.lab import Lab

    seen: list[dict[str, Any]] = []

    def read(host: int, line: str) -> None:
        if line.startswith("ROW "):
            seen.append(json.loads(line[4:]))

    with Lab(hosts, rate=rate) as lab:
        result = lab.run([sys.executable, "-m", "thinwire.tools.bench.advice_worker", json.dumps(options)], output=read)
    if result.failure is not None:
        raise LabError(f"the benchmark failed: {result.failure} ({(result.hosts[0].lines[-1:] or ('',))[0]})")

    def median(method: str, key: str) -> float:
        return 1e3 * statistics.median(float(row[key]) for row in seen if row["method"] == method)

    return [Cell(hosts, rate, m, median(m, "predicted"), median(m, "measured")) for m in options["methods"]]


def _show(cells: list[Cell]) -> None:
    table = Table(title=f"Predicted and measured steps; bar: {BAR:.0%} off", box=SIMPLE, pad_edge=False)
    for column in ("hosts", "rate", "method", "predicted ms", "measured ms", "off", ""):
        table.add_column(column, justify="left" if column in ("method", "") else "right", no_wrap=True)
    for c in cells:
        word = "[green]pass[/]" if abs(c.error) <= BAR else "[red]missed[/]"
        figures = (f"{c.predicted_ms:,.1f}", f"{c.measured_ms:,.1f}", f"{c.error:+.0%}")
        table.add_row(str(c.hosts), c.rate, c.method, *figures, word)
    Console().print(table)
