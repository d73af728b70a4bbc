"""One rank of `thinwire bench ddp`: all methods in turn, in the same processes, round after round.

Run by the parent in the lab; prints one JSON line per method and round on every rank.
"""

import json
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.link.link import Link
from thinwire.tools.race.methods import apply_method, single_bucket
from thinwire.tools.race.training import interface_bytes
from thinwire.tools.recipes.convnet import cuda_convnet


class Contestant:
    """One method with a model of its own."""

    def __init__(self, method: str, batch: int) -> None:
        torch.manual_seed(0)
        cap = 1000 if single_bucket(method) else None  # else DDP's own: a small first bucket, then 25 MiB each
        self.method = method
        self.model = DistributedDataParallel(cuda_convnet(), bucket_cap_mb=cap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.link: Link | None = apply_method(self.model, method)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(batch, 3, 32, 32, generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()

    def measure(self, count: int) -> dict[str, Any]:
        dist.barrier()
        before, cpu = interface_bytes("eth0") or (0, 0), _own_cpu(self.link)
        process = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        self.steps(count)
        dist.barrier()
        took = time.perf_counter() - began
        after, spent = interface_bytes("eth0") or (0, 0), resource.getrusage(resource.RUSAGE_SELF)
        return {
            "method": self.method,
            "step": took / count,
            "sent": (after[0] - before[0]) / count,
            "received": (after[1] - before[1]) / count,
            "hook_cpu": (_own_cpu(self.link) - cpu) / count,
            "cpu": (spent.ru_utime + spent.ru_stime - process.ru_utime - process.ru_stime) / count,
            "exchange": repr(self.link.exchange) if self.link is not None else "",
        }


def _own_cpu(link: Link | None) -> float:
    return float(link.stats()["cpu_seconds"]) if link is not None else 0.0


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contestants = [Contestant(method, options["batch"]) for method in options["methods"]]
    for contestant in contestants:
        contestant.steps(options["warmup"])
    for round_number in range(options["rounds"]):
        for contestant in contestants:
            row = {"rank": dist.get_rank(), "round": round_number, **contestant.measure(options["steps"])}
            print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
