"""What presets of updates cost in training: the committed runs of `thinwire bench fidelity`, against dense training."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.tools.race.methods import update_method
from thinwire.tune.forecast import EVERY
from thinwire.tune.presets import resolve_codec

# Beside this package in a wheel; in a checkout the results themselves.
_INSTALLED = Path(__file__).parents[1] / "fidelity"
_CHECKOUT = Path(__file__).parents[4] / "results" / "fidelity"
MODEL = "a GPT of 0.8 M parameters with AdamW"

Run = Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredCost:
    """What training with a preset cost against dense training of the same length, each at its best learning rate."""

    loss: float  # relative: 0.03 is a loss 3 % above that of dense training
    more_steps: float | None  # relative: the length over the steps that dense training took to that loss; None: longer
    steps: int
    workers: int
    seeds: int
    overlap: bool  # whether the exchange overlapped the next steps, as the presets with local steps do

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' if self.seeds != 1 else ''}"
        late = f", {self.more_steps:+.0%} steps to the same loss" if self.more_steps is not None else ""
        return f"loss {self.loss:+.1%}{late} ({self.steps:,} steps, {self.workers} workers, {seeds})"


def fidelity_folder() -> Path | None:
    """Return the folder of the committed runs, if this installation has it."""
    return next((folder for folder in (_CHECKOUT, _INSTALLED) if folder.is_dir()), None)


def measured_costs(folder: Path | None) -> dict[str, MeasuredCost]:
    """Return the costs of the presets that were measured; those that were not are left out."""
    if folder is None:
        return {}
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    runs = [run for run in runs if run["run"].get("recipe", "gpt") == "gpt"]
    found = {name: _cost_of(name, runs) for name in EVERY}
    return {name: cost for name, cost in found.items() if cost is not None}


def _cost_of(preset: str, runs: Sequence[Run]) -> MeasuredCost | None:
    """Return the cost in the longest runs of a preset and of dense training; with overlap if there are such runs."""
    for overlap in (True, False) if EVERY[preset] > 1 else (False,):
        wanted = repr(resolve_codec(preset)), EVERY[preset], overlap
        mine = [run for run in runs if _setting(run["run"]["method"]) == wanted]
        places = {(r["run"]["steps"], r["run"]["workers"]) for r in mine}
        for steps, workers in sorted(places, key=lambda place: (place[0], -place[1]), reverse=True):
            dense, these = (_at_best_rate(each, steps, workers) for each in (_named(runs, "dense"), mine))
            seeds = dense.keys() & these.keys()
            if seeds:
                return _cost(dense, these, sorted(seeds), steps, workers, overlap=overlap)
    return None


def _setting(method: str) -> tuple[str, int, bool] | None:
    found = update_method(method)
    if found is None or not isinstance(found[1].every, int):
        return None
    codec, rounds = found
    return repr(codec), int(rounds.every), rounds.overlap


def _named(runs: Iterable[Run], method: str) -> list[Run]:
    return [run for run in runs if run["run"]["method"] == method]


def _at_best_rate(runs: Sequence[Run], steps: int, workers: int) -> dict[int, Run]:
    """Return the runs of one length by seed, at the learning rate with the lowest mean loss."""
    here = [run for run in runs if (run["run"]["steps"], run["run"]["workers"]) == (steps, workers)]
    rates: dict[float, dict[int, Run]] = {}
    for run in here:
        rates.setdefault(run["run"]["lr"], {})[run["run"]["seed"]] = run
    return min(rates.values(), key=lambda found: statistics.mean(r["loss"] for r in found.values()), default={})


def _cost(
    dense: Mapping[int, Run], these: Mapping[int, Run], seeds: Sequence[int], steps: int, workers: int, *, overlap: bool
) -> MeasuredCost:
    loss, reference = (statistics.mean(each[seed]["loss"] for seed in seeds) for each in (these, dense))
    reached = [_steps_to(loss, dense[seed]["curve"]) for seed in seeds]
    known = [at for at in reached if at is not None]
    more = steps / statistics.mean(known) - 1.0 if len(known) == len(seeds) else None
    return MeasuredCost(loss / reference - 1.0, more, steps, workers, len(seeds), overlap)


def _steps_to(loss: float, curve: Sequence[Sequence[float]]) -> float | None:
    """Return the step at which a curve first reaches a loss, interpolated; None if it does not."""
    for (early, high), (late, low) in pairwise(curve):
        if low <= loss < high:
            return early + (late - early) * (high - loss) / (high - low)
    return None
