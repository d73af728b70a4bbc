"""Every replica holds the same bits after every step, whatever the exchange and the codec."""

from typing import Any

import pytest

import thinwire as tw
from tests.cluster import Cluster
from tests.ddp import jobs
from thinwire.codec.presets import PRESETS


@pytest.mark.parametrize("exchange", ["dense", "gather", "scatter-reduce", tw.Hierarchical(per_machine=2)], ids=str)
def test_replicas_are_bitwise_equal_for_every_exchange(cluster: Cluster, exchange: Any) -> None:
    results = cluster.run(jobs.replicas, 4, 0.05, exchange, 200)
    assert all(digest == results[0][0] for digest, _, _ in results)
    assert results[0][2] > 0.8


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
def test_replicas_are_bitwise_equal_for_every_preset(cluster: Cluster, preset: str, exchange: str) -> None:
    results = cluster.run(jobs.replicas, 3, preset, exchange, 60)
    assert all(digest == results[0][0] for digest, _, _ in results)
