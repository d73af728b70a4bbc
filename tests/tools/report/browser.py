"""Render a page in headless Chromium and hand back what became of it."""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--window-size=1280,900",
)


@dataclass(frozen=True)
class Rendered:
    """The document after its scripts ran, and what they wrote to the console."""

    dom: str
    console: list[str]


def chromium() -> str:
    """The browser's path; without one the test is skipped, but never in CI."""
    found = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have chromium: see .ci/run.")
        pytest.skip("chromium is not installed.")
    return found


def render(page: Path) -> Rendered:
    """Load a local page; no network is needed or used."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}"]
        done = subprocess.run(
            [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True
        )
    return Rendered(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])
