"""The examples run as their comments say: two ranks under torchrun, with checkpoints, on the CPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(script: str, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def check(output: str, ranks: int = 2) -> None:
    found = re.findall(r"rank (\d): accuracy ([\d.]+), checksum (\w+)", output)
    assert sorted(rank for rank, _, _ in found) == [str(r) for r in range(ranks)], output
    assert len({checksum for _, _, checksum in found}) == 1, output
    assert all(float(accuracy) > 0.85 for _, accuracy, _ in found), output


def test_torchrun() -> None:
    check(torchrun("torchrun_ddp.py"))


@pytest.mark.parametrize(
    ("library", "script"),
    [("lightning", "lightning_ddp.py"), ("accelerate", "accelerate_ddp.py"), ("transformers", "hf_trainer.py")],
)
def test_integration(tmp_path: Path, library: str, script: str) -> None:
    if find_spec(library) is None and os.environ.get("CI") != "true":
        pytest.skip(f"{library} is not installed: pip install 'thinwire[integrations]'")
    output = torchrun(script, str(tmp_path))
    check(output)
    assert output.count("step 256") == 2, output  # the link's own count went on from the checkpoint


def test_elastic_restart_is_the_unbroken_run_bit_by_bit(tmp_path: Path) -> None:
    broken = torchrun("elastic.py", str(tmp_path / "a"), "--kill-at", "12", ranks=4, options=("--max-restarts", "1"))
    assert "resumed at step 10" in broken
    unbroken = torchrun("elastic.py", str(tmp_path / "b"), ranks=4)

    def lines(output: str) -> list[str]:
        return sorted(line for line in output.splitlines() if line.startswith("rank "))

    assert len(lines(broken)) == 4
    assert lines(broken) == lines(unbroken)
