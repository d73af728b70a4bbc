"""Traffic of known size between two emulated hosts: the sender and the sink of the lab's own measurements.

Run by path, with the standard library only; sinks print a line of JSON in the end.
"""

import contextlib
import json
import socket
import sys
import time

_WARM_UP = 1.0  # seconds left out of a goodput: TCP is still finding its pace
_CHUNK = 1 << 20
_DATAGRAM = 256
_SILENCE = 2.0  # seconds without a datagram that end a count


def tcp_sink(port: int, seconds: float) -> dict[str, float]:
    """Receive from one connection; return the goodput after the warm-up in bits per second."""
    with socket.create_server(("0.0.0.0", port)) as server:
        connection, _ = server.accept()
    buffer = bytearray(_CHUNK)
    began, marked, total, at_mark = time.monotonic(), 0.0, 0, 0
    with connection:
        while True:
            count = connection.recv_into(buffer)
            now = time.monotonic()
            total += count
            if not marked and now - began >= _WARM_UP:
                marked, at_mark = now, total
            if not count or now - began >= _WARM_UP + seconds:
                return {"bits_per_second": 8 * (total - at_mark) / (now - marked), "bytes": total}


def tcp_blast(address: str, port: int) -> None:
    """Send to a sink, which may not listen yet, until it hangs up."""
    buffer = bytes(_CHUNK)
    with _connected(address, port) as connection, contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(buffer)


def _connected(address: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.02)


def udp_sink(port: int) -> dict[str, float]:
    """Say when ready, then count datagrams until silence; `overrun` arrived and found the socket's buffer full."""
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


def udp_blast(address: str, port: int, count: int, per_second: float) -> None:
    """Send datagrams at an even pace to a sink that is ready."""
    datagram = bytes(_DATAGRAM)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        began = time.monotonic()
        for number in range(count):
            ahead = number / per_second - (time.monotonic() - began)
            if ahead > 0.002:
                time.sleep(ahead)
            with contextlib.suppress(ConnectionRefusedError):
                sock.send(datagram)


def main(role: str, *arguments: str) -> None:
    """Play one role: tcp-sink PORT SECONDS, tcp-blast ADDRESS PORT,
    udp-sink PORT, or udp-blast ADDRESS PORT COUNT RATE.
    """
    if role == "tcp-sink":
        print(json.dumps(tcp_sink(int(arguments[0]), float(arguments[1]))))
    elif role == "tcp-blast":
        tcp_blast(arguments[0], int(arguments[1]))
    elif role == "udp-sink":
        print(json.dumps(udp_sink(int(arguments[0]))))
    elif role == "udp-blast":
        udp_blast(arguments[0], int(arguments[1]), int(arguments[2]), float(arguments[3]))
    else:
        raise SystemExit(f"blast.py: there is no role '{role}'")


if __name__ == "__main__":
    main(*sys.argv[1:])
