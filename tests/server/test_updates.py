"""Workers with optimizers of their own push what these changed, and the server adds it."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.server.serving import Threads, accuracy, gradients, serving, small_net
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import NoFeedback
from thinwire.codec.selection import TopK
from thinwire.codec.values import Float32
from thinwire.errors import ServerError
from thinwire.server.server import Server
from thinwire.server.worker import Worker

DENSE = Codec(TopK(1.0), Float32(), NoFeedback())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def work(
    address: str,
    slot: int,
    make: Any,
    every: int,
    codec: Any = DENSE,
    each: Callable[[int, Worker], None] = lambda slot, worker: None,
) -> int:
    """Train until the server stops; returns the number of local steps. `each` is called before every step."""
    model, step = small_net(seed=slot + 100), 0
    with Worker(address, model, codec, slot=slot, optimizer=make(model), every=every) as worker:
        while worker.stopped is None:
            each(slot, worker)
            gradients(model, step, slot)
            worker.step()
            step += 1
    return step


def trained(
    workers: int, steps: int, make: Any, every: int, each: Any = lambda slot, worker: None, **options: Any
) -> tuple[Server, list[int]]:
    model = small_net()
    codec = options.pop("push", DENSE)
    server = Server(model, options.pop("outer", lambda model: None)(model), expect=workers, **options)
    threads, taken = Threads(), [0] * workers

    def one(slot: int, address: str) -> None:
        taken[slot] = work(address, slot, make, every, codec, each)

    with serving(server, max_steps=steps) as address:
        for slot in range(workers):
            threads.start(one, slot, address)
        threads.join()
    return server, taken


def locally(workers: int, rounds: int, every: int, make: Any) -> nn.Module:
    """Local steps in one process: every worker begins its round at the mean of all ends."""
    model = small_net()
    replicas = [small_net() for _ in range(workers)]
    optimizers = [make(replica) for replica in replicas]
    for number in range(rounds):
        for slot, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.load_state_dict(model.state_dict())
            for step in range(number * every, (number + 1) * every):
                optimizer.zero_grad()
                gradients(replica, step, slot)
                optimizer.step()
        with torch.no_grad():
            for p, *ends in zip(model.parameters(), *(r.parameters() for r in replicas), strict=True):
                p.copy_(torch.stack(list(ends)).mean(0))
    return model


@pytest.mark.parametrize("every", [1, 3])
def test_the_server_adds_the_mean_of_what_optimizers_changed(every: int) -> None:
    server, _ = trained(3, 5, adamw, every, codec=None)
    expected = locally(3, 5, every, adamw)
    assert server.domain == "update"
    for p, q in zip(server.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_an_outer_optimizer_takes_the_change_as_its_gradient() -> None:
    def halved(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    first = small_net()
    whole, _ = trained(1, 1, adamw, 2, codec=None)
    half, _ = trained(1, 1, adamw, 2, codec=None, outer=halved, domain="update")
    for start, p, q in zip(first.parameters(), whole.model.parameters(), half.model.parameters(), strict=True):
        torch.testing.assert_close(q - start, 0.5 * (p - start), rtol=1e-3, atol=1e-6)


def test_a_straggler_is_allowed_under_ssp() -> None:
    """SparseLoCo with stale rounds: the slow worker begins when the other one has finished two rounds without it."""
    before, ahead, leads = accuracy(small_net()), threading.Event(), [0]

    def uneven(slot: int, worker: Worker) -> None:
        if slot == 0:
            leads[0] = worker.clock
            if worker.clock == 2:
                ahead.set()
        else:
            assert ahead.wait(20.0), f"the fast worker has finished {leads[0]} rounds without the slow one"
            time.sleep(0.01)

    server, taken = trained(2, 12, adamw, 4, uneven, mode="ssp", bound=2, push=0.2, codec=0.5)
    assert accuracy(server.model) > before + 0.2
    assert min(taken) >= 4 * 12 - 4


def test_a_gradient_that_is_not_finite_is_a_step_not_taken() -> None:
    model = small_net()
    server = Server(model, codec=None)
    with serving(server, max_steps=2) as address:
        mine = small_net(1)
        optimizer = adamw(mine)
        with Worker(address, mine, DENSE, optimizer=optimizer, every=2) as worker:
            for step in range(4):
                gradients(mine, step, 0)
                if step == 1:
                    gradient = next(mine.parameters()).grad
                    assert gradient is not None
                    gradient[0, 0] = torch.inf
                worker.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert [int(state["step"]) for state in optimizer.state.values()] == [3] * len(optimizer.state)
    assert not torch.equal(next(model.parameters()), next(small_net().parameters()))


def test_gradients_and_updates_do_not_mix() -> None:
    with serving(Server(small_net())) as address, pytest.raises(ServerError, match="the worker pushes gradients"):
        Worker(address, small_net(1), DENSE)
    model = small_net()
    with (
        serving(Server(model, torch.optim.SGD(model.parameters(), lr=0.1))) as address,
        pytest.raises(ServerError, match="the worker pushes updates and the server takes gradients"),
    ):
        mine = small_net(1)
        Worker(address, mine, DENSE, optimizer=adamw(mine))


def test_what_cannot_work_is_refused() -> None:
    model = small_net()
    first = torch.optim.SGD([next(model.parameters())], lr=0.1)
    for options, word in (
        ({"every": 4}, "give it as optimizer="),
        ({"optimizer": first}, "does not hold 0.bias"),
        ({"optimizer": adamw(model), "every": 0}, "a number of steps from 1"),
    ):
        with pytest.raises(ValueError, match=word):
            Worker("tcp://127.0.0.1:1", model, DENSE, **options)
    with pytest.raises(ValueError, match='with an optimizer "gradient"'):
        Server(model, domain="gradient")
