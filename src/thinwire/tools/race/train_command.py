"""The command `thinwire train`: train a recipe with one method, on this machine, in the lab or on real machines.

Under torchrun, which sets RANK, the command is one worker; otherwise it starts the workers and writes their log.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.tools import options
from thinwire.tools.race.config import TrainConfig, load_config, print_option

# Settings of the parameter server alone.
SERVED = ("mode", "bound", "pull_method", "reduce", "policy", "on_loss", "mtu")


def train_command(
    context: typer.Context,
    recipe: options.RecipeName,
    workers: Annotated[int, typer.Option(min=1, help="Workers: processes, or emulated hosts with --rate.")] = 4,
    method: options.Method = "topk1",
    rate: Annotated[str | None, typer.Option(help="Emulate hosts whose links have this rate: 100mbit.")] = None,
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
    from thinwire.tools.race.launch import ClusterSpec, make_plan
    from thinwire.tools.race.served import ServedWork, ServerSettings
    from thinwire.tools.race.train import DdpTraining, ServedTraining
    from thinwire.tools.race.training import Work
    from thinwire.tools.recipes import get_recipe

    chosen = load_config(TrainConfig, config, context)
    _check(chosen, typed_workers=bool(options.typed(context, ["workers"])))
    _check_folder(chosen.checkpoint, chosen.resume)
    made = get_recipe(recipe)
    count = chosen.workers if chosen.server else _world(chosen.workers)
    plan = make_plan(made, workers=count, resume=chosen.resume, diagnose=chosen.diagnose, **chosen.plan_options())
    place = ClusterSpec(count, options.link_rate(chosen.rate), options.invocation())
    path = options.log_path(chosen.events, f"{made.name}-{chosen.method}")
    if chosen.server:
        settings = ServerSettings(plan, save_every=plan.evaluate_every, **chosen.server_options())
        served = ServedTraining(
            made,
            ServedWork(recipe, chosen.data, settings),
            place,
            path,
            chosen.loss,
            tensorboard=chosen.tensorboard,
        )
        end = served.run_under_mpi() if chosen.transport == "mpi" else served.run()
    else:
        work = Work(recipe, chosen.data, ((chosen.method, chosen.seed),), plan)
        training = DdpTraining(made, work, place, path, chosen.tensorboard)
        end = training.run_under_torchrun() if "RANK" in os.environ else training.run()
    if end is not None:  # None: rank 0 shows the end
        console = Console()
        console.print(
            options.table_of([end.result.row()], title=f"{made.name}: {place}", caption="MB: sent per worker and step")
        )
        console.print(end.sentence, highlight=False)
        console.print(f"The log is {path}; thinwire report {path} makes a page of it.", highlight=False)


def _check(config: TrainConfig, *, typed_workers: bool) -> None:
    """Raise ValueError for settings that do not go together."""
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
    if config.rate is not None and ("RANK" in os.environ or config.transport == "mpi"):
        raise ValueError("--rate shapes the links of emulated hosts: leave it out under torchrun and mpirun")
    if config.loss is not None and (not config.server or config.rate is None or config.transport == "mpi"):
        raise ValueError("loss goes with --server and --rate: packets are lost in the lab")
    if config.diagnose and (config.server or config.method in BASELINES):
        raise ValueError("diagnose compares a compressed link with dense: leave out --server, dense and fp16")


def _world(workers: int) -> int:
    """Return the number of workers; under torchrun it is torchrun's."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else workers


def _check_folder(checkpoint: Path | None, resume: bool) -> None:
    """Raise ValueError if the checkpoint folder and --resume do not fit."""
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
