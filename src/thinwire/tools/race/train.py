"""Train: one run with its event log, started from here or as a worker of torchrun."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.tools.events import EventLog
from thinwire.tools.observe import mirrors
from thinwire.tools.race.launch import LiveRuns, launch
from thinwire.tools.race.race import Field, describe_run
from thinwire.tools.race.worker import Work, parse, run_all
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.summary import last_value, reached


@dataclass(frozen=True)
class Training:
    """What to run, where, and where to write."""

    recipe: Recipe
    work: Work
    place: Field
    log: Path
    tensorboard: Path | None

    def open_log(self) -> EventLog:
        """The log, continued where a checkpoint says so."""
        method, seed = self.work.runs[0]
        run = describe_run(self.recipe, self.work, self.place, method, seed)
        return EventLog(self.log, run, resume_at=self._resumed(), mirrors=mirrors(self.tensorboard), keep=False)

    def _resumed(self) -> int | None:
        plan = self.work.plan
        if plan.checkpoint is None or not plan.resume:
            return None
        steps = [int(path.parent.name.removeprefix("step-")) for path in plan.checkpoint.glob("step-*/model.pt")]
        return max(steps, default=0)

    def summary(self, log: EventLog, seconds: float) -> str:
        """One sentence in the end."""
        end, hit = log.log.end, reached(log.log)
        test = last_value(log.log, "test")
        steps = end.steps if end is not None else 0
        shown = "" if test is None else f", {self.recipe.metric} {test:.4f} on the test split"
        how = (
            f"the target was reached at step {hit.step}, after {hit.wall:.1f} s of training"
            if hit
            else f"{steps} steps"
        )
        return f"{self.recipe.name} with {self.work.runs[0][0]}: {how}{shown}; {seconds:.0f} s in all."


def run_training(training: Training) -> str:
    """Start the workers, show and log what they tell."""
    method, _ = training.work.runs[0]
    began = time.monotonic()
    with (
        training.open_log() as log,
        LiveRuns([method], [training.work.plan.max_steps], training.recipe.metric) as live,
    ):

        def read(host: int, line: str) -> None:
            found = parse(line)
            if found is None:
                return
            _, event = found
            if isinstance(event, str):
                log.end(event)
            elif getattr(event, "rank", 0) == 0:
                log.write(event)
            if isinstance(event, str) or getattr(event, "rank", 0) == 0:
                live.watch(0, event)

        launch(training.work.command(), training.place.hosts, training.place.rate, read)
    return training.summary(log, time.monotonic() - began)


def run_as_worker(training: Training) -> None:
    """This process is one rank of a process group that torchrun made."""
    torch.set_num_threads(max(1, torch.get_num_threads()))
    dist.init_process_group("gloo")
    began = time.monotonic()
    if dist.get_rank() != 0:
        run_all(training.work, lambda run, event: None)
    else:
        with training.open_log() as log:
            run_all(training.work, lambda run, event: log.end(event) if isinstance(event, str) else log.write(event))
        print(training.summary(log, time.monotonic() - began), flush=True)
    dist.destroy_process_group()
