"""Small trainings that run on every rank of a test's cluster."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.codec.encode import BucketViews
from thinwire.exchange.channel import checksum


class Net(nn.Module):
    """About 50,000 parameters: several buckets at 40 kB, one tensor that ScatterReduce cuts up, small ones too."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4 * width),
            nn.ReLU(), nn.Linear(4 * width, 4)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


# Megabytes per bucket, by the number of buckets that they give after the first step.
BUCKETS = {1: 25.0, 2: 0.04, 3: 0.01, 4: 0.005}


def make(seed: int = 0, *, buckets: int = 4, **options: Any) -> DDP:
    torch.manual_seed(seed)
    return DDP(Net(), bucket_cap_mb=BUCKETS[buckets], **options)


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, :4] * 2.0 + x[:, 4:8]).argmax(1)


def train(model: nn.Module, rank: int, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model: nn.Module) -> float:
    x, y = batch(99, 99, 1024)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def digest(model: nn.Module) -> list[int]:
    return [checksum(p) for p in model.parameters()]


def buckets_of(model: DDP) -> tuple[int, int]:
    """The number of buckets at the first step, and after they were rebuilt."""
    data = model._get_ddp_logging_data()
    return len(data["bucket_sizes"].split(",")), len([s for s in data["rebuilt_bucket_sizes"].split(",") if s.strip()])


Reached = dict[str | None, tuple[list[int], int, float]]


def replicas(rank: int, codec: Any, exchange: Any, steps: int, buckets: int = 3) -> tuple[list[int], int, float]:
    """Train; return checksums, the number of buckets after the first step, and the accuracy."""
    model = make(buckets=buckets)
    link = tw.attach(model, codec, exchange=exchange)
    train(model, rank, range(steps), torch.optim.SGD(model.parameters(), lr=0.1))
    link.detach()
    return digest(model), buckets_of(model)[1], accuracy(model)


def presets(rank: int, names: list[str], exchange: str, steps: int) -> dict[str, tuple[list[int], int, float]]:
    """The same for many presets in one process group."""
    return {name: replicas(rank, name, exchange, steps) for name in names}


def converge(rank: int, names: list[str | None], steps: int, rate: float) -> Reached:
    """As `replicas`, while the learning rate falls to zero; None stands for plain DDP."""
    reached: Reached = {}
    for name in names:
        model = make(buckets=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
        link = tw.attach(model, name, exchange="gather", optimizer=optimizer) if name else None
        for step in range(steps):
            train(model, rank, range(step, step + 1), optimizer)
            schedule.step()
        reached[name] = digest(model), buckets_of(model)[1], accuracy(model)
        if link:
            link.detach()
    return reached


def together(rank: int, steps: int) -> tuple[list[int], list[int]]:
    """Train with small buckets exchanged together; checksums, and elements per exchange of the last step."""
    from thinwire.tune import forecast as module

    before, module.JOINED_BELOW = module.JOINED_BELOW, 1 << 19
    seen: list[int] = []
    given: list[Any] = []  # the tensors of every exchange
    try:
        model = make()
        link = tw.attach(model, 0.05, exchange="gather")
        stages = link.exchange.stages

        def watched(bucket: Any) -> Any:
            seen.append(sum(bucket.numels))
            given.append(bucket.tensors)
            return stages(bucket)

        link.exchange.stages = watched  # type: ignore[method-assign]
        train(model, rank, range(steps), torch.optim.SGD(model.parameters(), lr=0.1))
        link.detach()
    finally:
        module.JOINED_BELOW = before
    # The encoder recognises the object, so that it need not be made anew in every step.
    assert isinstance(given[-1], BucketViews) and given[-1] is given[-2]
    return digest(model), seen
