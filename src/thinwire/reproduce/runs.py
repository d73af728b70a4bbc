"""Runs: a simulated training to its target, with its curve; it goes on where it stopped when it is run again.

A finished run is one JSON file; an unfinished one is a checkpoint of the whole cluster, replaced in one move.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.recipes.recipe import Recipe, Split, Splits
from thinwire.reproduce.cluster import Cluster, Diverged, Probe, Setting

SAVE_SECONDS = 45.0  # between checkpoints: what an interruption costs at the most
WORST = 1e9  # stands for losses that are larger or no number: a curve is plain data
Watch = Callable[["Curve", int], None]


@dataclass(frozen=True)
class Goal:
    """When a run ends and what is measured on the way."""

    max_steps: int
    evaluate_every: int
    train_samples: int = 2000  # the first so many of the training split; 0: none
    test_samples: int | None = 2000  # of the test split; None: all, 0: none
    objective_samples: int = 0  # of the training split, for the mean loss
    target: float | None = None  # of the metric on `split`, which ends the run
    split: str = "train"


@dataclass
class Curve:
    """What a run did; lists have one entry per evaluation."""

    name: str
    steps_per_epoch: int
    step: list[int] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # the workers' mean since the evaluation before
    megabytes: list[float] = field(default_factory=list)  # that one worker has sent so far
    packets: list[float] = field(default_factory=list)  # of 1448 bytes each, likewise
    density: float = 0.0  # mean over all steps
    reached: int | None = None  # the step that met the target
    diverged: int | None = None  # the step whose loss was not finite, which ended the run
    seconds: float = 0.0  # of processor time that the simulation took
    notes: dict[str, Any] = field(default_factory=dict)  # what a probe found

    @property
    def epoch(self) -> list[float]:
        return [step / self.steps_per_epoch for step in self.step]

    @property
    def best_test(self) -> float:
        return max(self.test)


def save_json(value: Any, path: Path) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(partial, path)


@dataclass(frozen=True)
class Simulation:
    """One run to be: a recipe, its data, how it is trained and until when."""

    name: str
    recipe: Recipe
    splits: Splits
    setting: Setting
    goal: Goal

    def described(self) -> str:
        """What must be the same for a file of an earlier run to count."""
        return f"{self.recipe.name} {len(self.splits.train)} {self.setting} {self.goal}"

    def run(self, folder: Path, watch: Watch | None = None, probe: "Probing | None" = None) -> Curve:
        """The curve: read if it is finished, else trained from the newest checkpoint on."""
        finished = folder / f"{self.name}.json"
        if finished.exists():
            held = json.loads(finished.read_text(encoding="utf-8"))
            if held["described"] == self.described():
                return Curve(**held["curve"])
        cluster = Cluster(self.recipe, self.splits.train, self.setting)
        try:
            curve = self._train(cluster, folder / f"{self.name}.pt", watch, probe)
        finally:
            cluster.close()
        save_json({"described": self.described(), "curve": asdict(curve)}, finished)
        (folder / f"{self.name}.pt").unlink(missing_ok=True)
        return curve

    def _train(self, cluster: Cluster, place: Path, watch: Watch | None, probe: "Probing | None") -> Curve:
        curve = self._resume(cluster, place)
        losses: list[float] = []
        began, saved = time.process_time(), time.monotonic()
        before = curve.seconds
        sent, packets = (values[-1] if values else 0.0 for values in (curve.megabytes, curve.packets))
        while cluster.done < self.goal.max_steps and curve.reached is None:
            looks = probe is not None and cluster.done % probe.every == 0
            try:
                stepped = cluster.step(probe.note(curve, cluster) if looks and probe is not None else None)
            except Diverged:
                curve.diverged = cluster.done + 1
                if not curve.step:
                    self._record(cluster, curve, [WORST], sent, packets)
                break
            losses.append(stepped.loss)
            sent += stepped.bytes / 1e6
            packets += math.ceil(stepped.bytes / 1448)
            curve.density += (stepped.density - curve.density) / cluster.done
            if watch is not None:
                watch(curve, cluster.done)
            if cluster.done % self.goal.evaluate_every == 0 or cluster.done == self.goal.max_steps:
                curve.seconds = before + time.process_time() - began
                self._record(cluster, curve, losses, sent, packets)
                losses.clear()
                if time.monotonic() - saved > SAVE_SECONDS:
                    self._save(cluster, curve, place)
                    saved = time.monotonic()
        return curve

    def _record(self, cluster: Cluster, curve: Curve, losses: list[float], sent: float, packets: float) -> None:
        """Evaluate, and add one entry to every list of the curve."""
        goal, recipe, model = self.goal, self.recipe, cluster.model
        curve.step.append(cluster.done)
        curve.loss.append(min(sum(losses) / len(losses), WORST))
        curve.megabytes.append(sent)
        curve.packets.append(packets)
        found = {}
        for split, data, samples in (
            ("train", self.splits.train, goal.train_samples),
            ("test", self.splits.test, goal.test_samples),
        ):
            if samples != 0:
                found[split] = recipe.evaluate(model, data, samples)
                getattr(curve, split).append(found[split])
        if goal.objective_samples:
            value = objective(recipe, model, self.splits.train, goal.objective_samples)
            curve.objective.append(value if value < WORST else WORST)  # a diverging run's may be anything
        if goal.target is not None and found[goal.split] >= goal.target:
            curve.reached = cluster.done

    def _resume(self, cluster: Cluster, place: Path) -> Curve:
        new = Curve(self.name, cluster.order.steps_per_epoch)
        if not place.exists():
            return new
        state = torch.load(place, weights_only=True)
        if state["described"] != self.described():
            return new
        cluster.load_state_dict(state["cluster"])
        return replace(new, **json.loads(state["curve"]))

    def _save(self, cluster: Cluster, curve: Curve, place: Path) -> None:
        partial = place.with_suffix(".partial")
        told = json.dumps(asdict(curve))
        torch.save({"described": self.described(), "cluster": cluster.state_dict(), "curve": told}, partial)
        os.replace(partial, place)


@dataclass(frozen=True)
class Probing:
    """A look at the workers' gradients every so many steps; what it finds goes into the curve's notes."""

    every: int
    note: Callable[[Curve, Cluster], Probe]


@torch.no_grad()
def objective(recipe: Recipe, model: torch.nn.Module, split: Split, samples: int) -> float:
    """The mean loss of the first samples of a split."""
    total = 0.0
    for start in range(0, samples, 500):
        chosen = range(start, min(start + 500, samples))
        total += float(recipe.loss(model, split.batch(chosen))) * len(chosen)
    return total / samples
