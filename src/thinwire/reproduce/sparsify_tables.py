"""What the study of SparsifyGradients tells in tables: times to the target, every seed, phases, what may be dropped."""

from typing import Any

from thinwire.reproduce.runs import Curve
from thinwire.reproduce.sparsify_seeds import LAST, Seeds, several
from thinwire.reproduce.sparsify_showing import DROPPED
from thinwire.reproduce.study import Table, number


def time_table(seeds: dict[str, Seeds], times: dict[str, dict[str, float | None]]) -> Table:
    rows = []
    for name, own in seeds.items():
        t = times[name]
        rows.append(
            {
                "Method": name,
                "Seeds": str(len(own)),
                "Epochs": number(own.epochs),
                "Steps": number(own.steps),
                "Step": number(t["paper"], "s"),
                "To target": number(t["paper_seconds"], "s"),
                "Step, own cores": number(t["own"], "s"),
                "To target, own cores": number(t["own_seconds"], "s"),
                "Step, served": number(t["served"], "s"),
                "To target, served": number(t["served_seconds"], "s"),
                "Step, all-reduce": number(t["ring"], "s"),
                "To target, all-reduce": number(t["ring_seconds"], "s"),
                "Sent by a worker": number(own.megabytes, "MB"),
                "Test accuracy": f"{own.test():.2f} %",
            }
        )
    means = " Epochs, steps, megabytes and test accuracy: means over the seeds." if several(seeds) else ""
    return Table("Steps to the target x time of a step", rows, _TIMED + means)


_TIMED = (
    "Steps: simulated exactly. Times: measured in the lab. First a master that broadcasts the model, as in the paper "
    "(thinwire: its own server), on this machine's cores, which all hosts share; own cores: the same with the "
    "computation of the slowest host alone; served: thinwire's server for all; all-reduce: no master."
)


def seed_tables(seeds: dict[str, Seeds]) -> list[Table]:
    """What the means are made of; nothing where no method has several seeds."""
    if not several(seeds):
        return []
    rows = []
    for name, own in seeds.items():
        for seed, curve in own.curves.items():
            alone = Seeds({seed: curve})
            rows.append(
                {
                    "Method": name,
                    "Seed": str(seed),
                    "Epochs": number(alone.epochs),
                    "Test accuracy": alone.tests_told(),
                    f"Mean of the last {LAST}": alone.tests_told(LAST),
                    "Best test accuracy": f"{100 * curve.best_test:.2f} %",
                }
            )
    return [Table("Every seed", rows, f"Test accuracy: at the end, over the last {LAST} evaluations, and at its best.")]


def phase_table(title: str, phases: Any) -> Table:
    rows = [
        {"Method": name, **{words: number(row[key], "ms") for key, words in _PHASES.items() if key in row}}
        for name, row in phases.items()
    ]
    return Table(title, rows, "13 workers' gradients are computed on this machine's cores.")


_PHASES = {
    "synchronise": "Synchronisation",
    "compute": "Computation",
    "alone": "Computation, one host alone",
    "aggregate": "Aggregation",
    "ms": "Step",
}


def sweep_table(sweep: dict[str, dict[float, Curve]]) -> Table:
    rows = []
    for dropped in (0.0, *DROPPED):
        row = {"Dropped": f"{dropped:g} %"}
        for words, found in sweep.items():
            curve = found.get(dropped)
            row[f"Loss, {words}"] = "–" if curve is None else "diverged" if curve.diverged else number(curve.loss[-1])
            row[f"Train accuracy, {words}"] = f"{100 * curve.train[-1]:.1f} %" if curve else "–"
        rows.append(row)
    steps = max((c.step[-1] for found in sweep.values() for c in found.values()), default=0)
    return Table("How much may be dropped", rows, f"After {steps} steps; 32-bit values.")
