"""`thinwire bench ddp`: step time, bytes and tax of each method on an emulated cluster, all in one run.

The model is the cuda-convnet of SparsifyGradients with a batch of 8; figures are medians over rounds in which every
method has its turn, so that the machine's moods hit all alike.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.tools.options import JsonFile, write_json

METHODS = "infinite,dense,fp16,powersgd,topk1"


@dataclass(frozen=True)
class Row:
    """One method's figures: milliseconds a step, tax over the infinite network, bytes per host and step."""

    name: str
    step_ms: float
    tax: float
    bytes_sent: float
    bytes_received: float
    hook_cpu_ms: float
    cpu_ms: float
    exchange: str


def ddp_command(
    hosts: Annotated[int, typer.Option(min=2, help="Emulated hosts.")] = 14,
    rate: Annotated[str, typer.Option(help="Rate of every link: 500mbit; none is unshaped.")] = "500mbit",
    methods: Annotated[str, typer.Option(help="Comma-separated; the infinite network comes first.")] = METHODS,
    batch: Annotated[int, typer.Option(min=1, help="Samples per worker and step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that every method gets.")] = 5,
    warmup: Annotated[int, typer.Option(min=3, help="Steps before anything is measured.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Step time, bytes per host and tax of each method on emulated hosts."""
    from thinwire.tools.race.methods import check_method

    names = [name.strip() for name in methods.split(",")]
    for name in names:
        check_method(name)
    if "infinite" not in names:
        names.insert(0, "infinite")
    options = {"methods": names, "batch": batch, "steps": steps, "rounds": rounds, "warmup": warmup}
    rows = measure(hosts, rate, options)
    _show(rows, hosts, rate)
    write_json(json_file, {"hosts": hosts, "rate": rate, **options, "rows": [asdict(row) for row in rows]})


def measure(hosts: int, rate: str, options: dict[str, Any]) -> list[Row]:
    """Run all methods in a lab and sum up."""
    from thinwire.errors import LabError
    from thinwire.tools.lab import Lab

    seen: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{hosts} hosts at {rate}", total=options["rounds"] * len(options["methods"]) * hosts)

        def read(host: int, line: str) -> None:
            if line.startswith("ROW "):
                seen.append(json.loads(line[4:]))
                progress.advance(task)

        with Lab(hosts, rate=None if rate == "none" else rate) as lab:
            argv = [sys.executable, "-m", "thinwire.tools.bench.ddp_worker", json.dumps(options)]
            result = lab.run(argv, output=read)
        if result.failure is not None:
            last = result.hosts[0].lines[-1:] or ("",)
            raise LabError(f"the benchmark failed: {result.failure} ({last[0]})")
    return _rows(seen, options["methods"])


def _rows(seen: list[dict[str, Any]], methods: list[str]) -> list[Row]:
    def median(method: str, key: str) -> float:
        return statistics.median(float(row[key]) for row in seen if row["method"] == method)

    infinite = median("infinite", "step")
    return [
        Row(
            name,
            1e3 * median(name, "step"),
            median(name, "step") / infinite - 1.0,
            median(name, "sent"),
            median(name, "received"),
            1e3 * median(name, "hook_cpu"),
            1e3 * median(name, "cpu"),
            next(row["exchange"] for row in seen if row["method"] == name),
        )
        for name in methods
    ]


def _show(rows: list[Row], hosts: int, rate: str) -> None:
    caption = "MB: per host and step, by the kernel. hook: milliseconds of its own CPU time"
    table = Table(
        title=f"cuda-convnet, {hosts} hosts at {rate}",
        caption=caption,
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in ("method", "step ms", "tax", "MB out", "MB in", "vs dense", "hook", "exchange"):
        table.add_column(column, justify="left" if column in ("method", "exchange") else "right", no_wrap=True)
    dense = next((row.step_ms for row in rows if row.name == "dense"), None)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.step_ms:,.1f}",
            f"{row.tax:+.1%}",
            f"{row.bytes_sent / 1e6:.3f}",
            f"{row.bytes_received / 1e6:.3f}",
            f"{dense / row.step_ms:.2f}x" if dense else "",
            f"{row.hook_cpu_ms:.2f}" if row.exchange else "",
            row.exchange,
        )
    Console().print(table)
