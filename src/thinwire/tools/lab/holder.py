"""The holder process of a lab: process 1 of the lab's PID namespace, which keeps the lab's namespaces alive.

It answers requests of its owner over a socket and ends with its owner. The kernel then kills every process of every
emulated host and removes the namespaces. Run by its path, with the standard library only.
"""

import base64
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from thinwire.tools.lab import kernel
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import kernel


def isolate() -> str:
    """Create the namespaces as root, or through a user namespace where that is not allowed; return which."""
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            kernel.unshare("pid", "net")
            return "root"
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare("user", "pid", "net")
    kernel.map_ids(0, 0, uid, gid)
    return "user namespace"


class Holder:
    """Carries out the requests of the owner; `where` is a host's number, or -1 for the switch."""

    def __init__(self, hosts_file: str) -> None:
        self._hosts_file = hosts_file
        self._nets: dict[int, int] = {-1: os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)}
        self._inits: dict[int, int] = {}
        self._delay_line: socket.socket | None = None

    def boot(self, hosts: int) -> dict[str, Any]:
        """Create the network namespaces of all hosts and start process 1 of each."""
        for host in range(hosts):
            kernel.unshare("net")
            self._nets[host] = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        handles = [self._nets[host] for host in range(hosts)]
        return {"inits": [self._start_init(host) for host in range(hosts)], "handles": handles}

    def reboot(self, host: int) -> dict[str, Any]:
        """Kill every process of a host and start its process 1 again; the host's link does not change."""
        pid = self._inits.pop(host)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it may have ended already
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {"init": self._start_init(host)}

    def netlink(self, where: int, protocol: int, requests: list[str]) -> dict[str, Any]:
        """Send netlink requests (base64) in a network namespace, up to the first one that the kernel refuses."""
        kernel.setns(self._nets[where], "net")
        answers = []
        with kernel.netlink(protocol) as link:
            for number, request in enumerate(requests):
                try:
                    answers.append(kernel.exchange(link, base64.b64decode(request)))
                except OSError as error:
                    return {"refused": number, "why": error.strerror}
        return {"answer": base64.b64encode(b"".join(answers)).decode()}

    def read(self, where: int, path: str) -> dict[str, Any]:
        """Return a file of /proc as seen from inside a network namespace."""
        kernel.setns(self._nets[where], "net")
        with open(path) as file:
            return {"text": file.read()}

    def configure(self, where: int, devices: list[str], settings: dict[str, str]) -> dict[str, Any]:
        """Turn the offloads of devices off and write kernel settings; return the settings that failed."""
        kernel.setns(self._nets[where], "net")
        for device in devices:
            kernel.offloads_off(device)
        refused = []
        for path, value in settings.items():
            try:
                with open(path, "w") as file:
                    file.write(value)
            except FileNotFoundError:
                continue  # the kernel does not have this feature
            except OSError as error:
                refused.append(f"{path}: {error.strerror}")
        return {"refused": refused}

    def start_delay_line(self, program: str, device: str, index: int, switch: int, hosts: int) -> dict[str, Any]:
        """Create a TAP device for the delay line and start its program, which ends with this process."""
        kernel.setns(self._nets[-1], "net")
        tap = kernel.open_tap(device, index)
        self._delay_line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._delay_line.settimeout(10)
        passed = theirs.fileno(), tap
        with theirs:
            try:
                subprocess.Popen([program, *map(str, (*passed, index, switch, hosts))], pass_fds=passed)
            finally:
                os.close(tap)
        return {}

    def ask_delay_line(self, requests: list[str]) -> dict[str, Any]:
        """Send requests to the delay line's program and return its answer to the last one, or the first failure."""
        assert self._delay_line is not None
        answer: dict[str, Any] = {}
        for request in requests:
            text = b""
            with contextlib.suppress(OSError):
                self._delay_line.send(request.encode())
            with contextlib.suppress(OSError):  # a program that could not start has left an answer
                text = self._delay_line.recv(1 << 16)
            if not text:
                return {"failed": "the delay line has ended"}
            answer = json.loads(text)
            if "failed" in answer:
                break
        return answer

    def _start_init(self, host: int) -> int:
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            try:
                os.close(reader)
                kernel.setns(self._nets[host], "net")
                kernel.unshare("pid", "mnt", "uts", "ipc")
                pid = os.fork()
                if pid == 0:
                    host_init(host, self._hosts_file, writer)
                os.write(writer, f"inner {pid}\n".encode())
            except OSError as error:
                os.write(writer, f"failed {error}\n".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            said = dict(line.rstrip("\n").split(" ", 1) for line in pipe)
        os.waitpid(middle, 0)
        if "failed" in said:
            raise OSError(0, said["failed"])
        self._inits[host] = int(said["inner"])
        return int(said["outer"])


def host_init(host: int, hosts_file: str, writer: int) -> NoReturn:
    """Run as process 1 of an emulated host: set its name and mounts, then reap orphaned processes."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        outer = os.readlink("/proc/self")  # still the outer /proc, so this is the PID that the owner knows
        kernel.allow_joining()
        socket.sethostname(f"h{host}")
        kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_SLAVE)
        # A container may forbid each of these mounts; a host works without them.
        for source, target, kind, flags in (
            ("proc", "/proc", "proc", 0),
            ("tmpfs", "/dev/shm", "tmpfs", 0),
            (hosts_file, "/etc/hosts", "none", kernel.MS_BIND),
        ):
            with contextlib.suppress(OSError):
                kernel.mount(source, target, kind, flags)
        os.write(writer, f"outer {outer}\n".encode())
    except OSError as error:
        os.write(writer, f"failed {error}\n".encode())
        os._exit(1)
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    while True:
        signal.sigwait({signal.SIGCHLD})
        reap()


def reap() -> None:
    """Reap all child processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(control: socket.socket, owner: int, mode: str, hosts_file: str) -> None:
    """Answer requests until the owner closes the socket or ends."""
    holder = Holder(hosts_file)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(owner, select.POLLIN)
    stream = control.makefile("rw")
    answer: dict[str, Any] = {"mode": mode}
    while True:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        while not (ready := poller.poll(1000)):
            reap()
        if any(descriptor == owner for descriptor, _ in ready) or not (line := stream.readline()):
            return
        request = json.loads(line)
        try:
            answer = getattr(holder, request.pop("op"))(**request)
        except OSError as error:
            answer = {"failed": error.strerror or str(error)}


def remove_files(*paths: str) -> None:
    """Remove the lab's files, because its owner may have been killed."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main(control: socket.socket, owner_pid: int, hosts_file: str, run_file: str) -> None:
    """Create the namespaces and fork: the child serves the lab, this process waits for it."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:  # the owner was killed while the holder started
        return remove_files(hosts_file, run_file)
    try:
        mode = isolate()
    except OSError as error:
        control.sendall((json.dumps({"failed": error.strerror}) + "\n").encode())
        return None
    init = os.fork()
    if init:
        control.close()
        os.waitpid(init, 0)
        return None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kernel.die_with_parent(signal.SIGKILL)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            serve(control, owner, mode, hosts_file)
    finally:
        remove_files(hosts_file, run_file)
        os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), *sys.argv[3:])
