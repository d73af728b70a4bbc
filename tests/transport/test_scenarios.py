"""Run the same scenarios over every transport: with threads over TCP, with the processes of a job over MPI."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.transport.scenarios import SCENARIOS
from thinwire.transport import connect, listen

ROOT = Path(__file__).parent.parent.parent
# Number of workers of each scenario in mpi_scenarios.py, which is not imported here because that would start MPI.
MPI_ALONE = {"hostile": 1, "unread": 1, "ended": 2, "rules": 1}
MPIRUN = Path(sys.executable).parent / "mpirun"  # from the mpich wheel


@pytest.mark.parametrize("name", SCENARIOS)
def test_tcp(name: str) -> None:
    scenario = SCENARIOS[name]
    listener = listen("tcp://127.0.0.1:0")
    with ThreadPoolExecutor(scenario.workers) as pool:
        sides = [
            pool.submit(scenario.worker, lambda: connect(listener.address), number)
            for number in range(scenario.workers)
        ]
        try:
            scenario.server(listener, scenario.workers)
        finally:
            for side in sides:
                side.result(60)
            listener.close()


@pytest.mark.parametrize("name", [*SCENARIOS, *MPI_ALONE])
def test_mpi(name: str) -> None:
    workers = SCENARIOS[name].workers if name in SCENARIOS else MPI_ALONE[name]
    done = subprocess.run(
        [MPIRUN, "-n", str(1 + workers), sys.executable, "-m", "mpi4py", "-m", "tests.transport.mpi_rank", name],
        cwd=ROOT,
        env={**os.environ, "MPIEXEC_TIMEOUT": "80"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
