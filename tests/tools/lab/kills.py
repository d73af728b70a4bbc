"""Kills labs in random states, then searches the machine for anything that they left.

`thinwire lab --hosts 1 -- python -m tests.tools.lab.kills --runs 100` sends SIGKILL, SIGINT and SIGTERM in turn. Run it
on an emulated host, where no other process creates namespaces.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from thinwire.tools.lab import registry
from thinwire.tools.progress import WorkProgress

MARK = "THINWIRE_KILLS"
# An owner that builds, uses, changes and closes labs in turn. All of this happens within the first seconds.
_OWNER = """
from thinwire.tools.lab import Lab
print("begun", flush=True)
while True:
    with Lab(3, rate="100mbit", loss="1%", delay="5ms", delay_line=True) as lab:
        lab.popen(0, ["sh", "-c", "setsid sleep 600 & sleep 600"])
        lab.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & sleep 0.1"])
        lab.set_rate(1, "10mbit")
        lab.cut(1)
        lab.set_loss(2, "5%")
        lab.set_delay(2, "20ms")
        lab.heal(1)
        lab.kill(0)
        lab.run(["sleep", "0.1"])
"""
_LONGEST = 1.5  # seconds from the start of an owner to its end: two labs
_SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


def machine() -> dict[str, list[str]]:
    """Return the machine's network devices and named namespaces, which a lab must not change."""
    named = Path("/run/netns")
    return {
        "devices": sorted(name for _, name in socket.if_nameindex()),
        "named namespaces": sorted(os.listdir(named)) if named.exists() else [],
    }


def namespaces() -> list[str]:
    """Return the namespaces that any visible process is in or holds open, and those that are mounted."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        for folder in ("ns", "fd"):
            try:
                links = [os.readlink(entry) for entry in (process / folder).iterdir()]
            except OSError:
                continue  # the process has ended
            found.update(link for link in links if link.endswith("]") and ":[" in link)
    found -= {link for link in found if link.startswith(("socket:", "pipe:", "anon_inode:"))}
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(found) + sorted(line.split()[3] for line in mounts if " - nsfs " in line)


def marked(mark: str) -> list[int]:
    """Return the running processes whose environment holds this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0") and registry.started(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def one_kill(mark: str, number: int, wait: float) -> None:
    """Start an owner of labs and send it the signal with this number in turn, `wait` seconds after its start."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    owner.stdout.readline()
    time.sleep(wait)
    owner.send_signal(_SIGNALS[number % len(_SIGNALS)])
    owner.wait()
    owner.stdout.close()


def left_over(mark: str, patience: float = 10.0) -> list[int]:
    """Return the processes that still run after the kernel had `patience` seconds to kill them."""
    end = time.monotonic() + patience
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def settled(before: dict[str, list[str]], patience: float = 10.0) -> dict[str, list[str]]:
    """Return the machine's devices and namespaces as soon as they are those of before, or after so many seconds."""
    end = time.monotonic() + patience
    while (now := {**machine(), "namespaces": namespaces()}) != before and time.monotonic() < end:
        time.sleep(0.02)
    return now


def main(
    runs: Annotated[int, typer.Option(min=1, help="How many owners of labs to kill.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the random times.")] = 1,
) -> None:
    """Kill running labs and report what they left on this machine."""
    registry.clean()  # labs that were killed before this run do not count
    mark, waits = str(os.getpid()), random.Random(seed)
    before = {**machine(), "namespaces": namespaces()}
    with WorkProgress("killing labs", runs) as progress:
        for number in range(runs):
            wait = waits.uniform(0, _LONGEST)
            one_kill(mark, number, wait)
            processes = left_over(mark)
            after, recorded = settled(before), registry.clean()
            if processes or recorded or before != after:
                print(f"kill {number}, {_SIGNALS[number % len(_SIGNALS)].name} after {wait:.3f} s, left something:")
                print(f"processes left: {processes}; run files left: {recorded}")
                for name in (name for name in before if before[name] != after[name]):
                    print(f"{name}: {before[name]} became {after[name]}")
                raise typer.Exit(1)
            progress.advance(figures=f"{number + 1} of {runs}")
    print(f"{runs} labs killed: no process, namespace, device or run file is left.")


if __name__ == "__main__":
    typer.run(main)
