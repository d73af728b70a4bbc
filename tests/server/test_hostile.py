"""A server under hostile messages: its memory stays bounded and honest workers go on.

Three waves of 100,000 messages of every kind, over loopback, while two honest workers train. A wave is paced, because
the attacker, the server and the workers share the cores of one machine: what is measured is what the messages cost the
server. Run it with `pytest -m long -s tests/server/test_hostile.py` to see the figures.
"""

import itertools
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from tests.server.processes import ProcessHandle, Say, processes
from tests.server.serving import small_net
from thinwire.server.protocol import Message, MessageKind, hello_of, parse, with_json
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.transport.addresses import connect, listen
from thinwire.transport.udp.packet import Envelope, EnvelopeKind, MessageAck, pack_end, read_envelope

WAVE, PER_SECOND, WAVES = 100_000, 8_000, 3
COMPUTE = 0.02  # seconds of a step of an honest worker
MEMORY_MB, RATE = 10.0, 0.7  # what must hold


def serve(say: Say, spec: dict[str, Any]) -> None:
    """Run a server that tells its steps, and its memory when a step is a multiple of ten."""
    torch.set_num_threads(1)
    model = small_net()
    server = Server(
        model, torch.optim.SGD(model.parameters(), lr=0.01), expect=2, timeout=5.0, stall=5.0, recipe="hostile"
    )
    listener = listen(spec["address"])
    say({"address": listener.address, "pid": os.getpid(), "end": False})
    server.run(listener)


def work(say: Say, spec: dict[str, Any]) -> None:
    """Train as an honest worker, and tell each step."""
    torch.set_num_threads(1)
    model = small_net()
    x = torch.randn(8, 20)
    with Worker(spec["address"], model, 0.1, slot=spec["slot"], recipe="hostile") as worker:
        while worker.stopped is None:
            time.sleep(COMPUTE)
            model(x).pow(2).mean().backward()
            worker.step()
            worker.report(loss=1.0, step=worker.clock)
            say({"clock": worker.clock})


class Clocks:
    """The steps that an honest worker has made."""

    def __init__(self, worker: ProcessHandle) -> None:
        self._worker, self.clock = worker, 0

    def read(self) -> int:
        while not self._worker._said.empty():
            self.clock = self._worker._said.get()["clock"]
        return self.clock


def rate(clocks: Clocks, during: Callable[[], None]) -> float:
    """Return the steps per second while something happens."""
    first, began = clocks.read(), time.monotonic()
    during()
    return (clocks.read() - first) / (time.monotonic() - began)


def memory(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


class Attacker:
    """Sends hostile messages to a server, each time of the next kind."""

    def __init__(self, address: str) -> None:
        self._chance, self._context = random.Random(1), zmq.Context()
        self._endpoint = "tcp" + address[3:]
        host, _, port = address[6:].rpartition(":")
        self._tcp = (host, int(port))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.connect(self._tcp)
        self._peers = [self._peer() for _ in range(30)]
        self._turn = itertools.cycle(self._peers[1:])  # the first one has a session
        self._insider = self._session(self._peers[0])
        self._number = 0
        self._address = address
        self.sent: dict[str, int] = {}
        kinds = [name.removeprefix("send_") for name in dir(self) if name.startswith("send_")]
        # What begins a connection or a session takes a thousand times as long as a message: 1 of 100 is of that kind.
        slow = {"connections", "joins_of_new_peers", "figures_of_a_member"}
        self._kinds = [kind for kind in kinds if kind not in slow] * 20 + sorted(slow)

    def _peer(self) -> "zmq.Socket[bytes]":
        peer = self._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.ROUTING_ID, b"\1" + os.urandom(15))
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(self._endpoint)
        return peer

    def _session(self, peer: "zmq.Socket[bytes]") -> int:
        """Return the number of a udp session of a peer that is not admitted."""
        peer.send_multipart([bytes(part) for part in Envelope(EnvelopeKind.JOIN, 0, 0, [os.urandom(8)]).as_parts()])
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if peer.poll(100) and (found := read_envelope(peer.recv_multipart())) and found.kind is EnvelopeKind.KEY:
                return found.session
        return 0

    def _send(self, parts: Any, peer: "zmq.Socket[bytes] | None" = None) -> None:
        target = peer if peer is not None else next(self._turn)
        try:
            target.send_multipart([bytes(part) for part in parts], zmq.DONTWAIT)
            while target.poll(0):  # what the server answers
                answer = read_envelope(target.recv_multipart())
                if peer is not None and answer is not None and answer.kind is EnvelopeKind.UNKNOWN:
                    self._insider, self._number = self._session(peer), 0
        except zmq.Again:
            time.sleep(0.001)

    def _envelope(self, kind: EnvelopeKind, parts: list[bytes], acks: bytes = b"") -> None:
        self._number += 1
        self._send(Envelope(kind, self._insider, self._number, parts, acks).as_parts(), self._peers[0])

    def send_noise(self) -> None:
        self._send([self._chance.randbytes(self._chance.choice([0, 36, 36, 2000])) for _ in range(3)])

    def send_headers(self) -> None:
        self._send([b"TWPS" + self._chance.randbytes(32)])

    def send_pushes_without_a_session(self) -> None:
        self._send(Message(MessageKind.PUSH, self._chance.getrandbits(32), body=self._chance.randbytes(500)).parts())

    def send_hellos_of_other_recipes(self) -> None:
        self._send(with_json(MessageKind.HELLO, **hello_of(small_net(), "other", None, "x")).parts())

    def send_long_hellos(self) -> None:
        self._send(Message(MessageKind.HELLO, body=b'{"token": "' + b"x" * 20_000 + b'"}').parts())

    def send_joins(self) -> None:
        self._send(Envelope(EnvelopeKind.JOIN, 0, 0, [os.urandom(8)]).as_parts())

    def send_unknown_sessions(self) -> None:
        self._send(Envelope(EnvelopeKind.PLAIN, self._chance.getrandbits(32), 1, [b"x" * 36]).as_parts())

    def send_envelopes(self) -> None:
        self._envelope(EnvelopeKind.PLAIN, [self._chance.randbytes(36)])

    def send_acks(self) -> None:
        self._envelope(EnvelopeKind.ACK, [], MessageAck(self._number, 0xFFFF, (range(0xFFFF),)).pack() * 50)

    def send_malformed_end_markers(self) -> None:
        self._envelope(EnvelopeKind.END, [pack_end(self._chance.getrandbits(32), 9, 99, b"h")], bytes(8000))

    def send_end_markers(self) -> None:
        self._number += 1
        end = pack_end(self._number, 0xFFFF, 1, b"h" * 40)
        self._send(Envelope(EnvelopeKind.END, self._insider, self._number, [end]).as_parts(), self._peers[0])

    def send_batches(self) -> None:
        records = b"".join(Envelope(EnvelopeKind.PLAIN, 0, self._number + i, [b""]).as_record() for i in range(30))
        self._envelope(EnvelopeKind.BATCH, [records])

    def send_datagrams(self) -> None:
        self._udp.send(b"TWU\1" + self._chance.randbytes(self._chance.choice([5, 40, 1200])))

    def send_forged_datagrams(self) -> None:
        self._udp.send(b"TWU\1" + self._insider.to_bytes(4, "little") + self._chance.randbytes(200))

    def send_connections(self) -> None:
        with socket.create_connection(self._tcp, 5) as stream:
            stream.send(self._chance.randbytes(64))

    def send_joins_of_new_peers(self) -> None:
        with closing(self._peer()) as peer:
            self._session(peer)

    def send_figures_of_a_member(self) -> None:
        """Join as a worker does, and send figures that are not finite."""
        with closing(connect(self._address)) as connection:
            hello = {**hello_of(small_net(), "hostile", None, "x"), "shards": True}
            connection.send(with_json(MessageKind.HELLO, **hello).parts())
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                for message in map(parse, connection.poll(0.1)):
                    if message.kind is MessageKind.WELCOME:
                        bad = Message(MessageKind.HEARTBEAT, message.session, body=b'{"loss": 1e999}')
                        connection.send(bad.parts())
                    elif message.kind is MessageKind.REFUSED:
                        return

    def wave(self, count: int, per_second: float) -> None:
        """Send so many messages of all kinds in turn, at this pace at most."""
        began = time.monotonic()
        for i, kind in zip(range(count), itertools.cycle(self._kinds), strict=False):
            if i % 50 == 0:
                time.sleep(max(0.0, began + i / per_second - time.monotonic()))
            getattr(self, f"send_{kind}")()
            self.sent[kind] = self.sent.get(kind, 0) + 1

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._udp.close()
        self._context.term()


@contextmanager
def training(transport: str) -> Iterator[tuple[str, int, Clocks]]:
    """Run a server and two honest workers; yield the address, the server's process, and a worker's steps."""
    with processes() as running:
        server = running.start(serve, address=f"{transport}://127.0.0.1:0")
        found = server.wait_for(lambda said: "address" in said)
        workers = [running.start(work, address=found["address"], slot=slot) for slot in range(2)]
        workers[0].wait_for(lambda said: said["clock"] >= 20)
        yield found["address"], found["pid"], Clocks(workers[0])


@pytest.mark.long
def test_memory_and_steps_under_three_waves_of_hostile_messages() -> None:
    with training("udp") as (address, pid, clocks):
        before = rate(clocks, lambda: time.sleep(10.0))
        figures: dict[str, Any] = {
            "steps per second before": round(before, 2),
            "memory before (MB)": round(memory(pid), 1),
        }
        with closing(Attacker(address)) as attacker:
            rates, sizes = [], [memory(pid)]
            for _ in range(WAVES):
                began = time.monotonic()
                rates.append(rate(clocks, lambda: attacker.wave(WAVE, PER_SECOND)))
                figures.setdefault("seconds of a wave", []).append(round(time.monotonic() - began, 1))
                time.sleep(2.0)
                sizes.append(memory(pid))
            figures["messages of each kind"] = attacker.sent
        figures["steps per second during the waves"] = [round(each, 2) for each in rates]
        figures["memory after the waves (MB)"] = [round(each, 1) for each in sizes[1:]]
        figures["steps per second after"] = round(rate(clocks, lambda: time.sleep(5.0)), 2)
        print(json.dumps(figures, indent=2))
    added = [after - size for size, after in itertools.pairwise(sizes)]
    assert max(added[1:]) <= MEMORY_MB, figures
    assert min(rates) >= RATE * before, figures
