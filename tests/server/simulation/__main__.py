"""Run many schedules: `python -m tests.server.simulation --seeds 100000`.

A failing seed is printed; `--replay SEED` runs it again, event by event the same.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from functools import partial

from tests.server.simulation.bugs import BUGS
from tests.server.simulation.schedule import Outcome, run_seed

_LINE_EVERY = 30.0


def outcomes(seeds: range, jobs: int, bug: str | None) -> Iterator[Outcome]:
    """Run schedules in so many processes."""
    run = partial(run_seed, bug_name=bug)
    if jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=20)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", type=int, help="run this seed alone, and print its digest")
    parser.add_argument("--bug", choices=BUGS, help="let the code have a deliberate bug, and stop when it is found")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.replay is not None:
        seeds, options.jobs = range(options.replay, options.replay + 1), 1
    began = said = time.monotonic()
    failures, virtual, steps, pushes, crashes = [], 0.0, 0, 0, 0
    for done, outcome in enumerate(outcomes(seeds, options.jobs, options.bug), 1):
        virtual, steps, pushes = virtual + outcome.seconds, steps + outcome.steps, pushes + outcome.pushes
        crashes += outcome.crashes
        if outcome.failure is not None:
            failures.append(outcome.seed)
            print(f"seed {outcome.seed} fails: {outcome.failure}", flush=True)
            if options.bug is not None:
                print(f"the bug {options.bug} was found in schedule {done}")
                return 0
        now = time.monotonic()
        if now - said > _LINE_EVERY or done == len(seeds):
            said, rate = now, done / (now - began)
            left = (len(seeds) - done) / rate
            print(
                f"{done:,} of {len(seeds):,} schedules, {virtual / 3600:.1f} simulated hours, {steps:,} steps, "
                f"{pushes:,} pushes, {crashes:,} crashes of the server, {len(failures)} failures; "
                f"{rate:.1f} schedules/s, about {left:.0f} s left",
                flush=True,
            )
    if options.replay is not None:
        print(f"digest {outcome.digest:08x}")
    return 1 if failures or options.bug is not None else 0


if __name__ == "__main__":
    sys.exit(main())
