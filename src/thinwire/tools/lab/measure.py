"""What the lab really does: goodput, loss, packet sizes and set-up times, measured from inside.

`python -m thinwire.tools.lab.measure` prints the table of docs/lab.md; `--json FILE` writes the same figures.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinwire.errors import LabError
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.shaping import FRAME
from thinwire.tools.lab.units import format_rate, parse_rate

_BLAST = str(Path(__file__).parent / "blast.py")
_PAYLOAD = 1448  # of a full frame, with TCP timestamps


@dataclass(frozen=True)
class Figure:
    """One measured figure beside the bar it must meet."""

    what: str
    expected: float
    measured: float
    unit: str
    bar: str
    met: bool


def _blast(lab: Lab, host: int, *role: object, **options: Any) -> "subprocess.Popen[Any]":
    return lab.popen(host, [sys.executable, "-I", "-S", _BLAST, *map(str, role)], **options)


def _answer(process: "subprocess.Popen[Any]", timeout: float) -> dict[str, float]:
    text, _ = process.communicate(timeout=timeout)
    if process.returncode != 0:
        raise LabError(f"a measuring process ended with code {process.returncode}")
    answer: dict[str, float] = json.loads(text)
    return answer


def goodput(lab: Lab, pairs: list[tuple[int, int]], *, seconds: float = 4.0) -> list[float]:
    """Return TCP's goodput in bits per second from sender to receiver, for all pairs at once."""
    sinks = []
    for number, (_, receiver) in enumerate(pairs):
        sinks.append(_blast(lab, receiver, "tcp-sink", 5000 + number, seconds, stdout=subprocess.PIPE))
    blasts = [
        _blast(lab, sender, "tcp-blast", lab.address(receiver), 5000 + number)
        for number, (sender, receiver) in enumerate(pairs)
    ]
    figures = [_answer(sink, seconds + 60)["bits_per_second"] for sink in sinks]
    for blast in blasts:
        blast.wait(timeout=60)
    return figures


def loss(lab: Lab, sender: int, receiver: int, *, count: int = 60_000, per_second: float = 20_000) -> float:
    """Return the share of UDP datagrams that the network lost."""
    sink = _blast(lab, receiver, "udp-sink", 6000, stdout=subprocess.PIPE)
    assert sink.stdout is not None
    sink.stdout.readline()  # on a busy machine it may take its time to get ready
    blast = _blast(lab, sender, "udp-blast", lab.address(receiver), 6000, count, per_second)
    answer = _answer(sink, count / per_second + 60)
    blast.wait(timeout=60)
    return 1 - (answer["received"] + answer["overrun"]) / count


def mean_packet(lab: Lab) -> float:
    """Return the mean size of the busiest sender's packets: above one frame, they would be super-packets."""
    busiest = max(lab.counters(), key=lambda traffic: traffic.sent_bytes)
    return busiest.sent_bytes / max(1, busiest.sent_packets)


def _goodputs() -> Iterator[Figure]:
    for rate, pairs, tolerance in (
        ("10mbit", [(0, 1), (1, 0)], 0.08),
        ("100mbit", [(0, 1), (1, 0)], 0.08),
        ("500mbit", [(0, 1), (1, 0)], 0.08),
        ("1gbit", [(0, 1)], 0.15),
    ):
        bits = parse_rate(rate)
        assert bits is not None
        expected = bits * _PAYLOAD / FRAME / 1e6
        with Lab(2, rate=rate) as lab:
            measured = [figure / 1e6 for figure in goodput(lab, pairs)]
            packet = mean_packet(lab)
        how = "both ways at once" if len(pairs) == 2 else "one way"
        for (sender, receiver), figure in zip(pairs, measured, strict=True):
            what = f"TCP goodput h{sender} to h{receiver}, {format_rate(bits)}, {how}"
            met = abs(figure / expected - 1) <= tolerance
            yield Figure(what, expected, figure, "Mbit/s", f"within {tolerance:.0%}", met)
        what = f"bytes a packet at {format_rate(bits)}"
        yield Figure(what, FRAME, packet, "bytes", f"at most {FRAME}", packet <= FRAME)


def _losses() -> Iterator[Figure]:
    for percent in (1, 5, 20):
        with Lab(2, rate="1gbit", loss=f"{percent}%") as lab:
            measured = 100 * loss(lab, 0, 1)
        met = abs(measured / percent - 1) <= 0.2
        yield Figure(f"UDP loss, {percent}% asked", percent, measured, "%", "within 20%", met)


def _lives() -> Iterator[Figure]:
    for hosts in (14, 64):
        began = time.monotonic()
        with Lab(hosts, rate="500mbit") as lab:
            up = time.monotonic() - began
            ended = lab.run(["true"]).exit_code
            began = time.monotonic()
        down = time.monotonic() - began
        bars = ("under 5 s", "under 3 s") if hosts == 14 else ("works", "works")
        yield Figure(f"{hosts} hosts up", 0, up, "s", bars[0], ended == 0 and (hosts != 14 or up < 5))
        yield Figure(f"{hosts} hosts down", 0, down, "s", bars[1], ended == 0 and (hosts != 14 or down < 3))


_PARTS: dict[str, Callable[[], Iterator[Figure]]] = {"goodput": _goodputs, "loss": _losses, "lives": _lives}


def main(
    only: Annotated[str | None, typer.Option(help="One part: goodput, loss or lives.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure the lab on this machine; about a minute."""
    if only is not None and only not in _PARTS:
        raise typer.BadParameter(f"the parts are {', '.join(_PARTS)}", param_hint="--only")
    console = Console()
    table = Table("figure", "expected", "measured", "unit", "bar", "met")
    figures = []
    with console.status("measuring") as status:
        for part in [only] if only else _PARTS:
            for figure in _PARTS[part]():
                figures.append(figure)
                status.update(f"measured {figure.what}: {figure.measured:.4g} {figure.unit}")
                expected = f"{figure.expected:.4g}" if figure.expected else "-"
                met = "yes" if figure.met else "NO"
                table.add_row(figure.what, expected, f"{figure.measured:.4g}", figure.unit, figure.bar, met)
    console.print(table)
    if json_file:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    if not all(figure.met for figure in figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
