"""The parameter server trains as one process does, in every mode, with both directions compressed."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.server.serving import Threads, accuracy, batch, gradients, residual, serving, small_net, train
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import NoFeedback
from thinwire.codec.selection import TopK
from thinwire.codec.values import Float32
from thinwire.server.server import Server
from thinwire.server.worker import Worker

DENSE = Codec(TopK(1.0), Float32(), NoFeedback())


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 if momentum else 0.4, momentum=momentum)


def reference(workers: int, steps: int, reduce: str) -> nn.Module:
    """Train in one process: add the gradients of all workers in turn, then make one step of the optimizer."""
    model = small_net()
    optimizer = sgd(model)
    for step in range(steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for slot in range(workers):
            model.zero_grad()
            gradients(model, step, slot)
            for t, p in zip(total, model.parameters(), strict=True):
                assert p.grad is not None
                t += p.grad
        for t, p in zip(total, model.parameters(), strict=True):
            p.grad = t / workers if reduce == "mean" else t
        optimizer.step()
    return model


def trained(
    workers: int, steps: int, push: Any = DENSE, overlap: bool = True, momentum: float = 0.9, **options: Any
) -> Server:
    model = small_net()
    server = Server(model, sgd(model, momentum), expect=workers, **options)
    threads = Threads()
    with serving(server, max_steps=steps) as address:
        for slot in range(workers):
            threads.start(lambda slot=slot: train(address, slot, codec=push, overlap=overlap))
        threads.join()
    return server


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("overlap", [True, False])
def test_bsp_equals_one_process_bit_for_bit(reduce: str, overlap: bool) -> None:
    server = trained(3, 12, overlap=overlap, reduce=reduce, cut=1000, codec=None)
    assert same_bits(server.model, reference(3, 12, reduce))


def test_a_bound_of_zero_is_bulk_synchronous_bit_for_bit() -> None:
    bsp = trained(3, 12, push="percentile90", codec=0.1, mode="bsp")
    ssp = trained(3, 12, push="percentile90", codec=0.1, mode="ssp", bound=0)
    assert same_bits(bsp.model, ssp.model)


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("bsp", "fifo"),
        ("bsp", "filo"),
        ("bsp", "stalest"),
        ("bsp", "forward"),
        ("ssp", "stalest"),
        ("async", "forward"),
    ],
)
def test_every_mode_and_policy_learns_with_both_ways_compressed(mode: str, policy: str) -> None:
    server = trained(3, 100, push=0.2, codec=0.2, momentum=0.0, mode=mode, policy=policy, cut=2000, window=3000)
    assert accuracy(server.model) > 0.7  # a guess is right in 25 % of cases
    assert all(p.isfinite().all() for p in server.model.parameters())


def test_worker_and_server_differ_by_the_servers_residual() -> None:
    model = small_net()
    server = Server(model, sgd(model), expect=2, codec=0.05, cut=2000)
    threads = Threads()
    workers: dict[int, nn.Module] = {}

    def work(slot: int) -> None:
        net = small_net(slot + 7)
        with Worker(address, net, 0.1, slot=slot) as worker:
            for _ in range(30):
                gradients(net, worker.clock, slot)
                worker.step()
            worker.wait()
            workers[slot] = net
            meeting.wait(30)
            meeting.wait(30)

    meeting = threading.Barrier(3)
    with serving(server) as address:
        for slot in range(2):
            threads.start(work, slot)
        meeting.wait(60)
        held = 0
        for member in server.membership.active.values():
            names = dict(workers[member.slot].named_parameters())
            for layer, part in server.layout.places():
                pieces = server.layout.layers[layer].parts[part]
                for piece, missing in zip(pieces, residual(server.replicas, member.session, layer, part), strict=True):
                    mine = dict(model.named_parameters())[piece.parameter].detach().view(-1)[piece.begin : piece.end]
                    theirs = names[piece.parameter].detach().view(-1)[piece.begin : piece.end]
                    assert torch.equal(mine - theirs, missing)
                    held += int((missing != 0).sum())
        assert held > 0  # otherwise the test proves nothing
        meeting.wait(30)
        threads.join()
    assert same_bits(workers[0], workers[1])


class Branched(nn.Module):
    """A layer that is always used, and one that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(20, 4), nn.Linear(20, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.always(x) + self.sometimes(x) if both else self.always(x)
        return out


def test_a_layer_that_a_step_does_not_use_does_not_run_ahead() -> None:
    """A layer that this step does not use still waits for workers that have not pushed its last step."""
    server = Server(model := Branched(), torch.optim.SGD(model.parameters(), lr=0.1), expect=2, codec=None)
    threads = Threads()

    def work(slot: int) -> None:
        net = Branched()
        with Worker(address, net, DENSE, slot=slot) as worker:
            while worker.stopped is None:
                net(batch(worker.clock, slot)[0], worker.clock % 2 == slot).square().mean().backward()
                time.sleep(0.05 * slot)  # layers that were not used are pushed by `step`
                worker.step()

    with serving(server, max_steps=8) as address:
        for slot in range(2):
            threads.start(work, slot)
        threads.join()
    assert server.clock.step == 8


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_the_last_step_before_a_worker_leaves_counts(transport: str) -> None:
    server = Server(model := small_net(), sgd(model), expect=1, codec=None)
    with serving(server, transport=transport) as address:
        train(address, 0, codec=DENSE, steps=5)
        deadline = time.monotonic() + 20
        while server.membership.active and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(server.clock.lowest) == {5}
    assert same_bits(server.model, reference(1, 5, "mean"))


def test_a_slow_worker_that_makes_progress_is_not_evicted() -> None:
    """With bounded staleness a slow worker may always be the last, which is not a lack of progress."""
    server = Server(model := small_net(), sgd(model), expect=2, codec=None, mode="ssp", bound=3, stall=0.4)
    threads = Threads()
    with serving(server, max_steps=30) as address:
        for slot in range(2):
            threads.start(
                lambda slot=slot: train(address, slot, codec=DENSE, each=lambda worker: time.sleep(0.05 if slot else 0))
            )
        threads.join()
    assert server.membership.left == 0


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for a condition; return whether it holds in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_two_workers_that_hang_but_send_heartbeats_are_evicted() -> None:
    """Two data loaders that are stuck at the same step do not stop the training of the others."""
    server = Server(model := small_net(), sgd(model), expect=3, codec=None, timeout=20.0, stall=0.5)
    threads, released = Threads(), threading.Event()

    def hang(worker: Worker) -> None:
        if worker.clock == 2:
            released.wait(60.0)  # the client's thread sends heartbeats meanwhile

    with serving(server) as address:
        for slot in range(3):
            threads.start(
                lambda slot=slot: train(address, slot, codec=DENSE, each=hang if slot else lambda worker: None)
            )
        try:
            assert until(lambda: server.clock.step >= 6)
            assert server.membership.left == 2  # they do not join again before they continue
        finally:
            released.set()
        assert until(lambda: server.membership.joined == 5)
        server.stop("test")
        threads.join()
