"""The command `thinwire race`: compare methods, or transports, on an emulated network."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from thinwire.tools import options

if TYPE_CHECKING:
    from thinwire.tools.race.launch import ClusterSpec
    from thinwire.tools.race.race import LossRace, Result
    from thinwire.tools.race.training import Work
    from thinwire.tools.recipes.recipe import Recipe


METHODS = "dense,fp16,percentile90,topk1"


def race_command(
    context: typer.Context,
    recipe: options.RecipeName = "digits",
    workers: options.Workers = 4,
    rate: options.Rate = "100mbit",
    methods: options.Methods = METHODS,
    target: options.Target = None,
    max_steps: options.MaxSteps = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with seeds 0, 1, ...")] = 1,
    batch: options.Batch = None,
    lr: options.LearningRate = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Steps between evaluations.")] = None,
    data: options.Data = None,
    diagnose: Annotated[int, typer.Option(min=0, help="Steps between two diagnoses; 0 makes none.")] = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the event logs; default: temporary.")] = None,
    json_file: options.JsonFile = None,
    report: options.Page = None,
    transport: Annotated[
        str | None, typer.Option(help="Compare transports to a parameter server instead: tcp,udp.")
    ] = None,
    loss: Annotated[str, typer.Option(help="With --transport: shares of lost packets: 0%,1%,5%.")] = "0%",
    on_loss: Annotated[str, typer.Option(help="With --transport: what udp does, restore,ignore.")] = "restore",
    method: Annotated[str, typer.Option(help="With --transport: the method of both directions.")] = "topk1",
) -> None:
    """Train a recipe with each method, or over each transport, on the same network."""
    from thinwire.tools.race.launch import ClusterSpec, make_plan
    from thinwire.tools.race.race import LossRace, ways
    from thinwire.tools.race.training import Work, with_infinite
    from thinwire.tools.recipes import get_recipe

    names, compared = _names(methods), [] if transport is None else ways(transport, loss, on_loss)
    _check(context, transport, rate)
    made = get_recipe(recipe)
    made.load(data)  # reports a missing file once, before every worker would
    plan = make_plan(
        made,
        workers=workers,
        data=data,
        batch=batch,
        lr=lr,
        target=target,
        max_steps=max_steps,
        evaluate_every=evaluate_every,
        diagnose=diagnose,
    )
    place = ClusterSpec(workers, options.link_rate(rate), options.invocation())
    if transport is not None:
        lasting = plan if target is not None else replace(plan, target=None)  # all make the same number of steps
        _race_transports(LossRace(made, recipe, data, lasting, place, compared, method), logs, json_file, report)
    else:
        runs = with_infinite([(name, seed) for seed in range(seeds) for name in names])
        _race_methods(made, Work(recipe, data, tuple(runs), plan), place, logs, json_file, report)


def _names(methods: str) -> list[str]:
    """Return the methods of a command line without `infinite`, which every race measures."""
    from thinwire.tools.race.methods import check_method

    names = [name for name in options.listed(methods) if name != "infinite"]
    for name in names:
        check_method(name)
    if not names:
        raise ValueError("--methods names no method besides the infinite network, which every race measures")
    return names


def _check(context: typer.Context, transport: str | None, rate: str) -> None:
    """Raise ValueError for options that do not go together."""
    if transport is None:
        options.refuse(context, ("loss", "on_loss", "method"), "go with --transport")
        return
    options.refuse(context, ("methods", "seeds", "diagnose"), "do not go with --transport, which takes one --method")
    if rate == "none":
        raise ValueError("--transport needs a --rate: packets are lost in the lab")


def _race_methods(
    made: "Recipe", work: "Work", place: "ClusterSpec", logs: Path | None, json_file: Path | None, report: Path | None
) -> None:
    from thinwire.tools.race.launch import RunProgress
    from thinwire.tools.race.race import RaceStopped, run_race

    steps, several = work.plan.max_steps, any(seed for name, seed in work.runs if name != "infinite")
    labels = [f"{name} #{seed}" if several and name != "infinite" else name for name, seed in work.runs]
    totals = [min(work.infinite_steps, steps) if name == "infinite" else steps for name, _ in work.runs]
    try:
        with _folder(logs) as folder, RunProgress(labels, totals, made.metric) as progress:
            result = run_race(made, work, place, folder, progress)
    except RaceStopped as stopped:
        if stopped.result is not None:
            _show(stopped.result, json_file)
        Console(stderr=True).print(f"{stopped}.", highlight=False)
        raise
    _show(result, json_file)
    Console().print(result.verdict(), highlight=False)
    if report is not None:
        from thinwire.tools.report.page import write_report

        write_report(result.logs, report, verdict=result.verdict())
        _point_to(report)


def _show(result: "Result", json_file: Path | None) -> None:
    """Write the figures first, because drawing a table or a page may fail."""
    options.write_json(json_file, result.to_json())
    caption = f"MB: sent per worker and step. A step without communication takes {result.infinite_ms:.0f} ms"
    rows = [method.row() for method in result.methods]
    Console().print(options.table_of(rows, title=f"{result.recipe}: {result.place}", caption=caption))


def _race_transports(race: "LossRace", logs: Path | None, json_file: Path | None, report: Path | None) -> None:
    with _folder(logs) as folder:
        result = race.run(folder)
    options.write_json(json_file, result.to_json())
    console, title = Console(), f"{result.recipe}: {race.place}"
    console.print(options.table_of(result.rows(), title=title, caption="sent: per worker and step"))
    console.print(result.verdict(), highlight=False)
    if report is not None:
        from thinwire.tools.report.page import write_report

        rows = [{heading.capitalize(): text for heading, text in row.items()} for row in result.rows()]
        write_report(result.logs, report, title=f"{title}, with lost packets", verdict=result.verdict(), table=rows)
        _point_to(report)


@contextmanager
def _folder(logs: Path | None) -> Iterator[Path]:
    """Yield the folder for the event logs; a temporary one is removed when they have been read."""
    folder = logs if logs is not None else Path(tempfile.mkdtemp(prefix="thinwire-race-"))
    try:
        yield folder
    finally:
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)


def _point_to(report: Path) -> None:
    Console().print(f"The page is {report}.", highlight=False)
