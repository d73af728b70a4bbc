"""One process of `thinwire bench udp`'s flows: rank 0 takes all that comes, the others send as fast as they may.

Some ranks send datagrams by the udp transport, the rest a plain TCP stream; rank 0 counts what arrives of each.
"""

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import time
from typing import Any

from thinwire.transport.addresses import connect, listen
from thinwire.transport.udp.recovery import unpack

# A message's datagrams, and messages under way at once: enough for long round trips.
_PIECES, _WINDOW = 64, 16


def take(address: str, port: int, seconds: float, senders: int, streams: int) -> None:
    """Rank 0: bytes of each sender between a second and a half after the last one came and the end."""
    # In processes of their own: one interpreter would let the datagrams' threads hold up the streams.
    forked = multiprocessing.get_context("fork")
    sinks = {f"tcp {number}": forked.Value("q", 0) for number in range(streams)}
    for number, taken in enumerate(sinks.values()):
        forked.Process(target=_sink, args=(port + 1 + number, taken), daemon=True).start()
    listener = listen(f"udp://{address}:{port}", insecure=True)
    counts: dict[str, int] = {}
    names: dict[bytes, str] = {}
    lost = sent = 0
    at_begin: dict[str, int] = {}
    begin, ends = 0.0, time.monotonic() + seconds + 60
    while time.monotonic() < ends:
        for peer, parts in listener.poll(0.05):
            name = names.setdefault(peer, f"udp {len(names)}")
            pieces = unpack(parts[1]) if len(parts) == 2 else None
            counts[name] = counts.get(name, 0) + (0 if pieces is None else sum(map(len, pieces.arrived.values())))
            if pieces is not None and at_begin:
                sent, lost = sent + pieces.count, lost + pieces.count - len(pieces.arrived)
            listener.send(peer, [b"taken"])
        now = time.monotonic()
        counts |= {name: taken.value for name, taken in sinks.items() if taken.value}
        if not begin and len(counts) == senders + streams:
            begin = now + 1.5
            ends = begin + seconds
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


def send(address: str, port: int) -> None:
    """Messages of many datagrams, a few under way, until told to stop."""
    connection = connect(f"udp://{address}:{port}")
    connection.send([b"hello"])
    assert connection.piece_bytes is not None
    under_way, stop, began = 0, False, time.monotonic()
    while not stop and time.monotonic() - began < 120:
        while under_way < _WINDOW and time.monotonic() - began > 0.5:
            connection.send_pieces(b"flow", [bytes(connection.piece_bytes)] * _PIECES)
            under_way += 1
        for parts in connection.poll(0.05):
            under_way -= bytes(parts[0]) == b"taken" and under_way > 0
            stop |= bytes(parts[0]) == b"stop"
    figures = connection.figures()
    print("SENDER " + json.dumps({"mbit": 8e-6 * figures["rate"], "trip": figures["round_trip"]}), flush=True)
    connection.close()


def stream(address: str, port: int, control: str) -> None:
    """A TCP stream until the other end hangs up, with a congestion control or the machine's own."""
    data, ends = bytes(1 << 18), time.monotonic() + 60
    while time.monotonic() < ends:
        try:
            connection = socket.create_connection((address, port), timeout=30)
        except OSError:  # not there yet
            time.sleep(0.05)
            continue
        if control:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(data)
        return


def main() -> None:
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    senders, streams, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if rank == 0:
        take(address, port, seconds, senders, streams)
    elif rank <= senders:
        send(address, port)
    else:
        stream(address, port + rank - senders, sys.argv[4])


if __name__ == "__main__":
    main()
