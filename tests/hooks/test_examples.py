"""The examples run, with checkpoints, on the CPU: two by torchrun itself, the others with the variables that it sets.

Ranks that are forked have imported torch already, which takes longer than the training.
"""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster import printed

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def torchrun(script: str, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def as_main(rank: int, script: str, *arguments: str) -> None:
    """Run a script as Python would in this process, a new one."""
    os.environ.update(QUIET)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


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
        pytest.skip(f"{library} is not installed: pip install 'PATH_OF_THE_CLONE[integrations]'")
    output = printed(as_main, 2, script, str(tmp_path))
    check(output)
    assert output.count("step 256") == 2, output  # the link's own count went on from the checkpoint


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "task.py"))
def test_what_a_user_writes_is_three_lines(script: str) -> None:
    """Lines that name thinwire, the callback, attach or what saves and loads; imports and comments do not count."""
    text = (EXAMPLES / script).read_text().partition("def ")[2]
    lines = [line for line in text.splitlines() if re.search(r"thinwire[._]|ThinwireCallback|attach\(|_ranks\(", line)]
    assert 1 <= len(lines) <= 3, lines


def test_fsdp() -> None:
    check(printed(as_main, 4, "fsdp.py"), ranks=4)


def test_elastic_restart_is_the_unbroken_run_bit_by_bit(tmp_path: Path) -> None:
    broken = torchrun("elastic.py", str(tmp_path / "a"), "--kill-at", "12", ranks=4, options=("--max-restarts", "1"))
    assert "resumed at step 10" in broken
    unbroken = printed(as_main, 4, "elastic.py", str(tmp_path / "b"))

    def lines(output: str) -> list[str]:
        return sorted(line for line in output.splitlines() if line.startswith("rank "))

    assert len(lines(broken)) == 8
    assert lines(broken) == lines(unbroken)
