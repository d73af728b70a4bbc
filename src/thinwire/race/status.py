"""Status: what a server shows of its workers: a live table, JSON for machines, Prometheus metrics on request."""

import time
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.table import Table

from thinwire.errors import ThinwireError
from thinwire.server.server import Server


def status(server: Server, values: dict[str, float]) -> dict[str, Any]:
    """Everything that is shown, as plain figures."""
    now, clock = time.monotonic(), server.clock
    # The server's thread goes on meanwhile: look at copies, and at no worker that has just left.
    pushed, members = dict(clock.members), list(server.members.active.values())
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
            **server.listener_figures(member),
        }
        for member in sorted(members, key=lambda member: member.slot)
        if member.session in pushed
    ]
    return {
        "mode": server.mode,
        "step": clock.step,
        "updates": server.updates,
        "joined": server.members.joined,
        "left": server.members.left,
        "waiting": len(server.members.waiting),
        "metric": dict(values),
        "workers": workers,
    }


def _mbit(size: int, seconds: float) -> float:
    return size * 8e-6 / seconds if seconds > 0.0 else 0.0


def table(server: Server, values: dict[str, float], metric: str) -> Table:
    """The workers, for people."""
    figures = status(server, values)
    shown = "".join(f", {split} {metric} {value:.4f}" for split, value in values.items())
    here = figures["waiting"] + len(figures["workers"])
    waiting = f", waiting for {server.expect - here} of {server.expect} workers" if not server.started else ""
    found = Table(title=f"{server.mode}, step {figures['step']}{shown}{waiting}")
    lossy = any("loss_received" in w for w in figures["workers"])
    lost = ("lost in", "lost out", "mbit/s") if lossy else ()
    for name in ("worker", "name", "clock", "behind", "steps/s", "Mbit/s in", "Mbit/s out", "loss", *lost):
        found.add_column(name, justify="left" if name == "name" else "right")
    for w in figures["workers"]:
        loss = "" if not isinstance(w["loss"], float) else f"{w['loss']:.3f}"
        cells = [w["slot"], escape(w["name"]), w["clock"], w["behind"], f"{w['steps_per_second']:.2f}"]
        traffic = [f"{w['mbit_per_second_in']:.2f}", f"{w['mbit_per_second_out']:.2f}"]
        way = [f"{w.get(n, 0.0):.2%}" for n in ("loss_received", "loss_sent")] if lossy else []
        pace = [f"{8e-6 * w.get('rate', 0.0):.0f}"] if lossy else []
        found.add_row(*map(str, [*cells, *traffic, loss, *way, *pace]))
    return found


def serve_metrics(port: int, read: Callable[[], dict[str, Any]]) -> Callable[[], None]:
    """Answer /metrics on loopback; returns how to stop that."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily
    except ImportError:
        raise ThinwireError("--metrics needs prometheus-client: pip install 'thinwire[server]'") from None

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
        raise ThinwireError(f"cannot serve metrics on port {port} ({error.strerror}): choose another") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop
