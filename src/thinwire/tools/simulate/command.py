"""The commands `thinwire simulate ...`: what a model predicts, before anything is run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from thinwire.tools.options import JsonFile, Page, invocation, refuse, writable, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from thinwire.tools.report.markup import Row
    from thinwire.tools.simulate.scale import Cluster, Point, Scaling, Task

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.race.profile import LayerTimes
    from thinwire.tools.simulate.schedule import Case, Outcome


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

    from thinwire.tools.lab.units import parse_delay, parse_rate
    from thinwire.tools.race.advise import GOODPUT
    from thinwire.tools.simulate.scale import Cluster, Scaling, Task, read_points
    from thinwire.tune.forecast import Setting, frame_bytes

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
    from thinwire.tools.simulate.scale import calibrated

    most = up_to if up_to is not None else max(point.workers for point in points)
    return calibrated([point for point in points if point.workers <= most], task, lab)


def _listed(text: str) -> tuple[str, ...]:
    from thinwire.tools.simulate import scale

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
    console.print(_scale_table("A step, by the number of workers", short))
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
        console.print(_scale_table("Against measurement", rows))
    console.print(found.verdict(), highlight=False)
    if page is not None:
        console.print(f"The page is {page}.", highlight=False)


def _scale_table(title: str, rows: "Sequence[Row]") -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if column.lower() == "exchange" else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


app = typer.Typer(help="Predict, without running anything.", no_args_is_help=True)
# More slices than this, times workers and steps, take minutes.
MOST_TRANSFERS = 1_000_000


@app.callback()
def _simulate() -> None:
    """Predict, without running anything."""


@app.command("schedule")
def schedule(
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; 8, or as many as times are given.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="Steps of each worker.")] = 10,
    staleness: Annotated[int, typer.Option(min=0, help="The bound B: 0 is bulk synchronous.")] = 0,
    forward: Annotated[str | None, typer.Option(help="Ms of each layer's forward pass: 1, or 1,2,...")] = None,
    backward: Annotated[str | None, typer.Option(help="Ms of each layer's backward pass.")] = None,
    transfer: Annotated[str | None, typer.Option(help="Ms of each layer on one worker's link, one way.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--from", help="Take layers and times from a worker's profile.")
    ] = None,
    slices: Annotated[str, typer.Option(help="Of the largest layer, others in that size; or a list.")] = "8",
    policies: Annotated[str, typer.Option(help="Comma-separated policies.")] = "fifo,filo,stalest,forward",
    window: Annotated[float | None, typer.Option(help="Ms of transfer under way; default: two slices.")] = None,
    server_rate: Annotated[float, typer.Option(help="The server's link, in links of a worker.")] = 1.0,
    latency: Annotated[float, typer.Option(help="Ms from a worker to the server.")] = 0.0,
    slow: Annotated[str | None, typer.Option(help="How much slower each worker computes: 1,1,1,3.")] = None,
    versions: Annotated[str, typer.Option(help="What the server counts and answers: slice or layer.")] = "slice",
    waits_for: Annotated[
        str, typer.Option(help="A forward pass waits for: answer (of this step) or copy (within the bound).")
    ] = "answer",
    json_file: JsonFile = None,
    report: Annotated[Path | None, typer.Option(callback=writable, help="Write a page with Gantt charts.")] = None,
) -> None:
    """Model the parameter server's request scheduling: makespan and staleness of each policy."""
    from thinwire.tools.simulate.schedule import Case, compare

    if profile is not None:
        times = _from_profile(profile, layers, (forward, backward, transfer))
    else:
        times = _from_options(layers, {"forward": forward, "backward": backward, "transfer": transfer})
    case = Case(
        times,
        workers,
        iterations,
        staleness,
        slices=_slices(slices, times),
        versions=cast(Any, versions),
        waits_for=cast(Any, waits_for),
        window=None if window is None else window / 1e3,
        server_rate=server_rate,
        latency=latency / 1e3,
        slowness=() if slow is None else tuple(_numbers(slow, "--slow", workers, "workers")),
    )
    transfers = workers * iterations * sum(case.slices)
    if transfers > MOST_TRANSFERS:
        raise ValueError(f"that is {transfers:,} slices to push, and {MOST_TRANSFERS:,} is the most: simulate less")
    outcomes = compare(case, list(dict.fromkeys(name.strip() for name in policies.split(","))))
    _tell(case, outcomes, json_file, report)


def _tell(case: "Case", outcomes: "list[Outcome]", json_file: Path | None, report: Path | None) -> None:
    from rich.console import Console

    from thinwire.tools.simulate.gantt import verdict, write_gantt
    from thinwire.tools.simulate.schedule import winner

    if json_file is not None:
        figures = [{k: v for k, v in asdict(o).items() if k != "intervals"} for o in outcomes]
        best = winner(outcomes)
        fastest = [o.policy for o in outcomes if o.makespan == best.makespan]
        record = {
            "unit": "seconds",
            "case": asdict(case),
            "outcomes": figures,
            "winner": best.policy,
            "fastest": fastest,
        }
        write_json(json_file, record)
    if report is not None:
        write_gantt(case, outcomes, report, command=invocation())
    console = Console()
    console.print(_table(case, outcomes))
    console.print(verdict(outcomes), highlight=False)
    if report is not None:
        console.print(f"The page is {report}.", highlight=False)


def _table(case: "Case", outcomes: "list[Outcome]") -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    from thinwire.tools.simulate.schedule import winner

    title = f"{case.workers} workers, {len(case.layers)} layers, {case.iterations} steps, B = {case.staleness}"
    caption = "waiting: of a step's forward pass; staleness: of the copies it used, in steps"
    table = Table(title=title, caption=caption, box=SIMPLE, collapse_padding=True, pad_edge=False)
    for heading in ("policy", "makespan ms", "step ms", "to the best", "waiting ms", "staleness", "most"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    best = winner(outcomes).makespan
    for o in outcomes:
        table.add_row(
            o.policy,
            f"{1000 * o.makespan:,.1f}",
            f"{1000 * o.step:,.2f}",
            "-" if o.makespan == best else f"{o.makespan / best - 1:+.1%}",
            f"{1000 * sum(o.waiting):,.2f}",
            f"{o.staleness_mean:.2f}",
            f"{o.staleness_max}",
            style="bold" if o.makespan == best else "",
        )
    return table


def _from_profile(path: Path, layers: int | None, given: tuple[str | None, ...]) -> "tuple[LayerTimes, ...]":
    from thinwire.tools.race.profile import read_profile

    if any(option is not None for option in given):
        raise ValueError("--from brings the times: leave out --forward, --backward and --transfer")
    times = read_profile(path)
    if layers not in (None, len(times)):
        raise ValueError(f"the profile {path} has {len(times)} layers, not {layers}: leave out --layers")
    return times


def _from_options(layers: int | None, given: dict[str, str | None]) -> "tuple[LayerTimes, ...]":
    from thinwire.tools.race.profile import LayerTimes

    usual = {"forward": "1", "backward": "2", "transfer": "1"}
    texts = {what: text if text is not None else usual[what] for what, text in given.items()}
    lengths = [text.count(",") + 1 for text in texts.values() if "," in text]
    count = layers or max(lengths, default=8)
    columns = [_numbers(text, f"--{what}", count, "layers") for what, text in texts.items()]
    return tuple(LayerTimes(f"{n}", *(ms / 1e3 for ms in row)) for n, row in enumerate(zip(*columns, strict=True)))


def _numbers(text: str, option: str, count: int, what: str) -> list[float]:
    """One number for all, or one for each."""
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is a number, or numbers with commas between them, not '{text}'") from None
    if len(values) not in (1, count):
        raise ValueError(f"{option} has {len(values)} numbers, but there are {count} {what}: give 1 or {count}")
    return values * count if len(values) == 1 else values


def _slices(text: str, times: "tuple[LayerTimes, ...]") -> tuple[int, ...]:
    from thinwire.tools.simulate.schedule import even_slices

    numbers = _numbers(text, "--slices", len(times), "layers")
    if not all(number.is_integer() and number >= 1 for number in numbers):
        raise ValueError(f"--slices are whole numbers from 1, not '{text}'")
    whole = tuple(int(number) for number in numbers)
    return whole if "," in text else even_slices(times, whole[0])


app.command("scale")(scale_command)
