"""The command `thinwire simulate scale`: what happens with more workers than there are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.race.options import JsonFile, Page, invocation, refuse, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from thinwire.race.scaling import Scaling
    from thinwire.report.markup import Row
    from thinwire.tune.calibrate import Point
    from thinwire.tune.scale import Cluster, Task

EXCHANGES = "star,ring,gather,scatter-reduce,hierarchical"
WORKERS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"
# Seconds an element to encode, and an entry to read (docs/performance.md).
_ENCODE, _DECODE = 0.75e-9, 14e-9
# The model of `thinwire bench ddp`.
_CONVNET = 1_756_426


def scale_command(
    context: typer.Context,
    parameters: Annotated[int | None, typer.Option(min=1, help="Of the model; default: bench ddp's.")] = None,
    compute: Annotated[str | None, typer.Option(help="A step without exchange: 80ms. Or --measured.")] = None,
    density: Annotated[float, typer.Option(help="Share of the entries that travel.")] = 0.01,
    bits: Annotated[float, typer.Option(min=1, max=32, help="Of a value.")] = 8.0,
    rate: Annotated[str, typer.Option(help="Rate of every worker's link.")] = "500mbit",
    latency: Annotated[str, typer.Option(help="One way between two workers.")] = "200us",
    stragglers: Annotated[float, typer.Option(help="Spread of computing times, as a share of the mean.")] = 0.0,
    rate_spread: Annotated[float, typer.Option(help="Spread of the links' rates, as a share.")] = 0.0,
    per_machine: Annotated[int, typer.Option(min=1, help="Workers of a machine, for hierarchical.")] = 8,
    bus: Annotated[str, typer.Option(help="Rate within a machine.")] = "100gbit",
    exchanges: Annotated[str, typer.Option(help="Comma-separated.")] = EXCHANGES,
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = WORKERS,
    measured: Annotated[
        list[Path] | None, typer.Option(help="File of bench ddp --json to calibrate with; repeat it.")
    ] = None,
    calibrate_up_to: Annotated[int | None, typer.Option(help="Calibrate with so many hosts at most.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="That all measured hosts shared: the lab's.")] = None,
    json_file: JsonFile = None,
    report: Page = None,
) -> None:
    """Step time, volume and efficiency from 2 to 4,096 workers, for each exchange."""
    from dataclasses import replace

    from thinwire.lab.units import parse_delay, parse_rate
    from thinwire.race.advising import GOODPUT
    from thinwire.race.scaling import Scaling, read_points
    from thinwire.tune.forecast import Setting, frame_bytes
    from thinwire.tune.scale import Cluster, Task

    if not measured:
        refuse(context, ("calibrate_up_to", "cores"), "are of the measurements: give --measured")
    names, counts = _listed(exchanges), _counts(workers)
    speed, inside = parse_rate(rate), parse_rate(bus)
    if speed is None or inside is None:
        raise ValueError("--rate and --bus: a scale needs rates, such as 500mbit and 100gbit")
    if not 0.0 < density <= 1.0:
        raise ValueError(f"--density lies in (0, 1], not {density}")
    elements = parameters if parameters is not None else _CONVNET
    frame = 4.0 * elements if density == 1.0 else frame_bytes(Setting("", density=density, bits=bits), elements)
    task = Task(elements, frame, 0.0, _ENCODE * elements, _DECODE * density * elements, buckets=2)  # as DDP has them
    delay = parse_delay(latency, "--latency")
    cluster = Cluster(GOODPUT * speed, delay, stragglers, rate_spread, per_machine, float(inside))
    lab = Cluster(cluster.rate, cores=cores)
    points = [point for path in measured or [] for point in read_points(path)]
    if points:
        task, lab = _calibrated(points, calibrate_up_to, task, lab)
        if cores is None:  # what messages wait for is the machines' own
            cluster = replace(cluster, switching=lab.switching)
    elif compute is None:
        raise ValueError("give --compute, the time of a step without exchange, or --measured, to find it out")
    if compute is not None:
        task = replace(task, compute=parse_delay(compute, "--compute"))
    found = Scaling(task, cluster, names, counts, tuple(points), lab, invocation())
    write_json(json_file, found.to_json())
    if report is not None:
        found.page(report)
    _show(found, report)


def _calibrated(points: "list[Point]", up_to: int | None, task: "Task", lab: "Cluster") -> "tuple[Task, Cluster]":
    """What the measurements with no more than so many workers say of computing and of the lab."""
    from thinwire.tune.calibrate import calibrated

    most = up_to if up_to is not None else max(point.workers for point in points)
    return calibrated([point for point in points if point.workers <= most], task, lab)


def _listed(text: str) -> tuple[str, ...]:
    from thinwire.tune import scale

    known = scale.EXCHANGES
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    strange = [name for name in names if name not in known]
    if strange:
        raise ValueError(f"no exchange is called {strange[0]!r}; there are {', '.join(known)}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and 2 <= int(part) <= 1_000_000 for part in parts):
        raise ValueError(f"--workers: numbers from 2 to a million, comma-separated, not {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def _show(found: "Scaling", page: Path | None) -> None:
    from rich.console import Console

    console = Console()
    short = [{head.removesuffix(" workers"): text for head, text in row.items()} for row in found.rows()]
    console.print(_table("A step, by the number of workers", short))
    checks = found.checks()
    if checks:
        rows = [
            {
                "hosts": str(check["workers"]),
                "rate": check["rate"],
                "exchange": check["exchange"],
                "predicted": f"{check['predicted_ms']:,.1f} ms",
                "measured": f"{check['measured_ms']:,.1f} ms",
                "off": f"{check['off']:+.0%}",
            }
            for check in checks
        ]
        console.print(_table("Against measurement", rows))
    console.print(found.verdict(), highlight=False)
    if page is not None:
        console.print(f"The page is {page}.", highlight=False)


def _table(title: str, rows: "Sequence[Row]") -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if column.lower() == "exchange" else "right")
    for row in rows:
        table.add_row(*row.values())
    return table
