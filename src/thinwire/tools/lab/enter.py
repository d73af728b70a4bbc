"""Starts a command inside a host, forwards signals to it, and ends with the command's exit status.

Run by its path, with the standard library only: `enter.py INIT_PID CORES COMMAND...`.
"""

import contextlib
import os
import resource
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from thinwire.tools.lab import kernel
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import kernel


_FORWARDED = [signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "CONT")]


def join(pid: int) -> bool:
    """Enter all namespaces of a host's process 1; return whether this included a user namespace."""
    handles = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kernel.NAMESPACES}
    foreign = os.fstat(handles["user"]).st_ino != os.stat("/proc/self/ns/user").st_ino
    for kind, handle in handles.items():
        if kind != "user" or foreign:
            kernel.setns(handle, kind)
        os.close(handle)
    return foreign


def become(command: list[str], user: tuple[int, int] | None) -> NoReturn:
    """Replace this process, which runs inside the host, by the command."""
    kernel.die_with_parent(signal.SIGKILL)
    os.setpgid(0, 0)
    try:
        if user:  # the command runs as the user who started the lab, not as the namespace's root
            kernel.unshare("user")
            kernel.map_ids(*user, 0, 0)
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        print(f"thinwire lab: cannot run '{command[0]}': {error.strerror}", file=sys.stderr, flush=True)
        os._exit(126 if isinstance(error, PermissionError) else 127)


def wait_for(child: int) -> NoReturn:
    """Forward signals to the command's process group; end with its exit code or by the same signal."""

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)

    with contextlib.suppress(OSError):  # the child does the same, and either may be first
        os.setpgid(child, child)
    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # the command alone must hold its output open, so that a reader sees its end
        os.dup2(devnull, descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(pid: int, cores: str, command: list[str]) -> NoReturn:
    """Join the host, start the command in a child process, and wait for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    here, uid, gid = os.getcwd(), os.geteuid(), os.getegid()
    try:
        mapped = join(pid)
        os.chdir(here)  # joining a mount namespace changed the directory to its root
        child = os.fork()
    except OSError as error:
        print(f"thinwire lab: cannot enter the host: {error.strerror}", file=sys.stderr)
        sys.exit(125)
    if child == 0:
        become(command, (uid, gid) if mapped else None)
    wait_for(child)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
