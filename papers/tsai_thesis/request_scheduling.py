"""Tsai 2018, second half: the order in which a parameter server with bounded staleness serves requests.

FIFO, FILO, stalest-first and forward order with staleness bounds 0 to 5, in a model and on a real server in the lab
with one slow worker: training time and staleness of each, and the model's prediction compared with the measurement.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from papers.study import Claim, Figure, Series, Study, Table, number
from papers.workspace import Workspace, without_skipped
from thinwire.errors import LabError
from thinwire.tools.lab import Lab
from thinwire.tools.progress import WorkProgress
from thinwire.tools.race.profile import LayerTimes
from thinwire.tools.simulate.schedule import Case, compare, even_slices

POLICIES = ("fifo", "filo", "stalest", "forward")
BOUNDS = range(6)
TOLERANCE = 0.15  # of the model's time against the lab's
MARGIN = 0.03  # a smaller difference in time or staleness does not count
TITLES = {
    "lab": "A real server in the lab, one worker twice as slow",
    "model": "The model, one worker twice as slow",
    "larger model": "A larger model",
}
Row = dict[str, Any]  # policy, bound, seconds, staleness, most


@dataclass(frozen=True)
class SchedulingSetup:
    """Workers that compute for a given time and send equal layers; the first worker is slower than the others."""

    workers: int
    steps: int
    forward: tuple[float, ...]  # seconds of each layer
    width: int = 256
    rate_mbit: float = 100.0
    slowness: tuple[float, ...] = ()
    slices: int = 4  # of a layer
    server_rate: float = 1.0  # the server's link rate over a worker's; the lab has equal links

    @property
    def layer_bytes(self) -> int:
        return 4 * self.width * (self.width + 1)

    def case(self, bound: int) -> Case:
        """Return the input of the model."""
        transfer = 8 * self.layer_bytes / (self.rate_mbit * 1e6)
        layers = tuple(LayerTimes(f"{i}", seconds, 0.0005, transfer) for i, seconds in enumerate(self.forward))
        slices = even_slices(layers, self.slices)
        return Case(
            layers, self.workers, self.steps, bound, slices=slices, slowness=self.slowness, server_rate=self.server_rate
        )

    def run(self, policy: str, bound: int) -> dict[str, Any]:
        """Return the input of the processes in the lab."""
        cut = self.width * self.width // self.slices
        return {**asdict(self), "name": f"{policy}-{bound}", "policy": policy, "bound": bound, "cut": cut}


# The first layer computes longest, as with large images: its parameters are needed first.
REAL = SchedulingSetup(3, 10, (0.04, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01), slowness=(2.0, 1.0, 1.0))


def study(workspace: Workspace) -> Study:
    """Run the model at two sizes, and a real server."""
    real = REAL if not workspace.full else SchedulingSetup(6, 30, REAL.forward, slowness=(2.0, *[1.0] * 5))
    workers = 16 if workspace.full else 8
    slowness = (2.0, *[1.0] * (workers - 1))
    large = SchedulingSetup(workers, 20, (0.02,) * 16, 512, 500.0, slowness, server_rate=workers / 2)
    parts = {
        "lab": workspace.lab_part("server", lambda: _measure(real), setup=f"{real}"),
        "model": workspace.part("model", lambda: predict(real), setup=f"{real}"),
        "larger model": workspace.part("model-larger", lambda: predict(large), setup=f"{large}"),
    }
    results: dict[str, list[Row]] = without_skipped(parts)
    return Study(
        "request-scheduling",
        workspace.scale,
        "Request scheduling at a parameter server",
        "Tsai, 2018",
        verdict(results),
        claims(results),
        [_table(TITLES[name], rows) for name, rows in results.items()],
        _figures(results),
        [
            "The thesis states no figures that can be compared with these: the claims are its expectations.",
            "Layers are equal, and their computation is a pause, so that the hosts of the lab do not compete for "
            "cores; the first layer takes four times as long as the others.",
            f"The lab: {real.workers} workers and a server, {real.rate_mbit:g} Mbit/s each, {len(real.forward)} layers "
            f"of {real.layer_bytes / 1e6:.2f} MB in {real.slices} slices, {real.steps} steps, dense both ways.",
            f"The larger model: {large.workers} workers, 16 layers of {large.layer_bytes / 1e6:.1f} MB at 500 Mbit/s, "
            f"{large.server_rate:g} times that at the server; a layer's forward pass takes 20 ms, at one worker 40 ms.",
            "The policy forward serves layers in the order in which the forward pass needs them. It is thinwire's and "
            "P3's, not the thesis's.",
        ],
        facts={"policies": ", ".join(POLICIES), "bounds": "0 to 5"},
    )


def predict(setup: SchedulingSetup) -> list[Row]:
    """Return the model's times and staleness for all policies and bounds."""
    return [
        {
            "policy": outcome.policy,
            "bound": bound,
            "seconds": outcome.makespan,
            "staleness": outcome.staleness_mean,
            "most": outcome.staleness_max,
        }
        for bound in BOUNDS
        for outcome in compare(setup.case(bound), POLICIES)
    ]


def _measure(setup: SchedulingSetup) -> list[Row]:
    """Run all policies and bounds in one lab, one after the other."""
    runs = [setup.run(policy, bound) for bound in BOUNDS for policy in POLICIES]
    events: dict[str, list[dict[str, Any]]] = {}

    argv = [sys.executable, "-m", "papers.tsai_thesis.process", json.dumps(runs)]
    lab = Lab(setup.workers + 1, rate=f"{setup.rate_mbit:g}mbit")
    with WorkProgress(f"{len(runs)} runs of {setup.workers} workers", setup.steps * len(runs)) as progress, lab:

        def read(host: int, line: str) -> None:
            kind, _, rest = line.partition(" ")
            if kind in ("APPLIED", "STEP"):
                event = json.loads(rest)
                events.setdefault(event["run"], []).append(event)
                progress.advance(1.0 if kind == "APPLIED" else 0.0)

        result = lab.run(argv, output=read)
    if result.failure is not None:
        raise LabError(f"the scheduling study failed: {result.failure}")
    return [_row(run, events[run["name"]]) for run in runs]


def _row(run: dict[str, Any], events: list[dict[str, Any]]) -> Row:
    """Scale the mean step time to all steps, without the first two, which open connections and send all parameters."""
    applied = sorted(event["applied"] for event in events if "applied" in event)
    staleness = [value for event in events if "staleness" in event for value in event["staleness"]]
    step = statistics.mean(b - a for a, b in pairwise(applied[2:]))
    return {
        "policy": run["policy"],
        "bound": run["bound"],
        "seconds": step * run["steps"],
        "staleness": statistics.mean(staleness) if staleness else 0.0,
        "most": max(staleness, default=0),
    }


def _find(rows: list[Row], policy: str, bound: int) -> Row:
    return next(row for row in rows if (row["policy"], row["bound"]) == (policy, bound))


def claims(results: dict[str, list[Row]]) -> list[Claim]:
    """Judge the thesis's expectations for each set of times, and the model against the lab."""
    made = [claim for name, rows in results.items() for claim in expectations(name, rows)]
    if "lab" in results and "model" in results:
        made.append(_confirmed(results["model"], results["lab"]))
    return made


def expectations(name: str, rows: list[Row]) -> list[Claim]:
    """Judge what the thesis expects of one set of times.

    The claims are about medians over the bounds: the largest of several noisy ratios exceeds one in any case.
    """
    fifo, filo, stalest, forward = ([_find(rows, p, bound)["seconds"] for bound in BOUNDS] for p in POLICIES)
    required = f"more than {MARGIN:.0%} is asked for"

    def more(what: str, ratio: float, note: str = "") -> Claim:
        holds = ratio > 1.0 + MARGIN
        return Claim(f"{name}: {what}", 1.0, ratio, "x", holds, f"{required}; {note}" if holds and note else required)

    fresher = statistics.median(
        _find(rows, "stalest", bound)["staleness"] / max(_find(rows, "fifo", bound)["staleness"], 1e-9)
        for bound in BOUNDS
        if bound
    )
    least = min(POLICIES, key=lambda p: _find(rows, p, 5)["staleness"])
    staler = f"{name}: stalest-first's staleness over FIFO's, median over bounds 1 to 5"
    note = f"{MARGIN:.0%} less is asked for; least at bound 5: {least}"
    return [
        more("stalest-first faster than FIFO, median over the bounds", _median_ratio(fifo, stalest)),
        more("forward order faster than FIFO, median over the bounds", _median_ratio(fifo, forward)),
        more("FILO's time over FIFO's, median over the bounds", _median_ratio(filo, fifo), "it starves"),
        more("bounds 1 to 5 faster than bulk synchronous (FIFO), median", fifo[0] / statistics.median(fifo[1:])),
        Claim(staler, 1.0, fresher, "x", fresher < 1.0 - MARGIN, note),
    ]


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _confirmed(modelled: list[Row], measured: list[Row]) -> Claim:
    ratios = {
        (row["policy"], row["bound"]): row["seconds"] / _find(measured, row["policy"], row["bound"])["seconds"]
        for row in modelled
    }
    middle = statistics.median(ratios.values())
    worst = max(ratios, key=lambda key: abs(ratios[key] - 1.0))
    furthest = f"{ratios[worst]:.2f}x at {worst[0]}, bound {worst[1]}"
    what, holds = "the model's time over the lab's, median of all runs", abs(middle - 1.0) <= TOLERANCE
    return Claim(what, 1.0, middle, "x", holds, f"within {TOLERANCE:.0%} is asked for; furthest off: {furthest}")


def verdict(results: dict[str, list[Row]]) -> str:
    """Say which policy is fastest, in the lab if it was used, else in the model."""
    if not results:
        return "Nothing is judged: no part was made."
    name, rows = next(iter(results.items()))
    best = min(rows, key=lambda row: row["seconds"])
    by_policy = {policy: _find(rows, policy, 0)["seconds"] for policy in POLICIES}
    fifo, first = by_policy["fifo"], min(by_policy, key=lambda policy: by_policy[policy])
    return (
        f"In the {name}, with bulk-synchronous steps, {first} is fastest, {fifo / by_policy[first]:.2f} times as fast "
        f"as FIFO; the fastest of all is {best['policy']} with a staleness bound of {best['bound']}, "
        f"{fifo / best['seconds']:.2f} times as fast as bulk-synchronous FIFO."
    )


def _table(title: str, rows: list[Row]) -> Table:
    table = []
    for policy in POLICIES:
        cells = {"Policy": policy}
        for bound in BOUNDS:
            row = _find(rows, policy, bound)
            cells[f"B = {bound}"] = f"{number(row['seconds'], 's')} ({row['staleness']:.2f})"
        table.append(cells)
    return Table(title, table, "Training time, and in brackets the mean staleness in steps of the parameters used.")


def _figures(results: dict[str, list[Row]]) -> list[Figure]:
    figures = []
    for name, rows in results.items():
        for key, axis in (("seconds", "training time (s)"), ("staleness", "mean staleness (steps)")):
            series = [Series(p, list(BOUNDS), [_find(rows, p, b)[key] for b in BOUNDS]) for p in POLICIES]
            title = "time" if key == "seconds" else "staleness"
            figures.append(Figure(f"{name}: {title}", "staleness bound", axis, series))
    return figures
