"""Recursive doubling: fewer messages, the same results bit for bit, for any number of ranks."""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.exchange import golden
from thinwire.exchange import choose
from thinwire.exchange.channel import Channel, checksum, share
from thinwire.exchange.choose import choose_doubling
from thinwire.exchange.doubling import hops
from thinwire.link import assembly


@given(st.integers(2, 300))
def test_every_rank_gets_every_message_once(world: int) -> None:
    held = {0}
    for distance, count in hops(world):
        assert set(range(count)) <= held  # what is passed on has arrived before
        arriving = set(range(distance, distance + count))
        assert not arriving & held
        held |= arriving
    assert held == set(range(world))
    assert len(hops(world)) == (world - 1).bit_length()
    assert sum(count for _, count in hops(world)) == world - 1  # the bytes of a direct all-gather


def message(sender: int, turn: int, size: int) -> Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(64 * turn + sender)
    )


def gathered(rank: int, world: int, turns: int) -> tuple[int, int]:
    """All-gathers of equal and of uneven messages, now and then directly; returns the bytes sent and received."""
    channel = Channel(dist.distributed_c10d._get_default_group())
    for turn in range(turns):
        drawn = random.Random(turn)
        sizes = [drawn.choice([0, 16, 900, 5000, 70_000]) for _ in range(world)]
        sizes = [4000 + turn] * world if turn % 2 else sizes
        channel.doubling = turn % 5 != 2
        mine = message(rank, turn, sizes[rank])
        found = channel.gather(mine, 1) if turn % 2 else channel.gather_uneven(mine, sizes, 1)
        for sender, got in enumerate(found.wait()):
            assert torch.equal(got, message(sender, turn, sizes[sender])), (turn, sender)
        found.release()
        assert share(channel, [float(rank)]) == [[float(r)] for r in range(world)]
    return channel.sent, channel.received


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_messages_of_any_sizes_arrive(cluster: Cluster, world: int) -> None:
    results = cluster.run(gathered, world, world, 14)
    assert sum(sent for sent, _ in results) == sum(received for _, received in results)


def counted(rank: int, doubling: bool) -> tuple[int, int, int, float]:
    """Messages that a rank sends, receives that it posts, bytes and round trips of one all-gather past the first."""
    channel = Channel(dist.distributed_c10d._get_default_group())
    channel.doubling = doubling
    for _ in range(2):
        channel.gather(torch.zeros(3000, dtype=torch.uint8), 1).finish()
    sent, found = channel.sent, channel.gather(torch.zeros(3000, dtype=torch.uint8), 1)
    found.finish()
    return len(found.sends), len(found.incoming), channel.sent - sent, found.trips  # type: ignore[attr-defined]


def test_fourteen_ranks_send_four_messages_each(cluster: Cluster) -> None:
    assert cluster.run(counted, 14, False, timeout=120.0) == [(13, 13, 39_000, 0.5)] * 14
    assert cluster.run(counted, 14, True, timeout=120.0) == [(4, 4, 39_000, 2.0)] * 14


@contextlib.contextmanager
def chosen_as(doubling: bool) -> Iterator[None]:
    """Attach with a given way of all-gathers, whatever was measured."""

    def choose(channel: Channel) -> str:
        channel.doubling = doubling
        return ""

    module: Any = assembly
    before, module.choose_doubling = module.choose_doubling, choose
    try:
        yield
    finally:
        module.choose_doubling = before


def trained(rank: int, exchange: Any, doubling: bool, late: int | None) -> tuple[int, int, int]:
    """Train in several buckets, past the first sizes; returns checksums of model and residual, and messages."""
    model = DDP(golden.Linear(), bucket_cap_mb=0.01)
    if rank == late:
        model.module.get_parameter("b").register_hook(lambda grad: time.sleep(0.02))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with chosen_as(doubling):
        link = tw.attach(model, 0.05, exchange=exchange)
    for step in range(7):
        optimizer.zero_grad()
        model(golden.coefficients(rank, step, finite=True)).backward()
        optimizer.step()
    messages = link.stats()["last_step"]["messages_sent"]
    held = link.state_dict()["codec"]["residuals"]
    link.detach()
    kept = torch.cat([t.reshape(-1) for name in sorted(held) for t in held[name].values()])
    return checksum(torch.cat([p.detach().reshape(-1) for p in model.parameters()])), checksum(kept), messages


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_trainings_are_the_same_bit_for_bit(cluster: Cluster, world: int) -> None:
    direct = cluster.run(trained, world, "gather", False, None)
    doubled = cluster.run(trained, world, "gather", True, world - 1)
    assert [found[:2] for found in direct] == [found[:2] for found in doubled]
    assert len({model for model, _, _ in direct}) == 1
    for (_, _, many), (_, _, few) in zip(direct, doubled, strict=True):
        assert few * (world - 1) == many * len(hops(world))


@pytest.mark.parametrize("exchange", ["scatter-reduce", tw.exchange.ScatterReduce(gather_below=2000)], ids=str)
def test_scattered_trainings_are_the_same_bit_for_bit(cluster: Cluster, exchange: Any) -> None:
    direct = cluster.run(trained, 5, exchange, False, None)
    doubled = cluster.run(trained, 5, exchange, True, 2)
    assert [found[:2] for found in direct] == [found[:2] for found in doubled]
    assert all(few < many for (_, _, many), (_, _, few) in zip(direct, doubled, strict=True))


def abandoned(rank: int) -> str:
    """Rank 2 leaves at step 4; the others have its messages to pass on, or wait for what it would pass on."""
    model = DDP(golden.Linear(), bucket_cap_mb=0.01)
    with chosen_as(True):
        link = tw.attach(model, 0.05, exchange="gather", timeout=20.0)
    try:
        for step in range(6):
            if rank == 2 and step == 4:
                os._exit(1)
            model(golden.coefficients(rank, step, finite=True)).backward()
    except RuntimeError as error:
        link.wait()
        link.detach()
        return str(error)
    return ""


def test_a_rank_that_leaves_is_named_by_all_others(cluster: Cluster) -> None:
    results = cluster.run(abandoned, 5, died=True)
    assert results.pop(2) is None
    assert all("step 4: the exchange failed; no sign of rank 2" in message for message in results), results


def chosen(rank: int) -> tuple[bool, str]:
    channel = Channel(dist.distributed_c10d._get_default_group())
    why = choose_doubling(channel)
    assert share(channel, [float(rank)]) == [[float(r)] for r in range(channel.world)]
    return channel.doubling, why


def test_all_ranks_choose_alike(cluster: Cluster) -> None:
    assert cluster.run(chosen, 3) == [(False, "")] * 3  # as many messages either way
    results = cluster.run(chosen, 5)
    assert len(set(results)) == 1
    doubling, why = results[0]
    assert why.startswith("3 messages a rank by recursive doubling" if doubling else "4 messages a rank directly")


def choice_with(rank: int, latency: float, message: float) -> tuple[bool, str, int]:
    """What is chosen where an all-gather takes these seconds for each latency in turn and for each of its messages."""
    channel = Channel(dist.distributed_c10d._get_default_group())
    timed: list[bool] = []

    def cost(channel: Channel, doubling: bool) -> float:
        channel.doubling = doubling
        timed.append(doubling)
        count = len(hops(channel.world))
        seconds = count * (latency + message) if doubling else latency + (channel.world - 1) * message
        return seconds * (1.0 + 0.01 * rank)

    before, choose._cost = choose._cost, cost
    try:
        why = choose_doubling(channel)
    finally:
        choose._cost = before
    return channel.doubling, why, len(timed)


def test_a_long_link_gathers_directly_and_dear_messages_double(cluster: Cluster) -> None:
    long, near = cluster.run(choice_with, 5, 50e-3, 0.1e-3), cluster.run(choice_with, 5, 0.1e-3, 1e-3)
    assert all(not doubling and why.startswith("4 messages a rank directly") for doubling, why, _ in long)
    assert all(doubling and why.startswith("3 messages a rank by recursive doubling") for doubling, why, _ in near)
    assert {probes for *_, probes in long} == {4} and {probes for *_, probes in near} == {12}  # long links: once each
