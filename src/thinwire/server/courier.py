"""Courier: the thread that talks to the server for one worker.

It encodes and pushes gradients while the backward pass goes on, pulls parameters as they become ready, keeps the
connection's session alive, and begins a new one when the server has forgotten it.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

from thinwire.codec.codec import Codec
from thinwire.server.buffers import Buffers
from thinwire.server.copies import Copies
from thinwire.server.handshake import hello_of
from thinwire.server.line import Line
from thinwire.server.messages import STALENESS, Kind, Message, MessageError, with_json
from thinwire.server.pace import Pace
from thinwire.server.pushes import Gradients, Pushes
from thinwire.server.session import Session
from thinwire.server.standing import ServerError, Standing
from thinwire.transport.base import Connection

log = logging.getLogger("thinwire.worker")

# Before the server's terms are known: how often to say hello.
_HELLO_EVERY = 2.0
# Seconds that the last gradients are given to be acknowledged when a worker leaves.
_GOODBYE = 2.0


class Courier:
    """Owns the connection. The worker's thread calls `push`, `fetch`, `report` and `leave`; the rest happens here."""

    def __init__(
        self,
        connection: Connection,
        model: nn.Module,
        codec: Codec | None,
        *,
        recipe: str = "",
        slot: int | None = None,
        name: str | None = None,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="thinwire-worker", daemon=True)
        self._line, self._model = Line(connection), model
        self.copies, self.pace = Copies(model), Pace()
        self._named = codec is not None
        self.pushes = Pushes(codec or Codec(), self.copies, self.pace, self._line)  # without one, as the server says
        self.standing = Standing(self._line)
        self._buffers = Buffers(model)
        connection.on_report = self._on_report
        self._hello = {**hello_of(model, recipe, slot, name), "pieces": connection.piece_bytes is not None}
        self._jobs: deque[Callable[[], None]] = deque()
        self._asked = 0.0
        self._taken = 0  # bytes of answers, since the server was told last
        self._ending = False

    # For the worker's thread

    def start(self) -> None:
        """Begin to talk."""
        self._thread.start()

    def push(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Send a layer's gradients (of some of its parameters), then ask for its parameters for the next step."""
        self._tell(lambda: self._enqueue(session, layer, clock, gradients))

    def fetch(self, session: Session, clock: int) -> None:
        """Ask for all parameters in full."""
        self._tell(lambda: self._enqueue_all(session, clock))

    def report(self, figures: dict[str, Any]) -> None:
        """Tell the server figures of a step."""
        self._tell(lambda: self._report(figures))

    def losses(self) -> dict[str, float]:
        """Datagrams sent and lost so far, and what was put back for them."""
        figures = self._line.connection.figures()
        sent, lost = (int(figures.get(name, 0)) for name in ("datagrams_sent", "datagrams_lost"))
        return {"datagrams": sent, "datagrams_lost": lost, "restored": self.pushes.restored}

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._line.sent, self._line.received

    def leave(self) -> None:
        """Say goodbye and end."""
        self._ending = True
        self._line.connection.wake()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _tell(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._line.connection.wake()

    # The thread

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
            until = time.monotonic() + _GOODBYE
            while self._owes() and time.monotonic() < until:
                self._turn()
            self._send(Message(Kind.BYE, self.standing.session.number if self.standing.session is not None else 0))
        except Exception as error:
            self.standing.fail(error)
        finally:
            self._line.connection.close()
            self.standing.close()

    def _owes(self) -> bool:
        """Whether the last step's gradients are still on their way; they are acknowledged as soon as they arrive."""
        if self.standing.session is None or self.standing.stopped is not None or self.standing.lost:
            return False
        return bool(self._jobs or self.pushes.under_way)

    def _turn(self) -> None:
        session = self.standing.session
        if session is None:
            if time.monotonic() - self._asked > _HELLO_EVERY and self.standing.stopped is None:
                self._asked = time.monotonic()
                self._send(with_json(Kind.HELLO, **self._hello))
        elif self.standing.stopped is None and self._line.beat_is_due(session.timeout / 4):
            self._send(Message(Kind.BEAT, session.number))
        while self._jobs:
            self._jobs.popleft()()
        self._flush()
        pause = 0.2 if self.standing.session is None else min(0.5, self.standing.session.timeout / 8)
        for message in self._line.poll(0.0 if self._jobs else pause):
            self._handle(message)
        if self._taken and self.standing.session is not None:  # one word for all that came together
            self._send(Message(Kind.GOT, self.standing.session.number, number=self._taken))
        self._taken = 0

    def _send(self, message: Message) -> None:
        self._line.send(message, self.standing.session)

    def _on_report(self, ticket: int, lost: frozenset[int]) -> None:
        told = "restore" if self.standing.session is None else str(self.standing.session.tell.get("on_loss", "restore"))
        self.pushes.report(ticket, lost, told)

    # Requests

    def _enqueue(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        if session is self.standing.session:  # what an earlier session computed does not count in this one
            self.pushes.enqueue(session, layer, clock, gradients)

    def _enqueue_all(self, session: Session, clock: int) -> None:
        if session is not self.standing.session:
            return
        if self._buffers:
            self._send(Message(Kind.BUFFERS, session.number))
        for layer, part in session.layout.places():
            self._send(Message(Kind.PULL, session.number, layer, part, clock, 1))

    def _report(self, figures: dict[str, Any]) -> None:
        if self.standing.session is not None and self.standing.stopped is None:
            plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
            self._send(with_json(Kind.BEAT, self.standing.session.number, **plain))

    def _flush(self) -> None:
        session = self.standing.session if self.standing.stopped is None else None
        while session is not None and (request := session.pool.next()) is not None:
            if request.kind == "pull":
                session.pool.done(request.size)
                self._send(Message(Kind.PULL, session.number, request.layer, request.part, request.clock))
            else:
                self.pushes.send(session, request)

    # Messages

    def _handle(self, message: Message) -> None:
        session = self.standing.session
        if message.kind is Kind.WELCOME and session is None:
            self._begin(message)
        elif message.kind is Kind.REFUSED:
            raise ServerError(f"the server refused this worker: {message.json.get('reason')}")
        elif message.kind is Kind.STOP and message.session == (0 if session is None else session.number):
            self._on_stop(str(message.json.get("reason")))
        elif session is None or message.session != session.number:
            return  # of an earlier session
        elif message.kind is Kind.AGAIN:
            self._forgotten(str(message.json.get("reason")))
        elif not session.counter.follows(message):
            self._forgotten("messages were lost on the way")
        elif message.kind is Kind.ACK:
            self._on_ack(session, message)
        elif message.kind in (Kind.DELTA, Kind.WHOLE):
            self._on_answer(session, message)
        elif message.kind is Kind.BUFFERS:
            self._on_buffers(session, message)

    def _on_stop(self, reason: str) -> None:
        self.standing.stop(reason)
        # The server waits for it, and the worker's thread may take its time.
        self._send(Message(Kind.BYE, self.standing.session.number if self.standing.session is not None else 0))

    def _on_buffers(self, session: Session, message: Message) -> None:
        if len(message.body):
            self._buffers.take(message.body)
        else:
            self._send(Message(Kind.BUFFERS, session.number, body=self._buffers.body()))

    def _begin(self, message: Message) -> None:
        session = Session(message.session, message.json, self._model)
        self.pushes.give_back(session.counted)
        if not self._named:
            self._named, self.pushes.codec = True, session.codec()
        log.info("joined the server as worker %d at step %d", session.slot, session.first)
        self._taken = 0  # of the session before
        self.pushes.clear()
        self.standing.enter(session)

    def _forgotten(self, reason: str) -> None:
        """Our session is over: whoever waits must know, and the server hears a hello."""
        log.warning("the session with the server is over (%s): joining again", reason)
        self.standing.enter(None)
        self._asked = 0.0

    def _on_ack(self, session: Session, message: Message) -> None:
        if not self.pushes.taken(message.layer, message.part, message.clock):
            return
        session.pool.done(message.number)
        if len(message.body) == STALENESS.size * len(session.arrived):
            for layer, (lowest, holders) in enumerate(STALENESS.iter_unpack(message.body)):
                session.known.lowest[layer], session.known.holders[layer] = lowest, holders

    def _on_answer(self, session: Session, message: Message) -> None:
        layer, part = message.layer, message.part
        if layer >= len(session.arrived) or part >= len(session.arrived[layer]):
            raise MessageError(f"the server sent a part {part} of a layer {layer}, which does not exist")
        self.pace.answered(message.clock)
        whole, lossy = message.kind is Kind.WHOLE, self._line.connection.piece_bytes is not None
        self._taken += self.copies.take(session.layout, layer, part, message.body, whole=whole, lossy=lossy)
        self.standing.arrive(session, message, self.pace)
