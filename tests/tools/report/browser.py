"""Renders a page in headless Chromium for tests; they skip where no browser is installed."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.needs import needs

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


def render(page: Path) -> Rendered:
    """Load a local page and return its document and console output; no network is used."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [needs("browser"), *FLAGS, f"--user-data-dir={profile}"]
        done = subprocess.run(
            [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True
        )
    return Rendered(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])
