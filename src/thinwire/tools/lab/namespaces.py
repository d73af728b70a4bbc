"""The owner's side of a lab's holder process: starts it, sends requests to it, and ends it.

Namespaces have no names in the file system. They exist as long as the holder, and the holder as long as its owner.
"""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import LabError
from thinwire.tools.lab.registry import RunFile

if TYPE_CHECKING:
    from thinwire.tools.lab.netlink import KernelRequest

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
        self.handles: list[int] = []  # the hosts' network namespaces, as file descriptors of the holder
        argv = [*_PYTHON, str(_HERE / "holder.py"), str(theirs.fileno()), str(os.getpid())]
        argv += [str(run_file.hosts_path), str(run_file.path)]
        with theirs:
            silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            self._process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], start_new_session=True, cwd="/", **silent
            )
        self._stream = self._control.makefile("rw")
        try:
            run_file.write(self._process.pid)
            self.mode = str(self._answer()["mode"])
        except BaseException as error:
            self.close()
            if not isinstance(error, LabError):
                raise
            why = f"this machine does not allow network namespaces ({error}): run 'thinwire lab --check' for details"
            raise LabError(why) from None

    def boot(self, hosts: int) -> None:
        """Create the hosts."""
        answer = self.ask("boot", hosts=hosts)
        self._inits, self.handles = answer["inits"], answer["handles"]

    def reboot(self, host: int) -> None:
        """Kill all processes of a host; new ones can be started afterwards."""
        self._inits[host] = self.ask("reboot", host=host)["init"]

    def send(self, where: int, requests: "Sequence[KernelRequest]") -> bytes:
        """Send requests to the kernel from a host or the SWITCH and return its answers; raise LabError if it refuses.

        All requests have the same protocol.
        """
        encoded = [base64.b64encode(request.data).decode() for request in requests]
        answer = self.ask("netlink", where=where, protocol=requests[0].protocol, requests=encoded)
        if "refused" in answer:
            raise LabError(f"the kernel refused to {requests[answer['refused']].what}: {answer['why']}")
        return base64.b64decode(answer["answer"])

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
