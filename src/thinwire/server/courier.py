"""Courier: the thread that talks to the server for one worker.

It encodes and pushes gradients while the backward pass goes on, pulls parameters as they become ready, keeps the
connection's session alive, and begins a new one when the server has forgotten it.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import ThinwireError
from thinwire.server.buffers import Buffers
from thinwire.server.copies import Copies
from thinwire.server.handshake import hello_of
from thinwire.server.lossy import Pushed, check_on_loss
from thinwire.server.messages import STALENESS, Kind, Message, MessageError, parse, with_json
from thinwire.server.pace import Pace
from thinwire.server.schedule import Request
from thinwire.server.session import Session
from thinwire.transport.base import Connection
from thinwire.transport.pieces import pack_all

log = logging.getLogger("thinwire.worker")

Gradients = Mapping[str, Tensor]
# A pull takes a header; an estimate of a push is corrected when it is encoded.
_PULL_BYTES = 64
# Before the server's terms are known: how often to say hello.
_HELLO_EVERY = 2.0
# Beats to a server that does not answer: from the fifth on they are this far apart, for they all wait in a queue.
_UNANSWERED, _PATIENT = 4, 2.0


class ServerError(ThinwireError, RuntimeError):
    """The server refused this worker, is gone, or sent something that makes no sense."""


class Courier:
    """Owns the connection. The worker's thread calls `push`, `fetch`, `wait` and `leave`; the rest happens here."""

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
        self._connection, self._model = connection, model
        self._named, self.codec = codec, codec or Codec()  # without one, as the server says
        self.copies = Copies(model)
        self._buffers = Buffers(model)
        connection.on_report = self._on_report
        self._hello = {**hello_of(model, recipe, slot, name), "pieces": connection.piece_bytes is not None}
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._unacknowledged: dict[tuple[int, int, int], Frame | Pushed] = {}
        self._tickets: dict[int, Pushed] = {}  # pushes in pieces that are not reported yet
        self.restored = 0.0  # sum of the magnitudes that were lost on the way and returned to the memory
        self._spoken = self._asked = 0.0
        self._beats = 0  # since anything was heard
        self._taken = 0  # bytes of answers, since the server was told last
        self._heard = time.monotonic()
        self._ending = False
        self.session: Session | None = None
        self.lost = False  # a new session has begun: what this step computes will not count
        self.stopped: str | None = None
        self.error: Exception | None = None
        self.pace = Pace()
        self.sent = self.received = 0

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

    def wait(self, layers: Sequence[int], clock: int, patience: float) -> bool:
        """Until these layers are fresh enough for this step; False if a new session began or training has ended."""
        with self._changed:
            while True:
                self._raise()
                if self.lost or self.stopped is not None or self.session is None:
                    return False
                if all(min(self.session.arrived[layer]) >= clock for layer in layers):
                    return True
                self._sleep(patience)

    def wait_for_session(self, patience: float) -> Session | None:
        """Until the server has let us in; None if training has ended."""
        with self._changed:
            while self.session is None and self.stopped is None:
                self._raise()
                self._sleep(patience)
            self._raise()
            self.lost = False
            return self.session

    def report(self, figures: dict[str, Any]) -> None:
        """Tell the server figures of a step."""
        self._tell(lambda: self._report(figures))

    def losses(self) -> dict[str, float]:
        """Datagrams sent and lost so far, and what was put back for them."""
        figures = self._connection.figures()
        sent, lost = (int(figures.get(name, 0)) for name in ("datagrams_sent", "datagrams_lost"))
        return {"datagrams": sent, "datagrams_lost": lost, "restored": self.restored}

    def leave(self) -> None:
        """Say goodbye and end."""
        self._ending = True
        self._connection.wake()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _tell(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._connection.wake()

    def _sleep(self, patience: float) -> None:
        # While anything is heard of the server it lives, and others are slow.
        self._changed.wait(1.0)
        if time.monotonic() - self._heard > patience:
            raise ServerError(f"nothing was heard of the server for {patience:g} s: is it still running?")

    def _raise(self) -> None:
        if self.error is not None and self.stopped is None:  # a server that has ended training may be gone
            raise self.error

    # The thread

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
            self._send(Message(Kind.BYE, self.session.number if self.session is not None else 0))
        except Exception as error:  # whatever it is, the thread that waits must hear of it
            self.error = error if isinstance(error, ThinwireError) else ServerError(f"the worker failed: {error}")
            self.error.__cause__ = error.__cause__ if self.error is error else error
        finally:
            self._connection.close()
            with self._changed:
                self._changed.notify_all()

    def _turn(self) -> None:
        now = time.monotonic()
        if self.session is None:
            if now - self._asked > _HELLO_EVERY and self.stopped is None:
                self._asked = now
                self._send(with_json(Kind.HELLO, **self._hello))
        elif self.stopped is None and now - self._spoken > self._beat_every(self.session):
            self._beats += 1
            self._send(Message(Kind.BEAT, self.session.number))
        while self._jobs:
            self._jobs.popleft()()
        self._flush()
        pause = 0.2 if self.session is None else min(0.5, self.session.timeout / 8)
        for parts in self._connection.poll(0.0 if self._jobs else pause):
            self.received += sum(map(len, parts))
            self._heard, self._beats = time.monotonic(), 0
            self._handle(parse(parts))
        if self._taken and self.session is not None:  # one word for all that came together
            self._send(Message(Kind.GOT, self.session.number, number=self._taken))
        self._taken = 0

    def _beat_every(self, session: Session) -> float:
        usual = session.timeout / 4
        return usual if self._beats < _UNANSWERED else max(usual, _PATIENT)

    def _send(self, message: Message) -> None:
        parts = message.parts(self.session.counter.next(message.kind) if self.session is not None else 0)
        self.sent += sum(map(len, parts))
        self._spoken = time.monotonic()
        self._connection.send(parts)

    def _send_pushed(self, message: Message, pushed: Pushed) -> None:
        """Send a gradient in pieces, any of which may be lost."""
        shards = list(pushed.shards.values())
        if not pushed.finite or self.session is None:  # what it says must arrive
            self._send(replace(message, body=pack_all(shards)))
            return
        head = bytes(message.parts(self.session.counter.next(message.kind))[0])
        self.sent += len(head) + pushed.size
        self._spoken = time.monotonic()
        ticket = self._connection.send_pieces(head, shards)
        if ticket is not None:
            self._tickets[ticket] = pushed

    def _on_report(self, ticket: int, lost: frozenset[int]) -> None:
        """Lost pieces of a push return to the memory, or are given up."""
        pushed = self._tickets.pop(ticket, None)
        if pushed is not None and lost:
            told = "restore" if self.session is None else str(self.session.tell.get("on_loss", "restore"))
            self.restored += pushed.give_back(self.codec, lost, restore=check_on_loss(told) == "restore")

    # Requests

    def _enqueue(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        if session is not self.session:  # what an earlier session computed does not count in this one
            return
        self._gradients[layer, clock] = gradients
        for part, pieces in enumerate(session.layout.layers[layer].parts):
            sizes = [len(piece) for piece in pieces]
            size = self.codec.frame_bound(sizes, self.codec.expected_counts(sizes, clock))
            session.pool.put(Request("push", layer, part, clock, size))
            session.pool.put(Request("pull", layer, part, clock + 1, _PULL_BYTES))

    def _enqueue_all(self, session: Session, clock: int) -> None:
        if session is not self.session:
            return
        if self._buffers:
            self._send(Message(Kind.BUFFERS, session.number))
        for layer, part in session.layout.places():
            self._send(Message(Kind.PULL, session.number, layer, part, clock, 1))

    def _report(self, figures: dict[str, Any]) -> None:
        if self.session is not None and self.stopped is None:
            plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
            self._send(with_json(Kind.BEAT, self.session.number, **plain))

    def _flush(self) -> None:
        session = self.session if self.stopped is None else None
        while session is not None and (request := session.pool.next()) is not None:
            if request.kind == "pull":
                session.pool.done(request.size)
                self._send(Message(Kind.PULL, session.number, request.layer, request.part, request.clock))
            else:
                self._push(session, request)

    def _push(self, session: Session, request: Request) -> None:
        layer, part, clock = request.layer, request.part, request.clock
        gradients = self._gradients[layer, clock]
        pieces = session.layout.layers[layer].parts[part]
        views = self.copies.gradients(pieces, gradients)
        hold = [piece.name for piece in pieces if piece.parameter not in gradients]
        message = Message(Kind.PUSH, session.number, layer, part, clock)
        began, budget = time.perf_counter(), self._connection.piece_bytes
        if budget is None:
            frame = self.codec.encode(views, step=clock, hold=hold)
            self.pace.encoded(clock, time.perf_counter() - began, sum(frame.counts))
            body = frame.data.numpy().data
            session.pool.sent(request, len(body))
            self._unacknowledged[layer, part, clock] = frame
            self._send(replace(message, body=body))
        else:
            pushed, entries = Pushed.encode(self.codec, views, budget, step=clock, hold=hold)
            self.pace.encoded(clock, time.perf_counter() - began, entries)
            session.pool.sent(request, pushed.size)
            self._unacknowledged[layer, part, clock] = pushed
            self._send_pushed(message, pushed)
        if part == len(session.layout.layers[layer].parts) - 1:
            self._gradients.pop((layer, clock), None)
        self.pace.note(self.pace.pushes, layer, clock)

    # Messages

    def _handle(self, message: Message) -> None:
        session = self.session
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
        with self._changed:
            self.stopped = reason
            self._changed.notify_all()
        # The server waits for it, and the worker's thread may take its time.
        self._send(Message(Kind.BYE, self.session.number if self.session is not None else 0))

    def _on_buffers(self, session: Session, message: Message) -> None:
        if len(message.body):
            self._buffers.take(message.body)
        else:
            self._send(Message(Kind.BUFFERS, session.number, body=self._buffers.body()))

    def _begin(self, message: Message) -> None:
        session = Session(message.session, message.json, self._model)
        self._give_back(session.counted)
        if self._named is None:
            self._named = self.codec = session.codec()
        log.info("joined the server as worker %d at step %d", session.slot, session.first)
        self._taken = 0  # of the session before
        with self._changed:
            self._gradients.clear()
            self.session, self.lost = session, True
            self._changed.notify_all()

    def _forgotten(self, reason: str) -> None:
        """Our session is over: whoever waits must know, and the server hears a hello."""
        log.warning("the session with the server is over (%s): joining again", reason)
        with self._changed:
            self.session, self.lost = None, True
            self._changed.notify_all()
        self._asked = 0.0

    def _give_back(self, counted: list[int] | None) -> None:
        """What was pushed and has not been counted returns to the memory."""
        layout = self.copies.last_layout
        if layout is None:
            return
        if counted is not None and len(counted) != len(layout.numbers):  # a server that cuts its parts otherwise
            counted = None
        for (layer, part, clock), frame in self._unacknowledged.items():
            if counted is not None and clock < counted[layout.numbers[layer, part]]:
                continue
            if isinstance(frame, Pushed):
                frame.give_back(self.codec)
                continue
            pieces = layout.layers[layer].parts[part]
            reader = FrameReader(frame, layout.numels(layer, part))
            for section in reader.sections:
                self.codec.give_back(pieces[section.id].name, *reader.entries(section))
        self._unacknowledged.clear()
        self._tickets.clear()

    def _on_ack(self, session: Session, message: Message) -> None:
        if self._unacknowledged.pop((message.layer, message.part, message.clock), None) is None:
            return
        self.pace.note(self.pace.acks, message.layer, message.clock)
        session.pool.done(message.number)
        if len(message.body) == STALENESS.size * len(session.arrived):
            for layer, (lowest, holders) in enumerate(STALENESS.iter_unpack(message.body)):
                session.known.lowest[layer], session.known.holders[layer] = lowest, holders

    def _on_answer(self, session: Session, message: Message) -> None:
        layer, part = message.layer, message.part
        if layer >= len(session.arrived) or part >= len(session.arrived[layer]):
            raise MessageError(f"the server sent a part {part} of a layer {layer}, which does not exist")
        self.pace.answered(message.clock)
        whole, lossy = message.kind is Kind.WHOLE, self._connection.piece_bytes is not None
        size = self.copies.take(session.layout, layer, part, message.body, whole=whole, lossy=lossy)
        self._taken += size
        before = session.editions[layer][part]
        session.editions[layer][part] = message.number
        with self._changed:
            session.arrived[layer][part] = message.clock
            session.known.here[layer] = min(session.arrived[layer])
            if session.known.here[layer] == message.clock:
                self.pace.arrived(layer, message.clock, self._stale(session, message, before))
                self._changed.notify_all()

    @staticmethod
    def _stale(session: Session, message: Message, before: int) -> int:
        """Steps that the layer lacks; without a bound, the updates of others that came between ours."""
        if session.bound is not None:
            return max(0, message.clock - message.number)
        return max(0, message.number - before - 1) if before >= 0 else 0
