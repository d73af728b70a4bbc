"""Tsai 2018, second half: which request goes first at a parameter server with bounded staleness.

FIFO, FILO, stalest-first and forward order under bounds 0 to 5: in the model, and on a real server in the lab with one
slow worker; training time and staleness of each, and the model's prediction next to what was measured.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from papers.request_scheduling.findings import BOUNDS, POLICIES, Row, claims, figures, tables, verdict
from papers.study import Study
from papers.workshop import Workshop
from thinwire.errors import LabError
from thinwire.tools.lab import Lab
from thinwire.tools.race.profile import LayerTimes
from thinwire.tools.simulate.schedule import Case, compare, even_slices


@dataclass(frozen=True)
class Setup:
    """Workers that compute for a while and send equal layers; the first worker is slower than the others."""

    workers: int
    steps: int
    forward: tuple[float, ...]  # seconds of each layer
    width: int = 256
    rate_mbit: float = 100.0
    slowness: tuple[float, ...] = ()
    slices: int = 4  # of a layer
    server_rate: float = 1.0  # the server's link in links of a worker; only the model can tell them apart

    @property
    def layer_bytes(self) -> int:
        return 4 * self.width * (self.width + 1)

    def case(self, bound: int) -> Case:
        """What the model is asked."""
        transfer = 8 * self.layer_bytes / (self.rate_mbit * 1e6)
        layers = tuple(LayerTimes(f"{i}", seconds, 0.0005, transfer) for i, seconds in enumerate(self.forward))
        slices = even_slices(layers, self.slices)
        return Case(
            layers,
            self.workers,
            self.steps,
            bound,
            slices=slices,
            slowness=self.slowness,
            server_rate=self.server_rate,
        )

    def run(self, policy: str, bound: int) -> dict[str, Any]:
        """What the processes in the lab are told."""
        return {
            "name": f"{policy}-{bound}",
            "policy": policy,
            "bound": bound,
            "workers": self.workers,
            "steps": self.steps,
            "forward": self.forward,
            "width": self.width,
            "slowness": self.slowness,
            "cut": self.width * self.width // self.slices,
        }


# The first layer is the slowest to compute, as where images are large: its parameters are wanted first.
REAL = Setup(3, 10, (0.04, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01), slowness=(2.0, 1.0, 1.0))


def study(workshop: Workshop) -> Study:
    """The model at two sizes, and a real server."""
    real = REAL if not workshop.full else Setup(6, 30, REAL.forward, slowness=(2.0, *[1.0] * 5))
    many = 16 if workshop.full else 8
    large = Setup(many, 20, (0.02,) * 16, 512, 500.0, (2.0, *[1.0] * (many - 1)), server_rate=many / 2)
    parts = {
        "lab": workshop.lab_part("server", lambda: _measure(real), setup=f"{real}"),
        "model": workshop.part("model", lambda: _model(real), setup=f"{real}"),
        "larger model": workshop.part("model-larger", lambda: _model(large), setup=f"{large}"),
    }
    found: dict[str, list[Row]] = {words: rows for words, rows in parts.items() if rows is not None}
    return Study(
        "request-scheduling",
        workshop.scale,
        "Request scheduling at a parameter server",
        "Tsai, 2018",
        verdict(found),
        claims(found),
        tables(found),
        figures(found),
        [
            "The thesis names no figures that can be set next to these: the claims are its expectations.",
            "Layers are equal and their computing is waiting, so that the hosts of the lab do not share it; the first "
            "layer takes four times as long as the others.",
            f"The lab: {real.workers} workers and a server, {real.rate_mbit:g} Mbit/s each, {len(real.forward)} layers "
            f"of {real.layer_bytes / 1e6:.2f} MB in {real.slices} slices, {real.steps} steps, dense both ways.",
            f"The larger model: {large.workers} workers, 16 layers of {large.layer_bytes / 1e6:.1f} MB at 500 Mbit/s, "
            f"{large.server_rate:g} times that at the server; a layer's forward pass takes 20 ms, at one worker 40 ms.",
            "forward, the order in which the forward pass needs the layers, is thinwire's and P3's, not the thesis's.",
        ],
        facts={"policies": ", ".join(POLICIES), "bounds": "0 to 5"},
    )


def _model(setup: Setup) -> list[Row]:
    rows = []
    for bound in BOUNDS:
        for outcome in compare(setup.case(bound), POLICIES):
            rows.append(
                {
                    "policy": outcome.policy,
                    "bound": bound,
                    "seconds": outcome.makespan,
                    "staleness": outcome.staleness_mean,
                    "most": outcome.staleness_max,
                }
            )
    return rows


def _measure(setup: Setup) -> list[Row]:
    """All policies and bounds in one lab, one after the other."""
    runs = [setup.run(policy, bound) for bound in BOUNDS for policy in POLICIES]
    said: dict[str, list[dict[str, Any]]] = {}

    def read(host: int, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind in ("APPLIED", "STEP"):
            told = json.loads(rest)
            said.setdefault(told["run"], []).append(told)

    with Lab(setup.workers + 1, rate=f"{setup.rate_mbit:g}mbit") as lab:
        argv = [sys.executable, "-m", "papers.request_scheduling.process", json.dumps(runs)]
        result = lab.run(argv, output=read)
    if result.failure is not None:
        raise LabError(f"the scheduling study failed: {result.failure}")
    return [_measured(run, said[run["name"]]) for run in runs]


def _measured(run: dict[str, Any], said: list[dict[str, Any]]) -> Row:
    """The first two steps are left out: connections open, and copies are made. The rest stands for all."""
    applied = sorted(told["applied"] for told in said if "applied" in told)
    stale = [value for told in said if "staleness" in told for value in told["staleness"]]
    steady = statistics.mean(b - a for a, b in pairwise(applied[2:]))
    return {
        "policy": run["policy"],
        "bound": run["bound"],
        "seconds": steady * run["steps"],
        "staleness": statistics.mean(stale) if stale else 0.0,
        "most": max(stale, default=0),
    }
