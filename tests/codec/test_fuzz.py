"""A short run of the fuzzer; `make fuzz` runs it longer."""

import re
import subprocess
import sys
from pathlib import Path

from tests.needs import missing, needs

RUN = Path(__file__).parents[2] / "native" / "fuzz" / "run.py"


def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    needs("clang++")
    done = subprocess.run(
        [sys.executable, str(RUN), "--seconds", "8", "--build", str(tmp_path)], capture_output=True, text=True
    )
    if done.returncode == 2 and done.stderr.startswith("fuzz: "):  # clang++ without its fuzzing library
        missing(done.stderr.strip().removeprefix("fuzz: ").rstrip("."))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) executions, (\d+) edges", done.stdout)
    assert found and int(found[1]) > 100 and int(found[2]) > 200, done.stdout
