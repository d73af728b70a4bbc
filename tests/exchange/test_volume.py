"""ScatterReduce's volume per rank does not grow with the number of ranks; Gather's does."""

import pytest
import torch

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from thinwire.codec.codec import Codec
from thinwire.exchange.base import Bucket, Exchange
from thinwire.exchange.channel import Channel

SIZES = {"a": 200_000, "b": 300_000, "c": 500, "d": 60_000}


def volume(rank: int, exchange: Exchange, steps: int) -> tuple[int, float]:
    """Bytes that a rank sent in the last step, and a checksum of the mean."""
    group = torch.distributed.group.WORLD
    assert group is not None
    channel = Channel(group)
    codec = Codec(tw.TopK(0.01))
    exchange.setup(channel, codec, SIZES, lambda members: [])
    before, total = 0, 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(31 * step + rank)
        gradients = {name: torch.randn(n, generator=generator) ** 3 for name, n in SIZES.items()}
        outs = [torch.empty(n) for n in SIZES.values()]
        before = channel.sent
        exchange.mean(Bucket(gradients, outs, step, frozenset()))
        total = float(torch.cat(outs).double().sum())
    return channel.sent - before, total


@pytest.mark.parametrize("kind", [tw.exchange.Gather, tw.exchange.ScatterReduce])
def test_volume_against_the_number_of_ranks(cluster: Cluster, kind: type[Exchange]) -> None:
    sent = {}
    for world in (2, 4, 8):
        results = cluster.run(volume, world, kind(), 6)
        assert len({total for _, total in results}) == 1
        sent[world] = max(n for n, _ in results)
    if kind is tw.exchange.Gather:
        assert sent[8] > 6 * sent[2]
    else:
        # A rank sends all of its entries but its own share's, and its share's result to all others: (w - 1) / w of
        # both, so 7/6 as much with 8 ranks as with 4; the rest is headers and padding of messages this small.
        assert sent[4] < 1.8 * sent[2]
        assert sent[8] < 1.35 * sent[4]
