"""`thinwire bench fidelity`: the loss that methods reach on a small GPT with AdamW, against dense training.

All ranks are simulated exactly in one process (`thinwire.tools.simulate.ranks`). Every run is one JSON file; runs whose
file exists are not repeated, so that an interrupted benchmark continues where it stopped. Methods are compared at their
own best learning rate and at dense training's.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.errors import ThinwireError
from thinwire.files import replace_file
from thinwire.tools.options import verdict, write_json

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
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)
DEMO_RATES = (3e-4, 1e-3, 2e-3, 4e-3)  # DeMo steps by signs, which are longer than Adam's steps
WORKERS, MANY = 4, 16
EVALUATED = 1024  # contexts of the validation text
EVERY = 100  # steps between evaluations
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
        method = self.method.replace(":", "-")
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


def run(
    folder: Path, parts: Sequence[str], methods: Sequence[str], jobs: int, data: Path | None, json_file: Path | None
) -> int:
    """Do what is missing, print the tables, write the figures, and return 1 if a bar was missed.

    data: the folder of Multi30k, for the part "translate".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for _ in range(2):  # the search over rates may ask for one more
            results = Results(folder)
            missing = [r for r in dict.fromkeys(wanted(part, methods, results)) if r not in results.rows]
            _simulate_all(missing, folder, jobs, data)
    results = Results(folder)
    _show(results)
    rows = _bars(results)
    write_json(json_file, {"bars": rows, "runs": list(results.rows.values())})
    return verdict(row["met"] for row in rows)


def _simulate_all(missing: Sequence[FidelityRun], folder: Path, jobs: int, data: Path | None) -> None:
    """FidelityRun simulations in processes of their own, several at a time; prints a line for each."""
    began, console = time.monotonic(), Console(stderr=True)

    def one(numbered: tuple[int, FidelityRun]) -> None:
        number, job = numbered
        arguments = [str(folder), json.dumps(asdict(job)), str(data or "")]
        command = [sys.executable, "-m", "thinwire.tools.bench.fidelity", *arguments]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ThinwireError(f"the simulation {job.file} failed: {last}")
        minutes = (time.monotonic() - began) / 60
        left = minutes / (number + 1) * (len(missing) - number - 1)
        console.print(f"{number + 1} of {len(missing)}: {job.file}, {minutes:.0f} min, about {left:.0f} left")

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(one, enumerate(missing)))


def simulate(job: FidelityRun, folder: Path, data: Path | None = None) -> dict[str, Any]:
    """Train, and write the result to the folder."""
    import torch

    from thinwire.tools.recipes import get_recipe
    from thinwire.tools.recipes.recipe import DataOrder
    from thinwire.tools.simulate.ranks import training

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)  # of dropout
    recipe = get_recipe(job.recipe)
    splits = recipe.load(data if job.recipe != "gpt" else None)
    every, samples = (EVERY, EVALUATED) if job.recipe == "gpt" else (job.steps, None)
    workers = 1 if job.method == "alone" else job.workers
    order = DataOrder(len(splits.train), batch=recipe.defaults.batch, workers=job.workers, seed=job.seed)
    trained = training(job.method, recipe, seed=job.seed, workers=job.workers, lr=job.lr, steps=job.steps)
    began, curve = time.monotonic(), []
    for step in range(job.steps):
        trained.step([splits.train.batch(order.at(step, rank)) for rank in range(workers)])
        if (step + 1) % every == 0 or step + 1 == job.steps:
            curve.append([step + 1, recipe.evaluate(trained.model, splits.test, samples)])
            if not math.isfinite(curve[-1][1]):
                break
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
    return rows + _translated(results)


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
    simulate(FidelityRun(**json.loads(sys.argv[2])), Path(sys.argv[1]), Path(sys.argv[3]) if sys.argv[3] else None)
