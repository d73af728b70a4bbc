"""Run many schedules: `python -m tests.server.simulation --seeds 100000`.

A failing seed is printed; `--replay SEED` runs it again, event by event the same.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from functools import partial

from rich.console import Console

from tests.server.simulation.bugs import BUGS
from tests.server.simulation.schedule import Outcome, prepare_process, run_seed
from thinwire.tools.options import LINE_EVERY
from thinwire.tools.progress import duration, lines_every


def outcomes(seeds: range, jobs: int, bug: str | None) -> Generator[Outcome, None, None]:
    """Run schedules in so many processes; yield each outcome when it is known."""
    run = partial(run_seed, bug_name=bug)
    if jobs == 1:
        gc.freeze()  # what torch has imported stays, so that the collector need not look at it again
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, prepare_process) as pool:
        yield from pool.imap_unordered(run, seeds)


class Totals:
    """What has happened in all schedules so far."""

    def __init__(self, schedules: int) -> None:
        self._schedules, self._began = schedules, time.monotonic()
        self.done = self._steps = self._pushes = self._crashes = 0
        self._seconds = 0.0  # virtual
        self.failures: list[int] = []  # seeds

    def add(self, outcome: Outcome) -> None:
        self.done, self._seconds = self.done + 1, self._seconds + outcome.seconds
        self._steps, self._pushes = self._steps + outcome.steps, self._pushes + outcome.pushes
        self._crashes += outcome.crashes
        if outcome.failure is not None:
            self.failures.append(outcome.seed)

    def __str__(self) -> str:
        taken = time.monotonic() - self._began
        left = f", about {duration(taken / self.done * (self._schedules - self.done))} left" if self.done else ""
        return (
            f"{self.done:,} of {self._schedules:,} schedules, {self._seconds / 3600:.1f} simulated hours, "
            f"{self._steps:,} steps, {self._pushes:,} pushes, {self._crashes:,} crashes of the server, "
            f"{len(self.failures)} failures; {self.done / taken:.1f} schedules/s{left}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", type=int, help="run this seed alone, and print its digest")
    parser.add_argument("--bug", choices=BUGS, help="let the code have a deliberate bug, and stop when it is found")
    options = parser.parse_args()
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs count from 1")
    seeds = range(options.first, options.first + options.seeds)
    if options.replay is not None:
        seeds, options.jobs = range(options.replay, options.replay + 1), 1
    totals = Totals(len(seeds))
    lines = lines_every(LINE_EVERY, lambda: str(totals), Console())
    try:
        with lines, closing(outcomes(seeds, options.jobs, options.bug)) as found:
            for outcome in found:
                totals.add(outcome)
                if outcome.failure is not None:
                    print(f"seed {outcome.seed} fails: {outcome.failure}", flush=True)
                    if options.bug is not None:
                        print(f"the bug {options.bug} was found in schedule {totals.done}")
                        return 0
    except KeyboardInterrupt:
        print(f"interrupted: {totals}")
        return 130
    print(totals)
    if options.replay is not None:
        print(f"digest {outcome.digest:08x}")
    return 1 if totals.failures or options.bug is not None else 0


if __name__ == "__main__":
    sys.exit(main())
