"""A server trains models with buffers, several types, and tied, frozen or unused parameters."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.server.serving import serving, small_net
from thinwire.codec.selection import TopK
from thinwire.server.server import Server
from thinwire.server.worker import Worker

Net = Callable[[], nn.Module]


def served(
    net: nn.Module, work: Callable[[Worker, nn.Module], None], other: nn.Module | None = None, **options: Any
) -> Server:
    """Train a net with a server and one worker, without compression, by SGD with lr 0.1."""
    server = Server(net, torch.optim.SGD(net.parameters(), lr=0.1), codec=None, cut=500, timeout=5.0)
    model = copy.deepcopy(net) if other is None else other
    with serving(server) as address, Worker(address, model, "dense", **options) as worker:
        work(worker, model)
        worker.wait()
    return server


def alone(net: nn.Module, steps: int, loss: Callable[[nn.Module, int], Tensor], clip: float | None = None) -> nn.Module:
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def sample(step: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(step))


def loss_of(net: nn.Module, step: int) -> Tensor:
    loss: Tensor = (net(sample(step)) ** 2).mean()
    return loss


class Tied(nn.Module):
    """The second module is used before the one that the parameter is named after."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)
        self.first.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """Has a layer that no forward pass calls, and one that only odd steps call."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.always, self.odd = nn.Linear(3, 3), nn.Linear(20, 4), nn.Linear(20, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.always(x)
        return y + self.odd(x) if self.calls % 2 else y


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("build", [Tied, Unused, small_net])
def test_a_model_trains_to_the_same_bits_as_without_a_server(build: Net, overlap: bool) -> None:
    torch.manual_seed(0)
    net = build()
    begun = copy.deepcopy(net)

    def work(worker: Worker, model: nn.Module) -> None:
        for step in range(6):
            loss_of(model, step).backward()
            worker.step()

    server = served(net, work, overlap=overlap)
    assert equal(server.model, alone(begun, 6, loss_of))


def test_frozen_parameters_stay_and_need_no_optimizer() -> None:
    net = small_net()
    first = net[0]
    assert isinstance(first, nn.Linear)
    first.requires_grad_(False)
    before = first.weight.clone()
    begun = copy.deepcopy(net)

    def work(worker: Worker, model: nn.Module) -> None:
        for step in range(4):
            loss_of(model, step).backward()
            worker.step()

    server = served(net, work)
    assert torch.equal(first.weight, before)
    assert equal(server.model, alone(begun, 4, loss_of))


def test_gradients_are_accumulated_and_clipped() -> None:
    net, begun = small_net(), small_net()

    def twice(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, step) + loss_of(model, step + 100)

    def accumulate(worker: Worker, model: nn.Module) -> None:
        for step in range(4):
            with worker.accumulate():
                loss_of(model, step).backward()
            loss_of(model, step + 100).backward()
            worker.step()

    server = served(net, accumulate)
    expected = alone(begun, 4, twice)
    assert all(
        torch.allclose(p, q, atol=1e-6) for p, q in zip(server.model.parameters(), expected.parameters(), strict=True)
    )

    def clip(worker: Worker, model: nn.Module) -> None:
        for step in range(4):
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            worker.step()

    assert equal(served(small_net(), clip, overlap=False).model, alone(begun, 4, loss_of, clip=0.01))


def test_workers_may_have_other_types_and_memory_layouts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    x = torch.randn(4, 3, 8, 8)
    for other in (
        copy.deepcopy(net).bfloat16(),
        copy.deepcopy(net).double(),
        copy.deepcopy(net).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    ):
        kind = next(other.parameters()).dtype

        def work(worker: Worker, model: nn.Module, kind: torch.dtype = kind) -> None:
            for _ in range(3):
                model(x.to(kind)).square().mean().backward()
                worker.step()
            worker.wait()
            for name, p in model.named_parameters():
                exact = worker.values(name).view(p.shape)
                assert torch.equal(exact.to(kind), p)

        mine = copy.deepcopy(net)
        served(mine, work, other)
        assert not equal(mine, net)
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.to(kind), q)


class Normed(nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))  # type: ignore[no-any-return]

    def statistics(self) -> tuple[Tensor, int]:
        assert self.norm.running_mean is not None
        assert self.norm.num_batches_tracked is not None
        return self.norm.running_mean, int(self.norm.num_batches_tracked)


def test_the_server_takes_buffers_of_a_worker_and_a_new_worker_takes_the_servers() -> None:
    net = Normed()

    def work(worker: Worker, model: nn.Module) -> None:
        for step in range(25):
            loss_of(model, step).backward()
            worker.step()

    server = served(net, work)
    means, batches = net.statistics()
    assert batches >= 10
    assert not torch.equal(means, torch.zeros(6))
    with serving(again := Server(net, torch.optim.SGD(net.parameters(), lr=0.1))) as address:
        fresh = Normed()
        with Worker(address, fresh, 0.1):
            assert torch.equal(fresh.statistics()[0], means)
            assert fresh.statistics()[1] == batches
    assert again.clock.step == 0
    assert server.clock.step == 25


@pytest.mark.parametrize(
    ("model", "reason"),
    [(nn.ReLU, "no parameter"), (lambda: nn.Linear(2, 2).bfloat16(), "float32 on the CPU")],
)
def test_unsupported_models_are_refused(model: Net, reason: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=reason):
        Server(net, torch.optim.SGD([nn.Parameter(torch.ones(1)), *net.parameters()], lr=0.1))


def test_a_server_takes_addresses_and_paths_as_strings(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="expect and save_every count from 1, not 1 and 0"):
        Server(net, optimizer, save_every=0)
    server = Server(net, optimizer, codec=TopK(0.1), checkpoint=str(tmp_path / "saved"))
    assert server.run("tcp://127.0.0.1:0", max_steps=0)
    assert (tmp_path / "saved" / "server.pt").exists()


def test_a_second_backward_pass_is_an_error_that_says_what_to_do() -> None:
    def work(worker: Worker, model: nn.Module) -> None:
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"worker\.accumulate"):
            loss_of(model, 1).backward()
        worker.step()

    served(small_net(), work)
