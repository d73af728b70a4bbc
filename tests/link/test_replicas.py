"""Every replica holds the same bits after every step, whatever the exchange and the codec; and it learns."""

from typing import Any

import pytest
import torch

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import jobs
from thinwire.tune.presets import LOCAL, PRESETS

EXCHANGES = ["dense", "gather", "scatter-reduce", tw.exchange.Hierarchical(tw.exchange.ScatterReduce(), per_machine=2)]
# Presets with a fixed rule: `Adaptive` has tests of its own, and "dense" leaves nothing out.
FIXED = sorted(PRESETS.keys() - {"adaptive", "adaptive-bytes", "dense", *LOCAL})


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_replicas_are_bitwise_equal_for_every_exchange(cluster: Cluster, exchange: Any) -> None:
    results = cluster.run(jobs.replicas, 4, 0.05, exchange, 200)
    assert all(digest == results[0][0] for digest, _, _ in results)
    assert results[0][1] == 3
    assert results[0][2] > 0.85


def test_small_buckets_are_gathered_while_large_ones_are_scattered(cluster: Cluster) -> None:
    results = cluster.run(mixed, 4, 200)
    assert all(digest == results[0][0] for digest, _, _ in results)
    assert all(small == [False, True, True] for _, small, _ in results)
    assert results[0][2] > 0.85


def mixed(rank: int, steps: int) -> tuple[list[int], list[bool], float]:
    model = jobs.make(buckets=3)
    link = tw.attach(model, 0.05, exchange=tw.exchange.ScatterReduce(gather_below=5000))
    jobs.train(model, rank, range(steps), torch.optim.SGD(model.parameters(), lr=0.1))
    state = link.state_dict()["exchange"]["ScatterReduce(gather_below=5000)"]
    small = sorted([False] * len(state["parts"]) + [True] * len(state["gather"]["sizes"]))
    return jobs.digest(model), small, jobs.accuracy(model)


def test_a_bucket_that_outgrows_the_limit_is_scattered_from_then_on(cluster: Cluster) -> None:
    results = cluster.run(growing, 2)
    assert results[0] == results[1]
    _, before, after = results[0]
    assert before == (0, 1)
    assert after == (1, 0)


def growing(rank: int) -> tuple[list[int], tuple[int, int], tuple[int, int]]:
    """Checksums, and how many buckets were scattered and gathered before and after the density rose."""
    model = jobs.make(buckets=1)
    codec = tw.Codec(tw.TopK(lambda step: 0.01 if step < 10 else 0.2))
    link = tw.attach(model, codec, exchange=tw.exchange.ScatterReduce(gather_below=4000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for steps in (range(10), range(10, 30)):
        jobs.train(model, rank, steps, optimizer)
        state = link.state_dict()["exchange"][repr(link.exchange)]
        seen.append((len(state["parts"]), len(state["gather"]["sizes"]) - len(state["parts"])))
    return jobs.digest(model), seen[0], seen[1]


def test_replicas_are_bitwise_equal_for_every_preset_scattered(cluster: Cluster) -> None:
    first, second = cluster.run(jobs.presets, 2, FIXED, "scatter-reduce", 200)
    assert first == second
    assert all(buckets == 3 for _, buckets, _ in first.values())


@pytest.mark.parametrize("buckets", [1, 2, 4])
@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_any_number_of_buckets(cluster: Cluster, exchange: str, buckets: int) -> None:
    results = cluster.run(jobs.replicas, 2, 0.05, exchange, 20, buckets)
    assert results[0] == results[1]
    assert results[0][1] == buckets


OTHERS = {
    "torch kernels": tw.Codec(tw.TopK(0.05), tw.Bits(8), kernels="torch"),
    "global": tw.Codec(tw.TopK(0.05), tw.Float16(), scope="global"),
    "bfloat16": tw.Codec(tw.TopK(0.05, exact=True), tw.BFloat16(), min_numel=0),
    "stochastic": tw.Codec(tw.Threshold(0.01), tw.Bits(4, seed=3)),
    "unary": tw.Codec(tw.TopK(0.05), tw.Unary()),
    "nesterov": tw.Codec(tw.TopK(0.05), tw.Bits(8), tw.MomentumCorrection(0.5, nesterov=True)),
    "decay": tw.Codec(tw.Percentile(95), tw.Sign(), tw.ErrorFeedback(0.9)),
    "torch momentum": tw.Codec(tw.RandomK(0.05), tw.Float32(), tw.MomentumCorrection(0.5), kernels="torch"),
}


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_replicas_are_bitwise_equal_for_other_codecs(cluster: Cluster, exchange: str) -> None:
    results = cluster.run(others, 2, exchange)
    assert results[0] == results[1]


def others(rank: int, exchange: str) -> dict[str, Any]:
    return {name: jobs.replicas(rank, codec, exchange, 30) for name, codec in OTHERS.items()}


def test_every_preset_gathered_converges_to_the_dense_accuracy_on_equal_replicas(cluster: Cluster) -> None:
    quick: list[str | None] = [None, *(name for name in FIXED if name not in ("dgc", "random1"))]
    reached = cluster.run(jobs.converge, 2, quick, 240, 0.3)
    # Momentum 0.9 multiplies the rate by ten; a random 1 % needs 100 steps to touch every weight once.
    for name, steps, rate in (("dgc", 240, 0.1), ("random1", 700, 0.2)):
        for found, more in zip(reached, cluster.run(jobs.converge, 2, [name], steps, rate), strict=True):
            found.update(more)
    assert reached[0] == reached[1]
    accuracies = {name: accuracy for name, (_, buckets, accuracy) in reached[0].items() if buckets == 3}
    assert accuracies.keys() == {None, *FIXED}
    assert accuracies[None] > 0.93
    assert {name: a for name, a in accuracies.items() if a < accuracies[None] - 0.04} == {}


def test_small_buckets_are_exchanged_together(cluster: Cluster) -> None:
    results = cluster.run(jobs.together, 2, 12)
    assert results[0] == results[1]
    total = sum(p.numel() for p in jobs.Net().parameters())
    assert results[0][1] == [total] * 12
