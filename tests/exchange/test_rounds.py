"""Rounds of messages: receives that are posted ahead meet the right messages, whatever their sizes and order."""

import os
import random
import time

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cluster import Cluster
from thinwire.exchange.base import AgreedSizes
from thinwire.exchange.channel import Channel, share
from thinwire.exchange.rounds import _MOST, _SPARE, capacity


@given(st.integers(0, 1 << 24), st.lists(st.integers(1, 1 << 24), min_size=1, max_size=20))
def test_a_receive_has_room_for_the_next_size_that_ranks_may_agree_on(posted: int, sizes: list[int]) -> None:
    for size in sizes:
        posted = capacity(posted, size)
        agreed = AgreedSizes()
        agreed.get("bucket", 0, lambda size=size: [size])  # type: ignore[misc]
        agreed.learn("bucket", [size], [0])  # the message was full
        assert posted >= min(agreed.sizes["bucket"][0], _MOST)
        assert posted <= max(_SPARE * size, 4096) and posted <= max(_MOST, posted)
        assert capacity(posted, size) == posted


def test_a_receive_has_room_for_messages_that_alternate_in_size() -> None:
    posted = capacity(capacity(0, 60_000), 4_000)
    assert posted >= 60_000


def message(sender: int, receiver: int, turn: int, lane: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(((turn * 8 + lane) * 8 + sender) * 8 + receiver)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def sizes_of(turn: int, lane: int, world: int) -> list[int]:
    """The bytes that each rank receives from every other: most grow and shrink a little, some much."""
    drawn = random.Random(100 * turn + lane)
    usual = [drawn.choice([0, 1, 900, 5000, 5500, 40_000]) for _ in range(world)]
    return [2 * _MOST + 77 if turn == 5 and lane == 1 else size for size in usual]


def exchanged(rank: int, world: int, turns: int) -> tuple[float, set[float]]:
    """Several lanes under way at once, which every rank starts and reads in an order of its own."""
    channel = Channel(dist.distributed_c10d._get_default_group())
    order, trips = random.Random(rank), set()
    for turn in range(turns):
        rounds = {}
        for lane in order.sample(range(1, 5), 4):
            sizes = sizes_of(turn, lane, world)
            outgoing = [message(rank, r, turn, lane, 0 if r == rank else n) for r, n in enumerate(sizes)]
            wire = [part.numel() for part in outgoing]
            rounds[lane] = channel.scatter(torch.cat(outgoing), wire, sizes[rank], lane)
        for lane in order.sample(range(1, 5), 4):
            size = sizes_of(turn, lane, world)[rank]
            for sender, found in enumerate(rounds[lane].wait()):
                wanted = message(sender, rank, turn, lane, 0 if sender == rank else size)
                assert torch.equal(found, wanted), (turn, lane, sender)
            rounds[lane].release()
            trips.add(rounds[lane].trips)
        assert share(channel, [float(rank)]) == [[float(r)] for r in range(world)]  # an agreement in between
    assert channel.sent > 0 < channel.seconds
    return float(channel.received), trips


def test_messages_of_any_sizes_arrive_in_their_lanes(cluster: Cluster) -> None:
    for world in (2, 3):
        results = cluster.run(exchanged, world, world, 12)
        assert all(trips == {0.5, 1.0} for _, trips in results)


def continued(rank: int) -> list[float]:
    """A second channel on the same process group, and the receives that the first has posted."""
    group = dist.distributed_c10d._get_default_group()
    first = Channel(group)
    for turn in range(3):
        first.gather(torch.full((5000,), turn, dtype=torch.uint8), 1).finish()
    second = Channel(group)
    found = second.gather(torch.full((6000,), rank, dtype=torch.uint8), 1)
    assert [int(m.unique()) for m in found.wait()] == [0, 1, 2]
    return [found.trips]


def test_a_channel_continues_the_lanes_of_the_last_one(cluster: Cluster) -> None:
    assert cluster.run(continued, 3) == [[0.5]] * 3


def spread(rank: int) -> list[list[int]]:
    channel = Channel(dist.distributed_c10d._get_default_group())
    seen = []
    for root in (0, 2, 0):
        found = channel.spread(torch.full((100,), 10 * root + rank, dtype=torch.int64), root, 1)
        seen.append(found.wait()[root].view(torch.int64).unique().tolist())
        found.release()
    return seen


def test_one_rank_can_send_to_all(cluster: Cluster) -> None:
    assert cluster.run(spread, 3) == [[[0], [22], [0]]] * 3


def left_alone(rank: int) -> str:
    """Rank 1 leaves after the last message. That rank 0 can post no receive then is no error before it needs one."""
    channel = Channel(dist.distributed_c10d._get_default_group())
    for _ in range(2):
        channel.gather(torch.zeros(5000, dtype=torch.uint8), 1).finish()
    found = channel.gather(torch.zeros(5000, dtype=torch.uint8), 1)
    found.wait()
    if rank == 1:
        os._exit(0)
    time.sleep(1.0)
    found.release()
    try:
        channel.gather(torch.zeros(5000, dtype=torch.uint8), 1).finish()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_has_left_is_missed_only_by_the_next_round(cluster: Cluster) -> None:
    (message, nothing) = cluster.run(left_alone, 2, died=True)
    assert nothing is None and message
