"""The owner's side of a lab's holder process: starts it, sends requests to it, and ends it.

Namespaces have no names in the file system. They exist as long as the holder, and the holder as long as its owner.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from thinwire.errors import LabError
from thinwire.tools.lab import shaping
from thinwire.tools.lab.registry import RunFile

_HERE = Path(__file__).parent
_PYTHON = [sys.executable, "-I", "-S"]  # without site packages and environment, so that it starts in milliseconds
SWITCH = -1


class Namespaces:
    """The namespaces of one lab, with a process 1 for each host."""

    def __init__(self, run_file: RunFile) -> None:
        if not sys.platform.startswith("linux"):
            raise LabError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._inits: list[int] = []
        argv = [*_PYTHON, str(_HERE / "holder.py"), str(theirs.fileno()), str(os.getpid())]
        argv += [str(run_file.hosts_path), str(run_file.path)]
        with theirs:
            silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            self._process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], start_new_session=True, cwd="/", **silent
            )
        self._stream = self._control.makefile("rw")
        run_file.write(self._process.pid)
        try:
            self.mode = str(self._answer()["mode"])
        except LabError as error:
            self.close()
            why = f"this machine does not allow network namespaces ({error}): run 'thinwire lab --check' for details"
            raise LabError(why) from None

    def boot(self, hosts: int) -> None:
        """Create the hosts."""
        self._inits = self.ask("boot", hosts=hosts)["inits"]

    def wire(self, hosts: int) -> None:
        """Build the switch and connect every host to it."""
        peers = [self.ask("peer", host=host)["path"] for host in range(hosts)]
        self.batch(SWITCH, ["ip", "-batch", "-"], shaping.switch_lines(peers))
        self.batch(SWITCH, ["bridge", "-batch", "-"], shaping.forwarding_lines(hosts))

    def reboot(self, host: int) -> None:
        """Kill all processes of a host; new ones can be started afterwards."""
        self._inits[host] = self.ask("reboot", host=host)["init"]

    def batch(self, where: int, argv: list[str], lines: list[str]) -> None:
        """Run ip, tc, bridge or nft in a host or the SWITCH with lines as its input; raise LabError if it fails."""
        answer = self.ask("run", where=where, argv=argv, text="\n".join(lines) + "\n")
        if answer["code"] != 0:
            complaint = answer["errors"].splitlines()[0] if answer["errors"] else f"exit code {answer['code']}"
            raise LabError(f"{argv[0]} failed in the lab: {complaint.removeprefix('Error: ').rstrip('.')}")

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send one request to the holder and return its answer."""
        with self._lock:
            try:
                self._stream.write(json.dumps({"op": operation, **arguments}) + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                raise LabError("the lab has ended") from None
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = ""
        with contextlib.suppress(OSError):
            line = self._stream.readline()
        if not line:
            raise LabError("the lab has ended: its holder process was killed")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise LabError(answer["failed"])
        return answer

    def command(self, host: int, cores: list[int], argv: list[str]) -> list[str]:
        """Return the command line that runs `argv` inside a host, on the given cores."""
        enter = [*_PYTHON, str(_HERE / "enter.py"), str(self._inits[host])]
        return [*enter, ",".join(map(str, cores)), *argv]

    def close(self) -> None:
        """End the holder and wait for it; all processes of all hosts have ended afterwards."""
        with contextlib.suppress(OSError):  # a forked child of the owner may keep a copy open
            self._control.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, ValueError):
            self._stream.close()
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
