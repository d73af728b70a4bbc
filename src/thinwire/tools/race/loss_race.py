"""Loss race: the same served training over each transport and through each loss, and what came of it.

Every run is one of `thinwire train --server`: a master and the workers on emulated hosts, whose links lose packets.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import thinwire
from thinwire.tools.events import RunLog, read_log
from thinwire.tools.lab.units import parse_loss
from thinwire.tools.race.race import Field
from thinwire.tools.race.served import Terms, check_terms
from thinwire.tools.race.served_process import Served
from thinwire.tools.race.train_served import ServedTraining
from thinwire.tools.race.training import Plan
from thinwire.tools.recipes.recipe import Recipe
from thinwire.tools.report.markup import Row
from thinwire.tools.report.page import megabytes
from thinwire.tools.report.summary import bytes_per_host_step, last_value, settled, show_metric, step_seconds


@dataclass(frozen=True)
class Way:
    """A transport, what is done about lost gradients, and the share of packets that the links lose."""

    transport: str
    on_loss: str
    loss: str

    @property
    def name(self) -> str:
        """As in tables and logs, without the loss."""
        return f"udp-{self.on_loss}" if self.transport == "udp" else self.transport


def ways(transports: str, losses: str, on_loss: str) -> list[Way]:
    """All runs that the words of a command line ask for; ValueError for a word that there is not."""
    names, shares, policies = (
        list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
        for words in (transports, losses, on_loss)
    )
    if not names or not set(names) <= {"tcp", "udp"}:
        raise ValueError(f"--transport takes tcp and udp, not {transports!r}")
    for share in shares:
        parse_loss(share)
    for policy in policies:
        check_terms("topk1", None, "bsp", "mean", "forward", "udp", policy)
    return [
        Way(name, policy, share)
        for share in shares or ["0%"]
        for name in names
        for policy in (policies if name == "udp" else ["restore"])
    ]


@dataclass(frozen=True)
class Standing:
    """One run's figures in the end."""

    transport: str
    on_loss: str | None
    loss: str
    step_ms: float
    wait_ms: float  # mean over steps and workers of what a step waits for communication
    bytes_per_host_step: float
    test_accuracy: float | None
    train_accuracy: float | None
    datagrams: int  # of gradients
    datagrams_lost: int
    restored: float  # sum of the magnitudes that returned to the workers' memories
    curve: list[tuple[float, float]]  # seconds of training, the metric on the test split


@dataclass(frozen=True)
class LossResult:
    """A finished race through loss."""

    field: Field
    recipe: str
    metric: str
    standings: list[Standing]
    logs: list[RunLog]

    def to_json(self) -> dict[str, Any]:
        """The figures under the names that machines rely on."""
        return {
            "hosts": self.field.hosts,
            "rate": self.field.rate or "none",
            "recipe": self.recipe,
            "runs": [asdict(standing) for standing in self.standings],
            "verdict": self.verdict(),
            "version": thinwire.__version__,
            "command": self.field.command,
        }

    def verdict(self) -> str:
        """From which loss on udp waits less than tcp."""
        waits = {(s.transport, s.loss): s.wait_ms for s in self.standings if s.on_loss in (None, "restore")}
        gains = {
            loss: waits["tcp", loss] / waits["udp", loss]
            for way, loss in waits
            if way == "udp" and ("tcp", loss) in waits
        }
        if not gains:
            return "Without both tcp and udp in the race there is nothing to compare."
        each = ", ".join(f"{gain:.2f}x at {loss}" for loss, gain in gains.items())
        better = [loss for loss, gain in gains.items() if gain > 1.0]
        where = f"udp waits less than tcp at {' and '.join(better)} loss" if better else "udp waits longer than tcp"
        return f"{where}: tcp's wait over udp's is {each}."

    def rows(self) -> list[Row]:
        """The table of the report."""
        return [
            {
                "Run": log.run.method,
                "Step": f"{s.step_ms:,.0f} ms",
                "Waiting": f"{s.wait_ms:,.0f} ms",
                "Sent per host and step": megabytes(s.bytes_per_host_step),
                "Lost parts": f"{s.datagrams_lost:,} of {s.datagrams:,}" if s.datagrams else "–",
                "Restored mass": f"{s.restored:,.4g}" if s.datagrams else "–",
                f"Final test {self.metric}": show_metric(s.test_accuracy, self.metric),
            }
            for s, log in zip(self.standings, self.logs, strict=True)
        ]


@dataclass(frozen=True)
class LossRace:
    """What to run, and where; `name` is what the command line calls the recipe."""

    recipe: Recipe
    name: str
    data: Path | None
    plan: Plan
    place: Field
    runs: Sequence[Way]
    codec: str = "topk1"

    def run(self, logs: Path) -> LossResult:
        """All ways one after the other, with a log each in the folder `logs`."""
        found, standings = [], []
        for way in self.runs:
            terms = check_terms(self.codec, None, "bsp", "mean", "forward", way.transport, way.on_loss)
            served = Served(self.name, self.data, Terms(self.plan, 0, self.place.hosts, **terms))
            path = logs / f"{way.name}-{way.loss.rstrip('%')}.jsonl"
            ServedTraining(self.recipe, served, self.place, path, way.loss, label=f"{way.name} {way.loss}").run()
            found.append(read_log(path))
            standings.append(_standing(way, found[-1]))
        return LossResult(self.place, self.recipe.name, self.recipe.metric, standings, found)


def _standing(way: Way, log: RunLog) -> Standing:
    steps = settled(log)
    return Standing(
        way.transport,
        way.on_loss if way.transport == "udp" else None,
        way.loss,
        1e3 * (step_seconds(log) or 0.0),
        1e3 * mean(step.exchange for step in steps) if steps else 0.0,
        bytes_per_host_step(log) or 0.0,
        last_value(log, "test"),
        last_value(log, "train"),
        sum(step.datagrams for step in log.steps),
        sum(step.datagrams_lost for step in log.steps),
        sum(step.restored for step in log.steps),
        [(round(e.wall, 3), e.value) for e in log.evals if e.split == "test"],
    )
