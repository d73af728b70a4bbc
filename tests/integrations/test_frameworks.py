"""Each framework trains equal replicas, and a run that was killed and resumed equals the unbroken one.

`make test` trains with AdamW, where each rank has an optimizer state of its own; `make test-long` with SGD, too.
"""

import contextlib
import os
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.integrations.frameworks import TRAININGS, Reached


def run(rank: int, kind: str, directory: str, optimizer: str, kill_at: int) -> Reached:
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    return TRAININGS[kind](rank, directory, optimizer, kill_at)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.long), "adamw"])
@pytest.mark.parametrize("kind", TRAININGS)
def test_a_killed_and_resumed_run_is_the_unbroken_one(tmp_path: Path, kind: str, optimizer: str) -> None:
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
    with contextlib.closing(Cluster()) as fresh:
        unbroken = fresh.run(run, 2, kind, str(tmp_path / "unbroken"), optimizer, -1, timeout=0)
    with contextlib.closing(Cluster()) as fresh:
        killed = fresh.run(run, 2, kind, str(tmp_path / "broken"), optimizer, 40, timeout=0, died=True)
        assert killed == [None, None]
        resumed = fresh.run(run, 2, kind, str(tmp_path / "broken"), optimizer, -1, timeout=0)
    assert unbroken[0][0] == unbroken[1][0]  # 64 steps, equal replicas
    assert [reached[1] for reached in unbroken] == [64, 64]
    assert all(reached[2] > 0 for reached in unbroken)
    assert resumed == unbroken
