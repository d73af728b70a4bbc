"""Nothing is lost: what all ranks gave is what was applied on all of them, plus what their residuals hold."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import probe
from tests.link.probe import Account, missing

EXACT = tw.Codec(tw.TopK(0.02), tw.Float32())
EXCHANGES = ["gather", "scatter-reduce", tw.exchange.Hierarchical(per_machine=1)]


@pytest.mark.parametrize("codec", [EXACT, tw.Codec(tw.TopK(0.02), tw.Bits(4))], ids=["float32", "4bit"])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_nothing_is_lost_across_an_exchange(cluster: Cluster, exchange: Any, codec: tw.Codec) -> None:
    accounts = cluster.run(probe.run, 3, codec, exchange, probe.plain, 12)
    assert missing(accounts) < 1e-4
    assert float(accounts[0].applied["d"].abs().sum()) > 0


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_nothing_is_lost_when_messages_are_full(cluster: Cluster, exchange: str) -> None:
    growing = tw.Codec(tw.TopK(tw.Warmup([0.001, 0.1], 3)), tw.Float32())
    assert missing(cluster.run(probe.run, 2, growing, exchange, probe.plain, 8)) < 1e-4


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_nothing_is_lost_of_accumulated_gradients(cluster: Cluster, exchange: str) -> None:
    assert missing(cluster.run(probe.run, 2, EXACT, exchange, probe.accumulated, 6)) < 1e-4


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_nothing_is_lost_of_parameters_that_are_sometimes_unused(
    cluster: Cluster, exchange: Any, bucket_view: bool
) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": bucket_view}
    accounts = cluster.run(probe.run, 2, EXACT, exchange, probe.unused, 9, options)
    assert missing(accounts) < 1e-4
    # Where nobody used a parameter DDP leaves the gradient alone; where one rank did, all get the mean.
    for account in accounts:
        assert account.seen == [["a"] if step % 3 == 1 else [] for step in range(9)]


def joined(rank: int, exchange: str) -> tuple[Account, int, float]:
    model = probe.make()
    link = tw.attach(model, EXACT, exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    account = Account()
    with Join([model]):
        for step in range(3 + 3 * rank):
            optimizer.zero_grad()
            probe.plain(model, rank, step, account)
            account.apply(model)
            optimizer.step()
    return account.close(link), link.step, float(model.module.d.double().sum())


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_uneven_inputs_with_join(cluster: Cluster, exchange: str) -> None:
    results = cluster.run(joined, 2, exchange)
    accounts = [account for account, _, _ in results]
    assert missing(accounts, applied_on=1) < 1e-4
    assert results[0][1] == results[1][1] == 6
    assert results[0][2] == results[1][2] != 0.0
