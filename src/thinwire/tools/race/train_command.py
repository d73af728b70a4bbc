"""The command `thinwire train`: one recipe, one method; local processes, emulated hosts, or real machines.

Under torchrun (RANK is set) the command is one worker; otherwise it starts the workers and writes their log.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from thinwire.tools import options

if TYPE_CHECKING:
    from thinwire.tools.race.train import Training


# Options of the parameter server alone.
SERVED = ("mode", "bound", "pull", "reduce", "policy", "on_loss", "mtu")


def train_command(
    context: typer.Context,
    recipe: options.RecipeName,
    workers: Annotated[int, typer.Option(min=1, help="Processes, or emulated hosts with --rate.")] = 4,
    compress: Annotated[str, typer.Option(help="A density, a preset, dense or fp16.")] = "topk1",
    rate: Annotated[str | None, typer.Option(help="Rate of every link, in the lab: 100mbit.")] = None,
    target: options.Target = None,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    batch: options.Batch = None,
    lr: options.LearningRate = None,
    seed: options.Seed = 0,
    evaluate_every: options.EvaluateEvery = None,
    data: options.Data = None,
    events: Annotated[Path | None, typer.Option(help="Event log; default: runs/RECIPE-METHOD-DATE.jsonl.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints, at every evaluation.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    diagnose: options.Diagnose = 0,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard, too.")] = None,
    server: Annotated[bool, typer.Option("--server", help="With a parameter server, on one host more.")] = False,
    mode: Annotated[str, typer.Option(help="Of the server: bsp, ssp or async.")] = "bsp",
    bound: options.Bound = 3,
    pull: Annotated[str | None, typer.Option(help="Codec of the server's way back; default: --compress.")] = None,
    reduce: Annotated[str, typer.Option(help="The server's: mean or sum.")] = "mean",
    policy: Annotated[str, typer.Option(help="Of requests: fifo, filo, stalest or forward.")] = "forward",
    transport: Annotated[str, typer.Option(help="To the server: tcp or udp; mpi under mpirun.")] = "tcp",
    on_loss: options.OnLoss = "restore",
    mtu: options.Mtu = None,
    loss: Annotated[str | None, typer.Option(help="Share of packets lost, in the lab: 5%.")] = None,
) -> None:
    """Train a recipe with compressed gradients."""
    from thinwire.tools.race.launch import make_plan, rate_or_none
    from thinwire.tools.race.race import Field
    from thinwire.tools.race.served import Terms, check_terms
    from thinwire.tools.race.served_process import Served
    from thinwire.tools.race.train import Training
    from thinwire.tools.race.train_served import ServedTraining
    from thinwire.tools.race.worker import Work
    from thinwire.tools.recipes import get_recipe

    words = check_terms(compress, pull, mode, reduce, policy, transport, on_loss, mtu) if server else {}
    _check(context, compress, server, transport, diagnose, lossy=loss is not None, shaped=rate is not None)
    _check_folder(checkpoint, resume)
    made = get_recipe(recipe)
    workers = workers if server else _world(workers)
    plan = make_plan(
        made,
        workers=workers,
        data=data,
        batch=batch,
        lr=lr,
        target=target,
        max_steps=max_steps,
        epochs=epochs,
        evaluate_every=evaluate_every,
        checkpoint=checkpoint,
        resume=resume,
        diagnose=diagnose,
    )
    place = Field(workers, rate_or_none(rate), options.invocation())
    path = options.log_path(events, f"{made.name}-{compress}")
    if server:
        agreed = Served(recipe, data, Terms(plan, seed, workers, bound=bound, save_every=plan.evaluate_every, **words))
        training = ServedTraining(made, agreed, place, path, loss, tensorboard=tensorboard)
        _tell(training.run_under_mpi() if transport == "mpi" else training.run(), path)
    else:
        work = Work(recipe, data, ((compress, seed),), plan)
        _tell(_run(Training(made, work, place, path, tensorboard)), path)


def _tell(end: str | None, path: Path) -> None:
    """How it ended and where the log is; None: rank 0 does the talking."""
    if end is not None:
        console = Console()
        console.print(end, highlight=False)
        console.print(f"The log is {path}; thinwire report {path} -o page.html makes a page of it.", highlight=False)


def _check(
    context: typer.Context, compress: str, server: bool, transport: str, diagnose: int, *, lossy: bool, shaped: bool
) -> None:
    """ValueError for options that do not go together."""
    from thinwire.tools.race.methods import BASELINES, check_method

    if not server:
        check_method(compress)
        options.refuse(context, SERVED, "go with --server")
    elif context.params["mode"] != "ssp":
        options.refuse(context, ("bound",), "goes with --mode ssp")
    if "RANK" in os.environ and context.params["workers"] != _world(0):
        options.refuse(context, ("workers",), f"is what torchrun says, {_world(0)} here: leave it out")
    if transport not in ("tcp", "udp", "mpi") or (transport != "tcp" and not server):
        raise ValueError("--transport is tcp, udp or mpi, and the last two go with --server")
    if shaped and ("RANK" in os.environ or transport == "mpi"):
        raise ValueError("--rate shapes the links of emulated hosts: leave it out under torchrun and mpirun")
    if lossy and (not server or not shaped or transport == "mpi"):
        raise ValueError("--loss goes with --server and --rate: packets are lost in the lab")
    if diagnose and (server or compress in BASELINES):
        raise ValueError("--diagnose looks at a link of compressed gradients: leave out --server, dense and fp16")


def _world(workers: int) -> int:
    """Under torchrun it says how many there are."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else workers


def _check_folder(checkpoint: Path | None, resume: bool) -> None:
    from thinwire.tools.race.training import open_folder

    if checkpoint is not None:
        found = any((*checkpoint.glob("step-*/model.pt"), *checkpoint.glob("server.pt")))
        if resume and not found and "RANK" not in os.environ:  # torchrun's restarts begin with the same words
            raise ValueError(f"{checkpoint} holds no checkpoint: name its folder, or leave out --resume to start anew")
        open_folder(checkpoint)
        if not resume and found:
            raise ValueError(f"{checkpoint} holds a checkpoint: go on from it by --resume, or choose another folder")
    elif resume:
        raise ValueError("--resume needs --checkpoint, the folder to go on from")


def _run(training: "Training") -> str | None:
    """Train as one worker of torchrun's, or with workers that are started here; None: another rank tells the end."""
    from thinwire.tools.race.train import run_as_worker, run_training

    if "RANK" in os.environ:
        run_as_worker(training)
        return None
    return run_training(training)
