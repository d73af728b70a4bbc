"""A small Transformer reaches the same loss sharded with FSDP2 as with DDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks.sharded import mesh_of
from thinwire.tools.recipes.gpt import gpt
from thinwire.tools.recipes.recipe import Splits

BATCH = 8  # contexts of each of four ranks


def _model(kind: str, mesh: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    net = gpt().model()
    if kind == "ddp":
        return DDP(net, process_group=mesh.get_group(0)), {}
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    return net, {"mesh": mesh}


def _loss(model: nn.Module, splits: Splits) -> float:
    model.eval()
    with torch.no_grad():
        x, y = splits.test.batch(range(400))
        return float(nn.functional.cross_entropy(model(x), y))


def trained(rank: int, kind: str, domain: str, steps: int) -> float:
    """The loss of two replicas of two shards, or of two DDP workers with the batches of two ranks each."""
    torch.set_num_threads(1)
    splits, mesh = gpt().load(None), mesh_of(4)
    model, options = _model(kind, mesh)
    if domain == "update":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    link = tw.attach(model, 0.01, optimizer=optimizer, **options)
    assert link.domain == domain
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], steps)
    for step in range(steps):
        ranks = [rank // 2 * 2, rank // 2 * 2 + 1] if kind == "ddp" else [rank]
        chosen = [BATCH * (4 * step + r) + i for r in ranks for i in range(BATCH)]
        x, y = splits.train.batch(chosen)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    loss = _loss(model, splits)
    link.detach()
    dist.barrier()
    return loss


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("domain", ["gradient", "update"])
def test_a_transformer_reaches_the_loss_of_ddp(cluster: Cluster, domain: str) -> None:
    found = {kind: cluster.run(trained, 4, kind, domain, 300, timeout=600) for kind in ("ddp", "fsdp")}
    print(domain, found)
    assert len(set(found["fsdp"])) == 1
    assert abs(found["fsdp"][0] / found["ddp"][0] - 1.0) < 0.01
