"""Train with the parameter server: a master and its workers in the lab, as local processes, or under mpirun."""

import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from thinwire.errors import ThinwireError
from thinwire.server.checkpoint import stored_step
from thinwire.tools.events import EventLog, Run
from thinwire.tools.lab.units import parse_loss
from thinwire.tools.observe import mirrors
from thinwire.tools.race.launch import LiveRuns, launch
from thinwire.tools.race.race import Field, describe_run
from thinwire.tools.race.served import Terms
from thinwire.tools.race.served_process import Served, run_server, run_worker
from thinwire.tools.race.worker import Work, parse
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.summary import last_value, reached
from thinwire.transport.addresses import require


def describe_served(recipe: Recipe, terms: Terms, place: Field, label: str = "", loss: str | None = None) -> Run:
    """The first record of a log that a parameter server writes; `label` in place of a name from the terms."""
    work = Work(recipe.name, None, (), terms.plan)
    way = f":udp-{terms.on_loss}" if terms.transport == "udp" else ""
    name = label or f"{terms.mode}:{terms.push}/{terms.pull}{way}"
    made = describe_run(recipe, work, place, name, terms.seed)
    return replace(made, transport=f"{terms.transport}{way[4:]}", packet_loss=parse_loss(loss))


@dataclass(frozen=True)
class ServedTraining:
    """What to run, where, and where to write. The place's hosts are the workers; the master comes on top."""

    recipe: Recipe
    served: Served
    place: Field
    log: Path
    loss: str | None = None  # of every link, in the lab
    label: str = ""  # what the log calls the method
    tensorboard: Path | None = None

    def open_log(self, run: Run) -> EventLog:
        """The log, continued where a checkpoint says so."""
        plan = self.served.terms.plan
        resumed = stored_step(plan.checkpoint) if plan.checkpoint is not None and plan.resume else None
        return EventLog(self.log, run, resume_at=resumed, mirrors=mirrors(self.tensorboard), keep=False)

    def run(self) -> str:
        """Start all processes, show and log what the master tells; returns a sentence."""
        terms, began = self.served.terms, time.monotonic()
        require(terms.transport)
        run = describe_served(self.recipe, terms, self.place, self.label, self.loss)
        argv = [sys.executable, "-m", "thinwire.tools.race.served_process", self.served.to_json()]
        with self.open_log(run) as log, LiveRuns([run.method], [terms.plan.max_steps], run.metric) as live:

            def read(host: int, line: str) -> None:
                found = parse(line)
                if found is None:
                    return
                _, event = found
                if isinstance(event, str):
                    log.end(event)
                else:
                    log.write(event)
                if getattr(event, "rank", 0) == 0:
                    live.watch(0, event)

            launch(argv, self.place.hosts + 1, self.place.rate, read, loss=self.loss)
        return self._summary(log, time.monotonic() - began)

    def run_under_mpi(self) -> str | None:
        """This process is one rank of mpirun's; rank 0 is the master and returns the sentence."""
        try:
            from mpi4py import MPI
        except ImportError:
            raise ThinwireError("--transport mpi needs mpi4py and an MPI: pip install 'thinwire[mpi]'") from None
        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if size != self.place.hosts + 1:
            raise ThinwireError(
                f"{self.place.hosts} workers and a master are {self.place.hosts + 1} processes, mpirun started {size}"
            )
        torch.set_num_threads(1)
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        try:
            if rank != 0:
                run_worker(self.served, "mpi://", rank)
                return None
            return self._serve_over_mpi()
        except (ThinwireError, ValueError) as error:
            # The other ranks would wait for this one for ever.
            print(f"thinwire: rank {rank}: {error}", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(2)
            raise

    def _serve_over_mpi(self) -> str:
        began = time.monotonic()
        with self.open_log(describe_served(self.recipe, self.served.terms, self.place)) as log:
            log.end(run_server(self.served, "mpi://", log.write))
        return self._summary(log, time.monotonic() - began)

    def _summary(self, log: EventLog, seconds: float) -> str:
        end, hit, test = log.log.end, reached(log.log), last_value(log.log, "test")
        steps = end.steps if end is not None else 0
        shown = "" if test is None else f", {self.recipe.metric} {test:.4f} on the test split"
        how = f"the target was reached at step {hit.step}, after {hit.wall:.1f} s" if hit else f"{steps} steps"
        return f"{self.recipe.name} with {log.log.run.method}: {how}{shown}; {seconds:.0f} s in all."
