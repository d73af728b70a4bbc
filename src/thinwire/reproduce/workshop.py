"""Workshop: where a study is made: its scale, data and folder, its parts that are done, and its progress.

A part is a piece of work whose outcome is kept in a file: a study that is run again does only what is missing.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.lab.check import check, ready
from thinwire.recipes.recipe import Batch, Recipe, Split, Splits
from thinwire.reproduce.cluster import Setting
from thinwire.reproduce.runs import Curve, Goal, Probing, Simulation, save_json
from thinwire.reproduce.study import StudyError

SCALES = ("small", "full")


@dataclass(frozen=True)
class First:
    """The first samples of a split, for a smaller scale."""

    whole: Split
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Any) -> Batch:
        return self.whole.batch(indices)


@dataclass
class Workshop:
    """What a study may use. With `lab` false nothing is measured on emulated hosts, and the study says so."""

    scale: str
    data: Path | None
    folder: Path  # of the parts
    lab: bool = True
    only: tuple[str, ...] = ()  # runs to make; empty: all
    console: Console = field(default_factory=lambda: Console(stderr=True))
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def full(self) -> bool:
        return self.scale == "full"

    def say(self, words: str) -> None:
        """One line on stderr."""
        self.console.print(words, highlight=False, markup=False)

    def load(self, recipe: Recipe, *, first: int | None = None) -> Splits:
        """A recipe's data, or the first samples of its training split."""
        splits = recipe.load(self.data)
        if first is None or first >= len(splits.train):
            return splits
        return Splits(First(splits.train, first), splits.test)

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """The outcome of a piece of work: from its file, or made now and kept. It must be plain data."""
        path = self.folder / f"part-{name}.json"
        if not path.exists():
            self.say(f"{name} ...")
            began = time.monotonic()
            outcome = make()
            save_json({"seconds": time.monotonic() - began, "outcome": outcome}, path)
        return json.loads(path.read_text(encoding="utf-8"))["outcome"]

    def took(self) -> str:
        """How long all parts and runs took together, those of earlier calls included."""
        held = [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("*.json")]
        simulated = sum(found["curve"]["seconds"] for found in held if "curve" in found) / 60
        others = sum(found["seconds"] for found in held if "curve" not in found) / 60
        return f"{simulated:.0f} minutes of one core for simulated runs, {others:.0f} minutes for all else"

    def lab_part(self, name: str, make: Callable[[], Any]) -> Any | None:
        """A part that needs emulated hosts; None, and noted, where they are not wanted."""
        if not self.lab and not (self.folder / f"part-{name}.json").exists():
            self.skipped.append(f"{name}: needs the lab, which was left out")
            return None
        return self.part(name, lambda: _with_lab(make))

    def train(
        self,
        name: str,
        recipe: Recipe,
        splits: Splits,
        setting: Setting,
        goal: Goal,
        *,
        probe: Probing | None = None,
    ) -> Curve | None:
        """A simulated run, shown while it goes on; None, and noted, if it is not among those wanted."""
        simulation = Simulation(name, recipe, splits, setting, goal)
        if self.only and name not in self.only and not (self.folder / f"{name}.json").exists():
            self.skipped.append(f"{name}: this run was left out")
            return None
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            TextColumn("about"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(name, total=goal.max_steps, news="")

            def watch(curve: Curve, done: int) -> None:
                progress.update(task, completed=done, news=_news(curve, recipe.metric))

            curve = simulation.run(self.folder, watch, probe)
            progress.update(task, completed=curve.step[-1], total=curve.step[-1], news=_news(curve, recipe.metric))
        return curve


def _with_lab(make: Callable[[], Any]) -> Any:
    """Make a part on emulated hosts, or say in one sentence why this machine has none."""
    if not ready(check()):
        raise StudyError(
            "this machine cannot emulate hosts (thinwire lab --check says why): leave them out by --no-lab"
        )
    return make()


def _news(curve: Curve, metric: str) -> str:
    parts = [f"{name} {values[-1]:.4f}" for name, values in (("train", curve.train), ("test", curve.test)) if values]
    if curve.objective:
        parts.append(f"objective {curve.objective[-1]:.4g}")
    return " ".join([metric, *parts] if curve.train or curve.test else parts)
