"""`thinwire bench fsdp`: step time and traffic between machines of a model that FSDP2 shards within each machine.

Every emulated host is a machine with several ranks, which share one replica of the model. Ranks of a machine reach one
another without limit; between machines the rate holds. Methods are measured in turns, in the same processes.
"""

import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.hooks.attach import attach
from thinwire.link.link import Link
from thinwire.tools.bench import BenchLab, judge
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.options import by_delay, caption, table_of, write_json
from thinwire.tools.race.training import interface_bytes
from thinwire.tools.recipes import get_recipe

# Steps of `infinite`: the machines train without one another, as if the network between them took no time.
# `hsdp` is native HSDP of PyTorch, whose replicas average uncompressed gradients.
BAR = 1.25  # times the step of `infinite` that a compressed step may take


@dataclass(frozen=True)
class ShardedFigures:
    """One method's figures: milliseconds and bytes are per step, bytes also per machine."""

    name: str
    step_ms: float
    ratio: float  # to the step without communication between machines
    bytes_sent: float
    bytes_received: float
    hook_cpu_ms: float
    why: str


def run(
    machines: int, ranks: int, settings: list[LinkSettings], options: dict[str, Any], json_file: Path | None
) -> int:
    """Measure all methods with each setting of the links, print tables, write the figures; 1 if a bar was missed."""
    figures, judged = [], []
    for links in settings:
        lab = BenchLab(links)
        rows, parameters = measure(machines, ranks, lab, options)
        setup = {"machines": machines, "ranks": ranks, **lab.to_json(), **options, "parameters": parameters}
        _show(rows, setup, lab)
        bars = {
            f"{row.name}: step without communication / step": (1.0 / row.ratio, 1.0 / BAR)
            for row in rows
            if row.name not in ("infinite", "hsdp")
        }
        figures.append({**setup, "rows": [asdict(row) for row in rows], "bars": bars})
        judged.append((links, bars))
    write_json(json_file, by_delay(figures))
    return judge(judged)


def measure(machines: int, ranks: int, lab: BenchLab, options: dict[str, Any]) -> tuple[list[ShardedFigures], int]:
    """Run all methods in a lab; return their figures and the number of the model's parameters."""
    argv = ["thinwire.tools.bench.fsdp", json.dumps({**options, "machines": machines})]
    total = options["rounds"] * len(options["methods"]) * machines * ranks
    records = lab.run(machines, argv, ("ROW",), total=total, per_host=ranks)

    def median(method: str, key: str) -> float:
        return statistics.median(float(row[key]) for _, row in records if row["method"] == method)

    rows = []
    for name in options["methods"]:
        step, sent, received, hook = (median(name, key) for key in ("step", "sent", "received", "hook_cpu"))
        why = next(row["why"] for _, row in records if row["method"] == name)
        rows.append(
            ShardedFigures(name, 1e3 * step, step / median("infinite", "step"), sent, received, 1e3 * hook, why)
        )
    return rows, int(records[0][1]["parameters"])


def _show(rows: list[ShardedFigures], setup: dict[str, Any], lab: BenchLab) -> None:
    native = next((row.step_ms for row in rows if row.name == "hsdp"), None)
    shown = [
        {
            "method": row.name,
            "step ms": f"{row.step_ms:,.1f}",
            "x infinite": f"{row.ratio:.2f}",
            "MB out": f"{row.bytes_sent / 1e6:.3f}",
            "MB in": f"{row.bytes_received / 1e6:.3f}",
            "vs hsdp": f"{native / row.step_ms:.2f}x" if native else "",
            "hook": f"{row.hook_cpu_ms:.2f}" if row.why else "",
        }
        for row in rows
    ]
    title = (
        f"{setup['recipe']}, {setup['parameters'] / 1e6:.1f} M parameters, batch {setup['batch']}, "
        f"{setup['machines']} machines x {setup['ranks']} ranks, machines {lab.links}"
    )
    counted = "MB: per machine and step, counted by the kernel. hook: CPU time of a rank's hook in ms"
    Console().print(table_of(shown, title=title, caption=caption(counted, lab.note)))


class ShardedTrainer:
    """Trains a sharded model of its own with one method, on fixed data."""

    def __init__(self, method: str, recipe: str, batch: int, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        found = get_recipe(recipe)
        model: Any = found.model()
        self.method = method
        over = mesh if method == "hsdp" else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=over)
        self.model: Any = fully_shard(model, mesh=over)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.link = self._attach(mesh)
        rank = dist.get_rank()
        self.x, self.y = found.load(None).train.batch(range(rank * batch, (rank + 1) * batch))

    def _attach(self, mesh: DeviceMesh) -> Link | None:
        if self.method in ("infinite", "hsdp"):
            return None
        if self.method == "update":
            return attach(self.model, mesh=mesh, optimizer=self.optimizer)
        codec = float(self.method) if self.method.replace(".", "").isdigit() else self.method
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Adam would train worse with gradients that come late; here time counts
            return attach(self.model, codec, mesh=mesh, optimizer=self.optimizer, domain="gradient")

    def steps(self, count: int) -> None:
        """Train for some steps."""
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()

    def measure(self, count: int) -> dict[str, Any]:
        """Train for some steps and return the mean seconds, bytes and CPU seconds of a step."""
        dist.barrier()
        before, hook = interface_bytes("eth0") or (0, 0), self._hook_cpu()
        began = time.perf_counter()
        self.steps(count)
        dist.barrier()
        took = time.perf_counter() - began
        after = interface_bytes("eth0") or (0, 0)
        return {
            "method": self.method,
            "step": took / count,
            "sent": (after[0] - before[0]) / count,
            "received": (after[1] - before[1]) / count,
            "hook_cpu": (self._hook_cpu() - hook) / count,
            "why": self.link.why if self.link is not None else "",
            "parameters": self.parameters,
        }

    def _hook_cpu(self) -> float:
        return float(self.link.stats()["cpu_seconds"]) if self.link is not None else 0.0


def main() -> None:
    """Run one rank, which prints a record for each method and round."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (options["machines"], dist.get_world_size() // options["machines"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    trainers = [ShardedTrainer(each, options["recipe"], options["batch"], mesh) for each in options["methods"]]
    for trainer in trainers:
        trainer.steps(options["warmup"])
    for round_number in range(options["rounds"]):
        for trainer in trainers:
            row = {"rank": dist.get_rank(), "round": round_number, **trainer.measure(options["steps"])}
            print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
