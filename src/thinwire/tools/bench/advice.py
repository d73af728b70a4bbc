"""`thinwire bench advice`: the error of the step times that `thinwire advise --probe` predicts.

Predictions and measurements alternate in the same processes on emulated hosts; figures are medians over the rounds.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from thinwire.exchange.choose import NAMES
from thinwire.tools.bench import BenchLab
from thinwire.tools.bench.ddp import MethodTrainer, start_trainers
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.lab.units import parse_delay
from thinwire.tools.options import verdict, write_json
from thinwire.tools.race.advise import AdviceReport, Subject, make_report, probed_wire
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tune.forecast import forecast

BAR, DELAYED_BAR = 0.20, 0.25  # relative errors, without and with a delay
NAMES_OF = {kind: name for name, kind in NAMES.items()}


@dataclass(frozen=True)
class Cell:
    """Predicted and measured step time of one method with one number of workers, one rate and one delay."""

    workers: int
    rate: str
    delay: str
    method: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def met(self) -> bool:
        """Whether the error is within its bar."""
        return abs(self.error) <= (DELAYED_BAR if parse_delay(self.delay) else BAR)


Place = tuple[int, LinkSettings]


def check_places(workers: list[str], rates: list[str], delays: list[str], loss: str) -> list[Place]:
    """Return every combination of a number of workers, a rate and a delay; ValueError before the first lab is built."""
    if not all(number.isdecimal() and int(number) >= 2 for number in workers):
        raise ValueError(f"--workers takes numbers from 2, comma-separated, not {','.join(workers)!r}")
    settings = [LinkSettings(rate, delay, loss) for rate in rates for delay in delays]
    places = [(int(number), links) for number in workers for links in settings]
    for number, links in places:
        links.check(number)
    return places


def run(places: list[Place], options: dict[str, Any], json_file: Path | None) -> int:
    """Measure all combinations, print a table, write the figures, and return 1 if a bar was missed."""
    labs = [(number, BenchLab(links)) for number, links in places]
    cells = [cell for number, lab in labs for cell in measure(number, lab, options)]
    delayed = [(number, lab) for number, lab in labs if lab.links.delayed]
    _show(cells, [f"{number} workers {lab.links}: {lab.note}" for number, lab in delayed])
    lines = [{"workers": number, **lab.to_json()} for number, lab in delayed]
    figures = {**options, "cells": [{**asdict(cell), "error": cell.error} for cell in cells]}
    write_json(json_file, {**figures, "delay_lines": lines} if lines else figures)
    return verdict(cell.met for cell in cells)


def measure(workers: int, lab: BenchLab, options: dict[str, Any]) -> list[Cell]:
    """Predict and measure all methods with one number of workers and one setting of the links."""
    total = options["rounds"] * len(options["methods"])
    records = lab.run(workers, ["thinwire.tools.bench.advice", json.dumps(options)], ("ROW",), total=total)

    def median(method: str, key: str) -> float:
        return 1e3 * statistics.median(float(row[key]) for _, row in records if row["method"] == method)

    place = workers, lab.links.rate or "none", lab.links.delay or "0"
    return [Cell(*place, m, median(m, "predicted"), median(m, "measured")) for m in options["methods"]]


def _show(cells: list[Cell], notes: list[str]) -> None:
    table = Table(
        title=f"Predicted and measured step times; bars: {BAR:.0%} error, {DELAYED_BAR:.0%} with a delay",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in ("workers", "rate", "delay", "method", "predicted ms", "measured ms", "error", ""):
        table.add_column(column, justify="left" if column in ("method", "") else "right", no_wrap=True)
    for c in cells:
        word = "[green]pass[/]" if c.met else "[red]missed[/]"
        figures = (f"{c.predicted_ms:,.1f}", f"{c.measured_ms:,.1f}", f"{c.error:+.0%}")
        table.add_row(str(c.workers), c.rate, c.delay, c.method, *figures, word)
    Console().print(table)
    for note in notes:
        Console().print(f"{note}.", highlight=False)


def subject(batch: int) -> Subject:
    """Return the model and the batch of `thinwire bench ddp`, as the prediction needs them."""
    torch.manual_seed(0)
    model = cuda_convnet()
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Subject("cuda-convnet", model, lambda step: cross_entropy(model(images), labels), optimizer)


def predicted(found: AdviceReport, trainer: MethodTrainer) -> float:
    """Return the predicted seconds of a step with the exchange that the trainer uses."""
    used = NAMES_OF.get(type(trainer.link.exchange)) if trainer.link is not None else None
    return min(
        forecast(setting, found.figures.work, found.wire.network).seconds
        for setting in found.settings
        if setting.name == trainer.method and used in (None, setting.exchange)
    )


def main() -> None:
    """Run one rank; rank 0 prints a record for each method and round."""
    options = json.loads(sys.argv[1])
    trainers = start_trainers(options)
    codecs = [method for method in options["methods"] if method not in ("dense", "fp16")]
    for _ in range(options["rounds"]):
        # Every round has a new prediction, so that changes in the machine's speed affect both figures.
        found = make_report(subject(options["batch"]), probed_wire(), codecs, "")
        for trainer in trainers:
            took = trainer.measure(options["steps"])["step"]
            row = {"method": trainer.method, "predicted": predicted(found, trainer), "measured": took}
            if dist.get_rank() == 0:
                print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
