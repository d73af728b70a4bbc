"""Workshop: where a study is made: its scale, data and folder, its parts that are done, and its progress.

A part is a piece of work whose outcome is kept in a file: a study that is run again does only what is missing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from papers.cluster import Setting
from papers.runs import Curve, Goal, Probing, Simulation, fingerprint, origins, provenance, read_json, save_json
from papers.study import Study, StudyError
from thinwire.tools.lab.check import check, ready
from thinwire.tools.recipes.recipe import Batch, Recipe, Split, Splits

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
    only: tuple[str, ...] = ()  # runs and parts to make; empty: all
    console: Console = field(default_factory=lambda: Console(stderr=True))
    skipped: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # every run and part that the study wanted
    used: list[Path] = field(default_factory=list)  # files of those that it got

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

    def part(
        self, name: str, make: Callable[[], Any], *, setup: str, data: Splits | None = None, needed: bool = False
    ) -> Any | None:
        """The outcome of a piece of work: from its file, or made now and kept. It must be plain data.

        setup and data say what it is the outcome of: a file of another is made anew. None, and noted, if it is not
        among those wanted; what other work needs is always made.
        """
        described = _described(setup, data)
        held = self._held(name, described)
        if held is None and not (needed or self._wanted(name)):
            self.skipped.append(f"{name}: this part was left out")
            return None
        path = self.folder / f"part-{name}.json"
        if held is None:
            self.say(f"{name} ...")
            began, outcome = time.monotonic(), make()
            kept = {"described": described, "made": provenance(), "seconds": time.monotonic() - began}
            save_json({**kept, "outcome": outcome}, path)
            held = read_json(path)
        self.used.append(path)
        return held["outcome"]

    def lab_part(self, name: str, make: Callable[[], Any], *, setup: str, data: Splits | None = None) -> Any | None:
        """A part that needs emulated hosts; None, and noted, where they are not wanted."""
        if not self.lab and self._held(name, _described(setup, data)) is None:
            self.skipped.append(f"{name}: needs the lab, which was left out")
            return None
        return self.part(name, lambda: _with_lab(make), setup=setup, data=data)

    def _held(self, name: str, described: str) -> dict[str, Any] | None:
        """What a part's file holds, if it is the outcome of the same."""
        self.asked.append(name)
        held = read_json(self.folder / f"part-{name}.json")
        return held if held.get("described") == described and "outcome" in held else None

    def _wanted(self, name: str) -> bool:
        return not self.only or name in self.only

    def made(self) -> dict[str, str]:
        """By what, where, when and in what time all that was used was made, by earlier calls too."""
        files = [read_json(path) for path in dict.fromkeys(self.used)]
        simulated = sum(_seconds(found.get("curve")) for found in files) / 60
        others = sum(_seconds(found) for found in files) / 60
        took = f"{simulated:.0f} minutes of one core for simulated runs, {others:.0f} minutes for all else"
        return {**origins(files), "took": took}

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
        self.asked.append(name)
        if not self._wanted(name) and simulation.finished(self.folder) is None:
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
        self.used.append(self.folder / f"{name}.json")
        return curve


def names_of(study: Callable[[Workshop], Study], workshop: Workshop) -> list[str]:
    """Every run and part that a study asks for, by a pass that makes nothing but what other work needs."""
    idle = replace(workshop, lab=False, only=("",), skipped=[], asked=[], used=[])
    study(idle)
    return list(dict.fromkeys(idle.asked))


def _described(setup: str, data: Splits | None) -> str:
    """What must be the same for a part's file to count."""
    return f"{setup} data={fingerprint(data)}" if data is not None else setup


def _seconds(held: Any) -> float:
    found = held.get("seconds") if isinstance(held, dict) else None
    return float(found) if isinstance(found, int | float) else 0.0


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
