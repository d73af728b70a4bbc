"""`thinwire bench ddp`: step time, traffic and communication overhead of each method on emulated hosts.

The model is the cuda-convnet of SparsifyGradients, or a stack of equal layers with a bucket for each of them. Figures
are medians over rounds. In every round each method is measured once, in the same processes, so that changes in the
machine's speed affect all methods alike.
"""

import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.link.link import Link
from thinwire.tools.bench import BenchLab, Record
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.lab.units import parse_rates
from thinwire.tools.options import by_delay, caption, table_of, verdict, write_json
from thinwire.tools.progress import print_line
from thinwire.tools.race.methods import apply_method, single_bucket
from thinwire.tools.race.training import interface_bytes
from thinwire.tools.recipes.convnet import cuda_convnet


@dataclass(frozen=True)
class MethodFigures:
    """One method's figures: milliseconds and bytes are per step, bytes also per host."""

    name: str
    step_ms: float
    overhead: float  # step time / step time without communication - 1
    bytes_sent: float
    bytes_received: float
    hook_cpu_ms: float
    cpu_ms: float  # of all threads of a rank, the kernel's work for it included
    cpu_beyond_ms: float  # the same beyond a step on an infinite network
    exchange: str
    round_trips: float | None  # that a step waited for, as the link counts them; None where it does not
    messages: float | None  # that a rank sent in a step, as the link counts them
    allowed_ms: float | None  # of a link: 1.5 round trips and the transfer time of its bytes; None without a rate


TRIPS = 1.5  # round trips that a step of a link may wait for, however many buckets it has
# Milliseconds of processor time that a method's step may take beyond an infinite network, by workers and rate.
CPU_BARS: dict[tuple[str, int, str | None], float] = {("topk1", 4, "100mbit"): 4.5, ("topk1", 14, "500mbit"): 6.0}
# Features of a layer of `--buckets`: more parameters than `JOINED_BELOW`, so that links do not join the buckets.
_FEATURES = 768
BAR = "topk1"  # the preset whose steps with a delay are judged, with any exchange (`topk1+gather`)


def run(workers: int, settings: list[LinkSettings], options: dict[str, Any], json_file: Path | None) -> int:
    """Measure all methods with each setting of the links, print tables, write the figures; 1 if a bar was missed."""
    figures, undelayed = [], None
    met: list[bool] = []
    for links in settings:
        lab = BenchLab(links)
        rows = measure(workers, lab, options)
        _show(rows, workers, lab, options["buckets"])
        for row in rows if options["buckets"] is None and not links.delayed else ():
            if (bar := CPU_BARS.get((row.name, workers, links.rate))) is not None:
                met.append(row.cpu_beyond_ms <= bar)
                print_line(Console(), _against_bar(row, bar))
        infinite = next(row.step_ms for row in rows if row.name == "infinite")
        if not links.delayed:
            undelayed = infinite
        for row in rows if links.delayed else ():
            if row.allowed_ms is not None:
                print_line(Console(), _compared(row, infinite, undelayed))
                judged = row.name.partition("+")[0] == BAR
                met += [row.step_ms - infinite <= row.allowed_ms] if judged else []
        figures.append({"workers": workers, **lab.to_json(), **options, "rows": [asdict(row) for row in rows]})
    write_json(json_file, by_delay(figures))
    return verdict(met)


def measure(workers: int, lab: BenchLab, options: dict[str, Any]) -> list[MethodFigures]:
    """Run all methods in a lab and return their figures."""
    total = options["rounds"] * len(options["methods"]) * workers
    records = lab.run(workers, ["thinwire.tools.bench.ddp", json.dumps(options)], ("ROW",), total=total)

    def median(method: str, key: str) -> float:
        return statistics.median(float(row[key]) for _, row in records if row["method"] == method)

    rows, infinite = [], median("infinite", "step")
    for name in options["methods"]:
        step, sent, received, hook, cpu = (median(name, key) for key in ("step", "sent", "received", "hook_cpu", "cpu"))
        first = next(row for _, row in records if row["method"] == name)
        beyond = 1e3 * _cpu_beyond(records, name)
        times = (1e3 * step, step / infinite - 1.0, sent, received, 1e3 * hook, 1e3 * cpu, beyond)
        counted = first["round_trips"] is not None
        trips, messages = (median(name, key) if counted else None for key in ("round_trips", "messages"))
        allowed = allowed_ms(workers, lab.links, sent, received) if first["exchange"] else None
        rows.append(MethodFigures(name, *times, first["exchange"], trips, messages, allowed))
    return rows


def _cpu_beyond(records: list[Record], method: str) -> float:
    """Return the median of the CPU seconds beyond those of the infinite network in the same round on the same rank."""
    cpu = {(row["method"], row["rank"], row["round"]): float(row["cpu"]) for _, row in records}
    places = [(rank, number) for name, rank, number in cpu if name == method]
    return statistics.median(cpu[method, rank, number] - cpu["infinite", rank, number] for rank, number in places)


def allowed_ms(workers: int, links: LinkSettings, sent: float, received: float) -> float | None:
    """Return the milliseconds of 1.5 round trips and of transferring these bytes; None if a link has no limit."""
    rates = parse_rates(links.rate)
    if rates.up is None or rates.down is None:
        return None
    return 1e3 * (TRIPS * links.round_trip(workers) + 8 * max(sent / rates.up, received / rates.down))


def _show(rows: list[MethodFigures], workers: int, lab: BenchLab, buckets: int | None) -> None:
    dense = next((row.step_ms for row in rows if row.name == "dense"), None)
    shown = [
        {
            "method": row.name,
            "step ms": f"{row.step_ms:,.1f}",
            "overhead": f"{row.overhead:+.1%}",
            "trips": "" if row.round_trips is None else f"{row.round_trips:.1f}",
            "MB out": f"{row.bytes_sent / 1e6:.3f}",
            "MB in": f"{row.bytes_received / 1e6:.3f}",
            "vs dense": f"{dense / row.step_ms:.2f}x" if dense else "",
            "hook": f"{row.hook_cpu_ms:.2f}" if row.exchange else "",
            "cpu": "" if row.name == "infinite" else f"{row.cpu_beyond_ms:+.2f}",
        }
        for row in rows
    ]
    counted = "MB: per host and step, counted by the kernel. hook: CPU time of the hook in ms. "
    counted += "cpu: CPU time of a step and rank in ms beyond the infinite network, all threads and the kernel included"
    trips = "trips: round trips that a step waited for" if any(row.round_trips is not None for row in rows) else ""
    sent = "; ".join(f"{row.name} {row.messages:.0f}" for row in rows if row.messages is not None)
    chosen = "; ".join(f"{row.name} {row.exchange}" for row in rows if row.exchange)
    exchanges = f"Exchanges: {chosen}" if chosen else ""
    messages = f"Messages that a rank sent in a step: {sent}" if sent else ""
    note = caption(counted, trips, exchanges, messages, lab.note)
    model = "cuda-convnet" if buckets is None else f"{buckets} buckets"
    Console().print(table_of(shown, title=f"{model}, {workers} workers {lab.links}", caption=note))


def _against_bar(row: MethodFigures, bar: float) -> str:
    """Return a line that compares a method's processor time beyond the infinite network with its bar."""
    word = "met   " if row.cpu_beyond_ms <= bar else "MISSED"
    return f"{word} {row.name}: {row.cpu_beyond_ms:.2f} ms of CPU time beyond the infinite network (bar {bar} ms)"


def _compared(row: MethodFigures, infinite: float, undelayed: float | None) -> str:
    """Return a line that compares what a step adds to one on an infinite network with what the links ask for.

    infinite: milliseconds of a step that exchanges a single number over the same delay, which waits for round trips of
    its own. undelayed: the same without a delay, where that was measured.
    """
    assert row.allowed_ms is not None
    beyond = row.step_ms - infinite
    word = "within" if beyond <= row.allowed_ms else "above"
    line = f"{row.name}: step - infinite step = {beyond:,.1f} ms, {word} {TRIPS} round trips + transfer of its bytes"
    line += f" = {row.allowed_ms:,.1f} ms"
    if undelayed is not None:
        line += f"; step - infinite step without a delay = {row.step_ms - undelayed:,.1f} ms"
    return line


def layers(count: int) -> nn.Sequential:
    """Return a network for small images with so many equal layers, each larger than a bucket of 1 MiB."""
    hidden = [nn.Sequential(nn.Linear(_FEATURES, _FEATURES), nn.ReLU()) for _ in range(count)]
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(_FEATURES), *hidden, nn.AdaptiveAvgPool1d(10))


class MethodTrainer:
    """Trains a model of its own with one method, on fixed random data."""

    def __init__(self, method: str, batch: int, buckets: int | None = None) -> None:
        torch.manual_seed(0)
        cap = 1 if buckets is not None else None  # None: DDP's default, a small first bucket, then 25 MiB each
        self.method = method
        model = cuda_convnet() if buckets is None else layers(buckets)
        self.model = DistributedDataParallel(model, bucket_cap_mb=1000 if single_bucket(method) else cap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.link: Link | None = apply_method(self.model, method, optimizer=self.optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(batch, 3, 32, 32, generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)

    def steps(self, count: int) -> None:
        """Train for some steps."""
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()

    def measure(self, count: int) -> dict[str, Any]:
        """Train for some steps and return the mean seconds, bytes and CPU seconds of a step."""
        dist.barrier()
        before, (hook, trips, messages) = interface_bytes("eth0") or (0, 0), _counters(self.link)
        cpu, began = _cpu_seconds(), time.perf_counter()
        self.steps(count)
        # A step ends when all ranks' messages have arrived. The barrier is not timed, because it takes round trips.
        took, spent = time.perf_counter() - began, _cpu_seconds() - cpu
        dist.barrier()
        after, (hook_now, trips_now, messages_now) = interface_bytes("eth0") or (0, 0), _counters(self.link)
        return {
            "method": self.method,
            "step": took / count,
            "sent": (after[0] - before[0]) / count,
            "received": (after[1] - before[1]) / count,
            "hook_cpu": (hook_now - hook) / count,
            "cpu": spent / count,
            "exchange": repr(self.link.exchange) if self.link is not None else "",
            "round_trips": (trips_now - trips) / count if self.link is not None else None,
            "messages": (messages_now - messages) / count,
        }


def _cpu_seconds() -> float:
    """Return the CPU seconds of all threads of this process, in user mode and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _counters(link: Link | None) -> tuple[float, float, float]:
    """Return a link's CPU seconds, the round trips that it waited for and the messages that it sent."""
    if link is None:
        return 0.0, 0.0, 0.0
    figures = link.stats()
    return float(figures["cpu_seconds"]), float(figures["round_trips"]), float(figures["messages_sent"])


def start_trainers(options: dict[str, Any]) -> list[MethodTrainer]:
    """Join the process group of the lab's ranks and warm up a trainer for every method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainers = [MethodTrainer(method, options["batch"], options.get("buckets")) for method in options["methods"]]
    for trainer in trainers:
        trainer.steps(options["warmup"])
    return trainers


def main() -> None:
    """Run one rank, which prints a record for each method and round."""
    options = json.loads(sys.argv[1])
    trainers = start_trainers(options)
    for round_number in range(options["rounds"]):
        for trainer in trainers:
            row = {"rank": dist.get_rank(), "round": round_number, **trainer.measure(options["steps"])}
            print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
