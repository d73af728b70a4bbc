"""Courier: the thread that talks to the server for one worker.

It encodes and pushes gradients while the backward pass goes on, pulls parameters as they become ready, keeps the
connection's session alive, and begins a new one when the server has forgotten it.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import MessageError, ThinwireError
from thinwire.server.layout import Buffers
from thinwire.server.protocol import STALENESS, Kind, Message, Session, hello_of, parse, with_json
from thinwire.server.replicas import Copies, Pushed, check_on_loss
from thinwire.server.schedule import Request
from thinwire.transport.base import Buffer, Connection
from thinwire.transport.udp.recovery import pack_all


@dataclass
class StepTimes:
    """Seconds of one step, and what happened when (time.monotonic).

    A step begins where the one before had computed its gradients: with waiting for what became of them.
    """

    synchronise: float = 0.0
    compute: float = 0.0
    aggregate: float = 0.0
    encode: float = 0.0
    kept: int = 0  # entries that were sent for the step before
    began: float = 0.0  # the step before had been computed
    ready: float = 0.0  # the last wait for parameters had ended
    computed: float = 0.0  # the backward pass had ended
    waits: dict[int, float] = field(default_factory=dict)  # by layer
    staleness: dict[int, int] = field(default_factory=dict)  # by layer


class Pace:
    """Notes of two threads: the courier's on what came when, the worker's on how long it waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first_answer: dict[int, float] = {}
        self._encoded: dict[int, tuple[float, int]] = {}  # by clock: seconds, and entries that were kept
        self._stale: dict[int, dict[int, int]] = {}
        # (when, layer, clock), for orders and profiles: gradients ready, pushes, acknowledgements, parameters here
        self.ready: list[tuple[float, int, int]] = []
        self.pushes: list[tuple[float, int, int]] = []
        self.acks: list[tuple[float, int, int]] = []
        self.arrivals: list[tuple[float, int, int]] = []
        self.keep = False  # whether to keep those

    def encoded(self, clock: int, seconds: float, kept: int) -> None:
        with self._lock:
            before = self._encoded.get(clock, (0.0, 0))
            self._encoded[clock] = before[0] + seconds, before[1] + kept

    def answered(self, clock: int) -> None:
        with self._lock:
            self._first_answer.setdefault(clock, time.monotonic())
            for old in [c for c in self._first_answer if c < clock - 8]:
                del self._first_answer[old]

    def note(self, events: list[tuple[float, int, int]], layer: int, clock: int) -> None:
        """Keep one of the lists above, if anybody wants them."""
        if self.keep:
            events.append((time.monotonic(), layer, clock))

    def arrived(self, layer: int, clock: int, staleness: int) -> None:
        with self._lock:
            self._stale.setdefault(clock, {})[layer] = staleness
        self.note(self.arrivals, layer, clock)

    def divide(self, clock: int, began: float, ended: float) -> tuple[float, float]:
        """A wait for parameters of this step as (aggregation, synchronisation)."""
        with self._lock:
            first = min(max(self._first_answer.get(clock, ended), began), ended)
        return first - began, ended - first

    def close_step(self, times: StepTimes, clock: int) -> None:
        """Note what was sent for the step before (this one's may still be under way), and how stale layers were."""
        with self._lock:
            done = [c for c in self._encoded if c < clock]
            times.encode, times.kept = self._encoded[max(done)] if done else (0.0, 0)
            for old in done:
                del self._encoded[old]
            times.staleness = self._stale.pop(clock, {})
            for old in [c for c in self._stale if c < clock - 8]:
                del self._stale[old]


class Stopwatch:
    """Times the steps of the worker's thread; `last` is the step that has ended."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._times = StepTimes(began=time.monotonic())
        self.last = StepTimes()

    def begin(self) -> None:
        """The first step begins: what was waited for before is none's."""
        now = time.monotonic()
        self._times = StepTimes(began=now, ready=now)

    def waited(self, layers: list[int], clock: int, began: float) -> None:
        """A wait for these layers, for this step, has ended."""
        ended = time.monotonic()
        aggregate, synchronise = self._pace.divide(clock, began, ended)
        self._times.aggregate += aggregate
        self._times.synchronise += synchronise
        self._times.ready = ended
        for layer in layers:
            self._times.waits[layer] = self._times.waits.get(layer, 0.0) + (ended - began) / len(layers)

    def computed(self) -> None:
        """The gradients of a step are there."""
        self._times.computed = time.monotonic()

    def end_step(self, clock: int) -> None:
        """All gradients of a step have been handed over."""
        times = self._times
        self._pace.close_step(times, clock)
        times.compute = max(0.0, times.computed - times.began - times.aggregate - times.synchronise)
        self.last, self._times = times, StepTimes(began=times.computed)


# Beats to a server that does not answer: from the fifth on they are this far apart, for they all wait in a queue.
_UNANSWERED, _PATIENT = 4, 2.0


class Line:
    """A connection, and when it was used last."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sent = self.received = 0  # bytes
        self.heard = time.monotonic()
        self._spoken = 0.0
        self._beats = 0  # since anything was heard

    def send(self, message: Message, session: Session | None) -> None:
        """Send a message; in a session it is counted."""
        parts = message.parts(session.counter.next(message.kind) if session is not None else 0)
        self.sent += sum(map(len, parts))
        self._spoken = time.monotonic()
        self.connection.send(parts)

    def send_pieces(self, message: Message, session: Session, pieces: Sequence[Buffer]) -> int | None:
        """Send a body in pieces, any of which may be lost; returns the transport's ticket."""
        head = bytes(message.parts(session.counter.next(message.kind))[0])
        self.sent += len(head) + sum(map(len, pieces))
        self._spoken = time.monotonic()
        return self.connection.send_pieces(head, pieces)

    def poll(self, timeout: float) -> Iterator[Message]:
        """Messages that have arrived; waits up to `timeout` seconds for the first."""
        for parts in self.connection.poll(timeout):
            self.received += sum(map(len, parts))
            self.heard, self._beats = time.monotonic(), 0
            yield parse(parts)

    def beat_is_due(self, usual: float) -> bool:
        """Whether to give a sign of life now, every `usual` seconds of silence; if so it is counted."""
        every = usual if self._beats < _UNANSWERED else max(usual, _PATIENT)
        due = time.monotonic() - self._spoken > every
        self._beats += due
        return due


class ServerError(ThinwireError, RuntimeError):
    """The server refused this worker, is gone, or sent something that makes no sense."""


class Standing:
    """What the two threads of a worker share."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._changed = threading.Condition()
        self.session: Session | None = None
        self.lost = False  # a new session has begun: what this step computes will not count
        self.stopped: str | None = None
        self.error: Exception | None = None

    # For the worker's thread

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

    def _sleep(self, patience: float) -> None:
        # While anything is heard of the server it lives, and others are slow.
        self._changed.wait(1.0)
        if time.monotonic() - self._line.heard > patience:
            raise ServerError(f"nothing was heard of the server for {patience:g} s: is it still running?")

    def _raise(self) -> None:
        if self.error is not None and self.stopped is None:  # a server that has ended training may be gone
            raise self.error

    # For the courier's

    def enter(self, session: Session | None) -> None:
        """A session begins, or the one that was is over."""
        with self._changed:
            self.session, self.lost = session, True
            self._changed.notify_all()

    def arrive(self, session: Session, message: Message, pace: Pace) -> None:
        """A part is there as its message tells; with a layer's last one it is noted how stale that is."""
        layer, part = message.layer, message.part
        before, session.editions[layer][part] = session.editions[layer][part], message.number
        with self._changed:
            session.arrived[layer][part] = message.clock
            session.known.here[layer] = min(session.arrived[layer])
            if session.known.here[layer] == message.clock:
                pace.arrived(layer, message.clock, session.stale(message, before))
                self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Training has ended."""
        with self._changed:
            self.stopped = reason
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The thread that waits must hear of it, whatever it is."""
        self.error = error if isinstance(error, ThinwireError) else ServerError(f"the worker failed: {error}")
        self.error.__cause__ = error.__cause__ if self.error is error else error

    def close(self) -> None:
        """The courier's thread is done: nobody needs to wait any more."""
        with self._changed:
            self._changed.notify_all()


Gradients = Mapping[str, Tensor]
# A pull takes a header; an estimate of a push is corrected when it is encoded.
_PULL_BYTES = 64


class Pushes:
    """All pushes of one worker."""

    def __init__(self, codec: Codec, copies: Copies, pace: Pace, line: Line) -> None:
        self.codec = codec
        self._copies, self._pace, self._line = copies, pace, line
        self._gradients: dict[tuple[int, int], Gradients] = {}  # by layer and clock
        self.unacknowledged: dict[tuple[int, int, int], Frame | Pushed] = {}  # by layer, part and clock
        self._tickets: dict[int, Pushed] = {}  # pushes in pieces that are not reported yet
        self.restored = 0.0  # sum of the magnitudes that were lost on the way and returned to the memory

    @property
    def under_way(self) -> bool:
        """Whether any gradient waits to be sent, or to be acknowledged."""
        return bool(self._gradients or self.unacknowledged)

    def enqueue(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Let a layer's gradients wait for their turn, and after them the pulls for the next step."""
        self._gradients[layer, clock] = gradients
        for part, pieces in enumerate(session.layout.layers[layer].parts):
            sizes = [len(piece) for piece in pieces]
            size = self.codec.frame_bound(sizes, self.codec.expected_counts(sizes, clock))
            session.pool.put(Request("push", layer, part, clock, size))
            session.pool.put(Request("pull", layer, part, clock + 1, _PULL_BYTES))

    def send(self, session: Session, request: Request) -> None:
        """Encode a part, whose turn it is, and send it."""
        layer, part, clock = request.layer, request.part, request.clock
        gradients = self._gradients[layer, clock]
        pieces = session.layout.layers[layer].parts[part]
        views = self._copies.gradients(pieces, gradients)
        hold = [piece.name for piece in pieces if piece.parameter not in gradients]
        message = Message(Kind.PUSH, session.number, layer, part, clock)
        began, budget = time.perf_counter(), self._line.connection.piece_bytes
        if budget is None:
            frame = self.codec.encode(views, step=clock, hold=hold)
            self._pace.encoded(clock, time.perf_counter() - began, sum(frame.counts))
            body = frame.data.numpy().data
            session.pool.sent(request, len(body))
            self.unacknowledged[layer, part, clock] = frame
            self._line.send(replace(message, body=body), session)
        else:
            pushed, entries = Pushed.encode(self.codec, views, budget, step=clock, hold=hold)
            self._pace.encoded(clock, time.perf_counter() - began, entries)
            session.pool.sent(request, pushed.size)
            self.unacknowledged[layer, part, clock] = pushed
            self._send_in_pieces(session, message, pushed)
        if part == len(session.layout.layers[layer].parts) - 1:
            self._gradients.pop((layer, clock), None)
        self._pace.note(self._pace.pushes, layer, clock)

    def _send_in_pieces(self, session: Session, message: Message, pushed: Pushed) -> None:
        shards = list(pushed.shards.values())
        if not pushed.finite:  # what it says must arrive
            self._line.send(replace(message, body=pack_all(shards)), session)
            return
        ticket = self._line.send_pieces(message, session, shards)
        if ticket is not None:
            self._tickets[ticket] = pushed

    def report(self, ticket: int, lost: frozenset[int], on_loss: str) -> None:
        """Lost pieces of a push return to the memory, or are given up."""
        pushed = self._tickets.pop(ticket, None)
        if pushed is not None and lost:
            self.restored += pushed.give_back(self.codec, lost, restore=check_on_loss(on_loss) == "restore")

    def taken(self, layer: int, part: int, clock: int) -> bool:
        """The server has taken a push; False if that was known."""
        if self.unacknowledged.pop((layer, part, clock), None) is None:
            return False
        self._pace.note(self._pace.acks, layer, clock)
        return True

    def give_back(self, counted: list[int] | None) -> None:
        """What was pushed and has not been counted, by part, returns to the memory."""
        layout = self._copies.last_layout
        if layout is None:
            return
        if counted is not None and len(counted) != len(layout.numbers):  # a server that cuts its parts otherwise
            counted = None
        for (layer, part, clock), frame in self.unacknowledged.items():
            if counted is not None and clock < counted[layout.numbers[layer, part]]:
                continue
            if isinstance(frame, Pushed):
                frame.give_back(self.codec)
                continue
            pieces = layout.layers[layer].parts[part]
            reader = FrameReader(frame, layout.numels(layer, part))
            for section in reader.sections:
                self.codec.give_back(pieces[section.id].name, *reader.entries(section))
        self.unacknowledged.clear()
        self._tickets.clear()

    def clear(self) -> None:
        """Gradients that wait are of a session that is over: they do not count in the next."""
        self._gradients.clear()


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
