"""A record of this user's labs on this machine, so that `thinwire lab --clean` can remove killed ones.

Each lab has a small file. It identifies processes by PID and start time, because PIDs are used again.
"""

import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.errors import LabError

_SPACE = "/proc/self/ns/pid"


def directory() -> Path:
    """Return the directory of run files, which only this user may read."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not base or not os.access(base, os.W_OK):
        base = tempfile.gettempdir()
    path = Path(base) / f"thinwire-lab-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.geteuid() or path.is_symlink():
        raise LabError(f"the directory {path} belongs to another user; remove it or set XDG_RUNTIME_DIR")
    return path


def started(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class RunFile:
    """The run file of one lab and the hosts file beside it."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.name = f"tw{os.getpid()}-{secrets.token_hex(3)}"
        self.path = directory() / f"{self.name}.json"
        self.hosts_path = directory() / f"{self.name}.hosts"
        self._addresses = addresses

    def write(self, holder: int) -> None:
        """Write both files and record the processes that own and hold the lab.

        The holder, which removes the files if the owner is killed, must run already.
        """
        addresses = self._addresses.items()
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses)]
        # torch looks up the name of the IPv4-mapped address; with the plain name the host would have two addresses.
        lines += [f"::ffff:{address} {name}-mapped" for name, address in addresses]
        self.hosts_path.write_text("\n".join(lines) + "\n")
        owner = os.getpid()
        entry = {"owner": [owner, started(owner)], "holder": [holder, started(holder)], "space": os.readlink(_SPACE)}
        self.path.write_text(json.dumps(entry))

    def remove(self) -> None:
        """Remove the lab's files."""
        self.path.unlink(missing_ok=True)
        self.hosts_path.unlink(missing_ok=True)


def _entries() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(directory().glob("tw*.hosts")):
        entry: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            entry = json.loads(path.with_suffix(".json").read_text())
        if not entry:  # killed before it wrote its run file: the file name still has the PID
            pid = int(path.name[2:].partition("-")[0])
            try:
                age = time.time() - path.stat().st_mtime
            except FileNotFoundError:  # the lab has closed in the meantime
                continue
            entry = {"owner": [pid, started(pid) if age < 60 else None]}
        space = os.readlink(_SPACE)
        if entry.get("space", space) == space:  # PIDs of another PID namespace mean other processes
            yield path, entry


def _alive(process: list[int] | None) -> bool:
    return process is not None and process[1] is not None and started(process[0]) == process[1]


def clean() -> list[str]:
    """Remove the labs whose owner has ended and return their names."""
    removed = []
    for path, entry in _entries():
        if _alive(entry.get("owner")):
            continue
        if _alive(entry.get("holder")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry["holder"][0], signal.SIGKILL)
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        removed.append(path.stem)
    return removed


def living() -> list[str]:
    """Return the names of labs whose owner still runs."""
    return [path.stem for path, entry in _entries() if _alive(entry.get("owner"))]
