"""The commands `thinwire serve`, a parameter server, and `thinwire work`, one worker of it on this machine."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from thinwire.errors import ThinwireError
from thinwire.tools import options
from thinwire.tools.progress import lines_every
from thinwire.tools.race.config import ServeConfig, load_config, print_option

if TYPE_CHECKING:
    from thinwire.server.server import Server
    from thinwire.tools.race.served import Serving
    from thinwire.transport.base import Listener


def serve_command(
    context: typer.Context,
    recipe: options.RecipeName,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 7077,
    bind: Annotated[str, typer.Option(help="Address to listen on; one beyond loopback needs --keys.")] = "127.0.0.1",
    workers: Annotated[int, typer.Option(min=1, help="Workers that training waits for before it begins.")] = 1,
    method: Annotated[
        str, typer.Option(help="How workers compress gradients: dense, a preset, or a density.")
    ] = "topk1",
    mode: Annotated[str, typer.Option(help="Synchronisation: bsp, ssp or async.")] = "bsp",
    target: options.Target = None,
    max_steps: options.MaxSteps = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints; resumes from it.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Folder made by thinwire keys new.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without keys.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="PATH", callback=options.json_file, help="Write the status as JSON lines; - is stdout."
        ),
    ] = None,
    config: options.Config = None,
    print_config: Annotated[bool, print_option(ServeConfig, "thinwire serve")] = False,
) -> None:
    """Serve a recipe's model to workers (thinwire work), which may join and leave."""
    from thinwire.tools.race.launch import make_plan
    from thinwire.tools.race.served import ServerSettings, Serving
    from thinwire.tools.recipes import get_recipe
    from thinwire.transport.addresses import listen

    chosen = load_config(ServeConfig, config, context)
    made = get_recipe(recipe)
    if chosen.transport not in ("tcp", "udp"):
        raise ValueError(f"the transport of a server is tcp or udp, not {chosen.transport!r}")
    if chosen.mode != "ssp":
        chosen.refuse(("bound",), "it is the bound of the mode ssp")
    if chosen.checkpoint is None:
        chosen.refuse(("save_every",), "it goes with --checkpoint")
    plan = make_plan(made, workers=chosen.workers, **chosen.plan_options())
    settings = ServerSettings(plan, save_every=chosen.save_every, timeout=chosen.timeout, **chosen.server_options())
    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console)])
    # Before anything is loaded or written: an address that cannot be used is the user's mistake.
    address = f"{chosen.transport}://{chosen.bind}:{chosen.port}"
    with closing(listen(address, keys=chosen.keys, insecure=chosen.insecure, mtu=chosen.mtu)) as listener:
        serving = Serving(made, chosen.data, settings, lambda event: None)
        _serve(serving, listener, console, chosen, json_file)


def _serve(
    serving: "Serving", listener: "Listener", console: Console, chosen: ServeConfig, json_file: Path | None
) -> None:
    """Serve with an event log, and say how the training ended."""
    from thinwire.tools.events import EventLog
    from thinwire.tools.lab.links import LinkSettings
    from thinwire.tools.race.launch import ClusterSpec, Follower
    from thinwire.tools.race.train import describe_served

    made, place = serving.recipe, ClusterSpec(serving.settings.workers, LinkSettings(), options.invocation())
    run, path = describe_served(made, serving.settings, place), options.log_path(chosen.events, f"{made.name}-server")
    with (
        options.json_lines(json_file) as write,
        EventLog(path, run, resume_at=serving.server.clock.step or None, keep=False) as log,
        serve_metrics(chosen.metrics, lambda: status(serving.server, serving.values)),
    ):
        follower = Follower([log])
        serving.emit = lambda event: follower.take(0, event)
        print(f"listening on {listener.address}", flush=True)
        write({"listening": listener.address})
        signal.signal(signal.SIGTERM, lambda *_: serving.server.stop("interrupted"))  # which writes a checkpoint
        end = log.end(_watched(serving, listener, console, write if json_file is not None else None))
    test = serving.values.get("test")
    shown = "" if test is None else f", {made.metric} {test:.4f} on the test split"
    steps = serving.server.clock.step
    console.print(f"{made.name}: {end.reason} after {steps} steps{shown}; the log is {path}.", highlight=False)


def _watched(serving: "Serving", listener: "Listener", console: Console, write: Callable[[Any], None] | None) -> str:
    """Run the server in a thread, while the main thread shows the status and receives signals."""
    ended: Future[str] = Future()

    def run() -> None:
        try:
            ended.set_result(serving.run(listener))
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=run, name="thinwire-server", daemon=True)
    thread.start()
    try:
        _show_until_end(thread, serving, console, write)
    except KeyboardInterrupt:
        serving.server.stop("interrupted")
        thread.join()  # writes a checkpoint; a second Ctrl-C does not wait for it
        raise
    return ended.result()


def _show_until_end(
    thread: threading.Thread, serving: "Serving", console: Console, write: Callable[[Any], None] | None
) -> None:
    """Show the status while the server runs: JSON lines if they are wanted, else a live table, or plain lines."""
    server, metric = serving.server, serving.recipe.metric
    if write is not None:
        while thread.is_alive():
            thread.join(1.0)
            write(status(server, serving.values))
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=2, transient=True) as live:
            while thread.is_alive():
                live.update(table(server, serving.values, metric))
                thread.join(0.4)
    else:
        with lines_every(options.LINE_EVERY, lambda: progress_line(serving), console):
            thread.join()


def progress_line(serving: "Serving") -> str:
    """Return the server's progress in one sentence: step, workers, metric, time left, and what it waits for."""
    server, plan = serving.server, serving.settings.plan
    step = server.clock.step
    shown = "".join(f", {split} {serving.recipe.metric} {value:.4f}" for split, value in list(serving.values.items()))
    line = f"{server.mode}: step {step} of {plan.max_steps}, {len(server.membership.active)} workers{shown}"
    # Only the steps of this process tell its pace.
    done, wall = step - serving.first_step, serving.wall - serving.first_wall
    if server.membership.started and done > 0:
        line += f", at most {wall / done * (plan.max_steps - step):.0f} s left"
    return f"{line}; {waited}" if (waited := waiting_for(server)) else line


def waiting_for(server: "Server") -> str:
    """Return what the server waits for and for how long, or "" if it waits for nothing."""
    return str(server.waiting() or "")


def status(server: "Server", values: dict[str, float]) -> dict[str, Any]:
    """Return everything that is shown of a server, as plain figures."""
    now, clock = time.monotonic(), server.clock
    # The server's thread may change these meanwhile: read copies, and leave out workers that have just left.
    pushed, members = dict(clock.workers), list(server.membership.active.values())
    ahead = max((each.ahead for each in pushed.values()), default=clock.step)
    workers = [
        {
            "slot": member.slot,
            "name": member.name,
            "clock": pushed[member.session].ahead,
            "behind": ahead - pushed[member.session].ahead,
            "steps_per_second": member.rate(),
            "bytes_received": member.received,
            "bytes_sent": member.sent,
            "mbit_per_second_in": _mbit(member.received, now - member.since),
            "mbit_per_second_out": _mbit(member.sent, now - member.since),
            "seconds_silent": max(0.0, now - member.heard),
            "loss": member.figures.get("loss"),
            **server.listener.figures(member.peer),
        }
        for member in sorted(members, key=lambda member: member.slot)
        if member.session in pushed
    ]
    return {
        "mode": server.mode,
        "step": clock.step,
        "updates": server.updates,
        "joined": server.membership.joined,
        "left": server.membership.left,
        "waiting": len(server.membership.waiting),
        "waiting_for": waiting_for(server),
        "metric": dict(values),
        "workers": workers,
    }


def _mbit(size: int, seconds: float) -> float:
    return size * 8e-6 / seconds if seconds > 0.0 else 0.0


def table(server: "Server", values: dict[str, float], metric: str) -> Table:
    """Return the live table of the workers."""
    figures = status(server, values)
    shown = "".join(f", {split} {metric} {value:.4f}" for split, value in values.items())
    title = f"{server.mode}, step {figures['step']}{shown}"
    found = Table(title=title, caption=waiting_for(server) or None, box=SIMPLE, collapse_padding=True, pad_edge=False)
    lossy = any("loss_received" in w for w in figures["workers"])
    lost = ("lost in", "out", "Mbit/s") if lossy else ()
    for name in ("#", "name", "clock", "behind", "steps/s", "Mbit/s in", "out", "loss", *lost):
        found.add_column(name, justify="left" if name == "name" else "right")
    for w in figures["workers"]:
        loss = "" if not isinstance(w["loss"], float) else f"{w['loss']:.3f}"
        cells = [w["slot"], escape(w["name"]), w["clock"], w["behind"], f"{w['steps_per_second']:.2f}"]
        traffic = [f"{w['mbit_per_second_in']:.2f}", f"{w['mbit_per_second_out']:.2f}"]
        way = [f"{w.get(n, 0.0):.2%}" for n in ("loss_received", "loss_sent")] if lossy else []
        pace = [f"{8e-6 * w.get('rate', 0.0):.0f}"] if lossy else []
        found.add_row(*map(str, [*cells, *traffic, loss, *way, *pace]))
    return found


@contextmanager
def serve_metrics(port: int | None, read: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Serve Prometheus metrics at /metrics on a port of loopback; None serves none."""
    if port is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily
    except ImportError:
        raise ThinwireError("metrics need prometheus-client: install the extra 'server'") from None

    class Collector:
        def collect(self) -> Any:
            figures = read()
            for name in ("step", "updates", "joined", "left", "waiting"):
                yield GaugeMetricFamily(f"thinwire_{name}", f"{name} of the parameter server", figures[name])
            for split, value in figures["metric"].items():
                yield GaugeMetricFamily(f"thinwire_metric_{split}", f"the metric on the {split} split", value)
            for name in ("clock", "behind", "steps_per_second", "bytes_received", "bytes_sent", "seconds_silent"):
                family = GaugeMetricFamily(f"thinwire_worker_{name}", f"{name} of a worker", labels=["slot", "name"])
                for worker in figures["workers"]:
                    family.add_metric([str(worker["slot"]), worker["name"]], worker[name])
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ThinwireError(f"cannot serve metrics on port {port} ({error.strerror}): choose another port") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def work_command(
    recipe: options.RecipeName,
    server: Annotated[str, typer.Option(help="Address of the server: tcp://host:7077, or udp://...")],
    method: Annotated[
        str | None, typer.Option(help="How gradients are compressed; default: as the server says.")
    ] = None,
    slot: Annotated[int | None, typer.Option(min=0, help="The number that this worker asks for.")] = None,
    data: options.Data = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with this worker's key and the server's.")] = None,
    overlap: Annotated[bool, typer.Option(help="Push and pull while computing.")] = True,
    profile: Annotated[
        Path | None,
        typer.Option(callback=options.writable, help="Write layer times for thinwire simulate schedule."),
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds without a message from the server after which the worker gives up.")
    ] = 300.0,
) -> None:
    """Compute gradients for a server (thinwire serve); a worker may join and leave at any time."""
    import torch

    from thinwire.tools.race.served import work
    from thinwire.tools.recipes import get_recipe

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(max(1, torch.get_num_threads()))
    console, steps, last = Console(stderr=True), 0, time.monotonic()

    def stepped() -> None:
        nonlocal steps, last
        steps, last = steps + 1, time.monotonic()

    def waiting() -> str:
        if (seconds := time.monotonic() - last) < options.LINE_EVERY:
            return "" if console.is_terminal else f"{steps} steps of this worker so far"
        what = f"after {steps} steps" if steps else "for the training to begin"
        return f"waiting for the server {server} {what}, {seconds:.0f} s so far"

    with lines_every(options.LINE_EVERY, waiting, console):
        settings: dict[str, Any] = {"overlap": overlap, "slot": slot, "keys": keys, "patience": patience}
        why = work(get_recipe(recipe), data, server, method, profile=profile, on_step=stepped, **settings)
    console.print(f"The server ended the training ({why}) after {steps} steps of this worker.", highlight=False)
