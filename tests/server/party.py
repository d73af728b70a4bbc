"""A server and workers as processes that say what happens: for tests in which some of them are killed.

The model's gradient is one everywhere and is summed with a rate of one: parameters count what was counted.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """The server; `spec` adds to its options: address, stop (steps, joins), kill (step)."""
    torch.set_num_threads(1)
    address, stop, kill = spec.pop("address"), spec.pop("stop"), spec.pop("kill", None)
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
    reason = server.run(listener)
    said = {"end": reason, "counts": counts(server), "accepted": accepted, "lowest": server.clock.lowest}
    say({**said, "joined": server.membership.joined, "left": server.membership.left})


def counts(server: Server) -> list[list[float]]:
    """Per part, the different values of its elements, as counts."""
    rows = (row for layer in server._aggregator.values for row in layer)
    return [sorted({-float(v) for piece in row for v in piece}) for row in rows]


def work(say: Say, spec: dict[str, Any]) -> None:
    """A worker; `spec` may hold a fault (where, step, signal) that it raises in itself."""
    torch.set_num_threads(1)
    where, at, number = spec.get("fault", ("", -1, 0))
    model = Ones()
    named = {"slot": spec["slot"], "recipe": spec.get("recipe", "")}
    with Worker(spec["address"], model, "dense", patience=60.0, **named) as worker:
        acked: list[tuple[int, int]] = []
        on_ack = worker._client._on_ack

        def noted(session: Any, message: Any) -> None:
            acked.append((session.layout.numbers[message.layer, message.part], message.clock))
            on_ack(session, message)

        worker._client._on_ack = noted  # type: ignore[method-assign]
        # The gradient of the second layer has been handed over when the first layer's is made.
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
    """A stranger's noise, a member's noise at its first step, another recipe, then twenty joins and leaves."""
    from tests.server.test_sessions import admitted, stranger, train_ones

    torch.set_num_threads(1)
    address, recipe = spec["address"], spec["recipe"]
    heard = stranger(address, [[os.urandom(36)]])[-1].kind.name
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


class Party:
    """Processes of a test, and what they said."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: list[BaseProcess] = []

    def start(self, role: Callable[[Say, dict[str, Any]], None], **spec: Any) -> "Guest":
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(role, theirs, spec), daemon=True)
        process.start()
        theirs.close()
        self._running.append(process)
        return Guest(process, ours)

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


def _run(role: Callable[[Say, dict[str, Any]], None], pipe: Connection, spec: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    role(pipe.send, spec)


class Guest:
    """One process."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self._pipe = process, pipe

    def hears(self, wanted: Callable[[dict[str, Any]], Any], seconds: float = 60.0) -> dict[str, Any]:
        """What it says, up to the first thing that is wanted."""
        deadline = time.monotonic() + seconds
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            said: dict[str, Any] = self._pipe.recv()
            if wanted(said):
                return said
        raise AssertionError("it was not said in time")

    def end(self) -> dict[str, Any]:
        return self.hears(lambda said: "end" in said or "stopped" in said)


@contextmanager
def party() -> Iterator[Party]:
    made = Party()
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """As a command, for hosts of the lab: serve or work, and the spec as JSON; says JSON lines."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    roles = {"serve": serve, "work": work}
    roles[sys.argv[1]](lambda said: print(json.dumps(said), flush=True), json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
