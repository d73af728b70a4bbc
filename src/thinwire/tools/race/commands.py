"""The commands `thinwire race`, `thinwire advise` and `thinwire train`.

Under torchrun, which sets RANK, `thinwire train` is one worker; otherwise it starts the workers and writes their log.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from thinwire.tools import options
from thinwire.tools.race.config import TrainConfig, load_config, print_option

if TYPE_CHECKING:
    from thinwire.tools.race.launch import ClusterSpec
    from thinwire.tools.race.race import LossResult, Result
    from thinwire.tools.race.training import Work
    from thinwire.tools.recipes.recipe import Recipe

# Settings of the parameter server alone.
SERVED = ("mode", "bound", "pull_method", "reduce", "policy", "on_loss", "mtu")


def race_command(
    context: typer.Context,
    recipe: options.RecipeName = "digits",
    workers: options.Workers = 4,
    preset: options.Preset = None,
    rate: options.Rate = "100mbit",
    delay: options.Delays = "0",
    host_delay: options.HostDelay = None,
    loss: Annotated[str, typer.Option(help="Share of lost packets: 1%; with --transport several: 0%,1%,5%.")] = "0%",
    methods: options.Methods = "dense,fp16,percentile90,topk1",
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
    on_loss: Annotated[str, typer.Option(help="With --transport: what udp does, restore,ignore.")] = "restore",
    method: Annotated[str, typer.Option(help="With --transport: the method of both directions.")] = "topk1",
) -> None:
    """Train a recipe with each method, or over each transport, on the same network."""
    from thinwire.tools.race.launch import ClusterSpec, make_plan
    from thinwire.tools.race.race import race_transports, ways
    from thinwire.tools.race.served import ServedWork, ServerSettings
    from thinwire.tools.race.training import Work, with_infinite
    from thinwire.tools.recipes import get_recipe

    names, losses = _names(methods), options.network_figures(context)["loss"]
    compared = [] if transport is None else ways(transport, losses, on_loss)
    if transport is None:
        options.refuse(context, ("on_loss", "method"), "go with --transport")
        settings = options.link_settings(context, workers)
    else:
        why = "do not go with --transport, which takes one --method"
        options.refuse(context, ("methods", "seeds", "diagnose"), why)
        if rate == "none":
            raise ValueError("--transport needs a --rate: packets are lost in the lab")
        settings = options.link_settings(context, workers + 1, loss="0%")  # each way has its own
    made = get_recipe(recipe)
    names_of_plan = ("workers", "data", "batch", "lr", "target", "max_steps", "evaluate_every", "diagnose")
    # Reports a missing file once, before every worker would.
    plan = make_plan(made, **{name: context.params[name] for name in names_of_plan})
    places = [ClusterSpec(workers, links, options.invocation()) for links in settings]
    if transport is not None:
        lasting = plan if target is not None else replace(plan, target=None)  # all make the same number of steps
        served = ServerSettings(lasting, workers=workers, method=method, pull_method=method)
        work = ServedWork(recipe, data, served)
        with _folder(logs) as folder:
            raced = [race_transports(made, work, place, compared, _inside(folder, place, places)) for place in places]
        _show_transports(raced, json_file, report)
    else:
        runs = with_infinite([(name, seed) for seed in range(seeds) for name in names])
        _race_methods(made, Work(recipe, data, tuple(runs), plan), places, logs, json_file, report)


def _names(methods: str) -> list[str]:
    from thinwire.tools.race.methods import check_method

    names = [name for name in options.listed(methods) if name != "infinite"]
    for name in names:
        check_method(name)
    if not names:
        raise ValueError("--methods names no method besides the infinite network, which every race measures")
    return names


def _race_methods(
    made: "Recipe",
    work: "Work",
    places: "list[ClusterSpec]",
    logs: Path | None,
    json_file: Path | None,
    report: Path | None,
) -> None:
    """Race on each network in turn."""
    from thinwire.tools.race.launch import RunProgress
    from thinwire.tools.race.race import RaceStopped, run_race

    steps, several = work.plan.max_steps, any(seed for name, seed in work.runs if name != "infinite")
    labels = [f"{name} #{seed}" if several and name != "infinite" else name for name, seed in work.runs]
    totals = [min(work.infinite_steps, steps) if name == "infinite" else steps for name, _ in work.runs]
    results: list[Result] = []
    try:
        with _folder(logs) as folder:
            for place in places:
                if len(places) > 1:
                    Console(stderr=True).print(f"{made.name}: {place}", highlight=False)
                with RunProgress(labels, totals, made.metric) as progress:
                    results.append(run_race(made, work, place, _inside(folder, place, places), progress))
    except RaceStopped as stopped:
        if finished := [*results, *([stopped.result] if stopped.result is not None else [])]:
            _show(finished, json_file)
        Console(stderr=True).print(f"{stopped}.", highlight=False)
        raise
    _show(results, json_file)
    _conclude(results, report)


def _inside(folder: Path | str, place: "ClusterSpec", places: "list[ClusterSpec]") -> Path:
    """Return the folder of the event logs; each of several delays has its own."""
    return Path(folder) / f"delay-{place.links.delay}" if len(places) > 1 else Path(folder)


def _show(results: "Sequence[Result]", json_file: Path | None) -> None:
    """Write the figures first, because drawing a table or a page may fail."""
    options.write_json(json_file, options.by_delay([result.to_json() for result in results]))
    for result in results:
        infinite = f"A step without communication takes {result.infinite_ms:.0f} ms"
        caption = options.caption("MB: sent per worker and step", infinite, result.note)
        rows = [method.row() for method in result.methods]
        Console().print(options.table_of(rows, title=f"{result.recipe}: {result.place}", caption=caption))


def _show_transports(results: "Sequence[LossResult]", json_file: Path | None, report: Path | None) -> None:
    options.write_json(json_file, options.by_delay([result.to_json() for result in results]))
    for result in results:
        caption = options.caption("sent: per worker and step", result.note)
        title = f"{result.recipe}: {result.place}"
        Console().print(options.table_of(result.rows(), title=title, caption=caption))
    rows = [{head.capitalize(): text for head, text in row.items()} for result in results for row in result.rows()]
    place = ", ".join(dict.fromkeys(str(result.place) for result in results))
    _conclude(results, report, title=f"{results[0].recipe}: {place}, with lost packets", table=rows)


def _conclude(results: "Sequence[Result] | Sequence[LossResult]", report: Path | None, **page: Any) -> None:
    console = Console(highlight=False)
    verdicts = [result.verdict() for result in results]
    console.print(*verdicts, sep="\n")
    if report is not None:
        from thinwire.tools.report.page import write_report

        logs = [log for result in results for log in result.logs]
        write_report(logs, report, verdict=" ".join(verdicts), **page)
        console.print(f"The page is {report}.")


def _folder(logs: Path | None) -> AbstractContextManager[Path | str]:
    """Return the folder for the event logs; a temporary one is removed when they have been read."""
    if logs is not None:
        return nullcontext(logs)
    return tempfile.TemporaryDirectory(prefix="thinwire-race-", ignore_cleanup_errors=True)


def advise_command(
    context: typer.Context,
    recipe: options.RecipeName = "digits",
    workers: options.Workers = 4,
    preset: options.Preset = None,
    rate: options.Rate = "500mbit",
    delay: options.Delay = "200us",
    probe: Annotated[bool, typer.Option("--probe", help="Measure the real links; under torchrun.")] = False,
    methods: Annotated[
        str, typer.Option(help="Methods besides dense and fp16, comma-separated.")
    ] = "percentile90,0.1,topk1,topk0.1,2bit",
    batch: options.Batch = None,
    data: options.Data = None,
    json_file: options.JsonFile = None,
    report: options.Page = None,
) -> None:
    """Predict each method's step time and traffic, and say whether to compress at all."""
    import torch.distributed as dist

    from thinwire.tools.lab.presets import find_preset
    from thinwire.tools.lab.units import parse_delay
    from thinwire.tools.progress import WorkProgress
    from thinwire.tools.race.advise import make_report, probed_wire, subject_of, wire_of
    from thinwire.tune.presets import resolve_codec

    names = [name for name in options.listed(methods) if name not in ("dense", "fp16")]
    for name in names:
        resolve_codec(name)
    figures = options.network_figures(context)
    wire = wire_of(workers, figures["rate"], parse_delay(figures["delay"], "--delay"))
    if probe:
        if "RANK" not in os.environ:
            raise ValueError("--probe measures the links of a process group: start it with torchrun on all machines")
        options.refuse(context, ("workers", "preset", "rate", "delay"), "are what --probe finds out: leave them out")
        dist.init_process_group("gloo")
        wire = probed_wire()
    rank = dist.get_rank() if probe else 0
    what, shown = f"measuring {recipe} and {len(names)} codecs", Console(stderr=True, quiet=rank != 0)
    subject = subject_of(recipe, data=data, batch=batch, rank=rank)
    with WorkProgress(what, console=shown):
        found = make_report(subject, wire, names, options.invocation())
    if rank == 0:
        options.write_json(json_file, found.to_json())
        if report is not None:
            found.page(report)
        console, best = Console(highlight=False), found.advice.rows.index(found.advice.best)
        compute = f"A step without communication: {1e3 * found.figures.work.compute:,.1f} ms"
        caption = f"{compute}. sent: per worker and step"
        console.print(options.table_of(found.rows(), title=found.title, caption=caption, bold=(best,)))
        console.print(found.advice.verdict)
        if preset is not None and (lost := find_preset(preset).loss) != "0%":
            console.print(f"The forecast leaves out that the network loses {lost} of the packets.")
        if report is not None:
            console.print(f"The page is {report}.")
    if probe:
        dist.barrier()
        dist.destroy_process_group()


def train_command(
    context: typer.Context,
    recipe: options.RecipeName,
    workers: Annotated[int, typer.Option(min=1, help="Workers: processes, or emulated hosts with --rate.")] = 4,
    method: options.Method = "topk1",
    preset: options.Preset = None,
    rate: Annotated[str | None, typer.Option(help="Emulate hosts whose links have this rate: 100mbit.")] = None,
    delay: Annotated[str | None, typer.Option(help="Emulate hosts with this one-way delay: 25ms.")] = None,
    host_delay: options.HostDelay = None,
    loss: Annotated[str | None, typer.Option(help="Emulate links that lose this share of packets: 1%.")] = None,
    target: options.Target = None,
    max_steps: options.MaxSteps = None,
    batch: options.Batch = None,
    lr: options.LearningRate = None,
    seed: options.Seed = 0,
    data: options.Data = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints, made at every evaluation.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    server: Annotated[bool, typer.Option("--server", help="Use a parameter server, on one host more.")] = False,
    config: options.Config = None,
    print_config: Annotated[bool, print_option(TrainConfig, "thinwire train")] = False,
) -> None:
    """Train a recipe with compressed gradients."""
    from thinwire.tools.lab.links import delay_note
    from thinwire.tools.race.launch import ClusterSpec, make_plan
    from thinwire.tools.race.served import ServedWork, ServerSettings
    from thinwire.tools.race.train import DdpTraining, ServedTraining
    from thinwire.tools.race.training import Work
    from thinwire.tools.recipes import get_recipe

    chosen = load_config(TrainConfig, config, context)
    _check_train(chosen, typed_workers=bool(options.typed(context, ["workers"])))
    _check_folder(chosen.checkpoint, chosen.resume)
    made = get_recipe(recipe)
    count = chosen.workers if chosen.server else _world(chosen.workers)
    plan = make_plan(made, workers=count, resume=chosen.resume, diagnose=chosen.diagnose, **chosen.plan_options())
    place = ClusterSpec(count, chosen.links(), options.invocation())
    if place.links.emulated:
        place.links.lab(count + chosen.server)  # checks its arguments; nothing is built
    path = options.log_path(chosen.events, f"{made.name}-{chosen.method}")
    if chosen.server:
        settings = ServerSettings(plan, save_every=plan.evaluate_every, **chosen.server_options())
        work = ServedWork(recipe, chosen.data, settings)
        served = ServedTraining(made, work, place, path, tensorboard=chosen.tensorboard)
        end = served.run_under_mpi() if chosen.transport == "mpi" else served.run()
    else:
        runs = ((chosen.method, chosen.seed),)
        training = DdpTraining(made, Work(recipe, chosen.data, runs, plan), place, path, chosen.tensorboard)
        end = training.run_under_torchrun() if "RANK" in os.environ else training.run()
    if end is not None:  # None: rank 0 shows the end
        result, sentence, cost = end
        console = Console(highlight=False)
        caption = options.caption("MB: sent per worker and step", delay_note(place.links, cost))
        console.print(options.table_of([result.row()], title=f"{made.name}: {place}", caption=caption))
        console.print(sentence)
        console.print(f"The log is {path}; thinwire report {path} makes a page of it.")


def _check_train(config: TrainConfig, *, typed_workers: bool) -> None:
    from thinwire.tools.race.methods import BASELINES, check_method

    if not config.server:
        check_method(config.method)
        config.refuse(SERVED, "they are the parameter server's, give --server too")
    elif config.mode != "ssp":
        config.refuse(("bound",), "it is the bound of the mode ssp")
    if "RANK" in os.environ and typed_workers and config.workers != _world(0):
        raise ValueError(f"torchrun started {_world(0)} workers, not {config.workers}: leave out --workers")
    if config.transport not in ("tcp", "udp", "mpi") or (config.transport != "tcp" and not config.server):
        raise ValueError("the transport is tcp, udp or mpi, and the last two go with --server")
    if config.links().emulated and ("RANK" in os.environ or config.transport == "mpi"):
        what = "--preset, --rate, --delay, --host-delay and --loss describe"
        raise ValueError(f"{what} the links of emulated hosts: leave them out under torchrun and mpirun")
    if config.diagnose and (config.server or config.method in BASELINES):
        raise ValueError("diagnose compares a compressed link with dense: leave out --server, dense and fp16")


def _world(workers: int) -> int:
    """Return the number of workers; under torchrun it is torchrun's."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else workers


def _check_folder(checkpoint: Path | None, resume: bool) -> None:
    from thinwire.tools.race.training import open_folder

    if checkpoint is not None:
        found = any((*checkpoint.glob("step-*/model.pt"), *checkpoint.glob("server.pt")))
        if resume and not found and "RANK" not in os.environ:  # torchrun restarts workers with the same options
            raise ValueError(f"{checkpoint} holds no checkpoint: name its folder, or leave out --resume to start anew")
        open_folder(checkpoint)
        if not resume and found:
            raise ValueError(f"{checkpoint} holds a checkpoint: continue it by --resume, or choose another folder")
    elif resume:
        raise ValueError("--resume needs --checkpoint, the folder to continue from")
