"""Trainings whose results are known bit for bit: gradients are whole numbers times powers of two, from a hash."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.exchange
from thinwire.exchange.channel import checksum

SIZES = {"a": 3000, "b": 5000, "c": 40, "d": 40000, "e": 231, "f": 9000}
STEPS = 9
BAD = {(1, 4, "b")}  # rank, step and parameter whose gradient is not finite


class Linear(nn.Module):
    """The loss is linear in the parameters, so that the coefficients are the gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, n in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(n)))

    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * coefficients[name]).sum() for name, p in self.named_parameters()]).sum()


def coefficients(rank: int, step: int, *, finite: bool = False) -> dict[str, Tensor]:
    """Gradients with a few large entries; the same on every machine."""
    found = {}
    for place, (name, n) in enumerate(SIZES.items()):
        x = np.arange(n, dtype=np.uint64) + np.uint64(1_000_003 * (100 * step + 10 * place + rank + 1))
        for shift, factor in ((33, 0xFF51AFD7ED558CCD), (29, 0xC4CEB9FE1A85EC53), (32, 1)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        u = (x >> np.uint64(44)).astype(np.float64) / (1 << 20) - 0.5
        found[name] = torch.from_numpy((64.0 * u * u * u * u * u).astype(np.float32))
        if (rank, step, name) in BAD and not finite:
            found[name][7] = torch.inf
    return found


EIGHT = tw.Codec(0.05, tw.Bits(8))
CASES: dict[str, tuple[int, Any, Any, Any]] = {
    "gather": (3, EIGHT, "gather", "gradient"),
    "scatter": (3, EIGHT, "scatter-reduce", "gradient"),
    "scatter, percentile": (4, "percentile90", "scatter-reduce", "gradient"),
    "mixed": (4, EIGHT, tw.exchange.ScatterReduce(gather_below=2000), "gradient"),
    "two": (2, "8bit", "gather", "gradient"),
    "machines": (4, EIGHT, tw.exchange.Hierarchical(per_machine=2), "gradient"),
    "machines, mixed": (
        4,
        EIGHT,
        tw.exchange.Hierarchical(tw.exchange.ScatterReduce(gather_below=700), per_machine=2),
        "gradient",
    ),
    "rotate": (3, tw.Codec(tw.Rotate(0.3), tw.Bits(4)), "scatter-reduce", "gradient"),
    "dense": (3, EIGHT, "dense", "gradient"),
    "updates": (3, EIGHT, "scatter-reduce", "update"),
}


# By case: checksums of the model, of all ranks' residuals, and the number of skipped steps. They were computed when
# buckets were still exchanged one after the other, with each receive posted when its exchange began.
GOLDEN: dict[str, tuple[int, list[int], int]] = {
    "gather": (0xDA53F7B8, [0xE5ACF483, 0x3893A1DC, 0x34C9A88C], 1),
    "scatter": (0x806DF8DC, [0x09535468, 0x1B0F9FCC, 0x72A5CBB7], 1),
    "scatter, percentile": (0x5325EBC2, [0x00000000, 0x00000000, 0x00000000, 0x00000000], 1),
    "mixed": (0x5BE4FDFC, [0x52B62458, 0x915D9D56, 0xC04842D5, 0xFD176B77], 1),
    "two": (0x492286B4, [0x5ABC765B, 0x43C9AB13], 1),
    "machines": (0x3115BF45, [0x7CA92F12, 0x00000000, 0xB28D9AF4, 0x00000000], 1),
    "machines, mixed": (0x32E040C4, [0xD5EE5BE0, 0x00000000, 0x6296D139, 0x00000000], 1),
    "rotate": (0x4CC57233, [0x734D99C6, 0xF4FAFA72, 0x18BE2401], 1),
    "dense": (0x57DC8DB6, [0x00000000, 0x00000000, 0x00000000], 0),
    "updates": (0x74CC14C7, [0x235C39BB, 0xFD233607, 0x48C7E260], 1),
}


def train(rank: int, case: str, late: int | None = None) -> tuple[int, int, int]:
    """Train in several buckets; returns checksums of the model and of this rank's residual, and skipped steps.

    late: a rank that comes late to the last buckets of every third step, so that the others have several under way.
    """
    _, codec, exchange, domain = CASES[case]
    module = Linear()
    model = DDP(module, bucket_cap_mb=0.01)
    step = 0
    if rank == late:
        module.get_parameter("b").register_hook(lambda grad: time.sleep(0.1 if step % 3 == 2 else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    link = tw.attach(model, codec, exchange=exchange, optimizer=optimizer, domain=domain)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(coefficients(rank, step)).backward()
        if domain == "update" or all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            optimizer.step()
    skipped = link.stats()["skipped"]
    held = link.state_dict()["codec"]["residuals"]
    kept = [t.reshape(-1) for name in sorted(held) for t in held[name].values()]
    link.detach()
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return checksum(parameters), checksum(torch.cat(kept)) if kept else 0, skipped
