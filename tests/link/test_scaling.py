"""Non-finite gradients, loss scales and learning rates: residuals stay clean and in the right unit."""

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import jobs, probe
from tests.link.probe import Account, missing
from tests.link.test_conservation import EXACT

BAD_STEP = 5


def infected(rank: int, exchange: Any, everybody: bool, codec: Any) -> tuple[Account, list[bool], list[float]]:
    """An inf in b at (rank 1, step 5), or on all ranks; training with a GradScaler that the link watches."""
    model = probe.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    link = tw.attach(model, codec, exchange=exchange, scaler=scaler)
    account, stepped, sent = Account(), [], []
    for step in range(9):
        optimizer.zero_grad()
        gradients = probe.coefficients(rank, step)
        bad = step == BAD_STEP and (rank == 1 or everybody)
        account.give({name: g for name, g in gradients.items() if not (bad and name == "b")})
        if bad:
            gradients["b"][7] = float("inf")
        scale = scaler.get_scale()
        scaler.scale(model(gradients)).backward()
        account.apply(model, 1.0 / scale)
        before = model.module.a.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(before, model.module.a))
        sent.append(link.stats()["last_step"]["entries"])
        assert all(bool(t.isfinite().all()) for name in probe.SIZES for t in link.codec.residuals(name).values())
    unit = 1.0 / link.state_dict()["units"]["scale"]
    assert link.stats()["skipped"] == 1
    return account.close(link, unit), stepped, sent


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce", tw.exchange.Hierarchical(per_machine=1)], ids=str)
@pytest.mark.parametrize("everybody", [False, True], ids=["one", "all"])
def test_an_inf_is_seen_by_all_and_nothing_finite_is_lost(cluster: Cluster, exchange: Any, everybody: bool) -> None:
    results = cluster.run(infected, 3, exchange, everybody, EXACT)
    for _, stepped, sent in results:
        assert stepped == [step != BAD_STEP for step in range(9)]
        # The step after is a normal one: no message was choked by the empty ones before.
        assert sent[BAD_STEP + 1] > 0.8 * sent[BAD_STEP - 1]
    # b is in one bucket with c: the infected rank takes in neither.
    for rank, (account, _, _) in enumerate(results):
        if rank == 1 or everybody:
            account.given["c"] -= probe.coefficients(rank, BAD_STEP)["c"].double()
    assert missing([account for account, _, _ in results]) < 1e-4


def test_an_inf_in_hierarchical_machines_is_seen_by_all(cluster: Cluster) -> None:
    for _, stepped, _ in cluster.run(infected, 4, tw.exchange.Hierarchical(per_machine=2), False, EXACT):
        assert stepped == [step != BAD_STEP for step in range(9)]


def test_an_inf_is_seen_by_all_with_dense(cluster: Cluster) -> None:
    results = cluster.run(dense_infected, 2)
    assert results == [[True, False, True]] * 2


def dense_infected(rank: int) -> list[bool]:
    model = probe.make()
    tw.attach(model, exchange="dense")
    account, finite = Account(), []
    for step in range(3):
        model.zero_grad()
        gradients = probe.coefficients(rank, step)
        if rank == 1 and step == 1:
            gradients["b"][7] = float("nan")
        probe.backward(model, gradients)
        finite.append(account.apply(model))
    return finite


def rates_change(rank: int, exchange: str) -> Account:
    """Two parameter groups, whose rates rise at different steps; sums are of rate x gradient."""
    model = probe.make()
    net = model.module
    groups: list[dict[str, Any]] = [{"params": [net.a, net.c], "lr": 0.125}, {"params": [net.b, net.d], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups)
    link = tw.attach(model, EXACT, exchange=exchange, optimizer=optimizer)
    account = Account()
    for step in range(6):
        rates = (0.125 if step < 3 else 0.5, 1.0 if step < 2 else 2.0)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rates
        optimizer.zero_grad()
        gradients = probe.coefficients(rank, step)
        backward = dict(gradients)
        probe.backward(model, backward)
        for name in probe.SIZES:
            rate = rates[0] if name in "ac" else rates[1]
            account.given[name] += rate * gradients[name].double()
            grad = net.get_parameter(name).grad
            assert grad is not None
            account.applied[name] += rate * grad.double()
    account.close(link)
    for name, held in account.held.items():
        held *= 0.5 if name in "ac" else 2.0
    return account


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_learning_rates_may_change(cluster: Cluster, exchange: str) -> None:
    assert missing(cluster.run(rates_change, 2, exchange)) < 1e-4


def norms_of_a_cosine(rank: int, steps: int) -> list[float]:
    """Norms of the averaged gradients while the learning rate falls to almost zero."""
    model = probe.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tw.attach(model, tw.Codec(tw.TopK(0.05)), optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        probe.backward(model, probe.coefficients(rank, step))
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        schedule.step()
    return norms


def test_a_rate_that_falls_to_zero_does_not_inflate_gradients(cluster: Cluster) -> None:
    for norms in cluster.run(norms_of_a_cosine, 2, 120):
        assert max(norms[90:]) < 2.0 * max(norms[40:80])


def trained(rank: int, falls: bool) -> list[list[int]]:
    """SGD with momentum and clipping, without `optimizer=` and with it."""
    digests = []
    for watched in (False, True):
        model = jobs.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        link = tw.attach(model, 0.05, optimizer=optimizer if watched else None)
        for step in range(20):
            x, y = jobs.batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if falls:
                schedule.step()
        link.detach()
        digests.append(jobs.digest(model))
    return digests


@pytest.mark.parametrize("falls", [False, True], ids=["constant", "falling"])
def test_rates_that_do_not_rise_leave_sgd_as_it_is_to_the_bit(cluster: Cluster, falls: bool) -> None:
    """The rule min(1, old / new) is 1 then, whatever the residual holds."""
    for without, watched in cluster.run(trained, 2, falls):
        assert without == watched


def resumed_scale(rank: int) -> Account:
    """The scale changes between the last step and the checkpoint, and again before the first step after it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    account, state = Account(), None
    for begin in (0, 2):
        model = probe.make()
        link = tw.attach(model, EXACT, exchange="gather", scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if state is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})
            link.load_state_dict(state)
        for step in range(begin, begin + 2):
            optimizer.zero_grad()
            gradients = probe.coefficients(rank, step)
            account.give(gradients)
            scale = scaler.get_scale()
            scaler.scale(model(gradients)).backward()
            account.apply(model, 1.0 / scale)
            scaler.step(optimizer)
            scaler.update()
        state = link.state_dict()
    return account.close(link, 1.0 / link.state_dict()["units"]["scale"])


def test_a_checkpoint_knows_the_unit_of_its_memory(cluster: Cluster) -> None:
    assert missing(cluster.run(resumed_scale, 2)) < 1e-4


def half(rank: int, kind: str, exchange: str) -> tuple[Account, bool]:
    """Parameters of 16 bits; returns whether the gradients have their type."""
    dtype = getattr(torch, kind)
    model = probe.make(dtype=dtype)
    link = tw.attach(model, EXACT, exchange=exchange)
    account = Account()
    for step in range(5):
        model.zero_grad()
        gradients = probe.coefficients(rank, step, dtype=dtype)
        account.give(gradients)
        probe.backward(model, gradients)
        account.apply(model)
    typed = all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    return account.close(link), typed


@pytest.mark.parametrize(("kind", "rounding"), [("float16", 2e-2), ("bfloat16", 2e-1)])
@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce", "dense"])
def test_parameters_of_16_bits(cluster: Cluster, kind: str, rounding: float, exchange: str) -> None:
    results = cluster.run(half, 2, kind, exchange)
    assert all(typed for _, typed in results)
    # The mean is rounded to the parameters' type in the end, as it is by DDP itself.
    assert missing([account for account, _ in results]) < rounding


def overflow(rank: int) -> tuple[list[bool], Account]:
    """What waits in a float16 parameter's residual outgrows float16: a skipped step, and nothing is lost."""
    model = probe.make(dtype=torch.float16)
    link = tw.attach(model, tw.Codec(tw.Threshold(70000.0), tw.Float32(), min_numel=0), exchange="gather")
    account, finite = Account(), []
    for _ in range(4):
        model.zero_grad()
        gradients = {name: torch.zeros(n, dtype=torch.float16) for name, n in probe.SIZES.items()}
        gradients["d"][5] = 30000.0
        account.give(gradients)
        probe.backward(model, gradients)
        finite.append(account.apply(model))
        link.rescale(0.25) if not finite[-1] else None
    return finite, account.close(link)


def test_a_memory_that_outgrows_float16_is_a_skipped_step(cluster: Cluster) -> None:
    for finite, account in cluster.run(overflow, 2):
        assert finite == [True, True, False, True]
        assert float(account.held["d"][5]) == 90000.0 / 4 + 30000.0
