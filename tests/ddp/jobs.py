"""Small trainings that run on every rank of a test's cluster."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw


class Net(nn.Module):
    """About 30,000 parameters in tensors large and small: several buckets at a bucket size of 40 kB."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * width),
            nn.ReLU(), nn.Linear(2 * width, 4)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


BUCKET_MB = 0.04


def make(seed: int = 0, *, bucket_mb: float = BUCKET_MB, **options: Any) -> DDP:
    torch.manual_seed(seed)
    return DDP(Net(), bucket_cap_mb=bucket_mb, **options)


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, :4] * 2.0 + x[:, 4:8]).argmax(1)


def train(model: DDP, rank: int, steps: range, optimizer: torch.optim.Optimizer) -> float:
    loss = torch.zeros(())
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss)


def digest(model: nn.Module) -> list[int]:
    from thinwire.replicas import checksum

    return [checksum(p) for p in model.parameters()]


def replicas(rank: int, codec: Any, exchange: Any, steps: int) -> tuple[list[int], int, float]:
    """Train; return checksums, the number of buckets and the accuracy."""
    model = make()
    link = tw.attach(model, codec, exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, rank, range(steps), optimizer)
    x, y = batch(99, 99, 512)
    accuracy = float((model(x).argmax(1) == y).float().mean())
    jobs = len(link._stats.per_parameter)
    return digest(model), jobs, accuracy
