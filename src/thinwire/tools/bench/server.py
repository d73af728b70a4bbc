"""`thinwire bench server`: phases, stragglers, policies and round trips of the parameter server on emulated hosts.

Phases are those of SparsifyGradients: synchronisation lasts until the last worker has the model, computation until the
last worker has its gradient, aggregation until the server has applied all gradients. All emulated hosts share the
machine's monotonic clock, so that times of different processes can be compared.
"""

import functools
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire.errors import LabError
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.bench import BenchLab, Record, judge
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.lab.units import parse_loss
from thinwire.tools.options import by_delay, table_of, write_json
from thinwire.tools.progress import print_line
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tools.recipes.digits import read_digits
from thinwire.transport.addresses import listen

Run = dict[str, Any]
# The steps of `trips` that are not measured: pacers and connections find out what the link carries in them.
_WARM_UP = 10
# How many round trips a step may take more on a link with a delay: one for pushes and one for pulls.
_MOST_TRIPS = 2.0


class Slow(nn.Module):
    """A linear layer whose forward pass also sleeps: emulated hosts share the cores, so it does not compute instead."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)  # its hook waits for the parameters before the sleep
        time.sleep(self.seconds)
        return torch.relu(y)


def take_turns(serve: Callable[[Run, str], None], work: Callable[[Run, str, int], None]) -> None:
    """Take part in each of the runs that the command line holds as JSON: rank 0 serves, the others work."""
    torch.set_num_threads(1)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    for number, run in enumerate(json.loads(sys.argv[1])):
        address = f"{run.get('transport', 'tcp')}://{os.environ['MASTER_ADDR']}:{port + number}"
        if rank == 0:
            serve(run, address)
        elif rank <= run["workers"]:
            work(run, address, rank)


@dataclass(frozen=True)
class ServerRun:
    """Settings of one training run with a parameter server."""

    name: str
    model: str = "convnet"
    workers: int = 13
    push: str = "topk1"
    pull: str = "topk1"
    mode: str = "bsp"
    bound: int = 3
    policy: str = "forward"
    overlap: bool = True
    phased: bool = False  # as in the paper: whole tensors, and the server sends none before it has received all
    batch: int = 8
    lr: float = 0.01
    steps: int = 0  # 0: run until the seconds are over
    seconds: float = 0.0
    pause: float = 0.0  # seconds that a step waits in addition, without using the processor
    chance: float = 0.0  # probability that a step takes `factor` times as long
    factor: float = 4.0
    slow: dict[str, float] = field(default_factory=dict)  # factors of the ranks that are always slower
    transport: str = "tcp"
    on_loss: str = "restore"


def server_runs(part: str, workers: int, steps: int, seconds: float) -> list[ServerRun]:
    """Return the runs of one part of the benchmark."""
    if part == "phases":
        phased: dict[str, Any] = {"workers": workers, "overlap": False, "phased": True}
        return [
            ServerRun("dense", push="dense", pull="dense", steps=steps, **phased),
            ServerRun("percentile90", push="percentile90", pull="dense", steps=steps, **phased),
            ServerRun("thinwire", steps=4 * steps, **phased),
            ServerRun("thinwire, overlapped", workers=workers, steps=4 * steps),
        ]
    if part == "stragglers":
        common: dict[str, Any] = dict(model="small", workers=4, batch=32, seconds=seconds, pause=0.1, lr=0.2)
        return [
            ServerRun("bsp, 1 in 5 steps 4x", chance=0.2, **common),
            ServerRun("ssp 3, 1 in 5 steps 4x", mode="ssp", chance=0.2, **common),
            ServerRun("bsp, one worker 3x", slow={"1": 3.0}, **common),
            ServerRun("async, one worker 3x", mode="async", slow={"1": 3.0}, **common),
        ]
    if part == "trips":
        common = {"model": "wide", "workers": workers, "batch": 32, "lr": 0.1, "steps": 4 * steps}
        return [ServerRun(f"bsp over {transport}", transport=transport, **common) for transport in ("tcp", "udp")]
    common = {"model": "slow_first", "workers": 2, "push": "dense", "pull": "dense", "steps": steps + 2}
    return [ServerRun(name, policy=name, **common) for name in ("fifo", "filo", "stalest", "forward")]


def run(
    parts: list[str],
    workers: int,
    settings: list[LinkSettings],
    steps: int,
    seconds: float,
    json_file: Path | None,
) -> int:
    """Run the parts with each of the links' settings, print their tables and bars, write the figures.

    Returns 1 if a bar was missed.
    """
    for part in parts:
        hosts = 1 + max(each.workers for each in server_runs(part, workers, steps, seconds))
        for links in settings:
            try:
                links_of(part, links).check(hosts)
            except LabError as error:
                raise LabError(f"{part}, {hosts} hosts: {error}") from None
    figures = [_run_parts(parts, workers, BenchLab(links), steps, seconds) for links in settings]
    compared = _compare_trips(settings, [each.get("trips", []) for each in figures], workers + 1)
    write_json(json_file, by_delay(figures))
    return judge(zip(settings, (each["bars"] for each in figures), strict=True), "x", compared)


def links_of(part: str, links: LinkSettings) -> LinkSettings:
    """Return the links of a part: those that are asked for, of which some parts replace the rate."""
    if part in ("policies", "trips"):
        return replace(links, rate="100mbit")
    # A delay line cannot carry gigabits.
    return replace(links, rate="1gbit") if part == "stragglers" and not links.delayed else links


def _run_parts(parts: list[str], workers: int, lab: BenchLab, steps: int, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"workers": workers, "bars": {}}
    console = Console()
    for part, count, what, measure in (
        ("phases", workers, "milliseconds", _phases),
        ("stragglers", 4, "steps of at least 100 ms", _stragglers),
        ("policies", 2, "slow first layer, milliseconds", _policies),
        ("trips", workers, "1.1 million parameters, milliseconds", _trips),
    ):
        if part in parts:
            used = BenchLab(links_of(part, lab.links), lab.costs)
            figures[part] = measure(used, server_runs(part, workers, steps, seconds), figures["bars"])
            console.print(_table(f"{count} workers {used.links}, {what}", figures[part], lab.note))
        for row in figures[part] if part == "stragglers" and part in parts else []:
            curve = ", ".join(f"{value:.3f} at {at:.1f} s" for at, value in row["curve"])
            console.print(f"accuracy over time, {row['run']}: {curve}", highlight=False)
    return {**figures, **lab.to_json()}


def measure_runs(lab: BenchLab, runs: Sequence[ServerRun]) -> list[Record]:
    """Run all runs in one lab, one after the other, and return the records of its processes."""
    advance = {each.name: 1.0 if each.steps else each.pause for each in runs}
    return lab.run(
        1 + max(each.workers for each in runs),
        ["thinwire.tools.bench.server", json.dumps([asdict(each) for each in runs])],
        ("APPLIED", "STEP"),
        total=sum(each.steps or each.seconds for each in runs),
        progress=lambda kind, record: advance[record["run"]] if kind == "APPLIED" else 0.0,
    )


def of_run(records: list[Record], kind: str, name: str) -> list[dict[str, Any]]:
    """Return the records of one kind that belong to one run."""
    return [record for each, record in records if each == kind and record["run"] == name]


def mean_step(records: list[Record], name: str, skip: int) -> float:
    """Return the mean milliseconds of a run's step, without the first steps."""
    at: list[float] = sorted(record["applied"] for record in of_run(records, "APPLIED", name))[skip:]
    return 1e3 * (at[-1] - at[0]) / (len(at) - 1)


def _phases(lab: BenchLab, runs: list[ServerRun], bars: dict[str, Any]) -> list[dict[str, Any]]:
    records = measure_runs(lab, runs)
    rows = [_phase_row(records, run) for run in runs]
    dense, percentile, plain, overlapped = rows
    both = [row["synchronisation"] + row["aggregation"] for row in rows]
    bars["percentile90 cuts aggregation"] = dense["aggregation"] / percentile["aggregation"], 3.5
    bars["thinwire cuts aggregation + synchronisation"] = both[0] / both[2], 25.0
    bars["thinwire's step is faster than dense"] = dense["step"] / overlapped["step"], 4.0
    bars["thinwire's step without overlap is faster than dense"] = dense["step"] / plain["step"], 4.0
    return rows


def _phase_row(records: list[Record], run: ServerRun) -> dict[str, Any]:
    """Return the median milliseconds of each phase, without the first two steps."""
    applied = {s["step"]: s["applied"] for s in of_run(records, "APPLIED", run.name)}
    work: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for s in of_run(records, "STEP", run.name):
        work[s["step"]].append(s)
    found = []
    for step in sorted(applied)[2:]:
        workers = work[step - 1]
        if step - 1 not in applied or len(workers) < run.workers:
            continue
        ready, computed = max(w["ready"] for w in workers), max(w["computed"] for w in workers)
        before, after = applied[step - 1], applied[step]
        found.append((after - before, ready - before, computed - ready, after - computed))
    names = ("step", "synchronisation", "computation", "aggregation")
    return {"run": run.name, **{n: 1e3 * statistics.median(v[i] for v in found) for i, n in enumerate(names)}}


def _stragglers(lab: BenchLab, runs: list[ServerRun], bars: dict[str, Any]) -> list[dict[str, Any]]:
    records = measure_runs(lab, runs)
    rows = []
    for run in runs:
        steps = of_run(records, "STEP", run.name)
        curve = [(s["applied"], s["accuracy"]) for s in of_run(records, "APPLIED", run.name) if "accuracy" in s]
        began = min(s["ready"] for s in steps)
        row: dict[str, Any] = {
            "run": run.name,
            "steps_per_second": len(steps) / (max(s["computed"] for s in steps) - began),
            "staleness": max(s["staleness"] for s in steps),
            "accuracy": curve[-1][1] if curve else 0.0,
            "curve": [(round(at - began, 2), round(value, 4)) for at, value in curve],
        }
        rows.append(row)
    speed = [row["steps_per_second"] for row in rows]
    bars["ssp 3 makes more steps per second than bsp"] = speed[1] / speed[0], 1.3
    bars["async makes more steps per second than bsp"] = speed[3] / speed[2], 1.8
    return rows


def policy_steps(lab: BenchLab, runs: list[ServerRun]) -> dict[str, float]:
    """Return the mean milliseconds of a step in each run, without the first two steps."""
    records = measure_runs(lab, runs)
    return {run.name: mean_step(records, run.name, skip=2) for run in runs}


def _policies(lab: BenchLab, runs: list[ServerRun], bars: dict[str, Any]) -> list[dict[str, Any]]:
    step = policy_steps(lab, runs)
    bars["stalest or forward against fifo"] = step["fifo"] / min(step["stalest"], step["forward"]), 1.0
    return [{"run": name, "step": milliseconds} for name, milliseconds in step.items()]


def _trips(lab: BenchLab, runs: list[ServerRun], bars: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the median milliseconds of a step over each transport, without the first steps."""
    records = measure_runs(lab, runs)
    rows = []
    for run in runs:
        at = sorted(record["applied"] for record in of_run(records, "APPLIED", run.name))[_WARM_UP:]
        rows.append({"run": run.name, "step": 1e3 * statistics.median(b - a for a, b in pairwise(at))})
    return rows


def _compare_trips(settings: list[LinkSettings], rows: list[list[dict[str, Any]]], hosts: int) -> list[bool]:
    """Add to each row how many round trips a step takes more than without a delay; return which bars are met."""
    undelayed = next((each for links, each in zip(settings, rows, strict=True) if not links.delayed), [])
    steps = {row["run"]: row["step"] for row in undelayed}
    met = []
    for links, each in zip(settings, rows, strict=True):
        for row in each if links.delayed and steps else ():
            row["round_trips"] = (row["step"] - steps[row["run"]]) / (1e3 * links.round_trip(hosts))
            word = "lossy "  # TCP waits for what is lost, so that the bar holds without loss
            if not parse_loss(links.loss):
                met.append(row["round_trips"] <= _MOST_TRIPS)
                word = "met   " if met[-1] else "MISSED"
            what = f"{row['run']} at {links.delays} one way: a step takes {row['round_trips']:.2f} round trips more"
            print_line(Console(), f"{word} {what} than without a delay (bar: at most {_MOST_TRIPS:g})")
    return met


def _table(title: str, rows: list[dict[str, Any]], note: str) -> Table:
    def text(value: object) -> str:
        return f"{value:,.2f}" if isinstance(value, float) else str(value)

    shown = [{name.replace("_", " "): text(row[name]) for name in row if name != "curve"} for row in rows]
    return table_of(shown, title=title, caption=note)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": cuda_convnet,
    # For runs in which workers wait more than they compute.
    "small": lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    # 1.1 million parameters, so that a step needs many datagrams.
    "wide": lambda: nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    ),
    # Eight layers of 1 MB each, of which the first is slow to compute.
    "slow_first": lambda: nn.Sequential(*(Slow(512, 0.005 if n else 0.5) for n in range(8)), nn.Linear(512, 10)),
}


def batches(model: str, size: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches to train on in turn: digits if the accuracy is measured, else a random one."""
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(0, 10, (size,), generator=generator)
    if shape := {"convnet": (3, 32, 32), "slow_first": (512,)}.get(model):
        return [(torch.randn(size, *shape, generator=generator), labels)]
    x, y = digits()
    order = torch.randperm(1300, generator=generator)[:640].view(-1, size)
    return [(x[rows], y[rows]) for rows in order]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the images and labels of scikit-learn's digits; those from 1300 on are for testing."""
    pixels, labels = read_digits()
    return pixels / 16.0, labels


def serve(run: dict[str, Any], address: str) -> None:
    """Serve one run to its end; rank 0 does this."""
    torch.manual_seed(0)
    model = MODELS[run["model"]]()

    def on_step(server: Server) -> None:
        record: dict[str, Any] = {"run": run["name"], "step": server.clock.step, "applied": server.applied_at}
        if run["model"] in ("small", "wide") and server.clock.step % 10 == 0:
            x, y = digits()
            with torch.no_grad():
                record["accuracy"] = float((model(x[1300:]).argmax(1) == y[1300:]).float().mean())
        print("APPLIED " + json.dumps(record), flush=True)
        if run["seconds"] and time.monotonic() - server.membership.started_at > run["seconds"]:
            server.stop("time")

    server = Server(
        model,
        torch.optim.SGD(model.parameters(), lr=run["lr"]),
        **{name: run[name] for name in ("mode", "bound", "policy", "phased", "on_loss")},
        codec=run["pull"],
        expect=run["workers"],
        cut=0 if run["phased"] else None,
        timeout=60.0,
        on_step=on_step,
    )
    server.run(listen(address, insecure=True), max_steps=run["steps"] or None)


def work(run: dict[str, Any], address: str, rank: int) -> None:
    """Train as a worker of one run, with the delays that the run asks for; all ranks but 0 do this."""
    model = MODELS[run["model"]]()
    data = batches(run["model"], run["batch"], rank)
    chance = random.Random(rank)
    with Worker(address, model, run["push"], slot=rank - 1, overlap=run["overlap"]) as worker:
        while worker.stopped is None:
            clock = worker.clock
            factor = run["slow"].get(str(rank), 1.0) * (run["factor"] if chance.random() < run["chance"] else 1.0)
            time.sleep(run["pause"] * factor)  # before the backward pass, which already pushes gradients
            x, y = data[clock % len(data)]
            nn.functional.cross_entropy(model(x), y).backward()
            worker.step()
            times = worker.last
            record = {"run": run["name"], "rank": rank, "step": clock, "ready": times.ready, "computed": times.computed}
            record |= {"wait": times.aggregate + times.synchronise, **worker.losses()}
            print("STEP " + json.dumps({**record, "staleness": max(times.staleness.values(), default=0)}), flush=True)


if __name__ == "__main__":
    take_turns(serve, work)
