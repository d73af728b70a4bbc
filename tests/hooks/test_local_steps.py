"""Local steps: rounds of several steps, outer optimizers, exchanges that overlap the next round, rounds by time."""

import copy
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks.test_optimizer import Normed, adamw, made
from tests.link import jobs
from thinwire.errors import LinkError
from thinwire.exchange.channel import checksum
from thinwire.hooks.optimizer import OptimizerHook, attached_hook
from thinwire.link import rounds, updates

STEPS = 22  # past five rounds of 4 steps, and into a sixth
EVERYTHING = tw.Codec(tw.TopK(1.0), tw.Float32(), min_numel=0)
SETTINGS: dict[str, dict[str, Any]] = {
    "rounds": {"every": 4},
    "overlap": {"every": 4, "overlap": True},
    "late": {"every": 1, "overlap": True},
    "nesterov": {"every": 4, "overlap": True, "outer": tw.Nesterov(0.5, momentum=0.5)},
}


def hook_of(net: nn.Module) -> OptimizerHook:
    hook = attached_hook(net)
    assert hook is not None
    return hook


def shared_of(net: nn.Module) -> list[int]:
    return [checksum(t) for t in hook_of(net).updates.shared.values()]


def trained(rank: int, codec: Any, ddp: bool, options: dict[str, Any]) -> tuple[list[Any], float, dict[str, Any]]:
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model, fused=ddp)
    link = tw.attach(model, codec, optimizer=optimizer, check_every=1, **options)
    seen: list[Any] = []
    for step in range(STEPS):
        jobs.train(model, rank, range(step, step + 1), optimizer)
        hook_of(net).updates.finish()
        seen.append(shared_of(net))
    figures = link.stats()
    link.flush()
    seen.append(jobs.digest(net))
    link.detach()
    return seen, jobs.accuracy(net), figures


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp-fused", "plain"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_shared_parameters_are_equal_after_every_exchange(cluster: Cluster, setting: str, ddp: bool) -> None:
    untrained, options = jobs.accuracy(jobs.Net()), SETTINGS[setting]
    results = cluster.run(trained, 3, None if ddp else "rotate", ddp, options)
    assert all(seen == results[0][0] for seen, *_ in results)
    seen, accuracy, figures = results[0]
    every = options["every"]
    assert figures["steps"] == STEPS // every and figures["skipped"] == 0
    moved = [now != before for before, now in itertools.pairwise(seen)]
    assert moved[: STEPS - 1] == [(step + 2) % every == 0 for step in range(STEPS - 1)]
    assert moved[-1]  # what the unfinished round changed is flushed
    assert accuracy > untrained + 0.1


def whole(rank: int, overlap: bool) -> list[bool]:
    """Everything is sent on equal batches: rounds end where the optimizer itself would have led."""
    updates.LOOK_AHEAD = 1.0
    torch.manual_seed(0)
    one, many = jobs.Net(), jobs.Net()
    many.load_state_dict(one.state_dict())
    mine, theirs = torch.optim.RMSprop(one.parameters(), lr=1e-3), torch.optim.RMSprop(many.parameters(), lr=1e-3)
    link = tw.attach(many, EVERYTHING, optimizer=theirs, every=3, overlap=overlap, exchange="gather")
    near = []
    for step in range(9):
        for model, optimizer in ((one, mine), (many, theirs)):
            jobs.train(model, 0, range(step, step + 1), optimizer)
        near.append(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one.parameters(), many.parameters())))  # noqa: B905
    link.detach()
    near.append(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one.parameters(), many.parameters())))  # noqa: B905
    return near


@pytest.mark.parametrize("overlap", [False, True])
def test_everything_sent_is_the_optimizer_itself(cluster: Cluster, overlap: bool) -> None:
    """At detach the exchange under way is finished, so that the shared parameters are those of step 9."""
    assert cluster.run(whole, 2, overlap) == [[True] * 10] * 2


def held_up(rank: int) -> tuple[dict[str, bool], list[int]]:
    """The second exchange stops on rank 0 until all ranks have taken all steps of the next round but its last one."""
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer, every=4, overlap=True, check_every=1)
    jobs.train(net, rank, range(7), optimizer)
    norm = link.stats()["residual_norm"]  # waits for the first exchange
    released, stages = threading.Event(), link.exchange.stages

    def held(bucket: Any) -> Any:
        assert released.wait(15.0), "the steps waited for the exchange that they overlap"
        return (yield from stages(bucket))

    if rank == 0:
        link.exchange.stages = held  # type: ignore[method-assign]
    jobs.train(net, rank, range(7, 11), optimizer)  # the second exchange begins, and three steps follow
    figures = link.metrics("")
    updates = hook_of(net).updates
    seen = {
        "under way": updates.waits and updates.exchanges == 2,
        "steps of the next round": updates.taken == [3],
        "figures of the exchange before": figures["steps"] == 1 and figures["bytes_sent"] > 0,
        "its residual": math.isclose(figures["residual_norm"], norm, rel_tol=1e-6) and norm > 0,
    }
    dist.barrier()
    released.set()
    jobs.train(net, rank, range(11, 13), optimizer)
    seen["figures without an exchange under way"] = link.stats()["steps"] == link.metrics("")["steps"] == 3
    link.detach()
    return seen, jobs.digest(net)


def test_steps_do_not_wait_for_the_exchange_that_they_overlap(cluster: Cluster) -> None:
    """Nor do figures for loggers, which are those of the exchange before."""
    (first, digest), (second, other) = cluster.run(held_up, 2)
    assert all(first.values()) and all(second.values()), (first, second)
    assert digest == other


# What is shown between exchanges


def shown(rank: int, ddp: bool, options: dict[str, Any]) -> dict[str, bool]:
    """What evaluation and state dicts see in the middle of a round, on rank 0 alone where that is possible."""
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer, **options)
    jobs.train(model, rank, range(6), optimizer)
    hook, prefix, seen = hook_of(net), "module." if ddp else "", {}
    x, y = jobs.batch(rank, 3)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    local = jobs.digest(net)
    if rank == 0:
        state = net.state_dict() if not ddp else model.state_dict()
        shared = {name: t.clone() for name, t in hook.updates.shared.items()}
        seen["state dict"] = all(torch.equal(state[prefix + name].flatten(), t) for name, t in shared.items())
        fresh = jobs.Net()
        fresh.load_state_dict({name: t.view_as(net.get_parameter(name)) for name, t in shared.items()})
        with torch.no_grad():
            seen["evaluation"] = torch.equal(model(x), fresh(x))
    seen["local view again"] = jobs.digest(net) == local
    loss.backward()  # raises if the evaluation had changed what the graph holds
    optimizer.step()
    seen["ranks differ in a round"] = len(set(map(str, _gathered(jobs.digest(net))))) == 2
    link.detach()
    seen["and not after it"] = len(set(map(str, _gathered(jobs.digest(net))))) == 1
    return seen


def _gathered(mine: list[int]) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
@pytest.mark.parametrize("setting", ["rounds", "nesterov"])
def test_evaluation_and_state_dict_see_the_shared_parameters(cluster: Cluster, setting: str, ddp: bool) -> None:
    for seen in cluster.run(shown, 2, ddp, SETTINGS[setting]):
        assert all(seen.values()), seen


def loaded(rank: int, overlap: bool) -> list[bool]:
    """Weights that are loaded in the middle of a round become the shared ones; no change of a rank is lost."""
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, "rotate", optimizer=optimizer, every=4, overlap=overlap, check_every=1)
    first = copy.deepcopy(net.state_dict())
    jobs.train(net, rank, range(6), optimizer)
    before = link.stats()["residual_norm"]
    net.load_state_dict(first)
    hook = hook_of(net)
    seen = [all(torch.equal(hook.updates.shared[name], t.flatten()) for name, t in first.items())]
    seen.append(link.stats()["residual_norm"] > before)
    jobs.train(net, rank, range(6, 14), optimizer)
    link.detach()
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_loaded_weights_become_the_shared_ones(cluster: Cluster, overlap: bool) -> None:
    assert cluster.run(loaded, 2, overlap) == [[True, True]] * 2


def buffers(rank: int, overlap: bool) -> tuple[list[int], bool, bool]:
    torch.manual_seed(0)
    net = Normed()
    model = DDP(net)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, every=3, overlap=overlap)
    jobs.train(model, rank, range(8), optimizer)
    running = net.get_buffer("net.1.running_mean")
    apart = len({str(each) for each in _gathered([checksum(running)])}) > 1
    link.detach()
    return [checksum(t) for t in net.state_dict().values()], apart, model.broadcast_buffers


@pytest.mark.parametrize("overlap", [False, True])
def test_buffers_are_averaged_with_exchanges_only(cluster: Cluster, overlap: bool) -> None:
    first, second = cluster.run(buffers, 2, overlap)
    assert first == second and first[1] and first[2]


# Values that are not finite


def infected(rank: int, bad: list[int], overlap: bool) -> tuple[list[int], int, bool]:
    """Rank 1 has infinite gradients at some steps."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, every=3, overlap=overlap, check_every=1)
    for step in range(12):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step in bad and rank == 1:
            gradient = next(net.parameters()).grad
            assert gradient is not None
            gradient[0, 0] = torch.inf
        optimizer.step()
    link.flush()
    figures = link.stats()
    finite = all(bool(p.isfinite().all()) for p in net.parameters())
    link.detach()
    return jobs.digest(net), figures["skipped"], finite


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("bad", "skipped"), [([4], 0), ([5], 0), ([3, 4, 5], 1)])
def test_a_rank_skips_its_own_bad_steps(cluster: Cluster, bad: list[int], skipped: int, overlap: bool) -> None:
    """All ranks skip a round in which one of them could not step at all."""
    results = cluster.run(infected, 2, bad, overlap)
    assert results[0] == results[1] and results[0][1:] == (skipped, True)


def diverged(rank: int) -> tuple[list[int], int, bool]:
    """At step 4 rank 1 writes an infinity to a parameter: its change is not finite."""
    net, _ = made(rank, ddp=False)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    link = tw.attach(net, optimizer=optimizer, every=3, overlap=True, check_every=1)
    for step in range(12):
        jobs.train(net, rank, range(step, step + 1), optimizer)
        if step == 4 and rank == 1:
            with torch.no_grad():
                net.get_parameter("layers.6.bias")[0] = torch.inf
    link.flush()
    finite = all(bool(p.isfinite().all()) for p in net.parameters())
    skipped = link.stats()["skipped"]
    link.detach()
    return jobs.digest(net), skipped, finite


def test_a_change_that_is_not_finite_is_skipped_by_all(cluster: Cluster) -> None:
    results = cluster.run(diverged, 2)
    assert results[0] == results[1] and results[0][1] >= 1 and results[0][2]


def scaled(rank: int, fused: bool, overlap: bool) -> tuple[list[int], int, float]:
    """Rank 1's loss scale is too high at steps 4 and 5, the last of a round: it skips them alone."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    link = tw.attach(model, optimizer=optimizer, every=3, overlap=overlap, check_every=1)
    for step in range(12):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * torch.inf if step in (4, 5) and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    link.flush()
    steps = int(link.stats()["steps"])
    link.detach()
    return jobs.digest(net), steps, scaler.get_scale()


@pytest.mark.parametrize(("fused", "overlap"), [(True, True), (False, False), (False, True)])
def test_loss_scales_are_each_ranks_own(cluster: Cluster, fused: bool, overlap: bool) -> None:
    first, second = cluster.run(scaled, 2, fused, overlap)
    assert first[:2] == second[:2] and first[1] == 4
    assert (first[2], second[2]) == (256.0, 64.0)


def diverged_shared(rank: int) -> str:
    """Rank 1's shared parameters change behind the link's back; its local view hides that."""
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer, every=3, overlap=True, check_every=2)
    jobs.train(net, rank, range(5), optimizer)
    hook_of(net).updates.finish()
    if rank == 1:
        hook_of(net).updates.shared["layers.2.bias"][5] += 1e-6
    try:
        jobs.train(net, rank, range(5, 16), optimizer)
    except LinkError as error:
        return f"{error} {link.exchanges}"
    return ""


def test_shared_parameters_that_diverge_are_named(cluster: Cluster) -> None:
    expected = "step 2: rank 1 holds another layers.2.bias than the others; the replicas have diverged"
    for message in cluster.run(diverged_shared, 3):
        assert expected in message and message.endswith(" 3"), message


# State


def unbroken(rank: int, options: dict[str, Any]) -> list[int]:
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, **options)
    jobs.train(model, rank, range(13), optimizer)
    link.detach()
    return jobs.digest(net)


def saved(rank: int, options: dict[str, Any], at: int, folder: str) -> list[int]:
    """Save at a step, and go on: saving must not change the course of training."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, **options)
    jobs.train(model, rank, range(at), optimizer)
    torch.save(link.state_dict(), f"{folder}/link-{rank}.pt")
    jobs.train(model, rank, range(at, 13), optimizer)
    link.detach()
    return jobs.digest(net)


def resumed(rank: int, options: dict[str, Any], at: int, folder: str) -> list[int]:
    net, model = made(rank + 7, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, **options)
    link.load_state_dict(torch.load(f"{folder}/link-{rank}.pt", weights_only=True))
    jobs.train(model, rank, range(at, 13), optimizer)
    link.detach()
    return jobs.digest(net)


@pytest.mark.parametrize("at", [6, 8])
@pytest.mark.parametrize("setting", ["rounds", "nesterov"])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(cluster: Cluster, tmp_path: Any, setting: str, at: int) -> None:
    options = SETTINGS[setting]
    expected = cluster.run(unbroken, 3, options)
    assert cluster.run(saved, 3, options, at, str(tmp_path)) == expected
    assert cluster.run(resumed, 3, options, at, str(tmp_path)) == expected


def fewer(rank: int, options: dict[str, Any], folder: str, how: str) -> tuple[bool, bool, bool]:
    """Two ranks continue what three have saved in the middle of a round, whose changes are in the residual then."""
    states = [torch.load(f"{folder}/link-{r}.pt", weights_only=True) for r in range(3)]
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, check_every=1, **options)
    link.load_state_dict(tw.merge_states(states) if how == "merged" else states)
    name = "layers.2.weight"
    changes = [s["updates"]["round"]["starts"][name] - s["updates"]["round"]["local"][name] for s in states]
    kept = [s["codec"]["residuals"][name]["residual"] for s in states]
    mean = torch.stack([a + b for a, b in zip(kept, changes, strict=True)]).mean(0)
    velocity = states[0]["updates"]["outer"][name].get("velocity")
    seen = (
        torch.allclose(link.codec.residuals(name)["residual"], mean, atol=1e-7) and bool(torch.stack(changes).any()),
        torch.equal(net.get_parameter(name).flatten(), states[0]["updates"]["shared"][name]),
        velocity is None or torch.equal(hook_of(net).updates.state_dict()["outer"][name]["velocity"], velocity),
    )
    jobs.train(model, rank, range(6, 14), optimizer)
    link.detach()
    return seen


@pytest.mark.parametrize("how", ["merged", "list"])
@pytest.mark.parametrize("setting", ["rounds", "nesterov"])
def test_another_number_of_ranks_loses_nothing(cluster: Cluster, tmp_path: Any, setting: str, how: str) -> None:
    options = SETTINGS[setting]
    cluster.run(saved, 3, options, 6, str(tmp_path))
    assert cluster.run(fewer, 2, options, str(tmp_path), how) == [(True, True, True)] * 2


def gathered(rank: int) -> float:
    """The mean state that all ranks compute together holds what their unfinished rounds changed."""
    _, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer, every=4, overlap=True)
    jobs.train(model, rank, range(6), optimizer)
    state, name = link.state_dict(gather=True), "layers.2.weight"
    mine = link.state_dict()["updates"]["round"]
    whole = link.codec.residuals(name)["residual"] + mine["starts"][name] - mine["local"][name]
    dist.all_reduce(whole)
    assert state["updates"]["round"]["taken"] == [0] and not state["updates"]["round"]["starts"]
    link.detach()
    return float((state["codec"]["residuals"][name]["residual"] - whole / dist.get_world_size()).abs().max())


def test_a_gathered_state_is_the_mean(cluster: Cluster) -> None:
    assert all(apart < 1e-6 for apart in cluster.run(gathered, 2))


# Rounds by time


def uneven(rank: int, ddp: bool, overlap: bool) -> tuple[list[int], int, int, float]:
    """Rank 1 is slower: it takes fewer steps in a round, and counts less."""
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, every="0.25s", overlap=overlap, check_every=1)
    steps = 0
    while link.exchanges < 4:
        jobs.train(model, rank, range(steps, steps + 1), optimizer)
        time.sleep(0.06 if rank == 1 else 0.0)
        steps += 1
    link.flush()
    exchanges, weight = link.stats()["steps"], hook_of(net).updates.weight
    link.detach()
    return jobs.digest(net), int(exchanges), steps, weight


@pytest.mark.parametrize(("ddp", "overlap"), [(False, True), (True, False)])
def test_a_slower_rank_takes_fewer_steps(cluster: Cluster, ddp: bool, overlap: bool) -> None:
    fast, slow = cluster.run(uneven, 2, ddp, overlap)
    assert fast[0] == slow[0] and fast[1] == slow[1] == 4
    assert fast[2] > slow[2] >= 4
    assert fast[3] > 1.0 > slow[3] and abs(fast[3] + slow[3] - 2.0) < 1e-6


class Clock:
    """The time of a rank, which only its test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@contextmanager
def by_clock() -> Iterator[Clock]:
    """Let rounds by time end by a clock."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "time", clock)
        yield clock


def weighed(rank: int) -> list[tuple[float, float]]:
    """In a round of 3 s rank 0 takes three steps and rank 1 one, each of which subtracts 1 from a parameter."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=1.0), []
    with by_clock() as clock:
        link = tw.attach(
            net, EVERYTHING, optimizer=optimizer, domain="update", every="3s", overlap=True, exchange="gather"
        )
        while link.exchanges < 3:
            clock.now += 3.0 if rank == 1 else 1.0
            before = link.exchanges
            optimizer.zero_grad()
            net(torch.ones(2, 1)).mean().backward()
            optimizer.step()
            updates = hook_of(net).updates
            updates.finish()
            if link.exchanges > before:
                seen.append((float(updates.shared["weight"]), float(net.weight.detach())))
        link.detach()
    return seen


def test_changes_count_by_the_samples_of_the_round_before(cluster: Cluster) -> None:
    """Weights are 1.5 and 0.5 from the second round on; each rank goes on where its own steps have led."""
    shared = [-(3 + 1) / 2, -2 - (1.5 * 3 + 0.5 * 1) / 2, -4.5 - (1.5 * 3 + 0.5 * 1) / 2]
    before = [0.0, *shared[:-1]]
    for steps, seen in zip((3, 1), cluster.run(weighed, 2), strict=True):
        assert seen == [(now, last - steps) for now, last in zip(shared, before, strict=True)]


def paced(rank: int, folder: str, resumes: bool) -> list[int]:
    """In a round of 3 s rank 0 takes three steps and rank 1 two; save after the first step of the third round."""
    net, _ = made(rank, ddp=False)
    optimizer, slowness = adamw(net), (1.0, 1.5)[rank]
    begun, saved = 6.0, 6.0 + slowness
    with by_clock() as clock:
        clock.now = begun if resumes else 0.0
        link = tw.attach(net, "rotate", optimizer=optimizer, every="3s", overlap=True, check_every=1)
        if resumes:
            link.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
            clock.now = saved
        while link.exchanges < 5:
            clock.now += slowness
            step = round(clock.now / slowness)
            jobs.train(net, rank, range(step, step + 1), optimizer)
            hook_of(net).updates.finish()
            if clock.now == saved:
                torch.save(link.state_dict(), f"{folder}/{rank}.pt")
        link.flush()
        link.detach()
    return jobs.digest(net)


def test_a_resumed_round_by_time_has_the_same_weight(cluster: Cluster, tmp_path: Path) -> None:
    unbroken = cluster.run(paced, 2, str(tmp_path), False)
    assert cluster.run(paced, 2, str(tmp_path), True) == unbroken and unbroken[0] == unbroken[1]
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert [state["updates"]["pace"] for state in states] == [
        {"weight": 1.2, "samples": 16},
        {"weight": 0.8, "samples": 16},
    ]
    merged, total = tw.merge_states(states), torch.zeros(96 * 96)
    for state in states:
        part, weight = state["updates"]["round"], state["updates"]["pace"]["weight"]
        total += state["codec"]["residuals"]["layers.2.weight"]["residual"]
        total += weight * (part["starts"]["layers.2.weight"] - part["local"]["layers.2.weight"])
    torch.testing.assert_close(merged["codec"]["residuals"]["layers.2.weight"]["residual"], total / 2)
    assert "pace" not in merged["updates"]


# Failures and refusals


def lost(rank: int, every: Any) -> str:
    """Rank 2 dies in the third round; the exchange that overlaps it has failed when the others need it."""
    net, _ = made(rank, ddp=False)
    optimizer, until = adamw(net), time.monotonic() + 20.0
    link = tw.attach(net, optimizer=optimizer, every=every, overlap=True)
    while link.exchanges < 2:
        jobs.train(net, rank, range(1), optimizer)
    if rank == 2:
        os._exit(1)
    try:
        while time.monotonic() < until:  # a rank that is not told would train alone for ever
            jobs.train(net, rank, range(1), optimizer)
    except LinkError as error:
        shown = all(torch.equal(p.flatten(), hook_of(net).updates.shared[n]) for n, p in net.named_parameters())
        link.detach()
        return f"{error} {shown}"
    return ""


@pytest.mark.parametrize("every", [3, "0.1s"])
def test_a_lost_rank_is_reported(cluster: Cluster, every: Any) -> None:
    first, second, third = cluster.run(lost, 3, every, died=True)
    assert third is None
    for error in (first, second):
        assert "no sign of rank 2" in error and error.endswith("True")


def refused(rank: int) -> dict[str, str]:
    def attach(**options: Any) -> tw.Link:
        net = jobs.Net()
        return tw.attach(net, **{"optimizer": adamw(net), **options})

    net = jobs.Net()
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer, every=4)
    jobs.train(net, rank, range(2), optimizer)
    state = link.state_dict()
    round_state = state["updates"]["round"]

    def load(**parts: Any) -> None:
        link.load_state_dict({**state, "updates": {**state["updates"], **parts}})

    halves = jobs.Net()
    parameters = list(halves.parameters())
    two = [torch.optim.AdamW(parameters[:2]), torch.optim.AdamW(parameters[2:])]
    cases: dict[str, Callable[[], Any]] = {
        "none": lambda: attach(every=0),
        "no time": lambda: attach(every="soon"),
        "outer": lambda: attach(every=4, outer=0.7),
        "momentum": lambda: attach(outer=tw.Nesterov(0.7, momentum=1.0)),
        "rate": lambda: attach(outer=tw.SGD(0.0)),
        "gradients": lambda: tw.attach(jobs.make(), 0.05, every=4),
        "preset": lambda: tw.attach(jobs.make(), "local16"),
        "two optimizers": lambda: tw.attach(halves, optimizer=two, every="1s"),
        "unused": lambda: tw.attach(d := DDP(jobs.Net(), find_unused_parameters=True), optimizer=adamw(d), every="1s"),
        "round": lambda: load(round={**round_state, "taken": [-1]}),
        "starts": lambda: load(round={**round_state, "starts": {}}),
        "view": lambda: load(round={**round_state, "local": {n: t[1:] for n, t in round_state["local"].items()}}),
        "pace": lambda: load(pace={"weight": -1.0, "samples": 3}),
        "velocity": lambda: load(outer={"layers.0.bias": {"velocity": torch.full((96,), torch.nan)}}),
    }
    seen = {}
    for name, case in cases.items():
        try:
            case()
        except (TypeError, ValueError, LinkError) as error:
            seen[name] = str(error)
    link.detach()
    return seen


def test_what_cannot_work_is_refused_in_a_sentence(cluster: Cluster) -> None:
    expected = {
        "none": "every is a number of steps from 1",
        "no time": "every is a number of steps from 1",
        "outer": "outer is an outer optimizer",
        "momentum": "lies in [0, 1)",
        "rate": "is a number above 0",
        "gradients": "are for updates",
        "preset": "are for updates",
        "two optimizers": "a single optimizer",
        "unused": "find_unused_parameters",
        "round": "lacks its counts of steps",
        "starts": "has no start",
        "view": "local view has",
        "pace": "not a weight and a number of samples",
        "velocity": "velocity has another size, or is not finite",
    }
    for seen in cluster.run(refused, 2):
        assert seen.keys() == expected.keys()
        for name, part in expected.items():
            assert part in seen[name], (name, seen[name])


def differing(rank: int) -> str:
    net = jobs.Net()
    try:
        tw.attach(net, optimizer=adamw(net), every=4, overlap=rank == 0)
    except LinkError as error:
        return str(error)
    return ""


def test_ranks_that_differ_in_their_rounds_fail_at_attach(cluster: Cluster) -> None:
    assert all("in rounds" in error for error in cluster.run(differing, 2))


def several(rank: int) -> tuple[list[int], int]:
    """Two optimizers, of which one steps twice as often; both exchange every second step of theirs."""
    net, _ = made(rank, ddp=False)
    parameters = list(net.parameters())
    two = [torch.optim.AdamW(parameters[:4], lr=3e-3), torch.optim.RMSprop(parameters[4:], lr=1e-3)]
    link = tw.attach(net, optimizer=two, every=2, overlap=True, check_every=1)
    for step in range(12):
        x, y = jobs.batch(rank, step)
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        two[0].step()
        if step % 2:
            two[1].step()
    link.flush()
    exchanges = link.exchanges
    link.detach()
    return jobs.digest(net), exchanges


def test_several_optimizers_have_rounds_of_their_own(cluster: Cluster) -> None:
    first, second = cluster.run(several, 2)
    assert first == second and first[1] == 6 + 3


def test_outer_optimizers_move_by_the_mean() -> None:
    """As torch's SGD with the mean change as the gradient."""
    for outer, options in (
        (tw.SGD(0.5), {"lr": 0.5}),
        (tw.Nesterov(0.7, momentum=0.9), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    ):
        p, shared = nn.Parameter(torch.randn(50)), torch.empty(50)
        shared.copy_(p.detach())
        reference = torch.optim.SGD([p], **options)  # type: ignore[arg-type]
        state: dict[str, Tensor] = {}
        for step in range(4):
            mean = torch.randn(50, generator=torch.Generator().manual_seed(step))
            p.grad = mean.clone()
            reference.step()
            outer.step(shared, mean, state)
            assert torch.allclose(shared, p.detach(), atol=1e-6)
