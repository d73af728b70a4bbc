"""Launching workers: who failed is named, with that worker's own last words and nobody else's."""

import sys

import pytest

from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.race.launch import WorkFailed, launch

TALK = "import os, sys, time\nrank = int(os.environ['RANK'])\n"


def failure_of(program: str) -> str:
    with pytest.raises(WorkFailed) as caught:
        launch([sys.executable, "-c", TALK + program], 3, LinkSettings(), lambda host, line: None)
    return str(caught.value)


def test_the_last_words_are_those_of_the_worker_that_failed() -> None:
    program = "print(f'rank {rank} speaks', flush=True)\nsys.exit(3) if rank == 1 else time.sleep(30)"
    assert failure_of(program) == "worker 1 failed with exit code 3: rank 1 speaks"


def test_a_worker_that_said_nothing_is_not_given_the_words_of_others() -> None:
    program = "os.kill(os.getpid(), 9) if rank == 2 else (print('EVENT x\\nothers speak', flush=True), time.sleep(30))"
    assert failure_of(program) == "worker 2 died: killed by SIGKILL"


def test_what_a_worker_says_of_its_failure_is_all_that_is_told() -> None:
    program = "print('FAILED the data is missing', flush=True)\nsys.exit(1) if rank == 0 else time.sleep(30)"
    assert failure_of(program) == "the data is missing"
