"""A server and its workers can say what they wait for, and for how long they have."""

import os
import signal
import time
from typing import Any

import pytest
import torch

from tests.server.processes import processes, serve, work
from tests.server.serving import Ones, serving
from thinwire.errors import ServerError
from thinwire.server.protocol import Waiting
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.transport.addresses import listen

LOOPBACK = "tcp://127.0.0.1:0"


def says(what: str, seconds: float = 0.0) -> Any:
    return lambda said: what in said.get("waiting", "") and said["seconds"] >= seconds


def test_a_wait_reads_as_a_phrase() -> None:
    assert str(Waiting("2 of 4 workers to join", 12.3)) == "waiting for 2 of 4 workers to join, 12 s so far"


def test_processes_say_whom_they_wait_for() -> None:
    with processes() as running:
        server = running.start(serve, address=LOOPBACK, stop=(10**9, 0), expect=2, timeout=20.0, watch=True)
        address = server.wait_for(lambda said: "address" in said)["address"]
        server.wait_for(says("2 of 2 workers to join"))
        first = running.start(work, address=address, slot=0, name="a")
        server.wait_for(says("1 of 2 workers to join", 1.0))
        first.wait_for(says("other workers to join, before training begins", 1.0))
        second = running.start(work, address=address, slot=1, name="b", fault=("step", 3, signal.SIGSTOP))
        # The signal may come before the last gradients of step 2 are sent.
        late = {f"worker 1 (b) to push step {step}": step for step in (2, 3)}
        said = server.wait_for(lambda said: said.get("waiting") in late and said["seconds"] >= 2.0)
        step = late[said["waiting"]]
        first.wait_for(says(f"the parameters of step {step + 1}", 1.0))
        assert second.process.pid is not None and server.process.pid is not None
        second.process.kill()
        os.kill(server.process.pid, signal.SIGSTOP)
        first.wait_for(says(f"an answer from {address}", 10.0))
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_worker_without_a_server_says_so_before_it_gives_up() -> None:
    listener = listen(LOOPBACK)
    address = listener.address
    listener.close()
    heard: list[Waiting] = []
    with pytest.raises(ServerError, match=r"no message from the server has arrived for 2\.5 s"):
        Worker(address, Ones(), "dense", patience=2.5, on_wait=heard.append)
    assert heard and heard[-1].what == f"an answer from {address}" and heard[-1].seconds >= 1.0


def test_nobody_waits_without_a_reason() -> None:
    """In asynchronous training the server waits for no worker; a worker that computes waits for nothing."""
    model = Ones()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=1.0), codec=None, mode="async")
    assert str(server.waiting()).startswith("waiting for 1 of 1 workers to join")
    with serving(server) as address:
        with Worker(address, net := Ones(), "dense") as worker:
            net().backward()
            worker.step()
            worker.wait()
            assert worker.waiting() is None and server.waiting() is None
        while server.membership.active:
            time.sleep(0.01)
        waiting = server.waiting()
        assert waiting is not None and waiting.what == "a worker to join, because all have left"
    assert server.waiting() is None
