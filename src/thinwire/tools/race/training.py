"""One rank of a training with DDP: a recipe, a method and a seed; everything that happens becomes an event.

The order of the samples depends on seed and step alone, so that all methods see the same data and a resumed run
continues exactly. `python -m thinwire.tools.race.training JSON` runs one rank, with torch.distributed's environment
variables set. It prints the events of its runs, one line each, with the number of the run.
"""

import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import DamagedFileError, ThinwireError
from thinwire.files import WriteMonitor, explain, flush_folder, open_checked, replace_file
from thinwire.link.link import Link
from thinwire.tools.events import Eval, Event, Step, from_line, to_line
from thinwire.tools.observe import gradient_histogram
from thinwire.tools.race.methods import applies_momentum, apply_method, single_bucket
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import DataOrder, Recipe, Splits
from thinwire.tune.presets import LOCAL

log = logging.getLogger("thinwire.checkpoint")

EVENT = "EVENT"  # begins a line that holds an event
WARNING = "WARNING"  # begins a line that the parent process shows
# The version of checkpoints; those of thinwire 0.2.0 have none, and their files have no checksums.
_VERSION = 2
# Bytes of a rank's reason why it cannot write its part of a checkpoint.
_REASON_BYTES = 512


class CheckpointError(ThinwireError):
    """A checkpoint cannot be read or written."""


def print_warnings(logger: str) -> None:
    """Print the warnings of a logger as lines that the parent process shows."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{WARNING} %(message)s"))
    logging.getLogger(logger).addHandler(handler)
    logging.getLogger(logger).propagate = False


def open_folder(folder: Path) -> None:
    """Create the folder; CheckpointError says why that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise CheckpointError(f"cannot write checkpoints to {folder} ({reason}): choose another folder") from error


class Checkpoint:
    """Saves and restores one training: the model once, the state of the link once per rank."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link | None) -> None:
        self.folder, self._model, self._optimizer, self._link = folder, model, optimizer, link
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._monitor = WriteMonitor(log.warning, "the checkpoint")
        open_folder(folder)

    def save(self, step: int, wall: float) -> None:
        """Save a checkpoint, on all ranks at the same step, and delete the older ones when it is complete.

        If any rank cannot write, rank 0 says so and the last checkpoint stays: training goes on.
        """
        place = self.folder / f"step-{step:08d}"
        failures = self._gather(_attempt(place, lambda: self._save_link(place)))
        if self._rank != 0:
            return
        states = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        state = {"version": _VERSION, "step": step, "wall": wall, "world": self._world, **states}
        reason = next(filter(None, failures), "") or _attempt(place, lambda: _write(place / "model.pt", state))
        if reason:
            shutil.rmtree(place, ignore_errors=True)
            self._monitor.failed(place, reason)
            return
        self._monitor.succeeded(place)
        for old in self.folder.glob("step-*"):
            if old.name < place.name:
                shutil.rmtree(old, ignore_errors=True)

    def _save_link(self, place: Path) -> None:
        place.mkdir(exist_ok=True)
        flush_folder(self.folder)
        if self._link is not None:
            _write(place / f"link-{self._rank}.pt", self._link.state_dict())

    def _gather(self, reason: str) -> list[str]:
        """Return all ranks' reasons why they cannot write, "" for those that can. A collective operation."""
        mine = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
        data = reason.encode()[:_REASON_BYTES]
        mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        found = [torch.zeros_like(mine) for _ in range(self._world)]
        dist.all_gather(found, mine)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in found]

    def _check_agreement(self, step: int) -> None:
        """Raise CheckpointError if ranks found different steps: they would train different models."""
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world)]
        dist.all_gather(steps, torch.tensor([step]))
        for rank, other in enumerate(map(int, steps)):
            if other != int(steps[0]):
                raise CheckpointError(
                    f"rank 0 finds step {int(steps[0])} in {self.folder}, rank {rank} step {other}: "
                    "checkpoints need a folder that all machines share"
                )

    def _check_rates(self, saved: dict[str, Any]) -> None:
        """Raise CheckpointError if the saved optimizer has other rates, which would replace those asked for."""
        for now, before in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            for name in ("lr", "momentum"):
                # A schedule changes lr and keeps the rate that was asked for as initial_lr.
                new, old = (group.get(f"initial_{name}", group.get(name)) for group in (now, before))
                if new is not None and old is not None and new != old:
                    raise CheckpointError(
                        f"the checkpoint in {self.folder} was trained with {name} {old:g}, not {new:g}: "
                        "continue with the same value, or start again in another folder"
                    )

    def _read(self, place: Path) -> dict[str, Any]:
        """Read the model's file. One of thinwire 0.2.0 has no version and no checksum, and is used with a warning."""
        with open_checked(place / "model.pt", required=False) as (file, checked):
            state: dict[str, Any] = torch.load(file, weights_only=True)
        if "version" in state and not checked:
            raise DamagedFileError("model.pt has lost its checksum")
        if not checked and self._rank == 0:
            log.warning(
                "the checkpoint %s has no checksums, because thinwire 0.2.0 wrote it: it is not verified", place
            )
        return state

    def load(self) -> tuple[int, float]:
        """Restore the newest complete checkpoint and return its step and training seconds; (0, 0) if there is none."""
        found = sorted(p.parent for p in self.folder.glob("step-*/model.pt"))
        self._check_agreement(int(found[-1].name.removeprefix("step-")) if found else 0)
        if not found:
            return 0, 0.0
        try:
            state = self._read(found[-1])
            self._model.load_state_dict(state["model"])
            self._check_rates(state["optimizer"])
            self._optimizer.load_state_dict(state["optimizer"])
            if self._link is not None:
                self._link.load_state_dict(_read_links(found[-1], state["world"], checked="version" in state))
        except CheckpointError:
            raise
        except Exception as error:  # torch raises many kinds for files that are not checkpoints
            why = f"cannot be used ({' '.join(str(error).split())[:200]})"
            raise CheckpointError(f"the checkpoint {found[-1]} {why}: remove it or start again") from error
        return int(state["step"]), float(state["wall"])


def _write(path: Path, state: dict[str, Any]) -> None:
    replace_file(path, lambda out: torch.save(state, out), checksum=True)


def _read_links(place: Path, world: int, *, checked: bool) -> list[dict[str, Any]]:
    """Read all ranks' states of the link. checked: their files must have checksums."""
    states = []
    for rank in range(world):
        with open_checked(place / f"link-{rank}.pt", required=checked) as (file, _):
            states.append(torch.load(file, weights_only=True))
    return states


def _attempt(place: Path, write: Callable[[], object]) -> str:
    """Write, and return the reason why that is impossible, or ""."""
    try:
        write()
    except (OSError, RuntimeError) as error:
        return explain(place, error)
    return ""


def interface_bytes(interface: str) -> tuple[int, int] | None:
    """Return the bytes sent and received by a network interface, or None if it does not exist."""
    with suppress(OSError):
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == interface:
                numbers = [int(word) for word in figures.split()]
                return numbers[8], numbers[0]
    return None


def ring_bytes(method: str, parameters: int, world: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce of 32- or 16-bit gradients."""
    width = {"dense": 4, "fp16": 2}.get(method, 0)
    return 2 * width * parameters * (world - 1) // world


class TrafficMeter:
    """Counts the bytes that this rank sends and receives: by the kernel in the lab, else by the link."""

    def __init__(self, link: Link | None, per_step: int = 0) -> None:
        self._link, self._per_step = link, per_step  # per_step: for methods whose bytes cannot be counted
        self._interface = "eth0" if "THINWIRE_LAB" in os.environ else None
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        if self._interface is not None:
            return interface_bytes(self._interface) or (0, 0)
        if self._link is None:
            return 0, 0
        totals = self._link.totals  # stats() would wait for an exchange that overlaps the next steps
        return totals.bytes_sent, totals.bytes_received

    def read(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        if self._interface is None and self._link is None:
            return self._per_step, self._per_step
        before, self._before = self._before, self._now()
        return self._before[0] - before[0], self._before[1] - before[1]


Emit = Callable[[Event], None]
EmitRun = Callable[[int, Event | str], None]


@dataclass(frozen=True)
class Plan:
    """How to train and when to stop; the same for every method of a race."""

    batch: int
    lr: float
    momentum: float
    max_steps: int
    target: float | None  # of the metric on the test split; None: run to max_steps
    evaluate_every: int
    train_samples: int = 2000  # of the training split, evaluated in the end
    test_samples: int | None = None  # of the test split, evaluated every time; None: all
    checkpoint: Path | None = None
    resume: bool = False
    diagnose: int = 0  # steps between two diagnoses of a link; 0: none

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Plan":
        """Return the plan that was written as JSON."""
        return cls(**{**raw, "checkpoint": optional_path(raw["checkpoint"])})


def optional_path(text: str | None) -> Path | None:
    """Return the path that was written as JSON."""
    return Path(text) if text else None


class Trainer:
    """Trains a model with one method on this rank."""

    def __init__(self, recipe: Recipe, splits: Splits, plan: Plan, method: str, seed: int) -> None:
        self.recipe, self.splits, self.plan, self.method, self.seed = recipe, splits, plan, method, seed
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(recipe.build(seed), bucket_cap_mb=1000 if single_bucket(method) else None)
        # With momentum correction the codec applies the momentum, so the optimizer must not apply it again.
        ours = applies_momentum(method)
        self.optimizer = recipe.optimizer(self.model, lr=plan.lr, momentum=0.0 if ours else plan.momentum)
        self.last_bucket = 0.0  # the time at which a backward pass filled it; the rest of the pass waits
        self.link = apply_method(self.model, method, optimizer=self.optimizer, on_last_bucket=self._on_last_bucket)
        if self.link is not None and plan.diagnose:
            self.link.diagnose(every=plan.diagnose)
        self.order = DataOrder(len(splits.train), batch=plan.batch, workers=dist.get_world_size(), seed=seed)
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.meter = TrafficMeter(self.link, ring_bytes(method, parameters, dist.get_world_size()))
        folder = plan.checkpoint
        self.checkpoint = Checkpoint(folder, self.model, self.optimizer, self.link) if folder else None
        self.wall = 0.0
        self._shortest = math.inf  # seconds of an optimizer's step

    def _on_last_bucket(self) -> None:
        self.last_bucket = time.perf_counter()

    def run(self, emit: Emit) -> str:
        """Train until the target or the last step; return the reason of the end."""
        step = 0
        if self.checkpoint is not None and self.plan.resume:
            step, self.wall = self.checkpoint.load()
        dist.barrier()
        self.meter.read()
        reached, evaluations = False, 0
        while step < self.plan.max_steps:
            step += 1
            emit(self._step(step))
            if self.link is not None:
                for found in self.link.diagnoses:
                    emit(found)
                self.link.diagnoses.clear()
            if step == min(10, self.plan.max_steps) and self.rank == 0:
                for name, parameter in self.model.module.named_parameters():
                    if parameter.grad is not None and parameter.dim() > 1:
                        emit(gradient_histogram(step, name, parameter.grad))
            if step % self.plan.evaluate_every == 0 or step == self.plan.max_steps:
                reached = self._evaluate(step, "test", self.plan.test_samples, emit)
                evaluations += 1
                if evaluations % 4 == 1:  # a few samples, for the curve of the training split
                    self._evaluate(step, "train", min(500, self.plan.train_samples), emit)
                if self.checkpoint is not None:
                    self.checkpoint.save(step, self.wall)
                dist.barrier()
                self.meter.read()  # leaves out what evaluation and checkpoints sent
                if reached:
                    break
        self._evaluate(step, "train", self.plan.train_samples, emit)
        return "target" if reached else "max_steps"

    def _step(self, step: int) -> Step:
        # Random numbers must not depend on earlier steps, or a resumed run would differ.
        torch.manual_seed((self.seed * 1_000_003 + step) * 4099 + self.rank)
        batch = self.splits.train.batch(self.order.at(step - 1, self.rank))
        began = time.perf_counter()
        self.recipe.set_rate(self.optimizer, step - 1, self.plan.max_steps)
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.recipe.loss(self.model, batch)
        loss.backward()
        done = time.perf_counter()
        self.recipe.clip_gradients(self.model)
        self.optimizer.step()
        ended = time.perf_counter()
        self.wall += ended - began
        waited, apply = done - self.last_bucket, ended - done
        compress, density = 0.0, 1.0
        if self.link is not None:
            figures = self.link.last_step.report(
                dist.get_world_size()
            )  # stats() would also compute the residual's norm
            compress, density = figures["compress_seconds"] + figures["decode_seconds"], figures["density"]
            if self.link.domain == "update":  # updates are exchanged inside of the optimizer's step
                inside = self._waited_inside(apply, compress + figures["exchange_seconds"])
                waited, apply = waited + inside, apply - inside
            compress = min(waited, compress)
        sent, received = self.meter.read()
        return Step(
            step=step,
            epoch=self.order.epoch(step),
            wall=self.wall,
            compute=self.last_bucket - began,
            compress=compress,
            exchange=waited - compress,
            apply=apply,
            bytes_sent=sent,
            bytes_received=received,
            loss=float(loss.detach()),
            density=density,
            residual_norm=self._residual_norm() if step % self.plan.evaluate_every == 0 else math.nan,
            rank=self.rank,
        )

    def _waited_inside(self, apply: float, exchange: float) -> float:
        """Return how long an optimizer's step waited for an exchange of updates, of which the last took `exchange`.

        With local steps most steps exchange nothing, or wait less than an exchange that has overlapped them took: the
        shortest step tells what the optimizer itself takes.
        """
        self._shortest = min(self._shortest, apply)
        local = self.method.partition("+")[0] in LOCAL
        return min(apply - self._shortest if local else apply, exchange)

    def _residual_norm(self) -> float:
        if self.link is None:
            return 0.0
        kept = [self.link.codec.residuals(name).get("residual") for name, _ in self.model.module.named_parameters()]
        return math.sqrt(sum(float(t.square().sum()) for t in kept if t is not None))

    def _evaluate(self, step: int, split: str, samples: int | None, emit: Emit) -> bool:
        """Evaluate on rank 0 and return on all ranks whether the target is reached."""
        met = torch.zeros(1)
        if self.rank == 0:
            data = self.splits.test if split == "test" else self.splits.train
            value = self.recipe.evaluate(self.model.module, data, samples)
            epoch, metric = self.order.epoch(step), self.recipe.metric
            emit(Eval(step=step, epoch=epoch, wall=self.wall, split=split, metric=metric, value=value))
            if self.plan.target is not None:
                met[0] = float(self.recipe.reaches(value, self.plan.target))
        dist.broadcast(met, 0)
        return bool(met[0])


@dataclass(frozen=True)
class Work:
    """The runs that all ranks make one after the other; a run is a (method, seed)."""

    recipe: str
    data: Path | None
    runs: tuple[tuple[str, int], ...]
    plan: Plan
    infinite_steps: int = 8  # of a run without communication, which only serves as a reference for times

    def command(self) -> list[str]:
        """Return the command line of one rank, with this work as JSON."""
        return [sys.executable, "-m", "thinwire.tools.race.training", json.dumps(asdict(self), default=str)]

    @classmethod
    def from_json(cls, text: str) -> "Work":
        """Return the work that another process put on the command line."""
        raw: dict[str, Any] = json.loads(text)
        runs = tuple((method, seed) for method, seed in raw["runs"])
        return cls(raw["recipe"], optional_path(raw["data"]), runs, Plan.read(raw["plan"]), raw["infinite_steps"])


def with_infinite(runs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Put a short run without communication before each run: every method has a reference of about the same time."""
    return [each for number, run in enumerate(runs) for each in (("infinite", number), run)]


def run_all(work: Work, emit: EmitRun) -> None:
    """Make every run in turn; `emit` gets the run's number and an event, or the reason when the run has ended."""
    recipe = get_recipe(work.recipe)
    splits = recipe.load(work.data)
    for number, (method, seed) in enumerate(work.runs):
        plan = work.plan
        if method == "infinite":
            steps = min(work.infinite_steps, plan.max_steps)
            plan = replace(plan, max_steps=steps, target=None, evaluate_every=plan.max_steps + 1, checkpoint=None)
        trainer = Trainer(recipe, splits, plan, method, seed)
        reason = trainer.run(partial(emit, number))
        if trainer.link is not None:
            trainer.link.detach()  # so that the next method can use the process group
        dist.barrier()
        emit(number, reason)


def printing(rank: int) -> EmitRun:
    """Return a function that prints events for the parent process: all of rank 0, only steps of the others."""

    def emit(run: int, event: Event | str) -> None:
        if rank == 0 or isinstance(event, Step):
            print(f"{EVENT} {run} {f'end {event}' if isinstance(event, str) else to_line(event)}", flush=True)

    return emit


def parse(line: str) -> tuple[int, Event | str] | None:
    """Return the run's number and the event, or the reason of its end, of a printed line; None for another line."""
    mark, _, rest = line.partition(" ")
    if mark != EVENT:
        return None
    run, _, what = rest.partition(" ")
    return int(run), what[4:] if what.startswith("end ") else from_line(what)


def main() -> None:
    """Run one rank of the work that the command line holds as JSON."""
    torch.set_num_threads(1)
    print_warnings(log.name)
    dist.init_process_group("gloo")
    try:
        run_all(Work.from_json(sys.argv[1]), printing(dist.get_rank()))
    except (ThinwireError, ValueError) as error:
        print(f"FAILED {error}", flush=True)
        sys.exit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
