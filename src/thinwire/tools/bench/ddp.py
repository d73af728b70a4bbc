"""`thinwire bench ddp`: step time, traffic and communication overhead of each method on emulated hosts.

The model is the cuda-convnet of SparsifyGradients. Figures are medians over rounds. In every round each method is
measured once, in the same processes, so that changes in the machine's speed affect all methods alike.
"""

import json
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
from thinwire.tools.bench import run_in_lab
from thinwire.tools.options import table_of, write_json
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
    cpu_ms: float
    exchange: str


def run(workers: int, rate: str, options: dict[str, Any], json_file: Path | None) -> None:
    """Measure all methods, print a table and write the figures."""
    rows = measure(workers, rate, options)
    _show(rows, workers, rate)
    write_json(json_file, {"workers": workers, "rate": rate, **options, "rows": [asdict(row) for row in rows]})


def measure(workers: int, rate: str, options: dict[str, Any]) -> list[MethodFigures]:
    """Run all methods in a lab and return their figures."""
    total = options["rounds"] * len(options["methods"]) * workers
    records = run_in_lab(workers, rate, ["thinwire.tools.bench.ddp", json.dumps(options)], ("ROW",), total=total)

    def median(method: str, key: str) -> float:
        return statistics.median(float(row[key]) for _, row in records if row["method"] == method)

    rows, infinite = [], median("infinite", "step")
    for name in options["methods"]:
        step, sent, received, hook, cpu = (median(name, key) for key in ("step", "sent", "received", "hook_cpu", "cpu"))
        exchange = next(row["exchange"] for _, row in records if row["method"] == name)
        overhead = step / infinite - 1.0
        rows.append(MethodFigures(name, 1e3 * step, overhead, sent, received, 1e3 * hook, 1e3 * cpu, exchange))
    return rows


def _show(rows: list[MethodFigures], workers: int, rate: str) -> None:
    dense = next((row.step_ms for row in rows if row.name == "dense"), None)
    shown = [
        {
            "method": row.name,
            "step ms": f"{row.step_ms:,.1f}",
            "overhead": f"{row.overhead:+.1%}",
            "MB out": f"{row.bytes_sent / 1e6:.3f}",
            "MB in": f"{row.bytes_received / 1e6:.3f}",
            "vs dense": f"{dense / row.step_ms:.2f}x" if dense else "",
            "hook": f"{row.hook_cpu_ms:.2f}" if row.exchange else "",
            "exchange": row.exchange,
        }
        for row in rows
    ]
    caption = "MB: per host and step, counted by the kernel. hook: CPU time of the hook in ms"
    Console().print(table_of(shown, title=f"cuda-convnet, {workers} workers at {rate}", caption=caption))


class MethodTrainer:
    """Trains a model of its own with one method, on fixed random data."""

    def __init__(self, method: str, batch: int) -> None:
        torch.manual_seed(0)
        cap = 1000 if single_bucket(method) else None  # None: DDP's default, a small first bucket, then 25 MiB each
        self.method = method
        self.model = DistributedDataParallel(cuda_convnet(), bucket_cap_mb=cap)
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
        before, hook = interface_bytes("eth0") or (0, 0), _hook_cpu(self.link)
        cpu, began = time.process_time(), time.perf_counter()
        self.steps(count)
        dist.barrier()
        took, spent = time.perf_counter() - began, time.process_time() - cpu
        after = interface_bytes("eth0") or (0, 0)
        return {
            "method": self.method,
            "step": took / count,
            "sent": (after[0] - before[0]) / count,
            "received": (after[1] - before[1]) / count,
            "hook_cpu": (_hook_cpu(self.link) - hook) / count,
            "cpu": spent / count,
            "exchange": repr(self.link.exchange) if self.link is not None else "",
        }


def _hook_cpu(link: Link | None) -> float:
    return float(link.stats()["cpu_seconds"]) if link is not None else 0.0


def start_trainers(options: dict[str, Any]) -> list[MethodTrainer]:
    """Join the process group of the lab's ranks and warm up a trainer for every method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainers = [MethodTrainer(method, options["batch"]) for method in options["methods"]]
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
