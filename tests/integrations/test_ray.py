"""Ray Train: a worker is killed, Ray starts all again, and the run equals the unbroken one."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

import thinwire as tw
from tests.needs import needs
from thinwire.integrations import ray as thinwire_ray
from thinwire.tools.lab import Lab

PROJECT = Path(__file__).parents[2]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(PROJECT)}


def run(*command: str) -> str:
    """Run a program on a host of a lab, where Ray's processes reach no other network."""
    if find_spec("ray") is None and os.environ.get("CI") != "true":
        pytest.skip("ray is not installed")
    needs("lab")
    with Lab(1) as lab:
        found = lab.run([sys.executable, *command], env=QUIET, timeout=900)
    output = "\n".join(found.hosts[0].lines)
    assert found.failure is None, output[-8000:]
    return output


def result(folder: Path, optimizer: str, kill_at: int) -> list[Any]:
    folder.mkdir()
    run("-m", "tests.integrations.ray_run", str(folder), optimizer, str(kill_at))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_killed_worker_is_replaced_and_the_run_is_the_unbroken_one(tmp_path: Path, optimizer: str) -> None:
    unbroken = result(tmp_path / "unbroken", optimizer, -1)
    resumed = result(tmp_path / "broken", optimizer, 40)
    assert (tmp_path / "broken" / "killed").exists()
    assert {epoch for _, epoch in unbroken} == {0}
    assert {epoch for _, epoch in resumed} in ({1}, {2})  # Ray may not have noticed the newest checkpoint yet
    assert unbroken[0][0][0] == unbroken[1][0][0] and unbroken[0][0][1] == 64
    assert [reached for reached, _ in resumed] == [reached for reached, _ in unbroken]


class StoredCheckpoint:
    """A checkpoint in a folder, as Ray copies it to its storage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield str(self.path)


def stand_in(stored: Path) -> ModuleType:
    """Return what `report` and `restore` use of ray.train, for a single worker."""
    module = ModuleType("ray.train")

    def report(metrics: dict[str, Any], checkpoint: StoredCheckpoint) -> None:
        shutil.copytree(checkpoint.path, stored)

    found = {
        "Checkpoint": SimpleNamespace(from_directory=StoredCheckpoint),
        "get_context": lambda: SimpleNamespace(get_world_rank=lambda: 0),
        "get_checkpoint": lambda: StoredCheckpoint(stored),
        "report": report,
    }
    vars(module).update(found)
    return module


def test_a_flipped_bit_in_a_checkpoint_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = tmp_path / "checkpoint"
    whole = ModuleType("ray")
    vars(whole)["train"] = stand_in(stored)
    monkeypatch.setitem(sys.modules, "ray", whole)
    monkeypatch.setitem(sys.modules, "ray.train", vars(whole)["train"])
    model = nn.Linear(100, 10)
    link = tw.attach(model, 0.05)
    thinwire_ray.report({"loss": 1.0}, link, model=model, epoch=3)
    assert thinwire_ray.restore(link, model=nn.Linear(100, 10)) == {"epoch": 3}
    shared = stored / "shared.pt"
    data = bytearray(shared.read_bytes())
    data[len(data) // 2] ^= 1
    shared.write_bytes(data)
    untouched = nn.Linear(100, 10)
    before = untouched.weight.detach().clone()
    with pytest.raises(ValueError, match=r"checkpoint is damaged \(shared.pt does not match its checksum\)"):
        thinwire_ray.restore(link, model=untouched)
    assert untouched.weight.equal(before)


EXAMPLE = """
import runpy, sys
from tests.integrations.ray_run import start
start()
sys.path.insert(0, sys.argv[1])
sys.argv[:] = ["ray_train.py", sys.argv[2]]
runpy.run_path(sys.path[0] + "/ray_train.py", run_name="__main__")
"""


@pytest.mark.timeout(950)
def test_the_example(tmp_path: Path) -> None:
    output = run("-c", EXAMPLE, str(PROJECT / "examples"), str(tmp_path))
    # Ray may show a worker's line twice.
    found = set(re.findall(r"rank (\d): accuracy ([\d.]+), checksum (\w+), step 256", output))
    assert sorted(rank for rank, _, _ in found) == ["0", "1"]
    assert len({checksum for _, _, checksum in found}) == 1
    assert all(float(accuracy) > 0.85 for _, accuracy, _ in found)
