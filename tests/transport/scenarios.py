"""Scenarios that every transport must pass. Each has a server's side, a worker's side and a number of workers.

The tests run the same scenarios with threads over TCP and with processes over MPI.
"""

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thinwire.transport import LARGEST, Connection, Listener, Parts, Peer
from thinwire.transport.base import MOST_PARTS

PATIENCE = 30.0
END = b"end"


@dataclass(frozen=True)
class Scenario:
    """`server` gets the listener and the number of workers; `worker` gets a function that connects, and its number."""

    server: Callable[[Listener, int], None]
    worker: Callable[[Callable[[], Connection], int], None]
    workers: int


@contextlib.contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    """Do what pytest.raises does; fourteen ranks would take seconds to import pytest."""
    try:
        yield
    except kind as error:
        assert text in str(error)
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


def arriving(listener: Listener) -> Iterator[tuple[Peer, Parts]]:
    """Yield messages from workers; fail after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield from listener.poll(1.0)
    raise AssertionError("no message came")


def replies(connection: Connection) -> Iterator[Parts]:
    """Yield messages from the server; fail after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield from connection.poll(1.0)
    raise AssertionError("no reply came")


def echo(listener: Listener, workers: int) -> None:
    """Send every message back until every worker has sent END."""
    peers, done = set(), 0
    for peer, parts in arriving(listener):
        peers.add(peer)
        assert listener.send(peer, parts)
        done += bytes(parts[0]) == END
        if done == workers:
            break
    assert len(peers) == workers


def order_worker(connect: Callable[[], Connection], number: int) -> None:
    """Messages of many sizes and parts, empty ones among them, come back complete and in order."""
    rng = random.Random(number)
    connection = connect()
    sent: list[list[bytes]] = []
    for step in range(40):
        sizes = [rng.choice((0, 1, 100, 20_000, 100_000)) for _ in range(rng.randrange(MOST_PARTS))]
        message = [b"%d:%d" % (number, step), *(rng.randbytes(size) for size in sizes)]
        sent.append(message)
        connection.send(message)
    connection.send([END])
    for parts in replies(connection):
        if bytes(parts[0]) == END:
            break
        assert [bytes(part) for part in parts] == sent.pop(0)
    assert not sent
    connection.close()


def large_server(listener: Listener, workers: int) -> None:
    """Answer a large message with its checksum and with itself."""
    messages = arriving(listener)
    for _ in range(workers):
        peer, (_, data) = next(messages)
        assert listener.send(peer, [hashlib.blake2b(data).digest(), data])


def large_worker(connect: Callable[[], Connection], number: int) -> None:
    connection = connect()
    data = random.Random(number).randbytes(1 << 20) * 50
    connection.send([b"large", data])
    checksum, back = next(replies(connection))
    assert bytes(checksum) == hashlib.blake2b(data).digest() and back == data
    connection.close()


def woken(poll: Callable[[float], object], wake: Callable[[], None]) -> None:
    """A poll without messages ends when another thread calls wake, or at once if wake was called before it."""
    timer = threading.Timer(0.05, wake)
    timer.start()
    assert poll(PATIENCE) == []
    timer.join()
    wake()
    assert poll(PATIENCE) == []


def wake_server(listener: Listener, workers: int) -> None:
    peer, _ = next(arriving(listener))
    before = time.monotonic()
    woken(listener.poll, listener.wake)
    assert time.monotonic() - before < PATIENCE
    assert listener.send(peer, [b"awake"])


def wake_worker(connect: Callable[[], Connection], number: int) -> None:
    connection = connect()
    before = time.monotonic()
    woken(connection.poll, connection.wake)
    assert time.monotonic() - before < PATIENCE
    connection.send([b"awake"])
    assert next(replies(connection)) == [b"awake"]
    connection.close()


def gone_server(listener: Listener, workers: int) -> None:
    """A peer that has closed its connection cannot be reached, nor can an unknown peer."""
    peer, _ = next(arriving(listener))
    assert listener.send(peer, [b"welcome"])
    deadline = time.monotonic() + PATIENCE
    while listener.send(peer, [b"still there?"]):
        assert time.monotonic() < deadline
        assert listener.poll(0.01) == []
    listener.forget(peer)
    assert not listener.send(b"\1" * 16, [b"who is this?"])


def gone_worker(connect: Callable[[], Connection], number: int) -> None:
    connection = connect()
    connection.send([b"hello"])
    assert next(replies(connection)) == [b"welcome"]
    connection.close()
    connection.close()
    connection.wake()


def back_server(listener: Listener, workers: int) -> None:
    """Messages that were queued when a worker closed still arrive, and a worker that reconnects can be reached."""
    messages = arriving(listener)
    assert next(messages)[1] == [b"first"]
    peer, parts = next(messages)
    assert parts == [b"again"]
    listener.forget(peer)  # this does not close the connection
    assert listener.send(peer, [b"welcome back"])


def back_worker(connect: Callable[[], Connection], number: int) -> None:
    connection = connect()
    connection.send([b"first"])
    connection.close()
    connection = connect()
    connection.send([b"again"])
    assert next(replies(connection)) == [b"welcome back"]
    connection.close()


def limits_worker(connect: Callable[[], Connection], number: int) -> None:
    """Sending a message beyond the limits raises ValueError, and the next message arrives."""
    connection = connect()
    for bad in ([], [b"x"] * (MOST_PARTS + 1)):
        with raises(ValueError, "1 to 8 parts"):
            connection.send(bad)
    with raises(ValueError, "larger than"):
        connection.send([b"x", memoryview(bytearray(LARGEST))])
    connection.send([END])
    assert next(replies(connection)) == [END]
    connection.close()


SCENARIOS = {
    "order": Scenario(echo, order_worker, 13),
    "large": Scenario(large_server, large_worker, 1),
    "wake": Scenario(wake_server, wake_worker, 1),
    "gone": Scenario(gone_server, gone_worker, 1),
    "back": Scenario(back_server, back_worker, 1),
    "limits": Scenario(echo, limits_worker, 1),
}
