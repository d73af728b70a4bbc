"""The commands `thinwire simulate ...`: what a model predicts, before anything is run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from thinwire.race.options import JsonFile, invocation, writable, write_json
from thinwire.race.scale_command import scale_command

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.server.case import Case, Outcome
    from thinwire.server.times import LayerTimes

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
    from thinwire.server.case import Case
    from thinwire.server.simulate import compare

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

    from thinwire.report.gantt import verdict, write_gantt
    from thinwire.server.case import winner

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

    from thinwire.server.case import winner

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
    from thinwire.server.times import read_profile

    if any(option is not None for option in given):
        raise ValueError("--from brings the times: leave out --forward, --backward and --transfer")
    times = read_profile(path)
    if layers not in (None, len(times)):
        raise ValueError(f"the profile {path} has {len(times)} layers, not {layers}: leave out --layers")
    return times


def _from_options(layers: int | None, given: dict[str, str | None]) -> "tuple[LayerTimes, ...]":
    from thinwire.server.times import LayerTimes

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
    from thinwire.server.case import even_slices

    numbers = _numbers(text, "--slices", len(times), "layers")
    if not all(number.is_integer() and number >= 1 for number in numbers):
        raise ValueError(f"--slices are whole numbers from 1, not '{text}'")
    whole = tuple(int(number) for number in numbers)
    return whole if "," in text else even_slices(times, whole[0])


app.command("scale")(scale_command)
