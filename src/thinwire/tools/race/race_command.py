"""The command `thinwire race`: dense against sparse on an emulated cluster, live, with a table and a verdict."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.tools import options

if TYPE_CHECKING:
    from thinwire.tools.race.loss_race import LossRace, LossResult
    from thinwire.tools.race.race import Field, Result
    from thinwire.tools.race.worker import Work
    from thinwire.tools.recipes.recipe import Recipe


METHODS = "dense,fp16,percentile90,topk1"


def race_command(
    context: typer.Context,
    recipe: options.RecipeName = "digits",
    hosts: Annotated[int, typer.Option(min=2, help="Emulated hosts.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of every link: 100mbit; none runs on plain loopback.")] = "100mbit",
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = METHODS,
    target: options.Target = None,
    max_steps: options.MaxSteps = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method, with seeds 0, 1, ...")] = 1,
    batch: options.Batch = None,
    lr: options.LearningRate = None,
    evaluate_every: options.EvaluateEvery = None,
    data: options.Data = None,
    diagnose: options.Diagnose = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the event logs; default: temporary.")] = None,
    json_file: options.JsonFile = None,
    report: options.Page = None,
    transport: Annotated[str | None, typer.Option(help="Race transports to a parameter server: tcp,udp.")] = None,
    loss: Annotated[str, typer.Option(help="With --transport: shares of packets lost: 0%,1%,5%,20%.")] = "0%",
    on_loss: Annotated[str, typer.Option(help="With --transport, of udp: restore,ignore.")] = "restore",
    compress: Annotated[str, typer.Option(help="With --transport: the codec of both directions.")] = "topk1",
) -> None:
    """Train the same recipe with each method, or over each transport, on the same thin network and compare."""
    from thinwire.tools.race.launch import make_plan, rate_or_none
    from thinwire.tools.race.loss_race import LossRace, ways
    from thinwire.tools.race.race import Field
    from thinwire.tools.race.worker import Work, with_infinite
    from thinwire.tools.recipes import get_recipe

    names, raced = _names(methods), [] if transport is None else ways(transport, loss, on_loss)
    _check(context, transport, rate)
    made = get_recipe(recipe)
    made.load(data)  # a missing file is better told here than by every worker
    plan = make_plan(
        made,
        workers=hosts,
        data=data,
        batch=batch,
        lr=lr,
        target=target,
        max_steps=max_steps,
        evaluate_every=evaluate_every,
        diagnose=diagnose,
    )
    place = Field(hosts, rate_or_none(rate), options.invocation())
    if transport is not None:
        lasting = plan if target is not None else replace(plan, target=None)  # all make the same steps
        race = LossRace(made, recipe, data, lasting, place, raced, compress)
        _race_transports(race, logs, json_file, report)
    else:
        runs = with_infinite([(name, seed) for seed in range(seeds) for name in names])
        _race_methods(made, Work(recipe, data, tuple(runs), plan), place, logs, json_file, report)


def _names(methods: str) -> list[str]:
    """The methods of a command line, without the infinite network, which every race measures."""
    from thinwire.tools.race.methods import check_method

    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip() != "infinite"))
    for name in names:
        check_method(name)
    if not names:
        raise ValueError("--methods names no method besides the infinite network, which every race measures")
    return names


def _check(context: typer.Context, transport: str | None, rate: str) -> None:
    """ValueError for options that do not go together."""
    if transport is None:
        options.refuse(context, ("loss", "on_loss", "compress"), "go with --transport")
        return
    options.refuse(context, ("methods", "seeds", "diagnose"), "do not go with --transport, which races one codec")
    if rate == "none":
        raise ValueError("--transport needs a --rate: packets are lost in the lab")


def _race_methods(
    made: "Recipe", work: "Work", place: "Field", logs: Path | None, json_file: Path | None, report: Path | None
) -> None:
    from thinwire.tools.race.launch import LiveRuns
    from thinwire.tools.race.race import run_race

    steps, several = work.plan.max_steps, any(seed for name, seed in work.runs if name != "infinite")
    labels = [f"{name} #{seed}" if several and name != "infinite" else name for name, seed in work.runs]
    totals = [min(work.infinite_steps, steps) if name == "infinite" else steps for name, _ in work.runs]
    with _folder(logs) as folder, LiveRuns(labels, totals, made.metric) as live:
        result = run_race(made, work, place, folder, live.watch)
    _tell(result, _table(result), json_file)
    if report is not None:
        from thinwire.tools.report.page import write_report

        write_report(result.logs, report, verdict=result.verdict())
        _point_to(report)


def _race_transports(race: "LossRace", logs: Path | None, json_file: Path | None, report: Path | None) -> None:
    with _folder(logs) as folder:
        result, place = race.run(folder), race.place
    rows = result.rows()
    table = Table(title=f"{result.recipe}: {place.hosts} workers at {place.rate}", box=SIMPLE, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "Run" else "right")
    for row in rows:
        table.add_row(*row.values())
    _tell(result, table, json_file)
    if report is not None:
        from thinwire.tools.report.page import write_report

        title = f"{result.recipe}: {place.hosts} workers and a server at {place.rate}, through loss"
        write_report(result.logs, report, title=title, verdict=result.verdict(), table=rows)
        _point_to(report)


@contextmanager
def _folder(logs: Path | None) -> Iterator[Path]:
    """The folder for the event logs; a temporary one goes when they have been read."""
    folder = logs if logs is not None else Path(tempfile.mkdtemp(prefix="thinwire-race-"))
    try:
        yield folder
    finally:
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)


def _tell(result: "Result | LossResult", table: Table, json_file: Path | None) -> None:
    """The figures for machines, then for people; before a page is made of them, which may fail."""
    options.write_json(json_file, result.to_json())
    console = Console()
    console.print(table)
    console.print(result.verdict(), highlight=False)


def _point_to(report: Path) -> None:
    Console().print(f"The page is {report}.", highlight=False)


def _table(result: "Result") -> Table:
    title = f"{result.recipe}: {result.field.hosts} hosts at {result.field.rate or 'no limit'}"
    caption = f"MB: sent per host and step. A step on an infinite network: {result.infinite_ms:.0f} ms"
    table = Table(title=title, caption=caption, box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in ("method", "step ms", "tax", "MB", "steps", "seconds", "speed-up", "train", "test"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for s in result.standings:
        table.add_row(
            s.name,
            f"{s.step_ms:,.0f}",
            f"{s.tax:+.0%}",
            f"{s.bytes_per_host_step / 1e6:.3g}",
            number(s.steps_to_target, ",.0f"),
            number(s.seconds_to_target, ",.1f"),
            "-" if s.speedup is None else f"{s.speedup:.1f}x",
            number(s.train_accuracy, ".3f"),
            number(s.test_accuracy, ".3f"),
        )
    return table
