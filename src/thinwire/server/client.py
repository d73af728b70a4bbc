"""Client: the worker's side of the protocol, in a thread of its own.

It encodes and pushes gradients while the backward pass runs, pulls parameters as they become ready, keeps the session
alive by heartbeats, and begins a new session when the server has ended the old one.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import MessageError, ServerError, ThinwireError
from thinwire.server.layout import Buffers
from thinwire.server.protocol import STALENESS, Message, MessageKind, Session, Waiting, parse, read_figures, with_json
from thinwire.server.replicas import LocalParameters, SentShards, check_on_loss
from thinwire.server.schedule import Request
from thinwire.server.timings import WorkerTimings
from thinwire.transport.base import Buffer, Connection
from thinwire.transport.udp.recovery import pack_all

log = logging.getLogger("thinwire.worker")

T = TypeVar("T")
Gradients = Mapping[str, Tensor]
OnWait = Callable[[Waiting], None]
# Heartbeats to a server that does not answer pile up in a queue: after the first few they are sent less often.
_UNANSWERED, _SLOW_HEARTBEAT = 4, 2.0
# Seconds between HELLO messages, until the server answers.
_HELLO_EVERY = 2.0
# Seconds in which the last gradients may be acknowledged when a worker leaves.
_LEAVE_TIMEOUT = 2.0
# The estimated size of a pull, which is a header. Estimates of pushes are corrected when they are encoded.
_PULL_BYTES = 64


class ServerConnection:
    """A connection to the server, which counts its bytes and notes when it was used last."""

    def __init__(self, connection: Connection, address: str) -> None:
        self.connection, self.address = connection, address
        self.sent = self.received = 0  # bytes
        self.heard = time.monotonic()  # when the last message arrived
        self._spoken = 0.0
        self._unanswered = 0  # heartbeats since then

    def send(self, message: Message, session: Session | None, shards: Sequence[Buffer] | None = None) -> int | None:
        """Send a message; in a session it is numbered.

        shards: its body, any of which may be lost; return the transport's ticket for them.
        """
        parts = message.parts(session.counter.next(message.kind) if session is not None else 0)
        self.sent += sum(map(len, [*parts, *(shards or ())]))
        self._spoken = time.monotonic()
        if shards is not None:
            return self.connection.send_pieces(bytes(parts[0]), shards)
        self.connection.send(parts)
        return None

    def poll(self, timeout: float) -> Iterator[Message]:
        """Yield messages that have arrived; wait up to `timeout` seconds for the first."""
        for parts in self.connection.poll(timeout):
            self.received += sum(map(len, parts))
            self.heard, self._unanswered = time.monotonic(), 0
            yield parse(parts)

    def heartbeat_is_due(self, usual: float) -> bool:
        """Return whether nothing was sent for `usual` seconds; if so, a heartbeat is counted as sent."""
        every = usual if self._unanswered < _UNANSWERED else max(usual, _SLOW_HEARTBEAT)
        due = time.monotonic() - self._spoken > every
        self._unanswered += due
        return due


class SessionState:
    """The state of the session, which the two threads of a worker share."""

    def __init__(self, server: ServerConnection) -> None:
        self._server = server
        self.on_wait: OnWait | None = None  # called about every second while the worker's thread waits
        self._changed = threading.Condition()
        self._blocked: tuple[str, float] | None = None  # what the worker's thread waits for, and since when
        self.session: Session | None = None
        self.lost = False  # the session has changed: what this step computes will not count
        self.deferred = False  # whether to join only when the worker's thread asks for a session
        self.stopped: str | None = None
        self.error: Exception | None = None

    @property
    def goes_on(self) -> bool:
        """Whether there is a session, in which what this step computes counts."""
        return self.session is not None and self.stopped is None and not self.lost

    # For the worker's thread

    def wait(self, layers: Sequence[int], clock: int, patience: float) -> bool:
        """Wait until these layers are fresh enough for a step; return False if the session or the training ended."""

        def arrived() -> bool | None:
            if not self.goes_on or self.session is None:
                return False
            return all(min(self.session.arrived[layer]) >= clock for layer in layers) or None

        return self._wait_for(arrived, f"the parameters of step {clock}", patience)

    def wait_for_session(self, patience: float) -> Session | None:
        """Wait until the server has admitted this worker; return None if training has ended."""

        def admitted() -> tuple[Session | None] | None:
            if self.session is None and self.stopped is None:
                return None
            self.lost = False
            return (self.session,)

        if self.deferred:
            self.deferred, self._server.heard = False, time.monotonic()  # the server had no reason to send anything
            self._server.connection.wake()
        return self._wait_for(admitted, "other workers to join, before training begins", patience)[0]

    def waiting(self) -> Waiting | None:
        """Return what the worker's thread waits for and how long it has, or None if it does not wait."""
        blocked, session, now = self._blocked, self.session, time.monotonic()
        if blocked is None or self.stopped is not None:
            return None
        silent = now - self._server.heard
        # A live server answers each HELLO message and each heartbeat.
        if not self._server.received or silent > (2 * _HELLO_EVERY if session is None else session.timeout / 2):
            return Waiting(f"an answer from {self._server.address}", silent)
        return Waiting(blocked[0], now - blocked[1])

    def _wait_for(self, outcome: Callable[[], T | None], what: str, patience: float) -> T:
        """Wait until there is an outcome, and return it. Raise an error of the client's thread."""
        try:
            while True:
                with self._changed:
                    if self.error is not None and self.stopped is None:  # after the end the server may be gone
                        raise self.error
                    if (found := outcome()) is not None:
                        return found
                    self._blocked = self._blocked or (what, time.monotonic())
                    self._changed.wait(1.0)
                self._check_server(patience)
        finally:
            self._blocked = None

    def _check_server(self, patience: float) -> None:
        """Raise ServerError if the server has been silent for too long; tell the owner what the worker waits for."""
        # As long as any message arrives the server is alive, and other workers are slow.
        if time.monotonic() - self._server.heard > patience:
            raise ServerError(f"no message from the server has arrived for {patience:g} s: is it still running?")
        waiting = self.waiting()
        if self.on_wait is not None and waiting is not None and waiting.seconds >= 1.0:
            self.on_wait(waiting)

    # For the client's thread

    def enter(self, session: Session | None, *, deferred: bool = False) -> None:
        """Begin a session, or end the present one. deferred: until the worker's thread asks for the next."""
        with self._changed:
            self.session, self.lost, self.deferred = session, True, deferred
            self._changed.notify_all()

    def arrive(self, session: Session, message: Message, timings: WorkerTimings) -> None:
        """Note that a part is up to date; when its layer is complete, note how stale that is."""
        layer, part = message.layer, message.part
        previous, session.versions[layer][part] = session.versions[layer][part], message.number
        with self._changed:
            session.arrived[layer][part] = message.clock
            session.known.here[layer] = min(session.arrived[layer])
            if session.known.here[layer] == message.clock:
                timings.arrived(layer, message.clock, session.staleness(message, previous))
                self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Note that training has ended."""
        self.stopped = reason
        self.wake()

    def fail(self, error: Exception) -> None:
        """Keep an error of the client's thread, which the worker's thread raises."""
        self.error = error if isinstance(error, ThinwireError) else ServerError(f"the worker failed: {error}")
        self.error.__cause__ = error.__cause__ if self.error is error else error

    def wake(self) -> None:
        """Let the worker's thread see what has changed."""
        with self._changed:
            self._changed.notify_all()


class PushQueue:
    """The gradients that one worker is pushing, until the server has accepted them."""

    def __init__(
        self, codec: Codec, parameters: LocalParameters, timings: WorkerTimings, server: ServerConnection
    ) -> None:
        self.codec = codec
        self._parameters, self._timings, self._server = parameters, timings, server
        self._gradients: dict[tuple[int, int], Gradients] = {}  # by layer and step
        self.unacknowledged: dict[tuple[int, int, int], Frame | SentShards] = {}  # by layer, part and step
        self._tickets: dict[int, SentShards] = {}  # pushes in shards that are not reported yet
        self.restored = 0.0  # sum of the magnitudes that were lost on the way and added to the residual again

    @property
    def busy(self) -> bool:
        """Whether any gradient waits to be sent or to be acknowledged."""
        return bool(self._gradients or self.unacknowledged)

    def enqueue(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Request the pushes of a layer's gradients, and after them the pulls for the next step."""
        self._gradients[layer, clock] = gradients
        for part, pieces in enumerate(session.layout.layers[layer].parts):
            sizes = [len(piece) for piece in pieces]
            size = self.codec.frame_bound(sizes, self.codec.expected_counts(sizes, clock))
            session.pool.put(Request("push", layer, part, clock, size))
            session.pool.put(Request("pull", layer, part, clock + 1, _PULL_BYTES))

    def send(self, session: Session, request: Request) -> None:
        """Encode the part that a request names, and send it."""
        layer, part, clock = request.layer, request.part, request.clock
        gradients = self._gradients[layer, clock]
        pieces = session.layout.layers[layer].parts[part]
        tensors = self._parameters.gradients(pieces, gradients)
        hold = [piece.name for piece in pieces if piece.parameter not in gradients]
        budget = self._server.connection.piece_bytes
        sent: Frame | SentShards
        body: Buffer
        shards: list[bytes] | None
        if budget is None:
            sent = self.codec.encode(tensors, step=clock, hold=hold)
            entries, body, shards = sum(sent.counts), sent.data.numpy().data, None
            size = len(body)
        else:
            sent, entries = SentShards.encode(self.codec, tensors, budget, step=clock, hold=hold)
            size, body, shards = sent.size, b"", list(sent.shards.values())
            if not sent.finite:  # the server must learn of it, so it is sent reliably
                body, shards = pack_all(shards), None
        self._timings.sent(clock, entries)
        session.pool.sent(request, size)
        self.unacknowledged[layer, part, clock] = sent
        message = Message(MessageKind.PUSH, session.number, layer, part, clock, body=body)
        ticket = self._server.send(message, session, shards)
        if ticket is not None and isinstance(sent, SentShards):
            self._tickets[ticket] = sent
        if part == len(session.layout.layers[layer].parts) - 1:
            self._gradients.pop((layer, clock), None)
        self._timings.note(self._timings.pushes, layer, clock)

    def report(self, ticket: int, lost: frozenset[int], on_loss: str) -> None:
        """Add the lost shards of a push to the residual again, or drop them."""
        sent = self._tickets.pop(ticket, None)
        if sent is not None and lost:
            self.restored += sent.give_back(self.codec, lost, restore=check_on_loss(on_loss) == "restore")

    def acknowledge(self, layer: int, part: int, clock: int) -> bool:
        """Note that the server has accepted a push; return False if that was known."""
        if self.unacknowledged.pop((layer, part, clock), None) is None:
            return False
        self._timings.note(self._timings.acks, layer, clock)
        return True

    def restart(self, accepted_steps: list[int] | None) -> None:
        """Begin a new session: add pushes that the server has not accepted, by part, to the residual again.

        Gradients that still wait to be sent belong to the old session and are dropped.
        """
        self._gradients.clear()
        layout = self._parameters.last_layout
        if layout is None:
            return
        if accepted_steps is not None and len(accepted_steps) != len(layout.numbers):  # the server cuts other parts now
            accepted_steps = None
        for (layer, part, clock), frame in self.unacknowledged.items():
            if accepted_steps is not None and clock < accepted_steps[layout.numbers[layer, part]]:
                continue
            if isinstance(frame, SentShards):
                frame.give_back(self.codec)
            else:
                reader = FrameReader(frame, layout.numels(layer, part))
                for section in reader.sections:
                    name = layout.layers[layer].parts[part][section.id].name
                    self.codec.give_back(name, *reader.entries(section))
        self.unacknowledged.clear()
        self._tickets.clear()


class Client:
    """Owns the connection to the server, and the thread that uses it."""

    def __init__(self, server: ServerConnection, model: nn.Module, codec: Codec | None, hello: dict[str, Any]) -> None:
        self.thread = threading.Thread(target=self._run, name="thinwire-worker", daemon=True)
        self.server, self._model = server, model
        self.parameters, self.timings = LocalParameters(model), WorkerTimings()
        self._has_codec = codec is not None  # otherwise the server chooses it
        self.pushes = PushQueue(codec or Codec(), self.parameters, self.timings, self.server)
        self.state = SessionState(self.server)
        self._buffers = Buffers(model)
        server.connection.on_report = self._on_report
        self._hello = {**hello, "shards": server.connection.piece_bytes is not None}
        self._jobs: deque[tuple[Callable[[], None], Session | None]] = deque()  # None: for any session
        self._hello_sent = 0.0
        self._unreported = 0  # bytes of replies since the last RECEIVED message
        self._ending = False

    # For the worker's thread

    def push(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Push a layer's gradients (of some of its parameters), then pull its parameters for the next step."""
        self._submit(lambda: self.pushes.enqueue(session, layer, clock, gradients), session)

    def fetch(self, session: Session, clock: int) -> None:
        """Pull all parameters in full."""

        def pull() -> None:
            if self._buffers:
                self._send(Message(MessageKind.BUFFERS, session.number))
            for layer, part in session.layout.places():
                self._send(Message(MessageKind.PULL, session.number, layer, part, clock, 1))

        self._submit(pull, session)

    def report(self, figures: dict[str, Any]) -> None:
        """Send figures of a step to the server; ValueError if it would refuse them."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
        if (session := self.state.session) is not None:
            read_figures(with_json(MessageKind.HEARTBEAT, 0, **plain), len(session.layout.layers))

        def send() -> None:
            if self.state.session is not None and self.state.stopped is None:
                self._send(with_json(MessageKind.HEARTBEAT, self.state.session.number, **plain))

        self._submit(send)

    def leave(self) -> None:
        """Leave the training and end the thread."""
        self._ending = True
        self.server.connection.wake()
        if self.thread.ident is not None:
            self.thread.join(10.0)

    def _submit(self, job: Callable[[], None], session: Session | None = None) -> None:
        self._jobs.append((job, session))
        self.server.connection.wake()

    # The client's thread

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
            until = time.monotonic() + _LEAVE_TIMEOUT
            # The server acknowledges the gradients of the last step when they arrive.
            while (self._jobs or self.pushes.busy) and self.state.goes_on and time.monotonic() < until:
                self._turn()
            self._send_leave()
        except Exception as error:
            self.state.fail(error)
        finally:
            self.server.connection.close()
            self.state.wake()

    def _turn(self) -> None:
        session = self.state.session
        if session is None:
            due = time.monotonic() - self._hello_sent > _HELLO_EVERY and not self.state.deferred
            if due and self.state.stopped is None:
                self._hello_sent = time.monotonic()
                self._send(with_json(MessageKind.HELLO, **self._hello))
        elif self.state.stopped is None and self.server.heartbeat_is_due(session.timeout / 4):
            self._send(Message(MessageKind.HEARTBEAT, session.number))
        while self._jobs:
            job, wanted = self._jobs.popleft()
            if wanted is None or wanted is self.state.session:  # gradients do not count in a later session
                job()
        self._flush()
        pause = 0.2 if self.state.session is None else min(0.5, self.state.session.timeout / 8)
        for message in self.server.poll(0.0 if self._jobs else pause):
            self._handle(message)
        if self._unreported and self.state.session is not None:  # one message for all replies that came together
            self._send(Message(MessageKind.RECEIVED, self.state.session.number, number=self._unreported))
        self._unreported = 0

    def _send(self, message: Message) -> None:
        self.server.send(message, self.state.session)

    def _send_leave(self) -> None:
        self._send(Message(MessageKind.LEAVE, self.state.session.number if self.state.session is not None else 0))

    def _on_report(self, ticket: int, lost: frozenset[int]) -> None:
        on_loss = "restore" if self.state.session is None else str(self.state.session.tell.get("on_loss", "restore"))
        self.pushes.report(ticket, lost, on_loss)

    def _flush(self) -> None:
        session = self.state.session if self.state.stopped is None else None
        while session is not None and (request := session.pool.next()) is not None:
            if request.kind == "pull":
                session.pool.done(request.size)
                self._send(Message(MessageKind.PULL, session.number, request.layer, request.part, request.clock))
            else:
                self.pushes.send(session, request)

    # Messages

    def _handle(self, message: Message) -> None:
        session = self.state.session
        if message.kind is MessageKind.WELCOME and session is None:
            self._on_welcome(message)
        elif message.kind is MessageKind.REFUSED:
            raise ServerError(f"the server refused this worker: {message.json.get('reason')}")
        elif message.kind is MessageKind.STOP and message.session == (0 if session is None else session.number):
            self.state.stop(str(message.json.get("reason")))
            self._send_leave()  # now, because the server waits for it and the worker's thread may be busy
        elif session is None or message.session != session.number:
            return  # of an earlier session
        elif message.kind is MessageKind.REJOIN:
            terms = message.json
            self._rejoin(str(terms.get("reason")), deferred=terms.get("later") is True)
        elif not session.counter.follows(message):
            self._rejoin("messages were lost on the way")
        elif message.kind is MessageKind.ACK:
            self._on_ack(session, message)
        elif message.kind in (MessageKind.DELTA, MessageKind.FULL):
            self._on_reply(session, message)
        elif message.kind is MessageKind.BUFFERS and len(message.body):
            self._buffers.update(message.body)
        elif message.kind is MessageKind.BUFFERS:
            self._send(Message(MessageKind.BUFFERS, session.number, body=self._buffers.body()))

    def _on_welcome(self, message: Message) -> None:
        session = Session(message.session, message.json, self._model)
        self.pushes.restart(session.accepted_steps)
        if not self._has_codec:
            self._has_codec, self.pushes.codec = True, session.codec()
        log.info("joined the server as worker %d at step %d", session.slot, session.first)
        self._unreported = 0  # those bytes were of the session before
        self.state.enter(session)

    def _rejoin(self, reason: str, *, deferred: bool = False) -> None:
        """End the session and send HELLO again, at once or when the worker's thread has computed its step."""
        when = "when it has computed its step" if deferred else "again"
        log.warning("the session with the server has ended (%s): the worker joins %s", reason, when)
        self.state.enter(None, deferred=deferred)
        self._hello_sent = 0.0

    def _on_ack(self, session: Session, message: Message) -> None:
        if not self.pushes.acknowledge(message.layer, message.part, message.clock):
            return
        session.pool.done(message.number)
        if len(message.body) == STALENESS.size * len(session.arrived):
            for layer, (lowest, holders) in enumerate(STALENESS.iter_unpack(message.body)):
                session.known.lowest[layer], session.known.holders[layer] = lowest, holders

    def _on_reply(self, session: Session, message: Message) -> None:
        layer, part = message.layer, message.part
        if layer >= len(session.arrived) or part >= len(session.arrived[layer]):
            raise MessageError(f"the server sent a part {part} of a layer {layer}, which does not exist")
        self.timings.replied(message.clock)
        full, lossy = message.kind is MessageKind.FULL, self.server.connection.piece_bytes is not None
        self._unreported += self.parameters.update(session.layout, layer, part, message.body, full=full, lossy=lossy)
        self.state.arrive(session, message, self.timings)
