"""The installed command: version and help; a user's mistake is one sentence on stderr and exit code 2."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "thinwire")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"thinwire {metadata.version('thinwire')}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("bench", "--help"), ("bench", "codec", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    # Without arguments a tool may tell its usage with either code; asked for help it must succeed.
    assert done.returncode == 0 if "--help" in arguments else done.returncode in (0, 2)
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("--frobnicate",),
        ("bench", "frobnicate"),
        ("bench", "codec", "--frobnicate"),
        ("bench", "codec", "--n", "many"),
        ("bench", "codec", "--n", "0"),
        ("bench", "codec", "--json", "/nowhere/at/all.json"),
        ("race", "--json", "/nowhere/at/all.json"),
        ("race", "--report", "/nowhere/at/all.html"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("thinwire") and lines[0].endswith(".")
