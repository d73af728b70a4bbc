"""`thinwire bench udp`: the udp transport on emulated hosts and on this machine.

Measures training with packet loss against tcp, links shared with TCP, many senders to one receiver (incast), forged
datagrams, and the speed of sending.
"""

import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire import _native
from thinwire.errors import LabError
from thinwire.tools.bench import BenchLab, Record, judge
from thinwire.tools.bench.server import ServerRun, mean_step, measure_runs, of_run
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.lab.measure import tcp_source
from thinwire.tools.lab.units import parse_loss, parse_rates
from thinwire.tools.options import by_delay, caption, write_json
from thinwire.tools.progress import WorkProgress
from thinwire.transport.addresses import connect, listen
from thinwire.transport.udp.congestion import BURST
from thinwire.transport.udp.packet import new_keys, split_packet
from thinwire.transport.udp.recovery import OutgoingMessage, unpack
from thinwire.transport.udp.session import UdpSession
from thinwire.transport.udp.socket import PacketReceiver, SocketThread, open_socket

# Each transport runs this often where the loss is at most _LITTLE; with more loss tcp takes minutes.
_ROUNDS, _LITTLE = 5, 0.05
# Datagrams of a message, and messages that may be unacknowledged: enough for long round trips.
_PIECES, _WINDOW = 64, 16
_INCAST = 13  # senders to one receiver
Bars = dict[str, tuple[float, float]]


_ALONE = ("fuzz", "sender")  # parts that use no emulated network


def run(
    parts: list[str],
    workers: int,
    settings: list[LinkSettings],
    losses: list[str],
    steps: int,
    seconds: float,
    fuzzed: int,
    json_file: Path | None,
) -> int:
    """Run the parts with each of the links' settings, print their figures and bars, and write them.

    workers: of the training runs, besides the server. Returns 1 if a bar was missed. Parts without a network run once.
    """
    for part, hosts in (("loss", 1 + workers), ("fair", 3), ("incast", 1 + _INCAST)):
        for links in settings if part in parts else []:
            try:
                links.check(hosts)
            except LabError as error:
                raise LabError(f"{part}, {hosts} hosts: {error}") from None
    if "incast" in parts and parse_rates(settings[0].rate).down is None:
        raise ValueError("incast needs a limited --rate: give one, or leave incast out of --only")
    for share in losses if "loss" in parts else []:
        parse_loss(share)
    alone = _run_alone(parts, fuzzed)
    sections = [(LinkSettings(), alone)]
    if not set(parts) <= set(_ALONE):
        for links in settings:
            sections.append((links, _run_parts(parts, workers, BenchLab(links), losses, steps, seconds)))
    first, *rest = [figures for _, figures in sections]
    bars = {**first["bars"], **(rest[0]["bars"] if len(rest) == 1 else {})}
    write_json(json_file, {**first, **(by_delay(rest) if rest else {}), "bars": bars})
    return judge((links, figures["bars"]) for links, figures in sections)


def _run_alone(parts: list[str], fuzzed: int) -> dict[str, Any]:
    """Run the parts that use no emulated network."""
    bars: Bars = {}
    figures: dict[str, Any] = {"bars": bars}
    if "fuzz" in parts:
        figures["fuzz"] = _fuzz(fuzzed)
        bars["forged datagrams that change nothing"] = figures["fuzz"]["harmless"], 1.0
    if "sender" in parts:
        figures["sender"] = _sender()
        bars["mbit/s that one core seals and sends"] = figures["sender"]["mbit"], 500.0
    for name in _ALONE:
        if name in parts:
            Console().print_json(json.dumps({name: figures[name]}))
    return figures


def _run_parts(
    parts: list[str], workers: int, lab: BenchLab, losses: list[str], steps: int, seconds: float
) -> dict[str, Any]:
    """Run the parts that use an emulated network."""
    bars: Bars = {}
    figures: dict[str, Any] = {"bars": bars}
    if "incast" in parts:
        figures["incast"] = _flows(lab, _INCAST, 0, seconds)
        total = sum(figures["incast"]["mbit"].values())
        bars[f"{_INCAST} senders fill the link to one receiver"] = (
            total / (1e-6 * (parse_rates(lab.links.rate).down or 1)),
            0.7,
        )
    if "loss" in parts:
        figures["workers"] = workers
        figures["loss"] = _loss(lab, workers, losses, steps, bars)
    if "fair" in parts:
        figures["fair"] = {control: _flows(lab, 1, 1, seconds, control) for control in _controls()}
        for control, flows in figures["fair"].items():
            shares = list(flows["mbit"].values())
            bars[f"share next to a TCP flow ({control}), the smaller of the larger"] = min(shares) / max(shares), 0.5
    console = Console()
    console.print(f"Links {caption(str(lab.links), lab.note)}.", highlight=False)
    for name in ("loss", "fair", "incast"):
        if name in parts:
            console.print_json(json.dumps({name: figures[name]}))
    return {**figures, **lab.to_json()}


def _loss(lab: BenchLab, workers: int, losses: list[str], steps: int, bars: Bars) -> list[dict[str, Any]]:
    transports = {"tcp": ("tcp", "restore"), "udp restore": ("udp", "restore"), "udp ignore": ("udp", "ignore")}
    rows: list[dict[str, Any]] = []
    for share in losses:
        # The transports take turns, so that other programs on the machine affect all of them.
        rounds = range(_ROUNDS if parse_loss(share) <= _LITTLE else 1)
        runs = [
            ServerRun(
                f"{name} {i}", "wide", workers, batch=32, lr=0.1, steps=steps, transport=transport, on_loss=on_loss
            )
            for i in rounds
            for name, (transport, on_loss) in transports.items()
        ]
        records = measure_runs(lab.at(loss=share), runs)
        for name in transports:
            found = [_row(f"{name} {i}", records) for i in rounds]
            medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
            rows.append({"loss": share, "run": name, **medians, "steps": [row["step"] for row in found]})
    tcp, udp = ({row["loss"]: row for row in rows if row["run"] == name} for name in ("tcp", "udp restore"))
    if "0%" in losses:
        bars["tcp's step over udp's, no loss"] = tcp["0%"]["step"] / udp["0%"]["step"], 0.909
    if "5%" in losses:
        bars["tcp's wait over udp's, 5 % loss"] = tcp["5%"]["wait"] / udp["5%"]["wait"], 2.0
    if {"0%", "20%"} <= set(losses):
        drop = udp["20%"]["accuracy"] - udp["0%"]["accuracy"]
        bars["accuracy at 20 % loss less accuracy without, restore, points"] = 100 * drop, -0.5
    return rows


def _row(name: str, records: list[Record]) -> dict[str, float]:
    """Return a run's milliseconds per step and of waiting per step, its accuracy, and its losses."""
    steps = of_run(records, "STEP", name)
    curve = [s["accuracy"] for s in of_run(records, "APPLIED", name) if "accuracy" in s]
    last = {s["rank"]: s for s in steps}.values()
    sent, lost = (sum(s[key] for s in last) for key in ("datagrams", "datagrams_lost"))
    return {
        "step": mean_step(records, name, skip=3),
        "wait": 1e3 * statistics.mean(s["wait"] for s in steps if s["step"] >= 3),
        "accuracy": curve[-1] if curve else 0.0,
        "datagrams": sent,
        "lost": lost / max(sent, 1),
        "restored": sum(s["restored"] for s in last),
    }


def _controls() -> list[str]:
    """Return the TCP congestion controls of this machine to share a link with; each behaves differently."""
    found = []
    for control in ("bbr", "cubic"):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            found.append(control)
    return found


def _flows(lab: BenchLab, senders: int, streams: int, seconds: float, control: str = "") -> dict[str, Any]:
    argv = ["thinwire.tools.bench.udp", str(senders), str(streams), str(seconds), control]
    records = lab.run(1 + senders + streams, argv, ("FLOWS", "SENDER"))
    flows: dict[str, Any] = next(values for kind, values in records if kind == "FLOWS")
    return {**flows, "senders": [values for kind, values in records if kind == "SENDER"]}


def _fuzz(count: int) -> dict[str, Any]:
    """Send forged datagrams to a session with a half received message; return how many had no effect."""
    keys = new_keys()
    theirs, ours = (UdpSession(7, keys, 0.0, server=server, mtu=1400) for server in (False, True))
    refused: Counter[str] = Counter()
    receiver = PacketReceiver({7: ours}, refused, server=True)

    def receive(packet: bytes, origin: bytes) -> bool:
        parts = split_packet(packet)
        refused["malformed"] += parts is None
        return parts is not None and receiver.receive([(parts, origin, 0.0)], 0.0)

    true = theirs.encryptor.encrypt(_native.pack_data(1, 0, 8, b"head", [bytes(400)] * 8, 0.0, 0))
    receive(true[0], b"theirs")
    chance, changed, began = random.Random(0), 0, time.perf_counter()
    with WorkProgress(f"{count:,} forged datagrams", count) as progress:
        for i in range(count):
            changed += receive(_forged(i, true, chance), b"others")
            kept = ours.reassembly.received == 1 and len(ours.reassembly.open[1].pieces) == 1
            changed += not kept or ours.origin != b"theirs"
            if i % 1000 == 999:
                progress.reach(i + 1)
    rejected = dict(refused + ours.decryptor.rejected)
    seconds = time.perf_counter() - began
    return {"datagrams": count, "harmless": 1.0 - changed / count, "rejected": rejected, "seconds": seconds}


def _forged(i: int, true: list[bytes], chance: random.Random) -> bytes:
    """Return random bytes, or a true datagram with a flipped bit or without its end."""
    forged = bytearray(true[i % 8] if i % 3 else chance.randbytes(chance.randrange(1500)))
    if i % 3 == 1:
        forged[chance.randrange(len(forged))] ^= 1 << chance.randrange(8)
    elif i % 3 == 2:
        forged = forged[: chance.randrange(len(forged))]
    return bytes(forged)


def _sender(seconds: float = 2.0) -> dict[str, float]:
    """Measure how fast one core encrypts datagrams and sends them over loopback, as in training."""
    session, sock = UdpSession(7, new_keys(), 0.0, server=False, mtu=1400), open_socket(socket.AF_INET)
    thread = SocketThread(sock, lambda: None, server=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        sock.connect(sink.getsockname())
        sent, began = 0, time.thread_time()
        while time.thread_time() - began < seconds:
            # The pacer sends this many datagrams at once.
            message = OutgoingMessage(1, b"head", [bytes(1300)] * BURST, 0)
            datagrams = session.encryptor.encrypt(message.packet_contents(BURST, time.time()))
            thread.send_packets(session, datagrams)
            sent += sum(map(len, datagrams))
        spent = time.thread_time() - began
    thread.close()
    return {"mbit": 8e-6 * sent / spent, "microseconds": 1e6 * spent * 1400 / sent}


def receive_flows(address: str, port: int, seconds: float, senders: int, streams: int) -> None:
    """Receive from all senders and print the rate of each, measured from 1.5 s after the last one started."""
    # Streams have processes of their own, because the threads for datagrams would delay them in one interpreter.
    forked = multiprocessing.get_context("fork")
    sinks = {f"tcp {number}": forked.Value("q", 0) for number in range(streams)}
    for number, taken in enumerate(sinks.values()):
        forked.Process(target=_sink, args=(port + 1 + number, taken), daemon=True).start()
    listener = listen(f"udp://{address}:{port}", insecure=True)
    counts: dict[str, int] = {}
    at_begin: dict[str, int] = {}
    names: dict[bytes, str] = {}
    lost = sent = 0
    begin, ends = 0.0, time.monotonic() + seconds + 60
    while time.monotonic() < ends:
        for peer, parts in listener.poll(0.05):
            listener.keep(peer)
            name = names.setdefault(peer, f"udp {len(names)}")
            pieces = unpack(parts[1]) if len(parts) == 2 else None
            counts[name] = counts.get(name, 0) + (0 if pieces is None else sum(map(len, pieces.arrived.values())))
            if pieces is not None and at_begin:
                sent, lost = sent + pieces.count, lost + pieces.count - len(pieces.arrived)
            listener.send(peer, [b"taken"])
        now = time.monotonic()
        counts |= {name: taken.value for name, taken in sinks.items() if taken.value}
        if not begin and len(counts) == senders + streams:
            begin, ends = now + 1.5, now + 1.5 + seconds
        if begin and now >= begin and not at_begin:
            at_begin = dict(counts)
    rates = {name: 8e-6 * (counts[name] - at_begin.get(name, 0)) / seconds for name in counts}
    print("FLOWS " + json.dumps({"mbit": rates, "loss": lost / max(sent, 1)}), flush=True)
    for peer in names:
        listener.send(peer, [b"stop"])
    listener.close()


def _sink(port: int, taken: Any) -> None:
    with socket.create_server(("0.0.0.0", port)) as server:
        stream, _ = server.accept()
        with stream, contextlib.suppress(OSError):
            while data := stream.recv(1 << 18):
                taken.value += len(data)


def send_datagrams(address: str, port: int) -> None:
    """Send messages of many datagrams, with a few unacknowledged at a time, until rank 0 says stop."""
    connection = connect(f"udp://{address}:{port}")
    connection.send([b"hello"])
    assert connection.piece_bytes is not None
    unacknowledged, stop, began = 0, False, time.monotonic()
    while not stop and time.monotonic() - began < 120:
        while unacknowledged < _WINDOW and time.monotonic() - began > 0.5:
            connection.send_pieces(b"flow", [bytes(connection.piece_bytes)] * _PIECES)
            unacknowledged += 1
        for parts in connection.poll(0.05):
            unacknowledged -= bytes(parts[0]) == b"taken" and unacknowledged > 0
            stop |= bytes(parts[0]) == b"stop"
    figures = connection.figures()
    print("SENDER " + json.dumps({"mbit": 8e-6 * figures["rate"], "trip": figures["round_trip"]}), flush=True)
    connection.close()


def main() -> None:
    """Run one process of the flows: rank 0 receives, the next ranks send datagrams, the rest TCP streams."""
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    senders, streams, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if rank == 0:
        receive_flows(address, port, seconds, senders, streams)
    elif rank <= senders:
        send_datagrams(address, port)
    else:
        tcp_source(address, port + rank - senders, sys.argv[4])


if __name__ == "__main__":
    main()
