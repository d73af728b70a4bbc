"""`thinwire bench udp`: training through loss against tcp, shared links, forged datagrams, and the sender's speed."""

import contextlib
import json
import random
import socket
import statistics
import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from thinwire import _native
from thinwire.tools.options import JsonFile, verdict, write_json
from thinwire.transport.udp.congestion import BURST

PARTS = ("loss", "fair", "incast", "fuzz", "sender")
# How often each way is tried where at most so much is lost.
_ROUNDS, _LITTLE = 5, 0.05
Bars = dict[str, tuple[float, float]]


def udp_command(
    only: Annotated[str, typer.Option(help=f"Parts to run: {', '.join(PARTS)}.")] = ",".join(PARTS),
    rate: Annotated[str, typer.Option(help="Rate of every link.")] = "100mbit",
    loss: Annotated[str, typer.Option(help="Shares of packets lost.")] = "0%,1%,5%,20%",
    steps: Annotated[int, typer.Option(min=10, help="Steps of each training.")] = 200,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of the flows.")] = 8.0,
    fuzzed: Annotated[int, typer.Option(min=1000, help="Forged datagrams.")] = 1_000_000,
    json_file: JsonFile = None,
) -> int:
    """Training over datagrams: through loss, next to TCP, with many senders, under fire."""
    parts = [part.strip() for part in only.split(",")]
    if not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"--only takes {', '.join(PARTS)}, not {only!r}")
    losses = [word.strip() for word in loss.split(",")]
    link = _check(parts, rate, losses)
    bars: Bars = {}
    figures: dict[str, Any] = {"rate": rate, "bars": bars}
    if "loss" in parts:
        figures["loss"] = _loss(rate, losses, steps, bars)
    if "fair" in parts:
        figures["fair"] = {control: _flows(rate, 1, 1, seconds, control) for control in _controls()}
        for control, flows in figures["fair"].items():
            shares = list(flows["mbit"].values())
            bars[f"share next to a TCP flow ({control}), the smaller of the larger"] = min(shares) / max(shares), 0.5
    if "incast" in parts:
        figures["incast"] = _flows(rate, 13, 0, seconds)
        total = sum(figures["incast"]["mbit"].values())
        bars["13 senders fill the link to one receiver"] = total / (1e-6 * link), 0.7
    if "fuzz" in parts:
        figures["fuzz"] = _fuzz(fuzzed)
        bars["forged datagrams that change nothing"] = figures["fuzz"]["harmless"], 1.0
    if "sender" in parts:
        figures["sender"] = _sender()
        bars["mbit/s that one core seals and sends"] = figures["sender"]["mbit"], 500.0
    console = Console()
    for name in parts:
        console.print_json(json.dumps({name: figures[name]}))
    for what, (measured, bar) in bars.items():
        console.print(
            f"{'met   ' if measured >= bar else 'MISSED'} {what}: {measured:.2f} (bar {bar})", highlight=False
        )
    write_json(json_file, figures)
    return verdict(measured >= bar for measured, bar in bars.values())


def _check(parts: list[str], rate: str, losses: list[str]) -> int:
    """Bits per second into a host (1 where no part asks); ValueError for words that a lab would refuse later."""
    from thinwire.tools.lab.units import parse_loss, parse_rates

    link = parse_rates(rate).down
    if "incast" in parts and link is None:
        raise ValueError("incast fills a link and needs a --rate: give one, or leave incast out of --only")
    for share in losses if "loss" in parts else []:
        parse_loss(share)
    return link or 1


def _lab(hosts: int, rate: str, argv: list[str], kinds: tuple[str, ...], loss: str | None = None) -> Any:
    """What the processes of one lab said, of these kinds."""
    from thinwire.errors import LabError
    from thinwire.tools.lab import Lab

    said: list[tuple[str, dict[str, Any]]] = []

    def read(host: int, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind in kinds:
            said.append((kind, json.loads(rest)))

    with Lab(hosts, rate=rate, loss=loss) as lab:
        result = lab.run([sys.executable, "-m", *argv], output=read)
    if result.failure is not None:
        raise LabError(f"the benchmark failed: {result.failure}")
    return said


def _loss(rate: str, losses: list[str], steps: int, bars: Bars) -> list[dict[str, Any]]:
    from thinwire.tools.bench.server import Trial
    from thinwire.tools.lab.units import parse_loss

    ways = {"tcp": ("tcp", "restore"), "udp restore": ("udp", "restore"), "udp ignore": ("udp", "ignore")}
    rows: list[dict[str, Any]] = []
    for share in losses:
        # In turns, so that a neighbour on the machine does not meet one way alone; with much loss tcp takes minutes.
        rounds = range(_ROUNDS if parse_loss(share) <= _LITTLE else 1)
        runs = [
            Trial(f"{name} {i}", "wide", 4, batch=32, lr=0.1, steps=steps, transport=way, on_loss=on_loss)
            for i in rounds
            for name, (way, on_loss) in ways.items()
        ]
        argv = ["thinwire.tools.bench.server_process", json.dumps([asdict(run) for run in runs])]
        said = _lab(5, rate, argv, ("APPLIED", "STEP"), None if share == "0%" else share)
        rows += [{"loss": share, "run": name, **_middle([_row(f"{name} {i}", said) for i in rounds])} for name in ways]
    found = {(row["loss"], row["run"]): row for row in rows}
    if "0%" in losses:
        bars["tcp's step over udp's, no loss"] = found["0%", "tcp"]["step"] / found["0%", "udp restore"]["step"], 0.909
    if "5%" in losses:
        bars["tcp's wait over udp's, 5 % loss"] = found["5%", "tcp"]["wait"] / found["5%", "udp restore"]["wait"], 2.0
    if {"0%", "20%"} <= set(losses):
        drop = found["20%", "udp restore"]["accuracy"] - found["0%", "udp restore"]["accuracy"]
        bars["accuracy at 20 % loss against none, restore, points"] = 100 * drop, -0.5
    return rows


def _middle(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure over the rounds, and the step of every round."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {
        "steps": [row["step"] for row in rows]
    }


def _row(name: str, said: list[tuple[str, dict[str, Any]]]) -> dict[str, float]:
    """Milliseconds of a step and of waiting in it, after the first steps; accuracy; what was lost and restored."""
    steps = [s for kind, s in said if kind == "STEP" and s["run"] == name]
    applied = sorted(s["applied"] for kind, s in said if kind == "APPLIED" and s["run"] == name)[3:]
    curve = [s["accuracy"] for kind, s in said if kind == "APPLIED" and s["run"] == name and "accuracy" in s]
    last = {s["rank"]: s for s in steps}.values()
    sent, lost = (sum(s[key] for s in last) for key in ("datagrams", "datagrams_lost"))
    return {
        "step": 1e3 * (applied[-1] - applied[0]) / (len(applied) - 1),
        "wait": 1e3 * statistics.mean(s["wait"] for s in steps if s["step"] >= 3),
        "accuracy": curve[-1] if curve else 0.0,
        "datagrams": sent,
        "lost": lost / max(sent, 1),
        "restored": sum(s["restored"] for s in last),
    }


def _controls() -> list[str]:
    """TCP's congestion controls that can be had here: what is fair to one may starve another."""
    found = []
    for control in ("bbr", "cubic"):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            found.append(control)
    return found


def _flows(rate: str, senders: int, streams: int, seconds: float, control: str = "") -> dict[str, Any]:
    argv = ["thinwire.tools.bench.udp_process", str(senders), str(streams), str(seconds), control]
    said = _lab(1 + senders + streams, rate, argv, ("FLOWS", "SENDER"))
    flows: dict[str, Any] = next(values for kind, values in said if kind == "FLOWS")
    return {**flows, "senders": [values for kind, values in said if kind == "SENDER"]}


def _fuzz(count: int) -> dict[str, Any]:
    """Forged datagrams against a session with a message half there: how many of them changed nothing."""
    from thinwire.transport.udp.packet import new_keys
    from thinwire.transport.udp.session import UdpSession
    from thinwire.transport.udp.socket import SocketThread, open_socket

    keys = new_keys()
    theirs, ours = (UdpSession(7, keys, server=server, mtu=1400) for server in (False, True))
    thread = SocketThread(open_socket(socket.AF_INET), lambda: None, server=True)
    thread.sessions[7] = ours
    true = theirs.encryptor.encrypt_all(_native.pack_data(1, 0, 8, b"head", [bytes(400)] * 8, 0.0, 0))
    thread.inject(true[0], b"theirs", 0.0)
    chance, changed, began = random.Random(0), 0, time.perf_counter()
    for i in range(count):
        forged = bytearray(true[i % 8] if i % 3 else chance.randbytes(chance.randrange(1500)))
        if i % 3 == 1:
            forged[chance.randrange(len(forged))] ^= 1 << chance.randrange(8)
        elif i % 3 == 2:
            forged = forged[: chance.randrange(len(forged))]
        changed += thread.inject(bytes(forged), b"others", 0.0)
        changed += ours.reassembly.received != 1 or len(ours.reassembly.open[1].pieces) != 1 or ours.origin != b"theirs"
    rejected = dict(thread.rejected + ours.decryptor.rejected)
    thread.close()
    seconds = time.perf_counter() - began
    return {"datagrams": count, "harmless": 1.0 - changed / count, "rejected": rejected, "seconds": seconds}


def _sender(seconds: float = 2.0) -> dict[str, float]:
    """What one core seals and hands to the kernel, over loopback, by the way that training uses."""
    from thinwire.transport.udp.packet import new_keys
    from thinwire.transport.udp.recovery import OutgoingMessage
    from thinwire.transport.udp.session import UdpSession
    from thinwire.transport.udp.socket import SocketThread, open_socket

    session, sock = UdpSession(7, new_keys(), server=False, mtu=1400), open_socket(socket.AF_INET)
    thread = SocketThread(sock, lambda: None, server=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        sock.connect(sink.getsockname())
        sent, began = 0, time.thread_time()
        while time.thread_time() - began < seconds:
            # As many together as the pacer lets leave at once.
            datagrams = session.encryptor.encrypt_all(
                OutgoingMessage(1, b"head", [bytes(1300)] * BURST, 0).packet_contents(BURST)
            )
            thread.send_packets(session, datagrams)
            sent += sum(map(len, datagrams))
        spent = time.thread_time() - began
    thread.close()
    return {"mbit": 8e-6 * sent / spent, "microseconds": 1e6 * spent * 1400 / sent}
