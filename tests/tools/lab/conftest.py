"""Fixtures for tests of the lab: what a lab needs, and the command line as a process."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.needs import needs

_MAIN = "from thinwire.tools.cli import main; main()"


@pytest.fixture
def lab_rights() -> None:
    """Skip where no lab can be built, or fail if CI is "true"."""
    needs("lab")


@pytest.fixture
def thinwire() -> Callable[..., "subprocess.Popen[str]"]:
    """Start `thinwire` with arguments as a process of its own, its output as text."""

    def start(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, *arguments],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start
