"""The command `thinwire work`: one worker of a parameter server, on this machine."""

import json
import logging
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from thinwire.tools import options
from thinwire.tools.options import Data, writable

if TYPE_CHECKING:
    from thinwire.tools.race.served import Serving
    from thinwire.transport.base import Listener


def serve_command(
    context: typer.Context,
    recipe: options.RecipeName,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes any that is free.")] = 7077,
    bind: Annotated[str, typer.Option(help="Address to listen on; beyond loopback it demands --keys.")] = "127.0.0.1",
    expect: Annotated[int, typer.Option(min=1, help="Workers that must be there before training begins.")] = 1,
    mode: Annotated[str, typer.Option(help="bsp, ssp or async.")] = "bsp",
    bound: options.Bound = 3,
    compress: Annotated[str, typer.Option(help="Codec of the way to the workers; dense: the whole model.")] = "topk1",
    push: Annotated[str, typer.Option(help="Codec that workers are told to push with.")] = "topk1",
    reduce: Annotated[str, typer.Option(help="mean or sum of the workers' gradients.")] = "mean",
    policy: Annotated[str, typer.Option(help="fifo, filo, stalest or forward.")] = "forward",
    transport: Annotated[str, typer.Option(help="tcp, or udp: gradients and changes in datagrams.")] = "tcp",
    on_loss: options.OnLoss = "restore",
    mtu: options.Mtu = None,
    target: options.Target = None,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    batch: options.Batch = None,
    lr: options.LearningRate = None,
    seed: options.Seed = 0,
    evaluate_every: options.EvaluateEvery = None,
    data: options.Data = None,
    events: Annotated[Path | None, typer.Option(help="Event log; default: runs/RECIPE-server-DATE.jsonl.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints; resumes from it.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    timeout: Annotated[float, typer.Option(min=0.5, help="Seconds of silence until a worker is out.")] = 10.0,
    keys: Annotated[Path | None, typer.Option(help="Folder made by thinwire keys new.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without keys.")] = False,
    metrics: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for /metrics (Prometheus), on loopback.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Status as JSON lines instead of a table.")] = False,
) -> None:
    """Serve a recipe's model to workers (thinwire work) that may come and go."""
    from thinwire.tools.race.launch import make_plan
    from thinwire.tools.race.served import Serving, Terms, check_terms
    from thinwire.tools.recipes import get_recipe
    from thinwire.transport.addresses import listen

    made = get_recipe(recipe)
    if transport not in ("tcp", "udp"):
        raise ValueError(f"--transport is tcp or udp, not {transport!r}")
    if mode != "ssp":
        options.refuse(context, ("bound",), "goes with --mode ssp")
    if checkpoint is None:
        options.refuse(context, ("save_every",), "goes with --checkpoint")
    words = check_terms(push, compress, mode, reduce, policy, transport, on_loss, mtu)
    plan = make_plan(
        made,
        workers=expect,
        data=data,
        batch=batch,
        lr=lr,
        target=target,
        max_steps=max_steps,
        epochs=epochs,
        evaluate_every=evaluate_every,
        checkpoint=checkpoint,
    )
    terms = Terms(plan, seed, expect, bound=bound, save_every=save_every, timeout=timeout, **words)
    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console)])
    # Before anything is loaded or written: an address that cannot be had is a mistake of the user's.
    with closing(listen(f"{transport}://{bind}:{port}", keys=keys, insecure=insecure, mtu=mtu)) as listener:
        path = options.log_path(events, f"{made.name}-server")
        _serve(Serving(made, data, terms, lambda event: None), listener, path, console, metrics, as_json)


def _serve(
    serving: "Serving",
    listener: "Listener",
    path: Path,
    console: Console,
    metrics: int | None,
    as_json: bool,
) -> None:
    """Serve, with a log, and say what came of it."""
    from thinwire.tools.events import EventLog
    from thinwire.tools.race.race import Field
    from thinwire.tools.race.train_served import describe_served

    made, place = serving.recipe, Field(serving.terms.workers, None, options.invocation())
    run = describe_served(made, serving.terms, place)
    with EventLog(path, run, resume_at=serving.server.clock.step or None, keep=False) as log:
        serving.emit = log.write
        said = {"listening": listener.address}
        print(json.dumps(said) if as_json else f"listening on {listener.address}", flush=True)
        end = log.end(_served(serving, listener, console, metrics, as_json))
    test = serving.values.get("test")
    shown = "" if test is None else f", {made.metric} {test:.4f} on the test split"
    steps = serving.server.clock.step
    console.print(f"{made.name}: {end.reason} after {steps} steps{shown}; the log is {path}.", highlight=False)


def _served(serving: "Serving", listener: "Listener", console: Console, metrics: int | None, as_json: bool) -> str:
    """Serve to the end, with metrics if a port for them was given; SIGTERM ends it with a checkpoint."""
    from thinwire.tools.race.served import serve_metrics, status

    stop_metrics = serve_metrics(metrics, lambda: status(serving.server, serving.values)) if metrics else None
    signal.signal(signal.SIGTERM, lambda *_: serving.server.stop("interrupted"))
    try:
        return _watched(serving, listener, console, as_json)
    finally:
        if stop_metrics is not None:
            stop_metrics()


def _watched(serving: "Serving", listener: "Listener", console: Console, as_json: bool) -> str:
    """Run the server in a thread, while this one shows what happens and hears signals."""
    from thinwire.tools.race.served import status, table

    ended: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(serving.run(listener))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="thinwire-server", daemon=True)
    thread.start()
    try:
        if as_json:
            while thread.is_alive():
                thread.join(1.0)
                print(json.dumps(status(serving.server, serving.values)), flush=True)
        else:
            with Live(console=console, refresh_per_second=2, transient=True) as live:
                while thread.is_alive():
                    live.update(table(serving.server, serving.values, serving.recipe.metric))
                    time.sleep(0.4)
    except KeyboardInterrupt:
        serving.server.stop("interrupted")
        thread.join()  # it writes a checkpoint; pressed again, Ctrl-C does not wait for it
        raise
    thread.join()
    if errors:
        raise errors[0]
    return ended[0]


def work_command(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or module:function; the server's.")],
    server: Annotated[str, typer.Option(help="Where the server is: tcp://master:7077, or udp://...")],
    compress: Annotated[str | None, typer.Option(help="Codec of the gradients; default: as the server says.")] = None,
    slot: Annotated[int | None, typer.Option(min=0, help="The number that this worker would like to have.")] = None,
    data: Data = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with this worker's key and the server's.")] = None,
    overlap: Annotated[bool, typer.Option(help="Push and pull while computing.")] = True,
    profile: Annotated[
        Path | None, typer.Option(callback=writable, help="Write layer times for thinwire simulate schedule.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds without a sign of the server until giving up.")] = 300.0,
) -> None:
    """Compute gradients for a server (thinwire serve); may join and leave at any time."""
    import logging

    import torch

    from thinwire.tools.race.served import work
    from thinwire.tools.recipes import get_recipe

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(max(1, torch.get_num_threads()))
    why = work(
        get_recipe(recipe),
        data,
        server,
        compress,
        overlap=overlap,
        slot=slot,
        keys=keys,
        patience=patience,
        profile=profile,
    )
    Console(stderr=True).print(f"the server ended training ({why}).", highlight=False)
