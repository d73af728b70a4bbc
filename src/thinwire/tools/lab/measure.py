"""Measures goodput, delay, loss, packet sizes and set-up times of labs on this machine.

`python -m thinwire.tools.lab.measure` prints a table; `--json PATH` writes the same figures. The module also runs on
the hosts of a lab, as the source or the sink of measured traffic.
"""

import contextlib
import json
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinwire.errors import LabError
from thinwire.tools.lab.delay import DelayFigures
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.shaping import FRAME
from thinwire.tools.lab.units import parse_rate

_PAYLOAD = 1448  # bytes of data in a full frame, with TCP timestamps
_WARM_UP = 1.0  # seconds that a goodput leaves out, while TCP raises its rate
_CHUNK = 1 << 20
_DATAGRAM = 256
_FULL_DATAGRAM = 1472
_ICMP = struct.Struct("!BBHHH")  # type, code, checksum, identifier, number
_ECHO_REQUEST = 8
_SO_TIMESTAMPNS = 35  # Python does not name it
_TIMESTAMP = struct.Struct("@qq")
_SILENCE = 2.0  # seconds without a datagram that end a count
LINE_EVERY = 5.0  # seconds between two lines of progress where there is no terminal


@dataclass(frozen=True)
class LabFigure:
    """One measured figure and the bar that it must meet."""

    what: str
    expected: float
    measured: float
    unit: str
    bar: str
    met: bool


def tcp_sink(port: int, seconds: float, warm_up: float) -> dict[str, float]:
    """Receive from one connection and return the goodput after the warm-up in bits per second."""
    with socket.create_server(("0.0.0.0", port)) as server:
        connection, _ = server.accept()
    buffer = bytearray(_CHUNK)
    began, marked, total, at_mark = time.monotonic(), 0.0, 0, 0
    with connection:
        while True:
            count = connection.recv_into(buffer)
            now = time.monotonic()
            total += count
            if not marked and now - began >= warm_up:
                marked, at_mark = now, total
            if not count or now - began >= warm_up + seconds:
                return {"bits_per_second": 8 * (total - at_mark) / (now - marked), "bytes": total}


def tcp_source(address: str, port: int, control: str = "") -> None:
    """Send until the sink closes the connection, with a congestion control; the sink has 60 s to listen."""
    buffer, end = bytes(_CHUNK), time.monotonic() + 60
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((address, port), timeout=30)
        except OSError:
            time.sleep(0.02)
            continue
        if control:  # otherwise the machine's default
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(buffer)
        return


def udp_sink(port: int) -> dict[str, float]:
    """Print "ready", then count datagrams until none arrives any more; `overrun` counts those that did not fit."""
    received = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        sock.bind(("0.0.0.0", port))
        print("ready", flush=True)
        sock.settimeout(30)
        buffer = bytearray(_DATAGRAM)
        with contextlib.suppress(TimeoutError):
            while True:
                sock.recv_into(buffer)
                if received == 0:
                    sock.settimeout(_SILENCE)
                received += 1
    with open("/proc/net/snmp") as file:
        names, figures = (line.split() for line in file if line.startswith("Udp:"))
    return {"received": received, "overrun": int(figures[names.index("RcvbufErrors")])}


def udp_source(address: str, port: int, count: int, per_second: float, size: int = _DATAGRAM) -> None:
    """Send `count` datagrams at a constant rate."""
    datagram = bytes(size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        began = time.monotonic()
        for number in range(count):
            ahead = number / per_second - (time.monotonic() - began)
            if ahead > 0.002:
                time.sleep(ahead)
            with contextlib.suppress(ConnectionRefusedError):
                sock.send(datagram)


def ping(address: str, count: int, gap: float) -> dict[str, float]:
    """Send echo requests, which the other host's kernel answers; return round trips in seconds.

    The kernel notes when an answer arrives, so that it does not matter how late this process wakes up.
    """
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.settimeout(30)
        sock.connect((address, 0))
        for number in range(count):
            began = time.time_ns()
            sock.send(_ICMP.pack(_ECHO_REQUEST, 0, 0, 0, number))
            _, stamps, _, _ = sock.recvmsg(_DATAGRAM, socket.CMSG_SPACE(_TIMESTAMP.size))
            seconds, nanoseconds = _TIMESTAMP.unpack(stamps[0][2])
            trips.append((seconds * 10**9 + nanoseconds - began) / 1e9)
            time.sleep(gap)
    parts = statistics.quantiles(trips, n=20)
    return {"least": min(trips), "p5": parts[0], "median": parts[9], "p95": parts[-1], "most": max(trips)}


_ROLES: dict[str, Callable[..., dict[str, float] | None]] = {
    role.__name__: role for role in (tcp_sink, tcp_source, udp_sink, udp_source, ping)
}


def _start(lab: Lab, host: int, role: Callable[..., Any], *arguments: Any, **options: Any) -> "subprocess.Popen[Any]":
    argv = [sys.executable, "-m", "thinwire.tools.lab.measure", role.__name__, json.dumps(arguments)]
    return lab.popen(host, argv, **options)


def _answer(process: "subprocess.Popen[Any]", timeout: float) -> dict[str, float]:
    text, _ = process.communicate(timeout=timeout)
    if process.returncode != 0:
        raise LabError(f"a measuring process on a host ended with exit code {process.returncode}")
    answer: dict[str, float] = json.loads(text)
    return answer


def goodput(lab: Lab, pairs: list[tuple[int, int]], *, seconds: float = 4.0, warm_up: float = _WARM_UP) -> list[float]:
    """Return the TCP goodput in bits per second from sender to receiver, for all pairs at the same time."""
    flows = [(port, *pair) for port, pair in enumerate(pairs, 5000)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE}
    sinks = [_start(lab, receiver, tcp_sink, port, seconds, warm_up, **options) for port, _, receiver in flows]
    sources = [_start(lab, sender, tcp_source, lab.address(receiver), port) for port, sender, receiver in flows]
    figures = [_answer(sink, warm_up + seconds + 60)["bits_per_second"] for sink in sinks]
    for source in sources:
        source.wait(timeout=60)
    return figures


def loss(lab: Lab, sender: int, receiver: int, *, count: int = 60_000, per_second: float = 20_000) -> float:
    """Return the share of UDP datagrams that the network lost."""
    sink = _start(lab, receiver, udp_sink, 6000, stdout=subprocess.PIPE)
    assert sink.stdout is not None
    sink.stdout.readline()  # the sink must listen before the first datagram is sent
    source = _start(lab, sender, udp_source, lab.address(receiver), 6000, count, per_second)
    answer = _answer(sink, count / per_second + 60)
    source.wait(timeout=60)
    return 1 - (answer["received"] + answer["overrun"]) / count


def round_trips(lab: Lab, sender: int, receiver: int, *, count: int = 200, gap: float = 0.005) -> dict[str, float]:
    """Return the least, median and largest round trip between two hosts in seconds, and the 5th and 95th percentile."""
    process = _start(lab, sender, ping, lab.address(receiver), count, gap, stdout=subprocess.PIPE)
    return _answer(process, count * (gap + 1) + 60)


def delay_cost(lab: Lab, *, count: int = 40_000, per_second: float = 15_000) -> float | None:
    """Return the processor time in seconds that the delay line takes for a full packet; None where none runs.

    The packets go from host 0 to host 1, which is disconnected meanwhile: the switch drops them after the delay line.
    """
    lab.cut(1)
    before = lab.delay_figures()
    source = _start(lab, 0, udp_source, lab.address(1), 6000, count, per_second, _FULL_DATAGRAM)
    source.wait(timeout=count / per_second + 60)
    time.sleep(max(lab.delays) + 0.1)
    lab.heal(1)
    line = lab.delay_figures(before)
    return line.cpu_seconds / max(1, line.packets) if line is not None else None


def mean_packet(lab: Lab) -> float:
    """Return the mean packet size of the busiest sender, which is at most one frame if offloads are off."""
    busiest = max(lab.counters(), key=lambda traffic: traffic.sent_bytes)
    return busiest.sent_bytes / max(1, busiest.sent_packets)


def _goodputs() -> Iterator[LabFigure]:
    for rate, pairs, tolerance in (
        ("10mbit", [(0, 1), (1, 0)], 0.08),
        ("100mbit", [(0, 1), (1, 0)], 0.08),
        ("500mbit", [(0, 1), (1, 0)], 0.08),
        ("1gbit", [(0, 1)], 0.15),
    ):
        expected = (parse_rate(rate) or 0) * _PAYLOAD / FRAME / 1e6
        with Lab(2, rate=rate) as lab:
            measured = [figure / 1e6 for figure in goodput(lab, pairs)]
            packet = mean_packet(lab)
        how = "both ways at once" if len(pairs) == 2 else "one way"
        for (sender, receiver), figure in zip(pairs, measured, strict=True):
            what = f"TCP goodput h{sender} to h{receiver}, {rate}, {how}"
            met = abs(figure / expected - 1) <= tolerance
            yield LabFigure(what, expected, figure, "Mbit/s", f"within {tolerance:.0%}", met)
        met = packet <= FRAME
        yield LabFigure(f"bytes per packet at {rate}", FRAME, packet, "bytes", f"at most {FRAME}", met)


def _losses() -> Iterator[LabFigure]:
    for percent in (1, 5, 20):
        with Lab(2, rate="1gbit", loss=f"{percent}%") as lab:
            measured = 100 * loss(lab, 0, 1)
        met = abs(measured / percent - 1) <= 0.2
        yield LabFigure(f"UDP loss, {percent}% requested", percent, measured, "%", "within 20%", met)


def _delays() -> Iterator[LabFigure]:
    for delay in (10, 25, 50):
        with Lab(4, rate="100mbit", delay=f"{delay}ms") as lab:
            for pair in ((0, 1), (2, 3)):
                found = {name: seconds * 1e3 for name, seconds in round_trips(lab, *pair).items()}
                what = f"round trip h{pair[0]} to h{pair[1]}, {delay} ms one way"
                median, spread = found["median"], found["p95"] - found["p5"]
                yield LabFigure(what, 2 * delay, median, "ms", "within 1 ms", abs(median - 2 * delay) <= 1)
                yield LabFigure(f"{what}: p95 - p5", 0, spread, "ms", "under 0.5 ms", spread < 0.5)
    for flows in ([(0, 1)], [(0, 1), (1, 2), (2, 3), (3, 0)]):
        with Lab(4, rate="100mbit", delay="25ms") as lab:
            before = lab.delay_figures()
            worst = min(goodput(lab, flows, warm_up=5)) / 1e6
            line = lab.delay_figures(before)
        what = f"{len(flows)} TCP flow{'s' if len(flows) > 1 else ''}, 100mbit, 25 ms one way"
        yield LabFigure(f"{what}: least goodput after 5 s", 100, worst, "Mbit/s", "at least 90", worst >= 90)
        if line is not None:
            yield from _costs(what, line)
    with Lab(2, rate="200mbit", delay="25ms") as lab:
        alone = delay_cost(lab)
    if alone is not None:
        what = "processor time of a packet in the delay line"
        yield LabFigure(what, 0, alone * 1e6, "us", "at most 10", alone <= 1e-5)


def _costs(what: str, line: DelayFigures) -> Iterator[LabFigure]:
    each = line.cpu_seconds * 1e6 / max(1, line.packets)
    yield LabFigure(f"{what}: time of a packet up to its socket", 0, each, "us", "at most 15", each <= 15)
    yield LabFigure(f"{what}: delay line's share of a core", 0, line.share, "", "at most 0.5", line.share <= 0.5)
    late = line.p99_late_ms
    yield LabFigure(f"{what}: p99 lateness", 0, late, "ms", "under 1 ms", late < 1)
    yield LabFigure(f"{what}: dropped by the delay line", 0, line.dropped, "packets", "none", line.dropped == 0)


def _lifecycle() -> Iterator[LabFigure]:
    for hosts in (14, 64):
        began = time.monotonic()
        with Lab(hosts, rate="500mbit") as lab:
            up = time.monotonic() - began
            ended = lab.run(["true"]).exit_code
            began = time.monotonic()
        down = time.monotonic() - began
        bars = ("under 2 s", "under 1 s") if hosts == 14 else ("works", "works")
        yield LabFigure(f"set-up of {hosts} hosts", 0, up, "s", bars[0], ended == 0 and (hosts != 14 or up < 2))
        yield LabFigure(f"removal of {hosts} hosts", 0, down, "s", bars[1], ended == 0 and (hosts != 14 or down < 1))


_PARTS: dict[str, Callable[[], Iterator[LabFigure]]] = {
    "goodput": _goodputs,
    "delay": _delays,
    "loss": _losses,
    "lifecycle": _lifecycle,
}


@contextlib.contextmanager
def _progress(console: Console, sentence: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what was measured; without a terminal, print a sentence every few seconds, too."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(LINE_EVERY):
            print(sentence(), file=sys.stderr, flush=True)

    if console.is_terminal:
        with console.status(sentence()) as status:
            yield status.update
        return
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lambda line: print(line, file=sys.stderr, flush=True)
    finally:
        ended.set()
        thread.join()


def main(
    only: Annotated[str | None, typer.Option(help="One part: goodput, delay, loss or lifecycle.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the figures as JSON.")] = None,
) -> None:
    """Measure labs on this machine, which takes about three minutes."""
    if only is not None and only not in _PARTS:
        raise typer.BadParameter(f"the parts are {', '.join(_PARTS)}", param_hint="--only")
    console = Console()
    table = Table("figure", "expected", "measured", "unit", "bar", "met")
    figures, began, parts = [], time.monotonic(), [only] if only else list(_PARTS)
    part = parts[0]

    def sentence() -> str:
        place = f" (part {parts.index(part) + 1} of {len(parts)})" if len(parts) > 1 else ""
        return f"measuring {part}{place}: {time.monotonic() - began:.0f} s so far"

    with _progress(console, sentence) as tell:
        for part in parts:
            for figure in _PARTS[part]():
                figures.append(figure)
                tell(f"measured {figure.what}: {figure.measured:.4g} {figure.unit}")
                expected = f"{figure.expected:.4g}" if figure.expected else "-"
                met = "yes" if figure.met else "NO"
                table.add_row(figure.what, expected, f"{figure.measured:.4g}", figure.unit, figure.bar, met)
    console.print(table)
    if json_file:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    if not all(figure.met for figure in figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _ROLES:
        # One source or sink on a host; a sink prints its figures as a line of JSON.
        if (figures := _ROLES[sys.argv[1]](*json.loads(sys.argv[2]))) is not None:
            print(json.dumps(figures))
    else:
        typer.run(main)
