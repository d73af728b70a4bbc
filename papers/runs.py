"""Runs: a simulated training to its target, with its curve; it goes on where it stopped when it is run again.

A finished run is one JSON file; an unfinished one is a checkpoint of the whole cluster, replaced in one move.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

import thinwire
from papers.cluster import Cluster, Diverged, Probe, Setting
from papers.study import StudyError
from thinwire.tools.observe import describe_machine, now
from thinwire.tools.recipes.recipe import Recipe, Split, Splits

LOOKS = 16  # samples of a split that stand for all of it


def fingerprint(splits: Splits) -> str:
    """The data in a few hexadecimal digits: lengths, and samples of both splits from the first to the last."""
    digest = hashlib.sha256()
    for split in (splits.train, splits.test):
        digest.update(f"{len(split)};".encode())
        for tensor in split.batch(_spread(split)) if len(split) else ():
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread(split: Split) -> list[int]:
    last = len(split) - 1
    return sorted({place * last // (LOOKS - 1) for place in range(LOOKS)})


def provenance() -> dict[str, str]:
    """What made a file, where and when."""
    version = f"thinwire {thinwire.__version__}, torch {torch.__version__}"
    return {"version": version, "machine": describe_machine(), "date": now()}


def origins(held: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The versions, machines and days of many files, each named once; files of before they were noted do not count."""
    made = [found["made"] for found in held if isinstance(found.get("made"), dict)]
    listed = {}
    for key in ("version", "machine", "date"):
        values = [str(each[key])[: 10 if key == "date" else None] for each in made if key in each]
        listed[key] = "; ".join(sorted(set(values)) if key == "date" else dict.fromkeys(values)) or "not noted"
    return listed


def save(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file whole or not at all, on the disk before it takes its name; StudyError if that cannot be."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter when the disk is full
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise StudyError(f"cannot write {path} ({why}): make room, or choose another folder by --work") from error


def save_json(value: Any, path: Path) -> None:
    """Plain data as a file."""
    text = json.dumps(value) + "\n"

    def write(out: IO[bytes]) -> None:
        out.write(text.encode())

    save(path, write)


def read_json(path: Path) -> dict[str, Any]:
    """What a file holds; nothing if it is missing, damaged or somebody else's, so that its work is done again."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StudyError(f"cannot read {path} ({error.strerror}): make it readable, or delete it") from error
    except ValueError:
        return {}
    return held if isinstance(held, dict) else {}


SAVE_SECONDS = 45.0  # between checkpoints: what an interruption costs, give or take a step and an evaluation
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

    def first_at(self, target: float) -> int | None:
        """The step of the first evaluation at which the test split's metric was at the target."""
        return next((step for step, value in zip(self.step, self.test, strict=True) if value >= target), None)


@dataclass
class Since:
    """What a run has gathered since its last evaluation, and sent in all."""

    losses: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    packets: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """One run to be: a recipe, its data, how it is trained and until when."""

    name: str
    recipe: Recipe
    splits: Splits
    setting: Setting
    goal: Goal

    @cached_property
    def _data(self) -> str:
        return fingerprint(self.splits)

    def described(self) -> str:
        """What must be the same for a file of an earlier run to count."""
        return f"{self.recipe.name} {len(self.splits.train)} {self.setting} {self.goal} data={self._data}"

    def finished(self, folder: Path) -> Curve | None:
        """The curve of an earlier run to its end; None if there is none, or only a damaged or another one."""
        held = read_json(folder / f"{self.name}.json")
        if held.get("described") != self.described():
            return None
        try:
            curve = Curve(**held["curve"])
        except (KeyError, TypeError):
            return None
        return curve if curve.step else None

    def run(self, folder: Path, watch: Watch | None = None, probe: "Probing | None" = None) -> Curve:
        """The curve: read if it is finished, else trained from the newest checkpoint on."""
        found = self.finished(folder)
        if found is not None:
            return found
        cluster = Cluster(self.recipe, self.splits.train, self.setting)
        try:
            curve = self._train(cluster, folder / f"{self.name}.pt", watch, probe)
        finally:
            cluster.close()
        kept = {"described": self.described(), "made": provenance(), "curve": asdict(curve)}
        save_json(kept, folder / f"{self.name}.json")
        (folder / f"{self.name}.pt").unlink(missing_ok=True)
        return curve

    def _train(self, cluster: Cluster, place: Path, watch: Watch | None, probe: "Probing | None") -> Curve:
        curve, since = self._resume(cluster, place)
        began, saved = time.process_time(), time.monotonic()
        before = curve.seconds
        while cluster.done < self.goal.max_steps and curve.reached is None:
            looks = probe is not None and cluster.done % probe.every == 0
            try:
                stepped = cluster.step(probe.note(curve, cluster) if looks and probe is not None else None)
            except Diverged:
                curve.diverged = cluster.done + 1
                if not curve.step:
                    self._record(cluster, curve, replace(since, losses=[WORST]))
                break
            since.losses.append(stepped.loss)
            since.megabytes += stepped.bytes / 1e6
            since.packets += math.ceil(stepped.bytes / 1448)
            curve.density += (stepped.density - curve.density) / cluster.done
            curve.seconds = before + time.process_time() - began
            if watch is not None:
                watch(curve, cluster.done)
            if cluster.done % self.goal.evaluate_every == 0 or cluster.done == self.goal.max_steps:
                self._record(cluster, curve, since)
                since.losses.clear()
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save(cluster, curve, since, place)
                saved = time.monotonic()
        return curve

    def _record(self, cluster: Cluster, curve: Curve, since: Since) -> None:
        """Evaluate, and add one entry to every list of the curve."""
        goal, recipe, model = self.goal, self.recipe, cluster.model
        curve.step.append(cluster.done)
        curve.loss.append(min(sum(since.losses) / len(since.losses), WORST))
        curve.megabytes.append(since.megabytes)
        curve.packets.append(since.packets)
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

    def _resume(self, cluster: Cluster, place: Path) -> tuple[Curve, Since]:
        """Go on where a checkpoint was taken; from the start if there is none, or only a damaged or another one."""
        new = Curve(self.name, cluster.order.steps_per_epoch)
        state = _read_checkpoint(place)
        if state.get("described") != self.described():
            return new, Since()
        try:
            curve = replace(new, **json.loads(state["curve"]))
            # Older checkpoints were taken at evaluations alone: nothing had been gathered since.
            since = json.loads(state["since"]) if "since" in state else _at_evaluation(curve)
            cluster.load_state_dict(state["cluster"])
            return curve, Since(**since)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StudyError(f"{place} is damaged ({error}): delete it, and its run starts anew") from error

    def _save(self, cluster: Cluster, curve: Curve, since: Since, place: Path) -> None:
        told = {"curve": json.dumps(asdict(curve)), "since": json.dumps(asdict(since))}
        state = {"described": self.described(), "cluster": cluster.state_dict(), **told}
        save(place, lambda out: torch.save(state, out))


def _at_evaluation(curve: Curve) -> dict[str, Any]:
    return {"megabytes": curve.megabytes[-1], "packets": curve.packets[-1]} if curve.step else {}


def _read_checkpoint(place: Path) -> dict[str, Any]:
    """A checkpoint's state; nothing if the file is missing or was damaged."""
    if not place.exists():
        return {}
    try:
        state = torch.load(place, weights_only=True)
    except OSError as error:
        raise StudyError(f"cannot read {place} ({error.strerror}): make it readable, or delete it") from error
    except Exception:  # torch raises many kinds for files that are not its own
        return {}
    return state if isinstance(state, dict) else {}


@dataclass(frozen=True)
class Probing:
    """A look at the workers' gradients every so many steps; what it finds goes into the curve's notes."""

    every: int
    note: Callable[[Curve, Cluster], Probe]


@torch.no_grad()
def objective(recipe: Recipe, model: torch.nn.Module, split: Split, samples: int) -> float:
    """The mean loss of the first samples of a split, or of all where they are fewer."""
    samples, total = min(samples, len(split)), 0.0
    for start in range(0, samples, 500):
        chosen = range(start, min(start + 500, samples))
        total += float(recipe.loss(model, split.batch(chosen))) * len(chosen)
    return total / samples
