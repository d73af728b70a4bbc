"""A server and workers as processes that report what happens, for tests in which some of them are killed.

The model's gradient is one everywhere and is summed with a rate of one: parameters count what was counted.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.cluster import PRELOADED
from tests.server.serving import Ones
from thinwire.errors import ServerError
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.transport.addresses import listen

Say = Callable[[dict[str, Any]], None]


def serve(say: Say, spec: dict[str, Any]) -> None:
    """Run a server; `spec` adds to its options: address, stop (steps, joins), kill (step), watch (say waits)."""
    torch.set_num_threads(1)
    address, stop, kill = spec.pop("address"), spec.pop("stop"), spec.pop("kill", None)
    watch = spec.pop("watch", False)
    spec["checkpoint"] = Path(spec["checkpoint"]) if spec.get("checkpoint") else None
    model, accepted = Ones(), []

    def on_step(server: Server) -> None:
        step, members = server.clock.step, server.membership
        say({"step": step, "joined": members.joined, "left": members.left})
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= stop[0] and members.joined >= stop[1]:
            server.stop("target")

    options = {"codec": None, "cut": 700, "reduce": "sum", "timeout": 2.0, **spec}
    server = Server(model, torch.optim.SGD(model.parameters(), lr=1.0), on_step=on_step, **options)
    push = server.clock.push

    def noted(session: int, part: int, clock: int) -> bool:
        fresh = push(session, part, clock)
        if fresh:
            accepted.append((server.membership.active[session].token, session, part, clock))
        return fresh

    server.clock.push = noted  # type: ignore[method-assign]
    listener = listen(address, insecure=True)
    say({"address": listener.address, "resumed": server.clock.step, "start": counts(server)})
    if watch:
        threading.Thread(target=_say_waiting, args=(say, server), daemon=True).start()
    reason = server.run(listener)
    said = {"end": reason, "counts": counts(server), "accepted": accepted, "lowest": server.clock.lowest}
    say({**said, "joined": server.membership.joined, "left": server.membership.left})


def _say_waiting(say: Say, server: Server) -> None:
    while server.stopped is None:
        waiting = server.waiting()
        if waiting is not None:
            say({"waiting": waiting.what, "seconds": waiting.seconds})
        time.sleep(0.1)


def counts(server: Server) -> list[list[float]]:
    """Return the different values of the elements of each part, negated: how many pushes they have counted."""
    rows = (row for layer in server._aggregator.values for row in layer)
    return [sorted({-float(v) for piece in row for v in piece}) for row in rows]


def work(say: Say, spec: dict[str, Any]) -> None:
    """Run a worker; `spec` may name a fault: a signal that the process sends itself at a place in a step."""
    torch.set_num_threads(1)
    where, at, number = spec.get("fault", ("", -1, 0))
    model = Ones()
    named: dict[str, Any] = {"slot": spec["slot"], "recipe": spec.get("recipe", ""), "name": spec.get("name")}
    named["on_wait"] = lambda waiting: say({"waiting": waiting.what, "seconds": waiting.seconds})
    with Worker(spec["address"], model, "dense", patience=60.0, **named) as worker:
        acked: list[tuple[int, int]] = []
        on_ack = worker._client._on_ack

        def noted(session: Any, message: Any, now: float) -> None:
            acked.append((session.layout.numbers[message.layer, message.part], message.clock))
            on_ack(session, message, now)

        worker._client._on_ack = noted  # type: ignore[method-assign]
        # The second layer's gradient is pushed when the first layer's is computed.
        model.a.weight.register_hook(
            lambda g: os.kill(os.getpid(), number) if where == "backward" and worker.clock == at else None
        )
        while worker.stopped is None:
            if where == "step" and worker.clock == at:
                os.kill(os.getpid(), number)
            model().backward()
            worker.step()
        seen = sorted({-float(v) for p in model.parameters() for v in p.detach().view(-1)})
        token = worker._client._hello["token"]
    say({"stopped": worker.stopped, "acked": acked, "token": token, "seen": seen})


def trouble(say: Say, spec: dict[str, Any]) -> None:
    """Send random bytes as an unknown peer and as a member, try another recipe, then join and leave twenty times."""
    from tests.server.test_sessions import admitted, send_without_session, train_ones

    torch.set_num_threads(1)
    address, recipe = spec["address"], spec["recipe"]
    heard = send_without_session(address, [[os.urandom(36)]])[-1].kind.name
    connection, _, _ = admitted(address, Ones(), recipe)
    connection.send([os.urandom(36)])
    connection.close()
    try:
        train_ones(address, steps=1, recipe="another")
    except ServerError as error:
        refused = str(error)
    for i in range(20):
        train_ones(address, steps=1 + i % 3, recipe=recipe)
    say({"stopped": "done", "heard": heard, "refused": refused})


class Processes:
    """The processes of a test, which are killed at its end."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: list[BaseProcess] = []

    def start(self, role: Callable[[Say, dict[str, Any]], None], **spec: Any) -> "ProcessHandle":
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(role, theirs, spec), daemon=True)
        process.start()
        theirs.close()
        self._running.append(process)
        return ProcessHandle(process, ours)

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


def _run(role: Callable[[Say, dict[str, Any]], None], pipe: Connection, spec: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    lock = threading.Lock()

    def say(said: dict[str, Any]) -> None:
        with lock:
            pipe.send(said)

    role(say, spec)


class ProcessHandle:
    """One process, and what it reports."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        # Read all the time: a pipe that is full after a few hundred messages would stop the process.
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._said.put(pipe.recv())

    def wait_for(self, wanted: Callable[[dict[str, Any]], Any], seconds: float = 60.0) -> dict[str, Any]:
        """Return the first thing that is wanted of what the process says; what it said before is dropped."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
                if wanted(said):
                    return said
        raise AssertionError("it was not said in time")

    def end(self) -> dict[str, Any]:
        """Return the last thing that the process says."""
        return self.wait_for(lambda said: "end" in said or "stopped" in said)


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    made = Processes()
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Run as a command on a host of the lab: serve or work, with the spec as JSON; reports are JSON lines."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    roles = {"serve": serve, "work": work}
    roles[sys.argv[1]](lambda said: print(json.dumps(said), flush=True), json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
