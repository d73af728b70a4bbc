"""Kills labs at every stage of their life, then searches the machine for anything that they left.

`python -m tests.tools.lab.kills --runs 100` sends SIGKILL, SIGINT and SIGTERM in turn.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from thinwire.tools.lab import registry

_MARK = "THINWIRE_KILLS"
_OWNER = """
from thinwire.tools.lab import Lab
print("begun", flush=True)
with Lab(3, rate="100mbit", loss="1%") as lab:
    lab.popen(0, ["sleep", "600"])
    lab.run(["sh", "-c", "sleep 600 & sleep 600"])
"""
_SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


def machine() -> dict[str, list[str]]:
    """Return the machine's network links and named namespaces, which a lab must not change."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {
        "ip link": sorted(line.split(":")[1].strip() for line in links.splitlines()),
        "ip netns list": sorted(spaces.splitlines()),
    }


def marked(mark: str) -> list[int]:
    """Return the running processes whose environment holds this mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0") and registry.started(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def one_kill(number: int, mark: str) -> None:
    """Start a lab and send its owner a signal; the delay before the signal depends on `number`."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        env={**os.environ, _MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    owner.stdout.readline()
    time.sleep(number * 37 % 400 / 1000)
    owner.send_signal(_SIGNALS[number % len(_SIGNALS)])
    owner.wait()
    owner.stdout.close()


def left_over(mark: str, patience: float = 10.0) -> list[int]:
    """Return the processes that still run after the kernel had `patience` seconds to kill them."""
    end = time.monotonic() + patience
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def main(runs: Annotated[int, typer.Option(min=1, help="How many labs to kill.")] = 100) -> None:
    """Kill running labs and report what they left on this machine."""
    registry.clean()  # labs that were killed before this run do not count
    before, mark = machine(), str(os.getpid())
    for number in track(range(runs), description="killing labs"):
        one_kill(number, mark)
    processes = left_over(mark)
    after, recorded = machine(), registry.clean()
    for name, state in before.items():
        print(f"{name}: {'as before' if state == after[name] else f'{state} became {after[name]}'}")
    print(f"processes left: {len(processes)}; dead labs on record: {len(recorded)}")
    if processes or recorded or before != after:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
