"""`thinwire bench local`: what local steps cost on thin and long links, and with one host that is slower.

Part `steps` compares the step of each method with a step without any exchange (`infinite`). Part `stragglers` counts
samples per second with one host that is several times slower: in rounds by time, and in rounds of a number of steps,
in which all hosts wait for the slow one. Methods are measured in turns, in the same processes.

Emulated hosts share the cores of one machine. Each step therefore computes on a small batch and sleeps until the base
step is over, as if every host had cores of its own; the slow host sleeps longer. Time that the exchange takes from
training, and time to compress that does not fit beside the computation, is measured as it is.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from thinwire.hooks.attach import attach
from thinwire.tools.bench import BenchLab, judge
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.options import caption, table_of, write_json
from thinwire.tools.race.training import interface_bytes
from thinwire.tools.recipes import get_recipe
from thinwire.tune.presets import LOCAL

# Times the step without exchange that a step may take, by the rate of the links.
STEP_BARS = {"50mbit": 1.05, "20mbit": 1.1}
STRAGGLER_BAR = 1.8  # samples per second of rounds by time, divided by those of rounds that wait for the slow host
WARM = 2  # rounds before those that are measured: with overlap a fast host waits from its second round on
INFINITE, BY_TIME, WAITING = "infinite", "rounds by time", "waiting for the slow host"


@dataclass(frozen=True)
class LocalSettings:
    """What is measured, on every rate."""

    recipe: str = "gpt-10m"
    methods: tuple[str, ...] = ("local16",)  # of the part `steps`
    batch: int = 1
    base: float = 1.0  # seconds that a step takes at least, before its optimizer steps
    turns: int = 3
    rounds: int = 2  # that are measured in each turn, after WARM others
    seconds: float = 10.0  # of a round by time
    slower: float = 3.0  # times that the last host's base step is longer, in the part `stragglers`

    @property
    def every(self) -> int:
        """Steps of a round that waits for the slow host: as many as a fast host takes in a round by time."""
        return max(1, round(self.seconds / self.base))

    def trainers(self, part: str) -> list[tuple[str, str, int | str]]:
        """Return name, preset and length of a round of all that a part compares; no preset exchanges nothing."""
        if part == "steps":
            return [(INFINITE, "", LOCAL[self.methods[0]]), *((name, name, LOCAL[name]) for name in self.methods)]
        return [(WAITING, self.methods[0], self.every), (BY_TIME, self.methods[0], f"{self.seconds:g}s")]


@dataclass(frozen=True)
class LocalFigures:
    """One row: medians over turns; a step and bytes are means over ranks and steps, and bytes are per host."""

    part: str
    name: str
    step_ms: float
    ratio: float  # to the step without exchange, or of samples per second to those of rounds that wait
    samples_per_second: float  # of all hosts together
    bytes_sent: float


def run(
    parts: Sequence[str], workers: int, links: list[LinkSettings], settings: LocalSettings, json_file: Path | None
) -> int:
    """Measure all parts, print a table for each, write the figures, and return 1 if a bar was missed.

    Stragglers are measured on the first of the links only.
    """
    tables, judged = [], []
    for place, link in enumerate(links):
        lab = BenchLab(link)
        for part in (part for part in parts if part == "steps" or place == 0):
            rows = measure(part, workers, lab, settings)
            bars = bars_of(part, rows, link)
            Console().print(_table(part, rows, workers, lab, settings))
            tables.append({"part": part, **lab.to_json(), "rows": [asdict(row) for row in rows], "bars": bars})
            judged.append((link, bars))
    write_json(json_file, {"workers": workers, **asdict(settings), "tables": tables})
    return judge(judged, "x", with_delay=True)


def bars_of(part: str, rows: Sequence[LocalFigures], link: LinkSettings) -> dict[str, tuple[float, float]]:
    """Return measured values and their bars, of which more is better; none for rates without a bar."""
    if part == "stragglers":
        found = {row.name: row.ratio for row in rows}
        return {"samples per second, rounds by time against waiting": (found[BY_TIME], STRAGGLER_BAR)}
    bar = STEP_BARS.get(link.rate or "")
    if bar is None:
        return {}
    return {
        f"{row.name} at {link.rate}: step without exchange / step": (1.0 / row.ratio, round(1.0 / bar, 3))
        for row in rows
        if row.name != INFINITE
    }


def measure(part: str, workers: int, lab: BenchLab, settings: LocalSettings) -> list[LocalFigures]:
    """Run one part in a lab and return its figures."""
    names = [name for name, *_ in settings.trainers(part)]
    argv = ["thinwire.tools.bench.local", part, json.dumps(asdict(settings))]
    records = lab.run(workers, argv, ("ROW",), total=settings.turns * len(names) * workers)
    return figures(part, names, [record for _, record in records])


def figures(part: str, names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[LocalFigures]:
    """Summarise the records of all ranks and turns: means over ranks, then medians over turns."""

    def by_turn(name: str, key: str) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for record in records:
            if record["name"] == name:
                found.setdefault(record["turn"], []).append(float(record[key]))
        return found

    def median(name: str, key: str) -> float:
        return statistics.median(map(statistics.mean, by_turn(name, key).values()))

    speeds = {name: statistics.median(map(sum, by_turn(name, "samples_per_second").values())) for name in names}
    rows = []
    for name in names:
        step = median(name, "step")
        # A straggler's step is long in any case: what counts there are the samples of all hosts.
        ratio = step / median(INFINITE, "step") if part == "steps" else speeds[name] / speeds[WAITING]
        rows.append(LocalFigures(part, name, 1e3 * step, ratio, speeds[name], median(name, "sent")))
    return rows


def _table(part: str, rows: Sequence[LocalFigures], workers: int, lab: BenchLab, settings: LocalSettings) -> Any:
    what = "x infinite" if part == "steps" else "x waiting"
    shown = [
        {
            "method": row.name,
            "step ms": f"{row.step_ms:,.1f}",
            what: f"{row.ratio:.3f}",
            "samples/s": f"{row.samples_per_second:,.2f}",
            "MB out": f"{row.bytes_sent / 1e6:.3f}",
        }
        for row in rows
    ]
    slow = f", one of them {settings.slower:g}x slower" if part == "stragglers" else ""
    title = f"{settings.recipe}, {workers} workers {lab.links}{slow}"
    base = f"A step computes on {settings.batch} samples and sleeps until {settings.base:g} s are over"
    return table_of(shown, title=title, caption=caption(base, "MB: per host and step, counted by the kernel", lab.note))


class LocalTrainer:
    """Trains a model of its own in rounds, on fixed data; each step takes at least the base time."""

    def __init__(self, name: str, preset: str, every: int | str, settings: LocalSettings, base: float) -> None:
        torch.manual_seed(0)
        recipe = get_recipe(settings.recipe)
        self.name, self._every, self._base, self._batch = name, every, base, settings.batch
        self._model = recipe.build(0)
        self._optimizer = recipe.optimizer(self._model)
        self._link = attach(self._model, preset, optimizer=self._optimizer, every=every) if preset else None
        rank = dist.get_rank()
        self._x, self._y = recipe.load(None).train.batch(range(rank * self._batch, (rank + 1) * self._batch))

    def _step(self) -> None:
        began = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self._model(self._x), self._y).backward()
        time.sleep(max(0.0, began + self._base - time.perf_counter()))
        self._optimizer.step()

    def _rounds(self, count: int) -> int:
        """Train for some rounds and return the number of steps; rounds by time end with their exchanges."""
        if self._link is None or isinstance(self._every, int):
            steps = count * int(self._every)
            for _ in range(steps):
                self._step()
            return steps
        steps, last = 0, self._link.exchanges + count
        while self._link.exchanges < last:
            self._step()
            steps += 1
        return steps

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return the means of some rounds, at whose beginning and end an exchange has just begun."""
        dist.barrier()
        self._rounds(WARM)
        before, began = interface_bytes("eth0") or (0, 0), time.perf_counter()
        steps = self._rounds(rounds)
        took, after = time.perf_counter() - began, interface_bytes("eth0") or (0, 0)
        if self._link is not None:
            self._link.wait()  # what is under way must not disturb the next method
        return {
            "name": self.name,
            "step": took / steps,
            "steps": steps,
            "samples_per_second": steps * self._batch / took,
            "sent": (after[0] - before[0]) / steps,
        }

    def close(self) -> None:
        """End the exchanges; call it on all ranks."""
        if self._link is not None:
            self._link.detach()


def main() -> None:
    """Run one rank, which prints a record for each method and turn."""
    part, options = sys.argv[1], json.loads(sys.argv[2])
    settings = LocalSettings(**{**options, "methods": tuple(options["methods"])})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    slow = part == "stragglers" and dist.get_rank() == dist.get_world_size() - 1
    base = settings.base * (settings.slower if slow else 1.0)
    trainers = [LocalTrainer(*each, settings, base) for each in settings.trainers(part)]
    for turn in range(settings.turns):
        for trainer in trainers:
            row = {"rank": dist.get_rank(), "turn": turn, **trainer.measure(settings.rounds)}
            print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    for trainer in trainers:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
