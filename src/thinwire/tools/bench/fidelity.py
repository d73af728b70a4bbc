"""`thinwire bench fidelity`: the loss that methods reach on a small GPT with AdamW, against dense training.

All ranks are simulated exactly in one process (`thinwire.tools.simulate.ranks`). Every run is one JSON file; runs whose
file exists are not repeated, so that an interrupted benchmark continues where it stopped. Methods are compared at their
own best learning rate and at dense training's.

Methods of local steps have three seeds at 1,500 steps. At 4,000 steps only `local64` is run, with one seed, to save
time: what the bars of the other local steps show, they show for 1,500 steps.
"""

import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.errors import ThinwireError
from thinwire.files import replace_file
from thinwire.tools.bench import value_fidelity
from thinwire.tools.options import LINE_EVERY, verdict, write_json
from thinwire.tools.progress import duration, print_line

METHODS = (
    "dense",
    "alone",
    "update:update",
    "update:rotate",
    "gradient:topk1",
    "powersgd:1",
    "powersgd:4",
    "demo:0.01",
)
# Local steps: at the bytes of "update" with every step exchanged, at a sixteenth of uncompressed ones, and presets.
# Uncompressed steps have two outer optimizers: DiLoCo's Nesterov momentum is not the better one in short runs.
LOCAL_METHODS = (
    "local4:lowrank=0.6:2:256",
    "local16:lowrank=1:4",
    "local16+overlap:lowrank=1:4",
    "local16:lowrank=0.6:2:256",
    "diloco16",
    "local16:dense",
    "local64",
)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)
LOCAL_RATES = (2e-3, 4e-3, 8e-3)
DEMO_RATES = (3e-4, 1e-3, 2e-3, 4e-3)  # DeMo steps by signs, which are longer than Adam's steps
WORKERS, MANY = 4, 16
EVALUATED = 1024  # contexts of the validation text
EVERY = 100  # steps between evaluations
PROGRESS = "PROGRESS "  # begins a simulation's lines of progress
TRANSLATED = {"translate-transformer": (4, 0.7), "translate-layernorm": (2, 1.0)}  # epochs, and BLEU that may be lost
STEPS_PER_EPOCH = 226  # of Multi30k's 29,000 sentences with four batches of 32


@dataclass(frozen=True)
class FidelityRun:
    """One training: what determines its result."""

    method: str
    lr: float
    steps: int
    workers: int
    seed: int
    recipe: str = "gpt"

    @property
    def file(self) -> str:
        """The name of its file."""
        method = self.method.replace(":", "-").replace("=", "")
        method = method if self.recipe == "gpt" else f"{self.recipe}-{method}"
        return f"{method}-lr{self.lr:g}-{self.steps}x{self.workers}-seed{self.seed}.json"


@dataclass(frozen=True)
class FidelityBar:
    """A claim about `update:update`: its loss is at most `limit` times above dense training's."""

    what: str
    steps: int
    workers: int
    limit: float
    at_dense_rate: bool = False


BARS = (
    FidelityBar("1,500 steps, each at its best rate", 1500, WORKERS, 0.03),
    FidelityBar("1,500 steps, at dense training's best rate", 1500, WORKERS, 0.05, at_dense_rate=True),
    FidelityBar("4,000 steps", 4000, WORKERS, 0.02),
    FidelityBar("1,500 steps, 16 workers", 1500, MANY, 0.04),
)


@dataclass(frozen=True)
class LocalBar:
    """A claim about local steps: a method's loss is at most `limit` times above that of the best of other methods.

    bits: the most bits that it may send, relative to that method.
    """

    what: str
    method: str
    against: tuple[str, ...]
    limit: float
    bits: float
    steps: int = 1500


LOCAL_BARS = (
    LocalBar("every=4 at the bytes of every=1", "local4:lowrank=0.6:2:256", ("update:update",), 0.01, 1.0),
    LocalBar("every=16 at the bytes of every=1", "local16:lowrank=1:4", ("update:update",), 0.01, 1.0),
    LocalBar(
        "every=16 at 1/16 of the bytes of the best uncompressed",
        "local16:lowrank=0.6:2:256",
        ("diloco16", "local16:dense"),
        0.01,
        1 / 16,
    ),
    LocalBar("every=16, overlap on against off", "local16+overlap:lowrank=1:4", ("local16:lowrank=1:4",), 0.005, 1.0),
    LocalBar("1,000 times fewer bytes than dense, 4,000 steps", "local64", ("dense",), 0.03, 1 / 1000, 4000),
)


class Results:
    """The finished runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = {}
        for path in sorted(folder.glob("*.json")):
            row = json.loads(path.read_text())
            self.rows[FidelityRun(**row["run"])] = row
        self.gpt = {run: row for run, row in self.rows.items() if run.recipe == "gpt"}

    def losses(self, method: str, steps: int, workers: int, lr: float | None = None) -> list[float]:
        """Final losses of a method, by seed; at one learning rate, or at all."""
        found = [
            (run.seed, row["loss"])
            for run, row in self.gpt.items()
            if (run.method, run.steps, run.workers) == (method, steps, workers) and lr in (None, run.lr)
        ]
        return [loss for _, loss in sorted(found)]

    def best_rate(self, method: str) -> float | None:
        """The learning rate with the lowest loss in the search over rates."""
        found = [(row["loss"], run.lr) for run, row in self.gpt.items() if run.method == method and run.steps == 800]
        return min(found)[1] if found else None

    def at_edge(self, method: str) -> float | None:
        """A learning rate beyond the best one, if no rate on that side of it was tried."""
        rates = sorted({run.lr for run in self.gpt if run.method == method and run.steps == 800})
        best = self.best_rate(method)
        if best is None or len(rates) < 2 or best not in (rates[0], rates[-1]):
            return None
        return best * 2 if best == rates[-1] else best / 2


def wanted(part: str, methods: Sequence[str], results: Results) -> Iterator[FidelityRun]:
    """The runs of one part; those of later parts depend on the best rates that the first has found."""
    if part == "values":
        for name, task in value_fidelity.TASKS.items():
            for seed, method in itertools.product(value_fidelity.SEEDS, task.methods()):
                yield FidelityRun(method, task.lr, task.steps, value_fidelity.WORKERS, seed, name)
        return
    if part == "local":
        chosen = [method for method in methods if method.startswith(("local", "diloco"))]
        yield from _wanted_local(chosen or LOCAL_METHODS, results)
        return
    for method in methods:
        if part == "rates":
            for lr in DEMO_RATES if method.startswith("demo") else RATES:
                yield FidelityRun(method, lr, 800, WORKERS, 0)
            if (more := results.at_edge(method)) is not None:
                yield FidelityRun(method, more, 800, WORKERS, 0)
            continue
        if part == "translate":
            for name, (epochs, _) in TRANSLATED.items() if method in ("dense", "update:update") else ():
                rate = 1e-3 if name == "translate-transformer" else 2e-3
                for seed in SEEDS[:2]:
                    yield FidelityRun(method, rate, epochs * STEPS_PER_EPOCH, WORKERS, seed, name)
            continue
        best, dense = results.best_rate(method), results.best_rate("dense")
        steps, workers = {"seeds": (1500, WORKERS), "long": (4000, WORKERS), "many": (1500, MANY)}[part]
        rates = [best, dense] if part == "seeds" and method.startswith("update") else [best]
        for rate in dict.fromkeys(rate for rate in rates if rate is not None):
            for seed in SEEDS if part == "seeds" else SEEDS[:1]:
                yield FidelityRun(method, rate, steps, workers, seed)


def _wanted_local(methods: Sequence[str], results: Results) -> Iterator[FidelityRun]:
    """For each method a search over rates, then three seeds at the best one, and a long run where a bar asks for it."""
    for method in methods:
        rates = [FidelityRun(method, lr, 800, WORKERS, 0) for lr in LOCAL_RATES]
        edge = results.at_edge(method) if all(rate in results.rows for rate in rates) else None
        rates += [FidelityRun(method, edge, 800, WORKERS, 0)] if edge is not None else []
        yield from rates
        best = results.best_rate(method)
        if best is not None and all(rate in results.rows for rate in rates):
            lengths = {1500: SEEDS} | {
                bar.steps: SEEDS[:1] for bar in LOCAL_BARS if bar.method == method and bar.steps > 1500
            }
            for steps, seeds in lengths.items():
                yield from (FidelityRun(method, best, steps, WORKERS, seed) for seed in seeds)


def run(
    folder: Path, parts: Sequence[str], methods: Sequence[str], jobs: int, data: Path | None, json_file: Path | None
) -> int:
    """Do what is missing, print the tables, write the figures, and return 1 if a bar was missed.

    data: the folder of Multi30k for the part "translate"; for "values" also of MNIST and CIFAR-10.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for _ in range(4):  # the search over rates may ask for more, and later runs depend on its result
            results = Results(folder)
            missing = [r for r in dict.fromkeys(wanted(part, methods, results)) if r not in results.rows]
            _simulate_all(missing, folder, jobs, data)
    results = Results(folder)
    _show(results)
    rows = _bars(results)
    write_json(json_file, {"bars": rows, "runs": list(results.rows.values())})
    return verdict(row["met"] for row in rows)


def _simulate_all(missing: Sequence[FidelityRun], folder: Path, jobs: int, data: Path | None) -> None:
    """Run simulations in processes of their own, several at a time; prints how far they are and a line for each."""
    if not missing:
        return
    began, console, finished = time.monotonic(), Console(stderr=True), itertools.count(1)

    def one(job: FidelityRun) -> None:
        _simulate_one(job, folder, data, tell)
        done, seconds = next(finished), time.monotonic() - began
        left = duration(seconds / done * (len(missing) - done))
        print_line(console, f"{done} of {len(missing)}: {job.file}, {duration(seconds)} so far, about {left} left")

    with console.status(f"{len(missing)} simulations") as status, ThreadPoolExecutor(max(1, jobs)) as pool:

        def tell(line: str) -> None:
            if console.is_terminal:
                status.update(line)
            else:
                print_line(console, line)

        tell(f"{len(missing)} simulations, {max(1, jobs)} at a time ...")
        list(pool.map(one, missing))


def _simulate_one(job: FidelityRun, folder: Path, data: Path | None, tell: Callable[[str], None]) -> None:
    """Run one simulation in a process and pass on its lines of progress."""
    arguments = [str(folder), json.dumps(asdict(job)), str(data or "")]
    command = [sys.executable, "-m", "thinwire.tools.bench.fidelity", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    last = "no message"
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        for line in process.stdout or ():
            if line.startswith(PROGRESS):
                tell(f"{job.file.removesuffix('.json')}: {line.removeprefix(PROGRESS).strip()}")
            elif line.strip():
                last = line.strip()
    if process.returncode:
        raise ThinwireError(f"the simulation {job.file} failed: {last}")


def _print_progress(job: FidelityRun) -> Callable[[int, list[Any]], None]:
    """Return a function that prints a line of progress every few seconds: step, last loss, time left."""
    said, begun = time.monotonic(), 0.0

    def report(step: int, curve: list[Any]) -> None:
        nonlocal said, begun
        now = time.monotonic()
        if step == 1:  # it only sets the clock
            begun = now
        if now - said >= LINE_EVERY:
            said = now
            loss = f", {curve[-1][1]:.4f} at step {curve[-1][0]}" if curve else ""
            left = f", about {duration((now - begun) / (step - 1) * (job.steps - step))} left" if step > 1 else ""
            print(f"{PROGRESS}step {step} of {job.steps}{loss}{left}", flush=True)

    return report


def simulate(
    job: FidelityRun,
    folder: Path,
    data: Path | None = None,
    report: Callable[[int, list[Any]], None] = lambda step, curve: None,
) -> dict[str, Any]:
    """Train, and write the result to the folder. `report` gets every step and the metric's curve so far."""
    import torch

    from thinwire.tools.recipes import get_recipe
    from thinwire.tools.recipes.recipe import DataOrder
    from thinwire.tools.simulate.ranks import training

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)  # of dropout
    recipe = get_recipe(job.recipe)
    splits = recipe.load(data if job.recipe != "gpt" else None)
    every, samples = (EVERY, EVALUATED) if job.recipe == "gpt" else (job.steps, None)
    ends = set(range(every, job.steps, every)) | {job.steps}
    if (task := value_fidelity.task_of(job.recipe, job.method, job.steps)) is not None:
        ends, samples = task.evaluated_steps(), task.samples
    workers = 1 if job.method == "alone" else job.workers
    order = DataOrder(len(splits.train), batch=recipe.defaults.batch, workers=job.workers, seed=job.seed)
    trained = training(job.method, recipe, seed=job.seed, workers=job.workers, lr=job.lr, steps=job.steps)
    began, curve = time.monotonic(), []
    for step in range(job.steps):
        trained.step([splits.train.batch(order.at(step, rank)) for rank in range(workers)])
        if step + 1 in ends:
            curve.append([step + 1, recipe.evaluate(trained.model, splits.test, samples)])
            if not math.isfinite(curve[-1][1]):
                break
        report(step + 1, curve)
    row = {
        "run": asdict(job),
        recipe.metric: curve[-1][1] if math.isfinite(curve[-1][1]) else 99.0,
        "curve": [[step, round(value, 5)] for step, value in curve if math.isfinite(value)],
        "bits": trained.bits,
        "seconds": round(time.monotonic() - began),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    replace_file(folder / job.file, lambda file: file.write(json.dumps(row).encode() + b"\n"))
    return row


def _show(results: Results) -> None:
    for steps, workers in sorted({(r.steps, r.workers) for r in results.gpt}):
        table = Table(
            title=f"GPT, AdamW, {steps:,} steps, {workers} workers; bits sent per element and step",
            box=SIMPLE,
            pad_edge=False,
        )
        for column in ("method", "rate", "loss", "seeds", "to dense", "bits"):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        dense = _dense(results, steps, workers)
        here = [r for r in results.gpt if (r.steps, r.workers) == (steps, workers)]
        for method, lr in sorted({(r.method, r.lr) for r in here}):
            losses = results.losses(method, steps, workers, lr)
            bits = next(results.rows[r]["bits"] for r in here if (r.method, r.lr) == (method, lr))
            against = f"{statistics.mean(losses) / dense - 1:+.1%}" if dense else ""
            table.add_row(method, f"{lr:g}", f"{statistics.mean(losses):.4f}", str(len(losses)), against, f"{bits:.2f}")
        Console().print(table)


def _dense(results: Results, steps: int, workers: int) -> float | None:
    """The loss of dense training at its best rate; its mean over seeds."""
    best = results.best_rate("dense")
    losses = results.losses("dense", steps, workers, best) if best is not None else []
    return statistics.mean(losses) if losses else None


def _bars(results: Results) -> list[dict[str, Any]]:
    """The bars whose runs are finished, with what was measured."""
    rows: list[dict[str, Any]] = []
    for bar in BARS:
        rate = results.best_rate("dense" if bar.at_dense_rate else "update:update")
        losses = results.losses("update:update", bar.steps, bar.workers, rate) if rate is not None else []
        dense = _dense(results, bar.steps, bar.workers)
        if not losses or not dense:
            Console().print(f"open   {bar.what}: its runs are missing", highlight=False)
            continue
        above = statistics.mean(losses) / dense - 1.0
        met = above <= bar.limit
        word = "met   " if met else "MISSED"
        Console().print(f"{word} {bar.what}: {above:+.1%} (bar {bar.limit:+.0%})", highlight=False)
        rows.append({"what": bar.what, "above_dense": above, "limit": bar.limit, "seeds": len(losses), "met": met})
    return rows + _local(results) + _translated(results) + value_fidelity.judge(results.rows.values())


def _local(results: Results) -> list[dict[str, Any]]:
    """The bars of local steps whose runs are finished: mean losses over the seeds that all methods have, and bits."""
    rows: list[dict[str, Any]] = []
    for bar in LOCAL_BARS:
        methods = (bar.method, *bar.against)
        found = {method: _at_best_rate(results, method, bar.steps) for method in methods}
        seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
        if not seeds:
            Console().print(f"open   {bar.what}: its runs are missing", highlight=False)
            continue
        losses = {method: statistics.mean(runs[seed]["loss"] for seed in seeds) for method, runs in found.items()}
        against = min(bar.against, key=losses.__getitem__)
        above = losses[bar.method] / losses[against] - 1.0
        bits = max(found[bar.method][seed]["bits"] / found[against][seed]["bits"] for seed in seeds)
        met = above <= bar.limit and bits <= bar.bits
        word = "met   " if met else "MISSED"
        said = f"{above:+.1%} (bar {bar.limit:+.1%}) against {against}"
        sent = f"with {bits:.2%} of its bytes (bar {bar.bits:.2%})"
        Console().print(f"{word} {bar.what}: {said}, {sent}", highlight=False)
        limits = {"limit": bar.limit, "bits_limit": bar.bits}
        row = {"what": bar.what, "against": against, "above": above, "bits": bits, **limits}
        rows.append({**row, "seeds": len(seeds), "met": met})
    return rows


def _at_best_rate(results: Results, method: str, steps: int) -> dict[int, dict[str, Any]]:
    """The runs of a method at its best learning rate, by seed."""
    wanted = (method, results.best_rate(method), steps, WORKERS)
    return {r.seed: row for r, row in results.gpt.items() if (r.method, r.lr, r.steps, r.workers) == wanted}


def _translated(results: Results) -> list[dict[str, Any]]:
    """The bars of translation: the mean BLEU over seeds against dense training."""
    rows: list[dict[str, Any]] = []
    for recipe, (epochs, most) in TRANSLATED.items():
        found = {(r.method, r.seed): row["bleu"] for r, row in results.rows.items() if r.recipe == recipe}
        seeds = [seed for method, seed in found if method == "dense" and ("update:update", seed) in found]
        if not seeds:
            continue
        lost = statistics.mean(found["dense", seed] - found["update:update", seed] for seed in seeds)
        what, met = f"{recipe}, {epochs} epochs: BLEU lost", lost <= most
        Console().print(f"{'met   ' if met else 'MISSED'} {what}: {lost:.2f} (bar {most})", highlight=False)
        rows.append({"what": what, "bleu_lost": lost, "limit": most, "seeds": len(seeds), "met": met})
    return rows


if __name__ == "__main__":
    started = FidelityRun(**json.loads(sys.argv[2]))
    simulate(started, Path(sys.argv[1]), Path(sys.argv[3]) if sys.argv[3] else None, _print_progress(started))
