"""The part `values` of `thinwire bench fidelity`: training with 8-bit values against values in unary code.

Both methods send the largest 1 % with error feedback, on the same batches from the same initial parameters. Test
metrics of short runs fluctuate from step to step, so that a run counts by the mean of several evaluations at its end.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

BASE, NEW = "8bit", "topk1"  # presets
SEEDS = (0, 1, 2)
WORKERS = 4


@dataclass(frozen=True)
class ValueTask:
    """A recipe's training for the comparison, and by how much its metric may become worse."""

    lr: float
    steps: int
    metric: str
    limit: float  # points of accuracy, BLEU, or a share of the loss
    domain: str = "gradient"  # what is compressed: gradients, or the optimizer's updates
    evaluations: int = 10  # in the last fifth of the run
    samples: int | None = 2000  # of the test split; None: all of it

    def methods(self) -> tuple[str, str]:
        """The two methods to compare."""
        return f"{self.domain}:{BASE}", f"{self.domain}:{NEW}"

    def evaluated_steps(self) -> set[int]:
        """The steps after which the metric is computed."""
        span = self.steps // 5
        return {self.steps - span * i // self.evaluations for i in range(self.evaluations)}

    def worse(self, base: float, new: float) -> float:
        """How much worse the new values are, in the unit of the limit."""
        if self.metric == "loss":
            return new / base - 1.0
        return (base - new) * (100.0 if self.metric == "accuracy" else 1.0)


# All runs together take about an hour on one core.
TASKS = {
    "digits": ValueTask(0.02, 400, "accuracy", 0.3, samples=None),
    "mnist": ValueTask(0.05, 250, "accuracy", 0.3, samples=5000),
    "cifar10": ValueTask(0.05, 1200, "accuracy", 0.3),
    "translate": ValueTask(2e-3, 452, "bleu", 0.3, evaluations=4, samples=None),
    "gpt": ValueTask(4e-3, 350, "loss", 0.01, domain="update", evaluations=4, samples=1024),
}


def task_of(recipe: str, method: str, steps: int) -> ValueTask | None:
    """Return the task that a run belongs to, if it is a run of this part."""
    task = TASKS.get(recipe)
    return task if task is not None and steps == task.steps and method in task.methods() else None


def judge(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Print the table of both methods and return the bars whose runs are finished.

    A row is what a finished run has written: its `run` and its `curve` of (step, metric).
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    bits: dict[tuple[str, str], float] = {}
    for row in rows:
        run = {"recipe": "gpt", **row["run"]}  # the first runs do not name their recipe
        if task_of(run["recipe"], run["method"], run["steps"]) is not None:
            key = run["recipe"], run["method"]
            found.setdefault(key, {})[run["seed"]] = statistics.mean(value for _, value in row["curve"])
            bits[key] = row["bits"]
    table = Table(title=f"{BASE} against {NEW}: means over seeds, bits per element", box=SIMPLE, pad_edge=False)
    for column in ("recipe", "metric", "seeds", BASE, NEW, "worse by", "at most", "bits", "bits now"):
        table.add_column(column, justify="left" if column in ("recipe", "metric") else "right", no_wrap=True)
    bars = []
    for recipe, task in TASKS.items():
        base, new = (found.get((recipe, method), {}) for method in task.methods())
        seeds = sorted(base.keys() & new.keys())
        if not seeds:
            continue
        means = [statistics.mean(runs[seed] for seed in seeds) for runs in (base, new)]
        worse = task.worse(*means)
        each = [bits[recipe, method] for method in task.methods()]
        table.add_row(
            *(recipe, task.metric, str(len(seeds)), f"{means[0]:.4f}", f"{means[1]:.4f}", f"{worse:+.4f}"),
            *(f"{task.limit:g}", f"{each[0]:.3f}", f"{each[1]:.3f}"),
        )
        what = f"{recipe}: {task.metric} of {NEW} against {BASE}"
        bars.append(
            {"what": what, "worse": worse, "limit": task.limit, "seeds": len(seeds), "met": worse <= task.limit}
        )
    if bars:
        Console().print(table)
    for bar in bars:
        word = "met   " if bar["met"] else "MISSED"
        Console().print(f"{word} {bar['what']}: worse by {bar['worse']:+.4f} (bar {bar['limit']:g})", highlight=False)
    return bars
