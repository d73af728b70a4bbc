"""Run one training with its event log: with DDP or a parameter server, started from here, by torchrun or by mpirun."""

import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire
from thinwire.errors import ThinwireError
from thinwire.server.checkpoint import stored_step
from thinwire.tools.events import EventLog, Run
from thinwire.tools.lab.links import DelayCost
from thinwire.tools.lab.units import parse_loss
from thinwire.tools.observe import describe_machine, mirrors, now
from thinwire.tools.race.launch import ClusterSpec, Follower, RunProgress, launch
from thinwire.tools.race.served import ServedWork, ServerSettings, run_server, run_worker
from thinwire.tools.race.training import Plan, Work, run_all
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.summary import delay_cost, last_value, reached
from thinwire.transport.addresses import require


def describe_run(recipe: Recipe, plan: Plan, place: ClusterSpec, method: str, seed: int) -> Run:
    """Return the first record of a run's log."""
    return Run(
        command=place.command,
        recipe=recipe.name,
        method=method,
        workers=place.workers,
        batch=plan.batch,
        parameters=recipe.parameter_count(),
        seed=seed,
        rate=place.links.rate or "none",
        delay=place.links.delays,
        packet_loss=parse_loss(place.links.loss),
        metric=recipe.metric,
        higher_is_better=recipe.higher_is_better,
        target=plan.target if plan.target is not None else float("nan"),
        version=thinwire.__version__,
        machine=describe_machine(),
        date=now(),
    )


def describe_served(recipe: Recipe, settings: ServerSettings, place: ClusterSpec, label: str = "") -> Run:
    """Return the first record of a log that a parameter server writes; `label` replaces the method's name."""
    suffix = f"-{settings.on_loss}" if settings.transport == "udp" else ""
    name = f"{settings.mode}:{settings.method}/{settings.pull_method}{f':udp{suffix}' if suffix else ''}"
    run = describe_run(recipe, settings.plan, place, label or name, settings.seed)
    return replace(run, transport=f"{settings.transport}{suffix}")


@dataclass(frozen=True)
class MethodResult:
    """One method's figures; None is what was not measured or not reached."""

    name: str
    step_ms: float
    overhead: float | None  # communication overhead
    aggregation_ms: float | None  # of a step, beyond the step without communication
    bytes_per_host_step: float
    steps_to_target: float | None
    seconds_to_target: float | None
    speedup: float | None  # of the time to the target, against dense
    train_metric: float | None
    test_metric: float | None

    def row(self) -> dict[str, str]:
        """Return the method's line of the results table, which training and racing show."""

        def number(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        return {
            "method": self.name,
            "step ms": f"{self.step_ms:,.0f}",
            "overhead": number(self.overhead, "+.0%"),
            "MB": f"{self.bytes_per_host_step / 1e6:.3g}",
            "steps": number(self.steps_to_target, ",.0f"),
            "seconds": number(self.seconds_to_target, ",.1f"),
            "speed-up": "-" if self.speedup is None else f"{self.speedup:.1f}x",
            "train": number(self.train_metric, ".3f"),
            "test": number(self.test_metric, ".3f"),
        }


# How a training ended: its figures, one sentence, and what delaying its packets cost.
TrainingEnd = tuple[MethodResult, str, DelayCost | None]


def end_of(log: EventLog, seconds: float, ranks: int = 1) -> TrainingEnd:
    """Sum up a training from its log, which has the steps of so many ranks; they need not be kept."""
    run, end, hit = log.log.run, log.log.end, reached(log.log)
    assert end is not None, "the log has ended"
    steps = max(end.steps, 1)
    result = MethodResult(
        run.method,
        step_ms=1e3 * end.wall / steps,
        overhead=None,
        aggregation_ms=None,
        bytes_per_host_step=end.bytes_sent / steps / ranks,
        steps_to_target=float(hit.step) if hit else None,
        seconds_to_target=hit.wall if hit else None,
        speedup=None,
        train_metric=last_value(log.log, "train"),
        test_metric=last_value(log.log, "test"),
    )
    how = f"reached the target at step {hit.step}" if hit else f"made {end.steps} steps without reaching the target"
    return result, f"{run.recipe} with {run.method} {how}; {seconds:.0f} s in all.", delay_cost([log.log])


def _progress(log: EventLog, plan: Plan) -> RunProgress:
    """Return the progress display of a training."""
    return RunProgress([log.log.run.method], [plan.max_steps], log.log.run.metric)


def _launched(
    opened: EventLog, argv: list[str], plan: Plan, place: ClusterSpec, *, served: bool = False
) -> TrainingEnd:
    """Run the processes to their end; a parameter server is one more, and the log then has the steps of all ranks."""
    began = time.monotonic()
    with opened as log, _progress(log, plan) as progress:
        follower = Follower([log], progress, every_rank=served)
        launch(argv, place.workers + served, place.links, follower.read, started=follower.started)
    return end_of(log, time.monotonic() - began, place.workers if served else 1)


@dataclass(frozen=True)
class DdpTraining:
    """A training with DDP: what to run, where, and where to log."""

    recipe: Recipe
    work: Work
    place: ClusterSpec
    log: Path
    tensorboard: Path | None = None

    def open_log(self) -> EventLog:
        """Open the log; a resumed training continues it from the checkpoint's step."""
        (method, seed), plan = self.work.runs[0], self.work.plan
        resume_at = None
        if plan.checkpoint is not None and plan.resume:
            found = plan.checkpoint.glob("step-*/model.pt")
            resume_at = max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)
        run = describe_run(self.recipe, plan, self.place, method, seed)
        return EventLog(self.log, run, resume_at=resume_at, mirrors=mirrors(self.tensorboard), keep=False)

    def run(self) -> TrainingEnd:
        """Start the workers, log and show what they report."""
        return _launched(self.open_log(), self.work.command(), self.work.plan, self.place)

    def run_under_torchrun(self) -> TrainingEnd | None:
        """Train as one rank of the process group that torchrun made; only rank 0 logs and returns the end."""
        torch.set_num_threads(max(1, torch.get_num_threads()))
        dist.init_process_group("gloo")
        began, end = time.monotonic(), None
        if dist.get_rank() != 0:
            run_all(self.work, lambda run, event: None)
        else:
            with self.open_log() as log, _progress(log, self.work.plan) as progress:
                run_all(self.work, Follower([log], progress).take)
            end = end_of(log, time.monotonic() - began)
        dist.destroy_process_group()
        return end


@dataclass(frozen=True)
class ServedTraining:
    """A training with a parameter server, which runs on one host more than the workers."""

    recipe: Recipe
    work: ServedWork
    place: ClusterSpec
    log: Path
    label: str = ""  # the method's name in the log
    tensorboard: Path | None = None

    def open_log(self) -> EventLog:
        """Open the log; a resumed training continues it from the checkpoint's step."""
        settings = self.work.settings
        plan = settings.plan
        resume_at = stored_step(plan.checkpoint) if plan.checkpoint is not None and plan.resume else None
        run = describe_served(self.recipe, settings, self.place, self.label)
        return EventLog(self.log, run, resume_at=resume_at, mirrors=mirrors(self.tensorboard), keep=False)

    def run(self) -> TrainingEnd:
        """Start the server and the workers, log and show what the server reports."""
        settings = self.work.settings
        require(settings.transport)
        return _launched(self.open_log(), self.work.command(), settings.plan, self.place, served=True)

    def run_under_mpi(self) -> TrainingEnd | None:
        """Train as one rank that mpirun started; rank 0 is the server and returns the end."""
        try:
            from mpi4py import MPI
        except ImportError:
            raise ThinwireError("the transport mpi needs mpi4py and an MPI: install the extra 'mpi'") from None
        rank, size, workers = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), self.place.workers
        if size != workers + 1:
            needed = f"{workers} workers and a server are {workers + 1} processes"
            raise ThinwireError(f"{needed}, but mpirun started {size}")
        torch.set_num_threads(1)
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        try:
            if rank != 0:
                run_worker(self.work, "mpi://", rank)
                return None
            began = time.monotonic()
            plan = self.work.settings.plan
            with self.open_log() as log, _progress(log, plan) as progress:
                follower = Follower([log], progress)
                follower.take(0, run_server(self.work, "mpi://", lambda event: follower.take(0, event)))
            return end_of(log, time.monotonic() - began, workers)
        except (ThinwireError, ValueError) as error:
            # Without the abort the other ranks would wait for this one for ever.
            print(f"thinwire: rank {rank}: {error}", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(2)
            raise
