"""`thinwire bench server`: the parameter server's phases, stragglers and policies on an emulated cluster.

Phases as in SparsifyGradients, seen from outside: synchronisation until the last worker has the model, computation
until the last worker has its gradient, aggregation until the master has applied them all.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.tools.options import JsonFile, verdict, write_json

PARTS = ("phases", "stragglers", "policies")


@dataclass(frozen=True)
class Trial:
    """One run of the server."""

    name: str
    model: str = "convnet"
    workers: int = 13
    push: str = "topk1"
    pull: str = "topk1"
    mode: str = "bsp"
    bound: int = 3
    policy: str = "forward"
    overlap: bool = True
    phased: bool = False  # as the paper did it: whole tensors, and none goes back before all have come
    batch: int = 8
    lr: float = 0.01
    steps: int = 0  # to the end; 0: until the seconds are over
    seconds: float = 0.0
    pause: float = 0.0  # what computing takes at least, without using the processor
    chance: float = 0.0  # that a step takes `factor` times as long
    factor: float = 4.0
    slow: dict[str, float] = field(default_factory=dict)  # factors of single ranks
    transport: str = "tcp"
    on_loss: str = "restore"


def trials(part: str, workers: int, steps: int, seconds: float) -> list[Trial]:
    """What is run for each part of the benchmark."""
    if part == "phases":
        return [
            Trial("dense", workers=workers, push="dense", pull="dense", overlap=False, phased=True, steps=steps),
            Trial(
                "percentile90",
                workers=workers,
                push="percentile90",
                pull="dense",
                overlap=False,
                phased=True,
                steps=steps,
            ),
            Trial("thinwire", workers=workers, overlap=False, phased=True, steps=4 * steps),
            Trial("thinwire, overlapped", workers=workers, steps=4 * steps),
        ]
    if part == "stragglers":
        common = {"model": "small", "workers": 4, "batch": 32, "seconds": seconds, "pause": 0.1, "lr": 0.2}
        return [
            Trial("bsp, 1 in 5 steps 4x", chance=0.2, **common),  # type: ignore[arg-type]
            Trial("ssp 3, 1 in 5 steps 4x", mode="ssp", chance=0.2, **common),  # type: ignore[arg-type]
            Trial("bsp, one worker 3x", slow={"1": 3.0}, **common),  # type: ignore[arg-type]
            Trial("async, one worker 3x", mode="async", slow={"1": 3.0}, **common),  # type: ignore[arg-type]
        ]
    common = {"model": "slow_first", "workers": 2, "push": "dense", "pull": "dense", "steps": steps + 2}
    return [Trial(name, policy=name, **common) for name in ("fifo", "filo", "stalest", "forward")]  # type: ignore[arg-type]


def server_command(
    hosts: Annotated[int, typer.Option(min=3, help="Emulated hosts: a master and the workers.")] = 14,
    rate: Annotated[str, typer.Option(help="Rate of every link.")] = "500mbit",
    only: Annotated[str, typer.Option(help="Parts to run: phases, stragglers, policies.")] = ",".join(PARTS),
    steps: Annotated[int, typer.Option(min=3, help="Steps of the dense runs.")] = 8,
    seconds: Annotated[float, typer.Option(min=2.0, help="Length of the runs with stragglers.")] = 15.0,
    json_file: JsonFile = None,
) -> int:
    """Phase times, stragglers and scheduling policies of the parameter server."""
    parts = [part.strip() for part in only.split(",")]
    if not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"--only takes {', '.join(PARTS)}, not {only!r}")
    figures: dict[str, Any] = {"hosts": hosts, "rate": rate, "bars": {}}
    console = Console()
    if "phases" in parts:
        figures["phases"] = _phases(hosts, rate, trials("phases", hosts - 1, steps, seconds), figures["bars"])
        console.print(_table(f"{hosts - 1} workers at {rate}, ms", figures["phases"]))
    if "stragglers" in parts:
        figures["stragglers"] = _stragglers(trials("stragglers", 4, steps, seconds), figures["bars"])
        console.print(_table("4 workers, steps of at least 100 ms", figures["stragglers"]))
        for row in figures["stragglers"]:
            curve = ", ".join(f"{value:.3f} at {at:.1f} s" for at, value in row["curve"])
            console.print(f"accuracy over time, {row['run']}: {curve}", highlight=False)
    if "policies" in parts:
        figures["policies"] = _policies(trials("policies", 2, steps, seconds), figures["bars"])
        console.print(_table("2 workers at 100mbit, slow first layer, ms", figures["policies"]))
    for what, (measured, bar) in figures["bars"].items():
        console.print(
            f"{'met   ' if measured >= bar else 'MISSED'} {what}: {measured:.2f}x (bar {bar}x)", highlight=False
        )
    write_json(json_file, figures)
    return verdict(measured >= bar for measured, bar in figures["bars"].values())


Lines = list[tuple[str, dict[str, Any]]]


def _run(hosts: int, rate: str, runs: Sequence[Trial], what: str) -> Lines:
    """All runs in one lab, one after the other; what the processes said."""
    from thinwire.errors import LabError
    from thinwire.tools.lab import Lab

    said: Lines = []
    total = sum(run.steps or run.seconds for run in runs)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{what}: {hosts} hosts at {rate}", total=total)
        by_name = {run.name: run for run in runs}

        def read(host: int, line: str) -> None:
            kind, _, rest = line.partition(" ")
            if kind in ("APPLIED", "STEP"):
                said.append((kind, json.loads(rest)))
                run = by_name[said[-1][1]["run"]]
                if kind == "APPLIED":
                    progress.advance(task, 1 if run.steps else run.pause)

        with Lab(hosts, rate=rate) as lab:
            argv = [
                sys.executable,
                "-m",
                "thinwire.tools.bench.server_process",
                json.dumps([asdict(run) for run in runs]),
            ]
            result = lab.run(argv, output=read)
        if result.failure is not None:
            last = next((h.lines[-1] for h in result.hosts if h.lines and "Error" in h.lines[-1]), "")
            raise LabError(f"the benchmark failed: {result.failure} ({last})")
    return said


def _phases(hosts: int, rate: str, runs: list[Trial], bars: dict[str, Any]) -> list[dict[str, Any]]:
    said = _run(hosts, rate, runs, "phases")
    rows = [_phase_row(said, run) for run in runs]
    dense, percentile, thin, overlapped = rows
    both = [row["synchronisation"] + row["aggregation"] for row in rows]
    bars["percentile90 cuts aggregation"] = dense["aggregation"] / percentile["aggregation"], 3.5
    bars["thinwire cuts aggregation + synchronisation"] = both[0] / both[2], 25.0
    bars["thinwire's step is faster than dense"] = dense["step"] / overlapped["step"], 4.0
    bars["thinwire's step without overlap is faster than dense"] = dense["step"] / thin["step"], 4.0
    return rows


def _phase_row(said: Lines, run: Trial) -> dict[str, Any]:
    """Medians over the steps, the first two left out."""
    applied = {s["step"]: s["applied"] for kind, s in said if kind == "APPLIED" and s["run"] == run.name}
    work: dict[int, list[dict[str, Any]]] = {}
    for kind, s in said:
        if kind == "STEP" and s["run"] == run.name:
            work.setdefault(s["step"], []).append(s)
    found = []
    for step in sorted(applied)[2:]:
        workers = work.get(step - 1, [])
        if step - 1 not in applied or len(workers) < run.workers:
            continue
        ready, computed = max(w["ready"] for w in workers), max(w["computed"] for w in workers)
        before, after = applied[step - 1], applied[step]
        found.append((after - before, ready - before, computed - ready, after - computed))
    names = ("step", "synchronisation", "computation", "aggregation")
    return {"run": run.name, **{n: 1e3 * statistics.median(v[i] for v in found) for i, n in enumerate(names)}}


def _stragglers(runs: list[Trial], bars: dict[str, Any]) -> list[dict[str, Any]]:
    said = _run(5, "1gbit", runs, "stragglers")
    rows = []
    for run in runs:
        steps = [s for kind, s in said if kind == "STEP" and s["run"] == run.name]
        curve = [(s["applied"], s["accuracy"]) for kind, s in said if s["run"] == run.name and "accuracy" in s]
        began = min(s["ready"] for s in steps)
        span = max(s["computed"] for s in steps) - began
        rows.append(
            {
                "run": run.name,
                "steps_per_second": len(steps) / span,
                "staleness": max(s["staleness"] for s in steps),
                "accuracy": curve[-1][1] if curve else 0.0,
                "curve": [(round(at - began, 2), round(value, 4)) for at, value in curve],
            }
        )
    rate = [row["steps_per_second"] for row in rows]
    bars["ssp 3 makes more steps per second than bsp"] = rate[1] / rate[0], 1.3
    bars["async makes more steps per second than bsp"] = rate[3] / rate[2], 1.8
    return rows


def policy_steps(hosts: int, rate: str, runs: list[Trial]) -> dict[str, float]:
    """Milliseconds of a step of each run, the first two left out."""
    said = _run(hosts, rate, runs, "policies")
    found = {}
    for run in runs:
        at = sorted(s["applied"] for kind, s in said if kind == "APPLIED" and s["run"] == run.name)[2:]
        found[run.name] = 1e3 * (at[-1] - at[0]) / (len(at) - 1)
    return found


def _policies(runs: list[Trial], bars: dict[str, Any]) -> list[dict[str, Any]]:
    step = policy_steps(3, "100mbit", runs)
    bars["stalest or forward against fifo"] = step["fifo"] / min(step["stalest"], step["forward"]), 1.0
    return [{"run": name, "step": milliseconds} for name, milliseconds in step.items()]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=SIMPLE, collapse_padding=True, pad_edge=False)
    names = [name for name in rows[0] if name != "curve"]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "run" else "right")
    for row in rows:
        table.add_row(*(f"{row[n]:,.2f}" if isinstance(row[n], float) else str(row[n]) for n in names))
    return table
