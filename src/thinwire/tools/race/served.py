"""One process of a training with a parameter server: rank 0 is the server, the others are workers.

`python -m thinwire.tools.race.served JSON` runs one of them, with torch.distributed's environment variables set, in the
lab or as a local process.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from thinwire.codec.feedback import MomentumCorrection
from thinwire.errors import MessageError, ThinwireError
from thinwire.server.aggregate import Reduce
from thinwire.server.membership import Member
from thinwire.server.protocol import check_on_loss, server_codec
from thinwire.server.schedule import check_policy
from thinwire.server.server import Mode, Server
from thinwire.server.worker import Worker
from thinwire.tools.events import Eval, Step
from thinwire.tools.race.profile import Profiler
from thinwire.tools.race.training import Emit, Plan, optional_path, print_warnings, printing
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import DataOrder, Recipe
from thinwire.transport.addresses import connect, listen
from thinwire.transport.base import Connection, Listener, check_mtu

# The figures of a step that a worker reports and that are copied to its event.
_NUMBERS = ("compute", "compress", "exchange", "apply", "loss", "density", "synchronise", "aggregate", "restored")
_OPTIONAL: dict[str, Any] = {"datagrams": 0, "datagrams_lost": 0, "restored": 0.0, "waits": [], "staleness": []}
_WHOLE_NUMBERS = ("step", "bytes_sent", "bytes_received", "datagrams", "datagrams_lost")


@dataclass(frozen=True)
class ServerSettings:
    """What is trained and how; `method` compresses the gradients and `pull_method` what the server sends back."""

    plan: Plan
    seed: int = 0
    workers: int = 1  # that training waits for; the order of the data depends on it
    method: str = "topk1"
    pull_method: str = "topk1"
    mode: str = "bsp"
    bound: int = 3
    reduce: str = "mean"
    policy: str = "forward"
    overlap: bool = True
    phased: bool = False  # as in SparsifyGradients: whole layers, no parameters before all gradients have arrived
    save_every: int = 100
    timeout: float = 10.0
    transport: str = "tcp"
    on_loss: str = "restore"
    mtu: int | None = None

    def __post_init__(self) -> None:
        choices = {"mode": get_args(Mode), "reduce": get_args(Reduce), "transport": ("tcp", "udp", "mpi")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        check_on_loss(self.on_loss)
        if self.transport != "udp" and (self.on_loss != "restore" or self.mtu is not None):
            raise ValueError("on_loss and mtu need the transport udp: the others lose nothing")
        if self.mtu is not None:
            check_mtu(self.mtu)
        for method in (self.method, self.pull_method):
            server_codec(method)
        check_policy(self.policy)


class Serving:
    """The server's side: owns the model and the optimizer, evaluates, and turns the workers' reports into events."""

    def __init__(self, recipe: Recipe, data: Path | None, settings: ServerSettings, emit: Emit) -> None:
        self.recipe, self.settings, self.emit = recipe, settings, emit
        self._splits = recipe.load(data)
        model, plan = recipe.build(settings.seed), settings.plan
        ours = isinstance(server_codec(settings.method).feedback, MomentumCorrection)
        self.server = Server(
            model,
            recipe.optimizer(model, lr=plan.lr, momentum=0.0 if ours else plan.momentum),
            mode=cast(Mode, settings.mode),
            bound=settings.bound,
            codec=settings.pull_method,
            reduce=cast(Reduce, settings.reduce),
            policy=settings.policy,
            on_loss=settings.on_loss,
            phased=settings.phased,
            cut=0 if settings.phased else None,
            expect=settings.workers,
            recipe=recipe.name,
            timeout=settings.timeout,
            checkpoint=plan.checkpoint,
            save_every=settings.save_every,
            tell={"push": settings.method, "workers": settings.workers, "batch": plan.batch, "seed": settings.seed},
            on_step=self._on_step,
            on_figures=self._on_figures,
        )
        self._order = DataOrder(len(self._splits.train), batch=plan.batch, workers=settings.workers, seed=settings.seed)
        self._seen = self.first_step = self.server.clock.step
        recipe.set_rate(self.server.optimizer, self.first_step, plan.max_steps)
        self.first_wall: float = self.server.extra.get("wall", 0.0)  # seconds of training before a restart
        self._paused = -self.first_wall
        self.values: dict[str, float] = {}  # the last value of the metric on each split

    def run(self, listener: Listener) -> str:
        """Serve until the target or the last step; return the reason of the end."""
        reason = self.server.run(listener, max_steps=self.settings.plan.max_steps)
        self._evaluate("train", self.settings.plan.train_samples)
        return reason

    @property
    def wall(self) -> float:
        """Seconds of training without evaluation, including those before a restart."""
        return time.monotonic() - self.server.membership.started_at - self._paused

    def _on_step(self, server: Server) -> None:
        step, plan = server.clock.step, self.settings.plan
        server.extra["wall"] = self.wall
        self.recipe.set_rate(server.optimizer, step, plan.max_steps)
        before, self._seen = self._seen, step
        # When a worker leaves, several steps may become complete at once, so step may pass the multiple.
        if step // plan.evaluate_every > before // plan.evaluate_every or step >= plan.max_steps:
            began = time.monotonic()
            value = self._evaluate("test", plan.test_samples)
            self._paused += time.monotonic() - began
            if plan.target is not None and self.recipe.reaches(value, plan.target):
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
        figures = _OPTIONAL | figures
        values: dict[str, Any] = {name: _number(figures.get(name), name) for name in _NUMBERS}
        values |= {name: _whole(figures.get(name), name) for name in _WHOLE_NUMBERS}
        for name, kind in (("waits", _number), ("staleness", _whole)):
            if not isinstance(figures[name], list):
                raise MessageError(f"a worker's {name} is not a list")
            values[name] = [kind(value, name) for value in figures[name]]
        self.emit(Step(epoch=self._order.epoch(values["step"]), wall=self.wall, rank=member.slot, **values))


def work(
    recipe: Recipe,
    data: Path | None,
    connection: str | Connection,
    codec: str | None = None,
    *,
    profile: Path | None = None,
    on_step: Callable[[], None] = lambda: None,
    **options: Any,
) -> str:
    """Run a worker until the server ends the training; return the server's reason.

    profile: file for the times of each layer, which `thinwire simulate schedule` reads. on_step: called after a step.
    A recipe that clips gradients has each worker clip its own, and then nothing is pushed during the backward pass.
    """
    if recipe.clip is not None:
        options["overlap"] = False  # the norm is known only after the backward pass
    splits, model = recipe.load(data), recipe.build(0)
    with Worker(connection, model, codec, recipe=recipe.name, **options) as worker:
        total = sum(p.numel() for p in model.parameters() if p.requires_grad)
        before, ways = worker.traffic(), worker.losses()
        profiler = Profiler(worker) if profile is not None else None
        while worker.stopped is None:
            told = {name: _whole(worker.tell.get(name), name) for name in ("workers", "batch", "seed")}
            order = DataOrder(len(splits.train), **told)
            clock, slot = worker.clock, worker.slot % order.workers
            torch.manual_seed((order.seed * 1_000_003 + clock) * 4099 + slot)
            loss: Tensor = recipe.loss(model, splits.train.batch(order.at(clock, slot)))
            loss.backward()
            recipe.clip_gradients(model)
            worker.step()
            traffic, losses = worker.traffic(), worker.losses()
            lost = {name: losses[name] - ways[name] for name in losses}
            moved = {f"bytes_{way}": traffic[i] - before[i] for i, way in enumerate(("sent", "received"))}
            worker.report(**_figures(worker, clock, float(loss.detach()), total), **moved, **lost)
            before, ways = traffic, losses
            on_step()
        if profiler is not None and profile is not None:
            profiler.write(profile)
        return worker.stopped


def _figures(worker: Worker, clock: int, loss: float, total: int) -> dict[str, Any]:
    times, layers = worker.last, range(len(worker.layers))
    return {
        "step": clock + 1,
        "loss": loss if math.isfinite(loss) else None,
        "compute": times.compute,
        "compress": 0.0,  # encoding overlaps; the part that a step waits for is in `waits`
        "exchange": times.aggregate + times.synchronise,
        "apply": 0.0,
        "aggregate": times.aggregate,
        "synchronise": times.synchronise,
        "density": times.sent_entries / total,
        "waits": [round(times.waits.get(i, 0.0), 6) for i in layers],
        "staleness": [times.staleness.get(i, 0) for i in layers],
    }


def _number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MessageError(f"a worker's {name} is not a number")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise MessageError(f"a worker's {name} is not a whole number")
    return value


@dataclass(frozen=True)
class ServedWork:
    """What all processes of a training with a parameter server are given."""

    recipe: str
    data: Path | None
    settings: ServerSettings

    def command(self) -> list[str]:
        """Return the command line of one process, with this work as JSON."""
        return [sys.executable, "-m", "thinwire.tools.race.served", json.dumps(asdict(self), default=str)]

    @classmethod
    def from_json(cls, text: str) -> "ServedWork":
        """Return the work that another process put on the command line."""
        raw: dict[str, Any] = json.loads(text)
        settings = {**raw["settings"], "plan": Plan.read(raw["settings"]["plan"])}
        return cls(raw["recipe"], optional_path(raw["data"]), ServerSettings(**settings))


def run_server(served: ServedWork, address: str, emit: Emit) -> str:
    """Run rank 0. It needs no keys: the lab's networks are isolated, and local processes use loopback."""
    serving = Serving(get_recipe(served.recipe), served.data, served.settings, emit)
    return serving.run(listen(address, insecure=True, mtu=served.settings.mtu))


def run_worker(served: ServedWork, address: str, rank: int) -> None:
    """Run any other rank."""
    recipe = get_recipe(served.recipe)
    work(recipe, served.data, connect(address), slot=rank - 1, name=f"h{rank}", overlap=served.settings.overlap)


def main() -> None:
    """Run one process of the training that the command line holds as JSON."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    print_warnings("thinwire.server.checkpoint")
    served, rank = ServedWork.from_json(sys.argv[1]), int(os.environ["RANK"])
    address = f"{served.settings.transport}://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        if rank == 0:
            emit = printing(0)
            emit(0, run_server(served, address, lambda event: emit(0, event)))
        else:
            run_worker(served, address, rank)
    except (ThinwireError, ValueError) as error:
        print(f"FAILED {error}", flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
