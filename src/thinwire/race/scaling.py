"""Scaling: from measurements and options to the curves, the checks and the page of `thinwire simulate scale`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import thinwire
from thinwire.lab.units import format_rate, parse_rate
from thinwire.observe import describe_machine, now
from thinwire.race.advising import GOODPUT
from thinwire.report.markup import Row, write_page
from thinwire.report.page import megabytes
from thinwire.tune.calibrate import Point, at, off
from thinwire.tune.scale import Cluster, Scaled, Task, predict

# By the beginning of what `thinwire bench ddp` says of a row's exchange.
_MEASURED = {"Gather": "gather", "ScatterReduce": "scatter-reduce", "Hierarchical": "hierarchical"}


def read_points(path: Path) -> list[Point]:
    """The steps in a file of `thinwire bench ddp --json`; methods that the model does not know are left out."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hosts, rate, rows = int(found["hosts"]), parse_rate(found["rate"]), found["rows"]
        idle = next(float(row["bytes_sent"]) for row in rows if row["name"] == "infinite")
        points = [
            # What a step without exchange sends (barriers, DDP's own) is no exchange's.
            Point(
                exchange,
                hosts,
                GOODPUT * (rate or 0),
                float(row["step_ms"]) / 1e3,
                max(float(row["bytes_sent"]) - idle, 0.0),
                float(row["hook_cpu_ms"]) / 1e3,
            )
            for row in rows
            if (exchange := _exchange(row))
        ]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ValueError(f"{path} is not a file of thinwire bench ddp --json ({error!r})") from error
    if rate is None:
        raise ValueError(f"{path} was measured without a limit: give measurements at a rate")
    return points


def _exchange(row: dict[str, Any]) -> str:
    known = {"infinite": "none", "dense": "ring"}
    return known.get(row["name"], _MEASURED.get(str(row["exchange"]).partition("(")[0], ""))


@dataclass(frozen=True)
class Scaling:
    """The prediction, and how it compares with what was measured on hosts that share `lab.cores`."""

    task: Task
    cluster: Cluster
    exchanges: tuple[str, ...]
    workers: tuple[int, ...]
    points: tuple[Point, ...]
    lab: Cluster
    command: str

    def curve(self, exchange: str) -> list[Scaled]:
        return [predict(exchange, n, self.task, self.cluster) for n in self.workers]

    def fastest(self) -> list[tuple[str, int]]:
        """Which exchange is the fastest up to which number of workers."""
        best = [min(self.exchanges, key=lambda e: predict(e, n, self.task, self.cluster).seconds) for n in self.workers]
        found = []
        for exchange, group in groupby(zip(best, self.workers, strict=True), key=lambda pair: pair[0]):
            found.append((exchange, [n for _, n in group][-1]))
        return found

    def verdict(self) -> str:
        """Who is fastest where, and how far the model is from what was measured."""
        parts = self.fastest()
        words = ", then ".join(f"{e} up to {n:,}" for e, n in parts[:-1])
        last, most = parts[-1]
        end = predict(last, most, self.task, self.cluster)
        said = (f"The fastest is {words} workers, then {last}" if words else f"{last.capitalize()} is the fastest") + (
            f"; with {most:,} workers a step takes {_ms(end.seconds)}, of which {end.efficiency:.0%} is computing."
        )
        if any(exchange == "hierarchical" for exchange, _ in parts):
            bus = format_rate(round(self.cluster.bus))
            said += f" Hierarchical has {self.cluster.per_machine} workers in each machine, on a bus of {bus}."
        if self.points:
            errors = [abs(off(p, self.task, self.lab)) for p in self.points]
            inside = sum(error <= 0.2 for error in errors)
            said += f" {inside} of {len(errors)} measured steps are within 20 %, the worst is {max(errors):.0%} off."
        return said

    def checks(self) -> list[dict[str, Any]]:
        """Every measured step and what the model says."""
        return [
            {
                "exchange": p.exchange,
                "workers": p.workers,
                "rate": format_rate(round(p.rate / GOODPUT)),
                "measured_ms": 1e3 * p.seconds,
                "predicted_ms": 1e3 * predict(p.exchange, p.workers, self.task, at(self.lab, p)).seconds,
                "off": off(p, self.task, self.lab),
                "sent": p.sent,
                "predicted_sent": predict(p.exchange, p.workers, self.task, at(self.lab, p)).sent,
            }
            for p in sorted(self.points, key=lambda p: (p.rate, p.workers))
        ]

    def to_json(self) -> dict[str, Any]:
        """Under the names that machines rely on."""
        return {
            "task": asdict(self.task),
            "cluster": asdict(self.cluster),
            "curves": {e: [asdict(s) for s in self.curve(e)] for e in self.exchanges},
            "fastest": [{"exchange": e, "up_to": n} for e, n in self.fastest()],
            "measured": self.checks(),
            "verdict": self.verdict(),
            "version": thinwire.__version__,
            "command": self.command,
        }

    def rows(self) -> list[Row]:
        """A line for each exchange: the step with some numbers of workers."""
        shown = _some(self.workers, 6)
        table: list[Row] = []
        for exchange in self.exchanges:
            curve = {s.workers: s for s in self.curve(exchange)}
            half = [n for n, s in curve.items() if s.efficiency >= 0.5]
            row = {"Exchange": exchange, **{f"{n:,} workers": _ms(curve[n].seconds) for n in shown}}
            row["Sent at most"] = megabytes(max(s.sent for s in curve.values()))
            row["Half efficient up to"] = f"{max(half):,}" if half else "–"
            table.append(row)
        return table

    def page(self, path: Path) -> None:
        """Write the page."""
        task, cluster = self.task, self.cluster
        write_page(
            path,
            "scale",
            title=f"{task.elements:,} parameters at {format_rate(round(cluster.rate / GOODPUT))}",
            verdict=self.verdict(),
            facts={
                "parameters": f"{task.elements:,}",
                "frame": megabytes(task.frame),
                "computing": _ms(task.compute),
                "latency": f"{1e3 * cluster.latency:.3g} ms",
                "stragglers": f"±{cluster.stragglers:.0%}",
                "links": f"±{cluster.rate_spread:.0%}",
            },
            table=self.rows(),
            made={
                "Command": self.command,
                "Machine": describe_machine(),
                "Version": f"thinwire {thinwire.__version__}",
                "Date": now(),
            },
            data={"workers": self.workers, "curves": self._drawn(), "lab": self._lab(), "cores": self.lab.cores},
        )

    def _drawn(self) -> dict[str, dict[str, list[float]]]:
        curves = {e: self.curve(e) for e in self.exchanges}
        return {
            e: {
                "ms": [1e3 * s.seconds for s in curve],
                "mb": [s.sent / 1e6 for s in curve],
                "efficiency": [100.0 * s.efficiency for s in curve],
            }
            for e, curve in curves.items()
        }

    def _lab(self) -> list[dict[str, Any]]:
        """For each rate that was measured: curves with shared cores, and the points."""
        checks, figures = self.checks(), []
        for rate in dict.fromkeys(check["rate"] for check in checks):
            here = [check for check in checks if check["rate"] == rate]
            cluster = at(self.lab, next(p for p in self.points if format_rate(round(p.rate / GOODPUT)) == rate))
            most = max(check["workers"] for check in here)
            workers = sorted({n for n in range(2, 2 * most) if n <= 32 or n % 8 == 0})
            names = list(dict.fromkeys(check["exchange"] for check in here))
            curves = {e: [1e3 * predict(e, n, self.task, cluster).seconds for n in workers] for e in names}
            figures.append({"rate": rate, "workers": workers, "curves": curves, "points": here})
        return figures


def _some(workers: Sequence[int], most: int) -> list[int]:
    """A few of many, the first and the last among them."""
    if len(workers) <= most:
        return list(workers)
    return [workers[round(i * (len(workers) - 1) / (most - 1))] for i in range(most)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
