"""Status: what a server shows of its workers: a live table, JSON for machines, Prometheus metrics on request."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from thinwire.codec.feedback import MomentumCorrection
from thinwire.errors import MessageError, ThinwireError
from thinwire.server.membership import Member
from thinwire.server.replicas import check_on_loss
from thinwire.server.schedule import check_policy
from thinwire.server.server import Mode, Server
from thinwire.server.worker import Worker
from thinwire.tools.events import Eval, Event, Step
from thinwire.tools.race.profile import Profiler
from thinwire.tools.race.training import Plan
from thinwire.tools.recipes.recipe import DataOrder, Recipe
from thinwire.transport.base import Connection, Listener
from thinwire.transport.limits import check_mtu
from thinwire.tune.presets import resolve_codec

Emit = Callable[[Event], None]
_FIGURES = ("wall", "compute", "compress", "exchange", "apply", "loss", "density", "synchronise", "aggregate")


@dataclass(frozen=True)
class Terms:
    """What is trained and how; `push` and `pull` name the codecs of the two directions."""

    plan: Plan
    seed: int = 0
    workers: int = 1  # to begin with, and for the order of the data
    push: str = "topk1"
    pull: str = "topk1"
    mode: Mode = "bsp"
    bound: int = 3
    reduce: Literal["mean", "sum"] = "mean"
    policy: str = "forward"
    overlap: bool = True
    phased: bool = False  # as SparsifyGradients did: whole layers, and no model goes back before all gradients came
    save_every: int = 100
    timeout: float = 10.0
    transport: str = "tcp"
    on_loss: str = "restore"
    mtu: int | None = None


def check_terms(
    push: str,
    pull: str | None,
    mode: str,
    reduce: str,
    policy: str,
    transport: str = "tcp",
    on_loss: str = "restore",
    mtu: int | None = None,
) -> dict[str, Any]:
    """Words of the command line as fields of `Terms`; ValueError for one that there is not."""
    for name, value, known in (("mode", mode, ("bsp", "ssp", "async")), ("reduce", reduce, ("mean", "sum"))):
        if value not in known:
            raise ValueError(f"--{name} is one of {', '.join(known)}, not {value!r}")
    check_on_loss(on_loss)
    if transport != "udp" and (on_loss != "restore" or mtu is not None):
        raise ValueError("--on-loss and --mtu go with --transport udp: the others lose nothing")
    if mtu is not None:
        check_mtu(mtu)
    back = push if pull is None else pull
    resolve_codec(push), resolve_codec(back), check_policy(policy)
    way = {"transport": transport, "on_loss": on_loss, "mtu": mtu}
    return {"push": push, "pull": back, "mode": mode, "reduce": reduce, "policy": policy, **way}


class Serving:
    """The server's side: owns model and optimizer, evaluates, and turns what workers tell into events."""

    def __init__(self, recipe: Recipe, data: Path | None, terms: Terms, emit: Emit) -> None:
        self.recipe, self.terms, self.emit = recipe, terms, emit
        self._splits = recipe.load(data)
        model, plan = recipe.build(terms.seed), terms.plan
        ours = isinstance(resolve_codec(terms.push).feedback, MomentumCorrection)
        self.server = Server(
            model,
            recipe.optimizer(model, lr=plan.lr, momentum=0.0 if ours else plan.momentum),
            mode=terms.mode,
            bound=terms.bound,
            codec=terms.pull,
            reduce=terms.reduce,
            policy=terms.policy,
            on_loss=terms.on_loss,
            phased=terms.phased,
            cut=0 if terms.phased else None,
            expect=terms.workers,
            recipe=recipe.name,
            timeout=terms.timeout,
            checkpoint=plan.checkpoint,
            save_every=terms.save_every,
            tell={"push": terms.push, "workers": terms.workers, "batch": plan.batch, "seed": terms.seed},
            on_step=self._on_step,
            on_figures=self._on_figures,
        )
        self._order = DataOrder(len(self._splits.train), batch=plan.batch, workers=terms.workers, seed=terms.seed)
        self._seen = self.server.clock.step
        self._paused = -self.server.extra.get("wall", 0.0)
        self.values: dict[str, float] = {}  # the last of each split

    def run(self, listener: Listener) -> str:
        """Serve until the target or the last step; returns which of them it was."""
        reason = self.server.run(listener, max_steps=self.terms.plan.max_steps)
        self._evaluate("train", self.terms.plan.train_samples)
        return reason

    @property
    def wall(self) -> float:
        """Seconds of training, evaluation left out, those before a restart included."""
        return time.monotonic() - self.server.started_at - self._paused

    def _on_step(self, server: Server) -> None:
        step, plan = server.clock.step, self.terms.plan
        server.extra["wall"] = self.wall
        before, self._seen = self._seen, step
        # When a worker leaves, several steps may become complete at once.
        if step // plan.evaluate_every > before // plan.evaluate_every or step >= plan.max_steps:
            began = time.monotonic()
            value = self._evaluate("test", plan.test_samples)
            self._paused += time.monotonic() - began
            if plan.target is not None and value >= plan.target:
                server.stop("target")

    def _evaluate(self, split: str, samples: int | None) -> float:
        step, wall = self.server.clock.step, self.wall
        data = self._splits.test if split == "test" else self._splits.train
        value = self.recipe.evaluate(self.server.model, data, samples)
        epoch, metric = self._order.epoch(step), self.recipe.metric
        self.emit(Eval(step=step, epoch=epoch, wall=wall, split=split, metric=metric, value=value))
        self.values[split] = value
        return value

    def _on_figures(self, member: Member, figures: dict[str, Any]) -> None:
        step, sent, received = (_whole(figures, name) for name in ("step", "bytes_sent", "bytes_received"))
        values = {name: _number(figures, name) for name in _FIGURES if name != "wall"}
        self.emit(
            Step(
                step=step,
                epoch=self._order.epoch(step),
                wall=self.wall,
                bytes_sent=sent,
                bytes_received=received,
                rank=member.slot,
                datagrams=_whole({"datagrams": figures.get("datagrams", 0)}, "datagrams"),
                datagrams_lost=_whole({"datagrams_lost": figures.get("datagrams_lost", 0)}, "datagrams_lost"),
                restored=_number({"restored": figures.get("restored", 0.0)}, "restored"),
                waits=[_number({"waits": v}, "waits") for v in _row(figures, "waits")],
                staleness=[_whole({"staleness": v}, "staleness") for v in _row(figures, "staleness")],
                **values,
            )
        )


def work(
    recipe: Recipe,
    data: Path | None,
    connection: str | Connection,
    codec: str | None = None,
    *,
    profile: Path | None = None,
    **options: Any,
) -> str:
    """A worker's side: compute, push, pull, until the server ends it; returns why it did.

    profile: where to write how long each layer takes.
    """
    splits, model = recipe.load(data), recipe.build(0)
    with Worker(connection, model, codec, recipe=recipe.name, **options) as worker:
        total = sum(p.numel() for p in model.parameters() if p.requires_grad)
        before, ways = worker.traffic(), worker.losses()
        profiler = Profiler(worker) if profile is not None else None
        while worker.stopped is None:
            told = {name: _whole(worker.tell, name) for name in ("workers", "batch", "seed")}
            order = DataOrder(len(splits.train), **told)
            clock, slot = worker.clock, worker.slot % order.workers
            torch.manual_seed((order.seed * 1_000_003 + clock) * 4099 + slot)
            loss: Tensor = recipe.loss(model, splits.train.batch(order.at(clock, slot)))
            loss.backward()
            worker.step()
            traffic = worker.traffic()
            losses = worker.losses()
            lost = {name: losses[name] - ways[name] for name in losses}
            worker.report(**_figures(worker, clock, float(loss.detach()), total, before, traffic), **lost)
            before, ways = traffic, losses
        if profiler is not None and profile is not None:
            profiler.write(profile)
        return worker.stopped


def _figures(
    worker: Worker, clock: int, loss: float, total: int, before: tuple[int, int], traffic: tuple[int, int]
) -> dict[str, Any]:
    times = worker.last
    layers = range(len(worker.layers))
    return {
        "step": clock + 1,
        "loss": loss if math.isfinite(loss) else None,
        "compute": times.compute,
        "compress": 0.0,  # it overlaps: what of it is waited for is in the waits
        "exchange": times.aggregate + times.synchronise,
        "apply": 0.0,
        "aggregate": times.aggregate,
        "synchronise": times.synchronise,
        "density": times.sent_entries / total,
        "bytes_sent": traffic[0] - before[0],
        "bytes_received": traffic[1] - before[1],
        "waits": [round(times.waits.get(i, 0.0), 6) for i in layers],
        "staleness": [times.staleness.get(i, 0) for i in layers],
    }


def _number(figures: dict[str, Any], name: str) -> float:
    value = figures.get(name)
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MessageError(f"a worker's {name} is not a number")
    return float(value)


def _whole(figures: dict[str, Any], name: str) -> int:
    value = figures.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MessageError(f"a worker's {name} is not a whole number")
    return value


def _row(figures: dict[str, Any], name: str) -> list[Any]:
    value = figures.get(name, [])
    if not isinstance(value, list) or len(value) > 1 << 16:
        raise MessageError(f"a worker's {name} is not a list")
    return value


def status(server: Server, values: dict[str, float]) -> dict[str, Any]:
    """Everything that is shown, as plain figures."""
    now, clock = time.monotonic(), server.clock
    # The server's thread goes on meanwhile: look at copies, and at no worker that has just left.
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
            **server.listener_figures(member),
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
