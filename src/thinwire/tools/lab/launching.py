"""Runs one command on many hosts: collects its output by host, handles failures, and measures time and traffic.

The first failure decides the exit code. The other processes get a grace period, then SIGTERM, then SIGKILL.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import IO, Any

_KEPT_LINES = 2000
_LONGEST_LINE = 1 << 20  # bytes; output without line breaks is divided, because it is kept until a line is complete
_PATIENCE = 3.0  # seconds between SIGINT, SIGTERM and SIGKILL
TIMED_OUT = 124
PIPED = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@dataclass(frozen=True)
class HostTraffic:
    """Bytes and packets that a host sent and received, with the 14-byte Ethernet headers.

    Counted at the switch's end of the host's cable, behind the host's own shaper.
    """

    sent_bytes: int = 0
    sent_packets: int = 0
    received_bytes: int = 0
    received_packets: int = 0

    def __sub__(self, earlier: "HostTraffic") -> "HostTraffic":
        return HostTraffic(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))


def parse_counters(text: str, hosts: int) -> list[HostTraffic]:
    """Return each host's traffic from the switch's /proc/net/dev: what port h3 received is what host 3 sent."""
    rows = (line.partition(":") for line in text.splitlines()[2:])
    ports = {name.strip(): [int(figure) for figure in figures.split()] for name, _, figures in rows}
    counted = [ports[f"h{host}"] for host in range(hosts)]
    return [HostTraffic(port[0], port[1], port[8], port[9]) for port in counted]


@dataclass(frozen=True)
class HostResult:
    """Result of one host: exit code (negative for a signal), seconds of time, traffic of its link, and output."""

    host: int
    code: int
    wall: float
    cpu: float
    traffic: HostTraffic
    lines: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class RunResult:
    """Result of a run on all hosts; `failure` is one sentence, or None."""

    exit_code: int
    failure: str | None
    wall: float
    hosts: tuple[HostResult, ...]
    failed: int | None = None  # the host that failed first


@dataclass
class _Job:
    host: int
    process: "subprocess.Popen[bytes]"
    stream: IO[bytes]
    began: float
    ended: float = 0.0
    cpu: float = 0.0
    partial: bytes = b""

    @property
    def code(self) -> int:
        assert self.process.returncode is not None
        return self.process.returncode


class Launch:
    """The processes of one run."""

    def __init__(self, *, timeout: float | None, output: Callable[[int, str], None] | None, grace: float) -> None:
        self._timeout, self._output, self._grace = timeout, output, grace
        self._began = time.monotonic()
        self._jobs: list[_Job] = []
        self._lines: dict[int, deque[str]] = {}
        self._selector = selectors.DefaultSelector()
        self._running = 0
        self._failed: _Job | None = None
        self._late: list[int] = []

    def add(self, host: int, process: "subprocess.Popen[Any]") -> None:
        """Add a process that was just started with the options PIPED."""
        assert process.stdout is not None
        job = _Job(host, process, process.stdout, time.monotonic())
        self._jobs.append(job)
        self._lines.setdefault(host, deque(maxlen=_KEPT_LINES))
        self._running += 1
        os.set_blocking(job.stream.fileno(), False)
        self._selector.register(job.stream, selectors.EVENT_READ, (self._read, job))
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (self._reap, job))

    def wait(self) -> None:
        """Wait until all processes have ended; stop them after a failure, a timeout or Ctrl-C."""
        end = None if self._timeout is None else self._began + self._timeout
        try:
            while self._running:
                if self._failed is not None:
                    self._serve_until(time.monotonic() + self._grace)
                    self.stop()
                elif end is not None and time.monotonic() >= end:
                    self._late = sorted({job.host for job in self._jobs if job.process.returncode is None})
                    self.stop()
                else:
                    self._step(end)
        except KeyboardInterrupt:
            self._signal(signal.SIGINT)
            self._serve_until(time.monotonic() + _PATIENCE)
            raise

    def stop(self) -> None:
        """Stop the processes that still run, first by SIGTERM and then by SIGKILL, and close their pipes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._running:
                self._signal(number)
                self._serve_until(time.monotonic() + _PATIENCE)
        for job in self._jobs:
            self._read(-1, job)  # output written just before the process ended
            self._emit(job, b"\n" if job.partial else b"")
            self._close(job)

    def result(self, traffic: list[HostTraffic]) -> RunResult:
        """Return the results; call it after all processes have ended."""
        self._selector.close()
        hosts = []
        for host, lines in self._lines.items():
            jobs = [job for job in self._jobs if job.host == host]
            code = next((job.code for job in jobs if job.code), 0)
            wall = max(job.ended for job in jobs) - min(job.began for job in jobs)
            hosts.append(HostResult(host, code, wall, sum(job.cpu for job in jobs), traffic[host], tuple(lines)))
        wall = max(job.ended for job in self._jobs) - self._began
        return RunResult(*self._verdict(), wall, tuple(hosts), self.failed)

    @property
    def failed(self) -> int | None:
        """The host that failed first, or None."""
        return self._failed.host if self._failed is not None else None

    def failure(self) -> str | None:
        """Return one sentence about the first failure, or None; call it after all processes have ended."""
        return self._verdict()[1]

    def _verdict(self) -> tuple[int, str | None]:
        if self._late:
            names = ", ".join(f"h{host}" for host in self._late)
            return TIMED_OUT, f"the command did not end within {self._timeout:g} s on {names}"
        if self._failed is None:
            return 0, None
        code = self._failed.code
        if code > 0:
            return code, f"host h{self._failed.host} failed with exit code {code}"
        return 128 - code, f"host h{self._failed.host} died: killed by {_signal_name(-code)}"

    def _serve_until(self, end: float) -> None:
        while self._running and time.monotonic() < end:
            self._step(end)

    def _step(self, end: float | None) -> None:
        left = None if end is None else max(0.0, end - time.monotonic())
        for key, _ in self._selector.select(left):
            action, job = key.data
            action(key.fd, job)

    def _read(self, _: int, job: _Job) -> None:
        while not job.stream.closed:
            try:
                data = os.read(job.stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._close(job)
            self._emit(job, data)

    def _close(self, job: _Job) -> None:
        if not job.stream.closed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(job.stream)
            job.stream.close()

    def _emit(self, job: _Job, data: bytes) -> None:
        *lines, job.partial = (job.partial + data).split(b"\n")
        if len(job.partial) > _LONGEST_LINE:
            lines, job.partial = [*lines, job.partial], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            self._lines[job.host].append(text)
            if self._output is not None:
                self._output(job.host, text)

    def _reap(self, handle: int, job: _Job) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        _, status, usage = os.wait4(job.process.pid, 0)
        job.process.returncode = os.waitstatus_to_exitcode(status)
        job.cpu = usage.ru_utime + usage.ru_stime
        job.ended = time.monotonic()
        self._running -= 1
        if job.code != 0 and self._failed is None:
            self._failed = job

    def _signal(self, number: signal.Signals) -> None:
        for job in self._jobs:
            if job.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.process.pid, number)


def _signal_name(number: int) -> str:
    """Return a signal's name as in signal(7); Python names only the first and the last real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"
