"""A hook that is not DDP's feeds a link: the library needs nothing of DDP below `thinwire.hooks.ddp`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.cluster import Cluster
from tests.link import jobs
from thinwire.link.assembly import LinkOptions, open_link
from thinwire.link.thread import Job


class PlainHook:
    """Averages the gradients of a plain module when `exchange` is called, in buckets of one layer."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        parameters = dict(module.named_parameters())
        self.layers = [dict(list(parameters.items())[i : i + 2]) for i in range(0, len(parameters), 2)]
        group = dist.distributed_c10d._get_default_group()
        self.link, _ = open_link(parameters, group, LinkOptions(**options), lambda: None)

    def exchange(self) -> None:
        futures = []
        for i, layer in enumerate(self.layers):
            buffer = torch.cat([p.grad.flatten() for p in layer.values() if p.grad is not None])
            parts = torch.split(buffer, [p.numel() for p in layer.values()])
            job = Job(buffer, dict(zip(layer, parts, strict=True)), first=i == 0, last=i == len(self.layers) - 1)
            futures.append((layer, job, self.link.submit(job)))
        for layer, job, future in futures:
            future.wait()
            for name, p in layer.items():
                p.grad = job.tensors[name].view_as(p)


def train(rank: int, codec: Any, steps: int) -> tuple[list[int], float, int]:
    torch.manual_seed(0)
    model = jobs.Net()
    hook = PlainHook(model, codec=codec, check_every=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        hook.exchange()
        optimizer.step()
    figures = hook.link.stats()
    hook.link.detach()
    return jobs.digest(model), jobs.accuracy(model), figures["steps"]


def test_a_hook_without_ddp_trains_equal_replicas(cluster: Cluster) -> None:
    untrained = jobs.accuracy(jobs.Net())
    for codec in (0.05, "dgc", "auto"):
        first, second = cluster.run(train, 2, codec, 30)
        assert first[0] == second[0] and first[2] == 30
        assert first[1] > untrained + 0.1
