"""Tests that need a program or a feature of the kernel skip where it is missing, and fail there if CI is "true"."""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from thinwire.tools.lab.check import Ability, check, ready

# What a test may ask for: the names under which a program may be installed, and how to get it on Debian.
_PROGRAMS = {
    "clang++": (("clang++",), "apt-get install clang libclang-rt-dev"),
    "browser": (("chromium", "chromium-browser", "google-chrome", "chrome"), "apt-get install chromium"),
}
# Abilities of a lab that not every kernel has; one of them is enough.
_LAB = {
    "lab": (),
    "nftables": ("loss (nftables)",),
    "loss": ("loss (nftables)", "delay (netem)"),
    "delay": ("delay (netem)", "delay (delay line)"),
    "delay line": ("delay (delay line)",),
}


def needs(what: str) -> str:
    """Return the path of a program, or nothing for an ability of the lab; skip or fail the test where it is missing.

    Args:
        what: `clang++` or `browser`; or of an emulated network `lab` (hosts with a rate), `loss`, `nftables`, `delay`
            or `delay line`.
    """
    if what in _PROGRAMS:
        names, remedy = _PROGRAMS[what]
        found = next((path for name in names if (path := shutil.which(name))), None)
        return found or missing(f"{names[0]} is not installed ({remedy})")
    reason = _why_no_lab(what)
    return "" if reason is None else missing(reason)


def missing(reason: str) -> NoReturn:
    """Skip the calling test for this reason, or fail it if the environment variable CI is "true"."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must offer everything that the tests need, but {reason}", pytrace=False)
    pytest.skip(reason)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a disk of this size at a path while the block runs; skip or fail the test where that is not allowed."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
        missing("this process may not mount a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def _why_no_lab(what: str) -> str | None:
    abilities = _abilities()
    if not ready(abilities):
        first = next(ability for ability in abilities if ability.required and not ability.works)
        return f"no lab can be built ({first.name}: {first.detail})"
    wanted = [ability for ability in abilities if ability.name in _LAB[what]]
    if not wanted or any(ability.works for ability in wanted):
        return None
    return "; ".join(f"{ability.name}: {ability.detail}" for ability in wanted)


@functools.cache
def _abilities() -> list[Ability]:
    return check()
