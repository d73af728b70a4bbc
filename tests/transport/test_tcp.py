"""The tcp transport alone: foreign programs, restarts, slow and dead peers."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.transport.scenarios import PATIENCE, arriving, replies
from thinwire.errors import TransportError
from thinwire.transport import connect, listen, tcp
from thinwire.transport.tcp import TcpConnection, TcpListener

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


@pytest.fixture
def listener() -> Iterator[TcpListener]:
    made = listen("tcp://127.0.0.1:0")
    assert isinstance(made, TcpListener)
    yield made
    made.close()


@contextlib.contextmanager
def connected(address: str) -> Iterator[TcpConnection]:
    made = connect(address)
    assert isinstance(made, TcpConnection)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def dealer(address: str, name: bytes = b"\1" * 16) -> Iterator["zmq.Socket[bytes]"]:
    """Open a ZeroMQ socket that can send anything a worker never would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.ROUTING_ID, name)
        made.setsockopt(zmq.LINGER, 0)
        made.connect(address)
        yield made


def raw_connection(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def speaks(listener: TcpListener, connection: TcpConnection, text: bytes) -> None:
    """Check that a message passes in each direction."""
    connection.send([text])
    peer, parts = next(arriving(listener))
    assert parts == [text]
    assert listener.send(peer, [text])
    assert next(replies(connection)) == [text]


def command(name: bytes, **properties: bytes) -> bytes:
    """Return a command of ZMTP 3, such as READY."""
    body = bytes([len(name)]) + name
    for key, value in properties.items():
        field = key.replace("_", "-").encode()
        body += bytes([len(field)]) + field + struct.pack(">I", len(value)) + value
    return b"\x04" + bytes([len(body)]) + body


def handshake(other: socket.socket) -> None:
    """Do ZMTP's handshake by hand, and send one message."""
    other.sendall(GREETING + command(b"READY", Socket_Type=b"DEALER", Identity=b"\1" * 16))
    received = b""
    while b"READY" not in received:
        received += other.recv(4096)
    other.sendall(b"\x00\x02ok")


def test_garbage_on_the_port_disturbs_no_worker(listener: TcpListener) -> None:
    garbage = [
        b"GET / HTTP/1.1\r\nHost: thinwire\r\n\r\n" * 50,
        os.urandom(100_000),
        b"\0" * 1000,
        b"\xff" * 1000,
        GREETING[:20],
        GREETING + b"\x04\xff" + bytes(300),
        b"",
    ]
    with connected(listener.address) as connection:
        for number, text in enumerate(garbage):
            with raw_connection(listener.address) as other:
                with contextlib.suppress(ConnectionError):
                    other.sendall(text)
                speaks(listener, connection, b"during %d" % number)
            speaks(listener, connection, b"after %d" % number)


def test_a_part_that_is_too_large_is_refused_before_it_arrives(listener: TcpListener) -> None:
    with connected(listener.address) as connection, raw_connection(listener.address) as other:
        handshake(other)
        assert next(arriving(listener))[1] == [b"ok"]
        other.sendall(b"\x02" + struct.pack(">Q", 1 << 40) + bytes(1000))
        with contextlib.suppress(ConnectionResetError):
            while other.recv(4096):  # the listener closes the connection
                pass
        speaks(listener, connection, b"next")


def test_messages_beyond_the_limits_are_discarded_and_counted(listener: TcpListener) -> None:
    with dealer(listener.address) as other:
        other.send_multipart([b"part"] * 9)
        other.send_multipart([b"part"] * 1000)
        other.send_multipart([b"part"] * 8)
        assert next(arriving(listener))[1] == [b"part"] * 8
    assert listener.discarded == 2
    with dealer(listener.address, name=b"short") as other:
        other.send(b"who am I?")
        deadline = time.monotonic() + PATIENCE
        while listener.discarded == 2 and time.monotonic() < deadline:
            assert listener.poll(0.05) == []
    assert listener.discarded == 3


def test_a_worker_reconnects_to_a_restarted_server(listener: TcpListener) -> None:
    with connected(listener.address) as connection:
        connection.send([b"one"])
        peer, _ = next(arriving(listener))
        listener.close()
        connection.send([b"two"])  # the server is away
        again = listen(listener.address)
        try:
            same, parts = next(arriving(again))
            assert same == peer and parts == [b"two"]
            assert again.send(peer, [b"welcome back"])
            assert next(replies(connection)) == [b"welcome back"]
        finally:
            again.close()


def test_a_worker_may_start_before_its_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with connected(address) as connection:
        connection.send([b"early"])
        assert connection.poll(0.05) == []
        listener = listen(address)
        try:
            assert next(arriving(listener))[1] == [b"early"]
        finally:
            listener.close()


WORKER = """
import sys
from thinwire.transport import connect
connection = connect(sys.argv[1])
connection.send([b"alive"])
while True:
    connection.poll(60)
"""


def test_a_killed_worker_is_unreachable(listener: TcpListener) -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER, listener.address]) as process:
        try:
            peer, _ = next(arriving(listener))
            assert listener.send(peer, [b"hello"])
        finally:
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while listener.send(peer, [b"hello?"]):
        assert time.monotonic() < deadline
        listener.poll(0.01)


def test_the_queue_of_a_silent_peer_is_bounded(listener: TcpListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LARGEST", 8 << 20)
    block = bytes(1 << 20)
    with raw_connection(listener.address) as other, connected(listener.address) as connection:
        handshake(other)
        peer, _ = next(arriving(listener))
        sent = 0
        while listener.send(peer, [block]):
            sent += 1
            assert sent < 100  # 8 MB queued, and what the kernel's buffers take
        assert sent >= 8
        speaks(listener, connection, b"next")
    listener.forget(peer)


def test_a_queue_of_small_messages_is_bounded(listener: TcpListener) -> None:
    with connected(listener.address) as connection:
        connection.send([b"here"])
        peer, _ = next(arriving(listener))
        sent = 0
        while listener.send(peer, [b"%d" % sent, b"x" * 10_000]):
            sent += 1
            assert sent < 10_000
        for number, parts in zip(range(sent), replies(connection), strict=False):
            assert parts[0] == b"%d" % number  # and all accepted messages arrive


def test_a_worker_gets_an_error_if_its_server_hangs(listener: TcpListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LARGEST", 8 << 20)
    with connected(listener.address) as connection, pytest.raises(TransportError, match="does not read"):
        for _ in range(200):
            connection.send([bytes(1 << 20)])


def test_a_port_in_use_is_an_error(listener: TcpListener) -> None:
    with pytest.raises(TransportError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+: address already in use"):
        listen(listener.address)
