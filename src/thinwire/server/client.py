"""Client: the worker's side of the protocol, as a state machine that does no I/O and reads no clock.

It encodes and pushes gradients while the backward pass runs, pulls parameters as they become ready, keeps the session
alive by heartbeats, and begins a new session when the server has ended the old one. Messages and `now`
(time.monotonic) come in, and `next_outgoing` returns what is to be sent; `worker.ClientThread` drives it.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, float64, nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import MessageError, ServerError
from thinwire.server.layout import Buffers
from thinwire.server.protocol import (
    STALENESS,
    AcceptedPushes,
    Message,
    MessageKind,
    Session,
    parse,
    read_figures,
    with_json,
)
from thinwire.server.replicas import NON_FINITE, LocalParameters, SentShards
from thinwire.server.schedule import Request
from thinwire.transport.base import Buffer, Outgoing
from thinwire.transport.udp.recovery import pack_all

log = logging.getLogger("thinwire.worker")

Gradients = Mapping[str, Tensor]
Event = tuple[float, int, int]  # when (time.monotonic), layer, step
# Heartbeats to a server that does not answer pile up in a queue: after the first few they are sent less often.
_UNANSWERED, _SLOW_HEARTBEAT = 4, 2.0
# Seconds between HELLO messages, until the server answers.
HELLO_EVERY = 2.0
# The estimated size of a pull, which is a header. Estimates of pushes are corrected when they are encoded.
_PULL_BYTES = 64


@dataclass
class StepTimes:
    """Seconds that the parts of one step took, and when they happened (time.monotonic).

    A step begins when the gradients of the step before are computed, by waiting for parameters.
    """

    synchronise: float = 0.0
    compute: float = 0.0
    aggregate: float = 0.0
    sent_entries: int = 0  # for the step before
    began: float = 0.0  # the gradients of the step before were computed
    ready: float = 0.0  # the last wait for parameters ended
    computed: float = 0.0  # the backward pass ended
    waits: dict[int, float] = field(default_factory=dict)  # by layer
    staleness: dict[int, int] = field(default_factory=dict)  # by layer


class WorkerTimings:
    """What the two threads of a worker note: the client's when messages came, the worker's how long it waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first_reply: dict[int, float] = {}
        self._sent_entries: dict[int, int] = {}  # by step
        self._staleness: dict[int, dict[int, int]] = {}
        self.keep = False  # whether to keep the events below, for profiles
        self.ready: list[Event] = []  # a layer's gradients were computed
        self.pushes: list[Event] = []
        self.acks: list[Event] = []
        self.last = StepTimes()  # of the step that ended last
        self.begin(0.0)

    def sent(self, clock: int, entries: int) -> None:
        """Note that so many entries of a step's gradients were sent."""
        with self._lock:
            self._sent_entries[clock] = self._sent_entries.get(clock, 0) + entries

    def replied(self, clock: int, now: float) -> None:
        """Note that the server has sent some of the parameters for a step."""
        with self._lock:
            self._first_reply.setdefault(clock, now)
            self._first_reply = {c: when for c, when in self._first_reply.items() if c >= clock - 8}

    def note(self, events: list[Event], layer: int, clock: int, now: float) -> None:
        """Append to one of the lists of events, if they are kept."""
        if self.keep:
            events.append((now, layer, clock))

    def arrived(self, layer: int, clock: int, staleness: int) -> None:
        """Note that a layer's parameters for a step are complete, and how stale they are."""
        with self._lock:
            self._staleness.setdefault(clock, {})[layer] = staleness

    # For the worker's thread

    def begin(self, now: float) -> None:
        """Begin the first step; waits before it belong to no step."""
        self._times = StepTimes(began=now, ready=now)

    def waited(self, layers: list[int], clock: int, began: float, ended: float) -> None:
        """Note a wait for these layers' parameters for a step."""
        with self._lock:  # the server's first reply divides aggregation from synchronisation
            first = min(max(self._first_reply.get(clock, ended), began), ended)
        self._times.aggregate += first - began
        self._times.synchronise += ended - first
        self._times.ready = ended
        for layer in layers:
            self._times.waits[layer] = self._times.waits.get(layer, 0.0) + (ended - began) / len(layers)

    def end_step(self, clock: int, computed: float) -> None:
        """End a step, all of whose gradients were computed at this time and have been handed to the client."""
        times, self._times.computed = self._times, computed
        with self._lock:
            done = [c for c in self._sent_entries if c < clock]  # this step's may still be on their way
            times.sent_entries = self._sent_entries[max(done)] if done else 0
            self._sent_entries = {c: entries for c, entries in self._sent_entries.items() if c >= clock}
            times.staleness = self._staleness.pop(clock, {})
            self._staleness = {c: found for c, found in self._staleness.items() if c >= clock - 8}
        times.compute = max(0.0, times.computed - times.began - times.aggregate - times.synchronise)
        self.last, self._times = times, StepTimes(began=times.computed)


class PushQueue:
    """The gradients that one worker is pushing, until the server has accepted them."""

    def __init__(self, codec: Codec, parameters: LocalParameters, timings: WorkerTimings) -> None:
        self.codec = codec
        self._parameters, self._timings = parameters, timings
        self._gradients: dict[tuple[int, int], Gradients] = {}  # by layer and step
        self.unacknowledged: dict[tuple[int, int, int], Frame | SentShards] = {}  # by layer, part and step
        # By ticket: pushes in shards that are not reported yet, with their layer, part and step.
        self._tickets: dict[int, tuple[tuple[int, int, int], SentShards]] = {}
        self._session = 0  # in which the last gradient was pushed
        self.restored = 0.0  # sum of the magnitudes that were lost on the way and added to the residual again

    @property
    def busy(self) -> bool:
        """Whether any gradient waits to be sent or to be acknowledged."""
        return bool(self._gradients or self.unacknowledged)

    def enqueue(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Request the pushes of a layer's gradients, and after them the pulls for the next step."""
        self._gradients[layer, clock] = gradients
        for part in range(len(session.layout.layers[layer].parts)):
            sizes = session.layout.numels[layer, part]
            size = self.codec.frame_bound(sizes, self.codec.expected_counts(sizes, clock))
            session.pool.put(Request("push", layer, part, clock, size))
            session.pool.put(Request("pull", layer, part, clock + 1, _PULL_BYTES))

    def encode(self, session: Session, request: Request, budget: int | None, now: float) -> Outgoing:
        """Encode the part that a request names, in shards of at most `budget` bytes if that is not None."""
        layer, part, clock = request.layer, request.part, request.clock
        gradients = self._gradients[layer, clock]
        pieces = session.layout.layers[layer].parts[part]
        tensors, hold = {}, []
        for piece in pieces:
            whole = gradients.get(piece.parameter)
            if whole is None:  # its values stand for a gradient, and the codec is told to skip it
                whole = self._parameters.rows[piece.parameter]
                hold.append(piece.name)
            row = whole.reshape(-1)
            tensors[piece.name] = (row.float() if row.dtype == float64 else row)[piece.begin : piece.end]
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
            if shards == [NON_FINITE]:  # the server must learn of it, so it is sent reliably
                body, shards = pack_all(shards), None
        self._timings.sent(clock, entries)
        session.pool.sent(request, size)
        self.unacknowledged[layer, part, clock] = sent
        self._session = session.number
        if part == len(session.layout.layers[layer].parts) - 1:
            self._gradients.pop((layer, clock), None)
        self._timings.note(self._timings.pushes, layer, clock, now)
        message = Message(MessageKind.PUSH, session.number, layer, part, clock, body=body)
        parts = message.parts(session.counter.next(message.kind))
        return Outgoing(parts, shards, (layer, part, clock))

    def on_ticket(self, out: Outgoing, ticket: int | None) -> None:
        """Note the transport's ticket of a push in shards; None if all of it will arrive."""
        sent = self.unacknowledged.get(out.place)
        if ticket is not None and isinstance(sent, SentShards):
            self._tickets[ticket] = out.place, sent

    def report(self, ticket: int, lost: frozenset[int], *, restore: bool) -> None:
        """Add the lost shards of a push to the residual again, or drop them."""
        _, sent = self._tickets.pop(ticket, (None, None))
        if sent is not None and lost:
            self.restored += sent.give_back(self.codec, lost, restore=restore)

    def acknowledge(self, layer: int, part: int, clock: int, now: float) -> bool:
        """Note that the server has accepted a push; return False if that was known."""
        if self.unacknowledged.pop((layer, part, clock), None) is None:
            return False
        self._timings.note(self._timings.acks, layer, clock, now)
        return True

    def restart(self, accepted: AcceptedPushes | None, *, restore: bool = True) -> None:
        """Begin a new session: add pushes that the server has not accepted, by part, to the residual again.

        restore: also those shards of accepted pushes that were lost. Gradients that still wait to be sent belong to the
        old session and are dropped.
        """
        self._gradients.clear()
        layout = self._parameters.last_layout
        if layout is None:
            return
        if accepted is not None and (
            accepted.session not in (0, self._session) or len(accepted.steps) != len(layout.numbers)
        ):  # of a session before the last one, or the server cuts other parts now
            accepted = None
        for (layer, part, clock), frame in {**dict(self._tickets.values()), **self.unacknowledged}.items():
            number = layout.numbers[layer, part]
            if accepted is not None and clock < accepted.steps[number]:
                if isinstance(frame, SentShards):
                    lost = frame.within(accepted.shards.get((number, clock), []))
                    self.restored += frame.give_back(self.codec, lost, restore=restore)
                continue
            if (layer, part, clock) not in self.unacknowledged:  # the server that acknowledged it has lost it
                continue
            if isinstance(frame, SentShards):
                frame.give_back(self.codec)
            else:
                reader = FrameReader(frame, layout.numels[layer, part])
                for section in reader.sections:
                    name = layout.layers[layer].parts[part][section.id].name
                    self.codec.give_back(name, *reader.entries(section))
        self.unacknowledged.clear()
        self._tickets.clear()


class Client:
    """One worker's state in the protocol.

    codec: None lets the server choose. hello: the body of the HELLO message, as `protocol.hello_of` returns it.
    piece_bytes: of a transport that may lose parts of messages, the bytes of such a part.
    """

    def __init__(
        self, model: nn.Module, codec: Codec | None, hello: dict[str, Any], now: float, *, piece_bytes: int | None
    ) -> None:
        self._model, self.piece_bytes = model, piece_bytes
        self.parameters, self.timings = LocalParameters(model), WorkerTimings()
        self._has_codec = codec is not None
        self.pushes = PushQueue(codec or Codec(), self.parameters, self.timings)
        self._buffers = Buffers(model)
        self._hello = {**hello, "shards": piece_bytes is not None}
        self._queue: deque[Outgoing] = deque()
        self._unreported = 0  # bytes of replies since the last RECEIVED message
        self.session: Session | None = None
        self.lost = False  # the session has changed: what this step computes will not count
        self.deferred = False  # whether to join only when the worker asks for a session
        self.stopped: str | None = None
        self.sent = self.received = 0  # bytes
        self.heard = now  # when the last message arrived
        self._hello_sent = self._spoken = -math.inf
        self._unanswered = 0  # heartbeats since the last message arrived

    @property
    def goes_on(self) -> bool:
        """Whether there is a session, in which what this step computes counts."""
        return self.session is not None and self.stopped is None and not self.lost

    # What the worker asks for

    def arrived(self, layers: Sequence[int], clock: int) -> bool | None:
        """Return whether these layers are fresh enough for a step, None for not yet; False if that will never be."""
        if not self.goes_on or self.session is None:
            return False
        return all(min(self.session.arrived[layer]) >= clock for layer in layers) or None

    def request_session(self, now: float) -> None:
        """Join again, if the server asked this worker to do so only after its step."""
        if self.deferred:
            self.deferred, self.heard = False, now  # the server had no reason to send anything

    def accept_session(self) -> Session | None:
        """Return the present session: from now on what is computed counts in it."""
        self.lost = False
        return self.session

    def push(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Push a layer's gradients (of some of its parameters), then pull its parameters for the next step."""
        if session is self.session:  # gradients do not count in a later session
            self.pushes.enqueue(session, layer, clock, gradients)

    def fetch(self, session: Session, clock: int, now: float) -> None:
        """Pull all parameters in full."""
        if session is self.session:
            if self._buffers:
                self._send(Message(MessageKind.BUFFERS, session.number), now)
            for layer, part in session.layout.places():
                self._send(Message(MessageKind.PULL, session.number, layer, part, clock, 1), now)

    def figures(self, figures: dict[str, Any]) -> Message:
        """Return the message that reports figures of a step; ValueError if the server would refuse it."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
        message = with_json(MessageKind.HEARTBEAT, 0, **plain)
        if (session := self.session) is not None:
            read_figures(message, len(session.layout.layers))
        return message

    def report(self, message: Message, now: float) -> None:
        """Send what `figures` returned, if there is a session."""
        if self.session is not None and self.stopped is None:
            self._send(replace(message, session=self.session.number), now)

    def leave(self, now: float) -> None:
        """Tell the server that this worker leaves the training."""
        self._send(Message(MessageKind.LEAVE, self.session.number if self.session is not None else 0), now)

    # Time and what is to be sent

    @property
    def pause(self) -> float:
        """Seconds after which `on_timer` must be called again."""
        return 0.2 if self.session is None else min(0.5, self.session.timeout / 8)

    def on_timer(self, now: float) -> None:
        """Send a HELLO message or a heartbeat if one is due."""
        if self.stopped is not None:
            return
        if self.session is None:
            if now - self._hello_sent > HELLO_EVERY and not self.deferred:
                self._hello_sent = now
                self._send(with_json(MessageKind.HELLO, **self._hello), now)
            return
        usual = self.session.timeout / 4
        if now - self._spoken > (usual if self._unanswered < _UNANSWERED else max(usual, _SLOW_HEARTBEAT)):
            self._unanswered += 1
            self._send(Message(MessageKind.HEARTBEAT, self.session.number), now)

    def next_outgoing(self, now: float) -> Outgoing | None:
        """Return the next message to send, or None for now.

        Gradients are encoded here, one part at a time, so that a transport can send one while the next is encoded.
        """
        session = self.session
        if self._unreported and session is not None:  # one message for all replies that came together
            self._send(Message(MessageKind.RECEIVED, session.number, number=self._unreported), now)
            self._unreported = 0
        if not self._queue and session is not None and self.stopped is None:
            request = session.pool.next()
            if request is not None and request.kind == "pull":
                session.pool.done(request.size)
                pull = Message(MessageKind.PULL, session.number, request.layer, request.part, request.clock)
                self._send(pull, now)
            elif request is not None:
                self._queue.append(self.pushes.encode(session, request, self.piece_bytes, now))
        if not self._queue:
            return None
        out, self._spoken = self._queue.popleft(), now
        self.sent += sum(map(len, [*out.parts, *(out.shards or ())]))
        return out

    def on_report(self, ticket: int, lost: frozenset[int]) -> None:
        """Handle the transport's report on a push in shards."""
        self.pushes.report(ticket, lost, restore=self.session is None or self.session.restores)

    def _send(self, message: Message, now: float) -> None:
        self._spoken = now
        count = self.session.counter.next(message.kind) if self.session is not None else 0
        self._queue.append(Outgoing(message.parts(count)))

    # Messages

    def receive(self, parts: Sequence[Buffer], now: float) -> bool:
        """Handle a message; return whether the worker may have been waiting for it.

        ServerError if the server refuses this worker, MessageError or FrameError if the message is invalid.
        """
        self.received += sum(map(len, parts))
        self.heard, self._unanswered = now, 0
        message, session = parse(parts), self.session
        if message.kind is MessageKind.WELCOME and session is None:
            self._on_welcome(message)
            return True
        if message.kind is MessageKind.REFUSED:
            raise ServerError(f"the server refused this worker: {message.json.get('reason')}")
        if message.kind is MessageKind.STOP and message.session == (0 if session is None else session.number):
            self.stopped = str(message.json.get("reason"))
            self.leave(now)  # now, because the server waits for it and the worker may be busy
            return True
        if session is None or message.session != session.number:
            return False  # of an earlier session
        if message.kind is MessageKind.REJOIN:
            terms = message.json
            self._rejoin(str(terms.get("reason")), deferred=terms.get("later") is True)
            return True
        if not session.counter.follows(message):
            self._rejoin("messages were lost on the way")
            return True
        if message.kind is MessageKind.ACK:
            self._on_ack(session, message, now)
        elif message.kind in (MessageKind.DELTA, MessageKind.FULL):
            return self._on_reply(session, message, now)
        elif message.kind is MessageKind.BUFFERS and len(message.body):
            self._buffers.update(message.body)
        elif message.kind is MessageKind.BUFFERS:
            self._send(Message(MessageKind.BUFFERS, session.number, body=self._buffers.body()), now)
        return False

    def _on_welcome(self, message: Message) -> None:
        session = Session(message.session, message.json, self._model)
        self.pushes.restart(session.accepted, restore=session.restores)
        if not self._has_codec:
            self._has_codec, self.pushes.codec = True, session.codec
        log.info("joined the server as worker %d at step %d", session.slot, session.first)
        self.session, self.lost, self.deferred = session, True, False
        self._unreported = 0

    def _rejoin(self, reason: str, *, deferred: bool = False) -> None:
        """End the session and send HELLO again, at once or when the worker has computed its step."""
        when = "when it has computed its step" if deferred else "again"
        log.warning("the session with the server has ended (%s): the worker joins %s", reason, when)
        self.session, self.lost, self.deferred = None, True, deferred
        self._queue.clear()  # those messages are of the session that has ended
        self._hello_sent = -math.inf

    def _on_ack(self, session: Session, message: Message, now: float) -> None:
        if not self.pushes.acknowledge(message.layer, message.part, message.clock, now):
            return
        session.pool.done(message.number)
        if len(message.body) == STALENESS.size * len(session.arrived):
            for layer, (lowest, holders) in enumerate(STALENESS.iter_unpack(message.body)):
                session.known.lowest[layer], session.known.holders[layer] = lowest, holders

    def _on_reply(self, session: Session, message: Message, now: float) -> bool:
        """Bring a part up to date; return whether its layer is complete, and note how stale that is."""
        layer, part = message.layer, message.part
        if layer >= len(session.arrived) or part >= len(session.arrived[layer]):
            raise MessageError(f"the server sent a part {part} of a layer {layer}, which does not exist")
        self.timings.replied(message.clock, now)
        full, lossy = message.kind is MessageKind.FULL, self.piece_bytes is not None
        self._unreported += self.parameters.update(session.layout, layer, part, message.body, full=full, lossy=lossy)
        previous, session.versions[layer][part] = session.versions[layer][part], message.number
        session.arrived[layer][part] = message.clock
        session.known.here[layer] = min(session.arrived[layer])
        complete = session.known.here[layer] == message.clock
        if complete:
            self.timings.arrived(layer, message.clock, session.staleness(message, previous))
        return complete
