"""Results that must not change with the way in which messages travel: replicas and residuals, bit for bit."""

import pytest

from tests.cluster import Cluster
from tests.exchange import golden


@pytest.mark.parametrize("case", golden.CASES)
def test_results_are_those_of_one_bucket_after_the_other(cluster: Cluster, case: str) -> None:
    world = golden.CASES[case][0]
    model, residuals, skipped = golden.GOLDEN[case]
    assert cluster.run(golden.train, world, case) == [(model, residual, skipped) for residual in residuals]


@pytest.mark.parametrize("case", ["gather", "mixed", "machines, mixed"])
def test_a_late_rank_changes_nothing(cluster: Cluster, case: str) -> None:
    world = golden.CASES[case][0]
    model, residuals, skipped = golden.GOLDEN[case]
    late = cluster.run(golden.train, world, case, world - 1)
    assert late == [(model, residual, skipped) for residual in residuals]
