"""The command `thinwire train`: one recipe, one method; local processes, emulated hosts, or real machines.

Under torchrun (RANK is set) the command is one worker; otherwise it starts the workers and writes their log.
"""

import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def train_command(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or module:function.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes, or emulated hosts with --rate.")] = 4,
    compress: Annotated[str, typer.Option(help="A density, a preset, dense or fp16.")] = "topk1",
    rate: Annotated[str | None, typer.Option(help="Rate of every link, in the lab: 100mbit.")] = None,
    target: Annotated[float | None, typer.Option(help="Metric on the test split that ends the run.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes of the data at the most.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps at the most.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per worker and step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Steps between evaluations.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the recipe's files.")] = None,
    events: Annotated[Path | None, typer.Option(help="Event log; default: runs/RECIPE-METHOD-DATE.jsonl.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints, at every evaluation.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    diagnose: Annotated[int, typer.Option(min=0, help="Diagnose the link every so many steps; 0: never.")] = 0,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard, too.")] = None,
    server: Annotated[bool, typer.Option("--server", help="With a parameter server, on one host more.")] = False,
    mode: Annotated[str, typer.Option(help="Of the server: bsp, ssp or async.")] = "bsp",
    bound: Annotated[int, typer.Option(min=0, help="With ssp: steps that workers may be apart.")] = 3,
    pull: Annotated[str | None, typer.Option(help="Codec of the server's way back; default: --compress.")] = None,
    reduce: Annotated[str, typer.Option(help="The server's: mean or sum.")] = "mean",
    policy: Annotated[str, typer.Option(help="Of requests: fifo, filo, stalest or forward.")] = "forward",
    transport: Annotated[str, typer.Option(help="To the server: tcp or udp; mpi under mpirun.")] = "tcp",
    on_loss: Annotated[str, typer.Option(help="With udp, of lost gradients: restore or ignore.")] = "restore",
    mtu: Annotated[int | None, typer.Option(help="With udp: bytes of a datagram; default 1400.")] = None,
    loss: Annotated[str | None, typer.Option(help="Share of packets lost, in the lab: 5%.")] = None,
) -> None:
    """Train a recipe with compressed gradients."""
    from thinwire.race.checkpoints import open_folder
    from thinwire.race.methods import BASELINES, check_method
    from thinwire.race.plans import make_plan, rate_or_none
    from thinwire.race.race import Field
    from thinwire.race.served import Terms, check_terms
    from thinwire.race.served_process import Served
    from thinwire.race.train import Training, run_as_worker, run_training
    from thinwire.race.train_served import ServedTraining
    from thinwire.race.worker import Work
    from thinwire.recipes import get_recipe

    terms = check_terms(compress, pull, mode, reduce, policy, transport, on_loss, mtu) if server else {}
    if not server:
        check_method(compress)
    if transport not in ("tcp", "udp", "mpi") or (transport != "tcp" and not server):
        raise ValueError("--transport is tcp, udp or mpi, and the last two go with --server")
    if loss is not None and (not server or rate is None or transport == "mpi"):
        raise ValueError("--loss goes with --server and --rate: packets are lost in the lab")
    if diagnose and (server or compress in BASELINES):
        raise ValueError("--diagnose looks at a link of compressed gradients: leave out --server, dense and fp16")
    if resume and checkpoint is None:
        raise ValueError("--resume needs --checkpoint, the folder to go on from")
    if checkpoint is not None:
        open_folder(checkpoint)
    if "RANK" in os.environ and not server:
        workers = int(os.environ.get("WORLD_SIZE", "1"))
    made = get_recipe(recipe)
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
    place = Field(workers, rate_or_none(rate), shlex.join(["thinwire", *sys.argv[1:]]))
    date = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    path = events if events is not None else Path("runs") / f"{made.name}-{compress}-{date}.jsonl"
    if server:
        agreed = Served(recipe, data, Terms(plan, seed, workers, bound=bound, **terms))
        served = ServedTraining(made, agreed, place, path, loss)
        said = served.run_under_mpi() if transport == "mpi" else served.run()
        if said is None:
            return
        end = said
    else:
        training = Training(made, Work(recipe, data, ((compress, seed),), plan), place, path, tensorboard)
        if "RANK" in os.environ:
            run_as_worker(training)
            return
        end = run_training(training)
    console = Console()
    console.print(end, highlight=False)
    console.print(f"The log is {path}; thinwire report {path} -o page.html makes a page of it.", highlight=False)
