"""A model whose gradients are known exactly, to account for every bit of them: given = applied + kept in residuals."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.link.link import Link

SIZES = {"a": 3000, "b": 5000, "c": 40, "d": 40000}


class Probe(nn.Module):
    """The loss is linear in the parameters, so that the coefficients are the gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, n in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(n, dtype=dtype)))

    def forward(self, coefficients: dict[str, Tensor]) -> Tensor:
        parameters = dict(self.named_parameters())
        return torch.stack([(parameters[n] * c).sum() for n, c in coefficients.items()]).sum()


def coefficients(rank: int, step: int, leave_out: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    found = {}
    for name, n in SIZES.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {step} {name}".encode()))
        found[name] = torch.randn(n, generator=generator).to(dtype)
    return {name: c for name, c in found.items() if name not in leave_out}


def make(*, dtype: torch.dtype = torch.float32, **options: Any) -> DDP:
    """Three buckets from the second step on: d, c and b, a."""
    return DDP(Probe(dtype), bucket_cap_mb=0.01, **options)


@dataclass
class Account:
    """One rank's sums, in double precision."""

    given: dict[str, Tensor] = field(default_factory=lambda: {n: torch.zeros(s).double() for n, s in SIZES.items()})
    applied: dict[str, Tensor] = field(default_factory=lambda: {n: torch.zeros(s).double() for n, s in SIZES.items()})
    held: dict[str, Tensor] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)

    def give(self, gradients: dict[str, Tensor], unit: float = 1.0) -> None:
        for name, gradient in gradients.items():
            self.given[name] += unit * gradient.double()

    def apply(self, model: nn.Module, unit: float = 1.0) -> bool:
        """Take in the gradients as an optimizer would, unless one is not finite; whether it did."""
        found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        if not all(bool(g.isfinite().all()) for g in found.values()):
            return False
        for name, gradient in found.items():
            self.applied[name] += unit * gradient.double()
        return True

    def close(self, link: Link, unit: float = 1.0) -> "Account":
        residual = link.state_dict()["codec"]["residuals"]
        self.held = {n: unit * residual.get(n, {}).get("residual", torch.zeros(s)).double() for n, s in SIZES.items()}
        return self


def missing(accounts: list[Account], applied_on: int = 0) -> float:
    """The largest difference between what all ranks gave and what was applied or is held."""
    worst = 0.0
    for name in SIZES:
        given = torch.stack([a.given[name] for a in accounts]).sum(0)
        held = torch.stack([a.held[name] for a in accounts]).sum(0)
        worst = max(worst, float((len(accounts) * accounts[applied_on].applied[name] + held - given).abs().max()))
    return worst


def backward(model: DDP, gradients: dict[str, Tensor]) -> None:
    model(gradients).backward()


Scenario = Callable[[DDP, int, int, Account], None]


def plain(model: DDP, rank: int, step: int, account: Account) -> None:
    gradients = coefficients(rank, step)
    account.give(gradients)
    backward(model, gradients)


def unused(model: DDP, rank: int, step: int, account: Account) -> None:
    """b is not used by rank 0 at odd steps, a by nobody at every third."""
    leave_out = ("b" if rank == 0 and step % 2 else "") + ("a" if step % 3 == 1 else "")
    gradients = coefficients(rank, step, leave_out)
    account.give(gradients)
    backward(model, gradients)
    account.seen.append([n.removeprefix("module.") for n, p in model.named_parameters() if p.grad is None])


def accumulated(model: DDP, rank: int, step: int, account: Account) -> None:
    for part in range(3):
        gradients = coefficients(rank, 10 * step + part)
        account.give(gradients)
        if part < 2:
            with model.no_sync():
                backward(model, gradients)
        else:
            backward(model, gradients)


def run(
    rank: int, codec: Any, exchange: Any, scenario: Scenario, steps: int, options: dict[str, Any] | None = None
) -> Account:
    """Steps of a scenario; attach options by default, DDP's in `options`."""
    model = make(**(options or {}))
    link = tw.attach(model, codec, exchange=exchange)
    account = Account()
    for step in range(steps):
        model.zero_grad()
        scenario(model, rank, step, account)
        assert account.apply(model)
    account.close(link)
    link.detach()
    return account
