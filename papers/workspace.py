"""The workspace of a study: its scale, data and folder, the runs and parts that are finished, and the progress display.

A part is a piece of work whose result is saved in a file. A study that is run again does only the work that is missing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from papers.files import fingerprint, merge_provenance, provenance, read_json, save_json
from papers.simulation import Curve, Goal, PeriodicProbe, Simulation, TrainingSetting
from papers.study import Study, StudyError
from thinwire.tools.lab.check import check, ready
from thinwire.tools.options import LINE_EVERY
from thinwire.tools.progress import WorkProgress, duration, lines_every, print_line
from thinwire.tools.recipes.recipe import Batch, Recipe, Split, Splits

Key = TypeVar("Key")
Found = TypeVar("Found")


@dataclass(frozen=True)
class FirstSamples:
    """The first samples of a split, for the small scale."""

    whole: Split
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Any) -> Batch:
        return self.whole.batch(indices)


@dataclass
class Workspace:
    """What a study works with. Without `lab`, parts that need emulated hosts are skipped, and the study says so."""

    scale: str
    data: Path | None
    folder: Path  # for the files of finished runs and parts
    lab: bool = True
    only: tuple[str, ...] = ()  # the runs and parts to do now; empty: all
    console: Console = field(default_factory=lambda: Console(stderr=True))
    skipped: list[str] = field(default_factory=list)  # "NAME: why"
    requested: list[str] = field(default_factory=list)  # every run and part that the study asked for
    used: list[Path] = field(default_factory=list)  # the files of those that it got

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def full(self) -> bool:
        return self.scale == "full"

    def load(self, recipe: Recipe, *, first: int | None = None) -> Splits:
        """Load a recipe's data, with only the first samples of the training split if `first` is given."""
        splits = recipe.load(self.data)
        if first is None or first >= len(splits.train):
            return splits
        return Splits(FirstSamples(splits.train, first), splits.test)

    def part(
        self,
        name: str,
        make: Callable[[], Any],
        *,
        setup: str,
        data: Splits | None = None,
        needed: bool = False,
        shown: bool = False,
    ) -> Any | None:
        """Return the result of a part, which is plain data: read it from its file, or make it now and save it.

        `setup` and `data` identify the work: a file with another identity is replaced. A part that `only` does not
        name is skipped and None is returned, unless other work needs it. `shown`: the part shows its own progress.
        """
        described = _described(setup, data)
        path = self.folder / f"part-{name}.json"
        if not self._is_saved(name, described):
            if not (needed or self._selected(name)):
                self.skipped.append(f"{name}: this part was left out")
                return None
            print_line(self.console, f"{name} ...")
            began = time.monotonic()
            quiet = shown or self.console.is_terminal

            def sentence() -> str:
                return "" if quiet else f"{name}: {duration(time.monotonic() - began)} so far"

            with lines_every(LINE_EVERY, sentence, self.console):
                outcome = make()
            header = {"described": described, "made": provenance(), "seconds": time.monotonic() - began}
            save_json({**header, "outcome": outcome}, path)
        self.used.append(path)
        return read_json(path)["outcome"]

    def lab_part(self, name: str, make: Callable[[], Any], *, setup: str, data: Splits | None = None) -> Any | None:
        """Return the result of a part that needs emulated hosts; skip it and return None if the lab is left out."""
        if not self.lab and not self._is_saved(name, _described(setup, data)):
            self.skipped.append(f"{name}: needs the lab, which was left out")
            return None
        return self.part(name, lambda: _make_in_lab(make), setup=setup, data=data, shown=True)

    def _is_saved(self, name: str, described: str) -> bool:
        self.requested.append(name)
        content = read_json(self.folder / f"part-{name}.json")
        return content.get("described") == described and "outcome" in content

    def _selected(self, name: str) -> bool:
        return not self.only or name in self.only

    def made(self) -> dict[str, str]:
        """Return the versions, machines, days and time of all runs and parts that were used, also of earlier calls."""
        files = [read_json(path) for path in dict.fromkeys(self.used)]
        simulated, others = (sum(map(_seconds, of)) / 60 for of in ([f.get("curve") for f in files], files))
        took = f"{simulated:.0f} minutes of one core for simulated runs, {others:.0f} minutes for all else"
        return {**merge_provenance(files), "took": took}

    def train(
        self,
        name: str,
        recipe: Recipe,
        splits: Splits,
        setting: TrainingSetting,
        goal: Goal,
        *,
        probe: PeriodicProbe | None = None,
    ) -> Curve | None:
        """Return the curve of a simulated run and show its progress; skip it and return None if `only` excludes it."""
        simulation = Simulation(name, recipe, splits, setting, goal)
        self.requested.append(name)
        if not self._selected(name) and simulation.finished(self.folder) is None:
            self.skipped.append(f"{name}: this run was left out")
            return None
        with WorkProgress(name, goal.max_steps, self.console) as progress:

            def watch(curve: Curve, done: int) -> None:
                metrics = [text] if (text := _metrics(curve, recipe.metric)) else []
                progress.reach(done, figures=", ".join([f"step {done} of {goal.max_steps}", *metrics]))

            curve = simulation.run(self.folder, watch, probe)
        print_line(self.console, f"{name}: {curve.step[-1]} steps, {_metrics(curve, recipe.metric)}")
        self.used.append(self.folder / f"{name}.json")
        return curve


def requested_names(study: Callable[[Workspace], Study], workspace: Workspace) -> list[str]:
    """List every run and part of a study, by running it with everything left out but what other work needs."""
    idle = replace(workspace, lab=False, only=("",), skipped=[], requested=[], used=[])
    study(idle)
    return list(dict.fromkeys(idle.requested))


def without_skipped(found: dict[Key, Found | None]) -> dict[Key, Found]:
    """Return those runs or parts that were not skipped."""
    return {key: value for key, value in found.items() if value is not None}


def run_name(prefix: str, label: str) -> str:
    """Return the name of a run, which is also that of its file, from its label in tables."""
    return f"{prefix}-{label}".lower().replace(" %", "").replace(", ", "-").replace(" ", "-")


def _described(setup: str, data: Splits | None) -> str:
    return f"{setup} data={fingerprint(data)}" if data is not None else setup


def _seconds(content: Any) -> float:
    seconds = content.get("seconds") if isinstance(content, dict) else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _make_in_lab(make: Callable[[], Any]) -> Any:
    if not ready(check()):
        why = "this machine cannot emulate hosts (thinwire lab --check says why)"
        raise StudyError(f"{why}: leave them out by --no-lab")
    return make()


def _metrics(curve: Curve, metric: str) -> str:
    parts = [f"{name} {values[-1]:.4f}" for name, values in (("train", curve.train), ("test", curve.test)) if values]
    objective = [f"objective {curve.objective[-1]:.4g}"] if curve.objective else []
    return " ".join([*([metric, *parts] if parts else []), *objective])
