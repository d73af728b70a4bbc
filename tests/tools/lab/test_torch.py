"""Unmodified torch.distributed scripts on emulated hosts."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.tools.lab import Lab

pytestmark = pytest.mark.usefixtures("lab_rights")

_SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
world = dist.get_world_size()
assert (tensor == world * (world + 1) / 2).all()
# one write: ranks of a host share a pipe, and print() would write word by word
print(f"reduced over {world}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "reduce.py"
    path.write_text(_SCRIPT)
    return str(path)


def test_all_reduce_over_fourteen_hosts(script: str) -> None:
    with Lab(14, rate="500mbit") as lab:
        result = lab.run([sys.executable, script], timeout=100)
    assert result.failure is None
    assert result.exit_code == 0
    for host in result.hosts:
        assert host.lines[-1] == "reduced over 14"
        assert host.traffic.sent_bytes > 0


def test_torchrun_on_every_host(thinwire: Callable[..., "subprocess.Popen[str]"], script: str) -> None:
    process = thinwire("lab", "--hosts", "2", "--per-host", "2", "--torchrun", "--", sys.executable, script)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert sorted(line for line in out.splitlines() if "reduced" in line) == sorted(
        f"[h{host}] reduced over 4" for host in (0, 0, 1, 1)
    )
