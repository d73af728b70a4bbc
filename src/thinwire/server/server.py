"""Server: owns the model, applies the gradients that workers push, and sends them the parameters that they pull.

`Server` is a state machine that does no I/O and reads no clock: messages and `now` (time.monotonic) come in by
`receive` and the methods named `on_...`, and `next_outgoing` returns what is to be sent. `transport.base.serve` drives
it, in one thread. A message is checked before it is used: an invalid one ends its sender's session with the reason in
the log, and the other workers continue.
"""

import logging
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.codec.selection import Selection
from thinwire.errors import FrameError, MessageError
from thinwire.server.aggregate import Aggregator, Clock, Reduce
from thinwire.server.checkpoint import CheckpointWriter, load_checkpoint
from thinwire.server.layout import Buffers, Layout, cut_for, trained
from thinwire.server.membership import REPORTS_PER_STEP, Member, Membership
from thinwire.server.protocol import (
    STALENESS,
    HelloCheck,
    Message,
    MessageKind,
    Waiting,
    check_on_loss,
    check_timeout,
    parse,
    read_figures,
    server_codec,
    with_json,
)
from thinwire.server.replicas import LossyReplicas, ReceivedShards, Replicas
from thinwire.server.schedule import Request, check_policy
from thinwire.transport.addresses import listen
from thinwire.transport.base import Buffer, Listener, Outgoing, Parts, Peer, serve

log = logging.getLogger("thinwire.server")

Mode = Literal["bsp", "ssp", "async"]
OnFigures = Callable[[Member, dict[str, Any]], None]
# The largest number of bytes in flight to or from one worker.
WINDOW = 1 << 19
# The number of steps after which the server asks a worker for its buffers (running statistics), if the model has any.
BUFFERS_EVERY = 10
# The assumed bytes of a reply before the first one of its part is known.
_ASSUMED_BYTES = 1 << 18


class Server:
    """Trains a model with the gradients of workers that may join and leave at any time.

    optimizer: steps on the gradients. None: workers have optimizers of their own (`Worker(..., optimizer=...)`), and
        the server adds the mean of what these changed.
    domain: "update" if workers push what their optimizers changed, and `optimizer` is an outer one that takes it as its
        gradient; by default that is so if there is no optimizer.
    mode: "bsp" (bulk-synchronous: all workers step together), "ssp" (stale-synchronous: the fastest worker is at most
        `bound` steps ahead of the slowest) or "async" (every gradient is applied when it arrives).
    codec: how changes of the model are sent to the workers: a codec, preset or density; None sends parameters in full.
    reduce: "mean" or "sum" of the workers' gradients. policy: which layer is sent first.
    expect: training begins when so many workers have joined.
    phased: no parameters are sent before the whole step is complete; otherwise each part is sent as soon as it is.
    on_loss: what workers do with the parts of a gradient that a lossy transport lost: "restore" adds them to the
        residual, "ignore" drops them.
    recipe: workers with another recipe are refused. cut: the largest number of elements in a part; None chooses it.
    window: the largest number of bytes in flight to or from one worker.
    timeout: the server evicts a worker after so many seconds without a message. stall: and after so many seconds
        without progress while others wait for it.
    checkpoint: folder; the server writes to it every `save_every` steps, and resumes from it if it has a checkpoint.
    tell: sent to every worker that joins, as `Worker.tell`; its `push` is their codec if they choose none.
    on_step: called by `run` with the server after every step that is complete in all layers.
    on_figures: called with the figures that a worker reports; on a ValueError the worker is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        domain: Literal["gradient", "update"] | None = None,
        mode: Mode = "bsp",
        bound: int = 3,
        codec: Codec | Selection | float | str | None = 0.01,
        reduce: Reduce = "mean",
        policy: str = "forward",
        expect: int = 1,
        phased: bool = False,
        on_loss: str = "restore",
        recipe: str = "",
        cut: int | None = None,
        window: int = WINDOW,
        timeout: float = 10.0,
        stall: float = 300.0,
        checkpoint: Path | str | None = None,
        save_every: int = 100,
        tell: dict[str, Any] | None = None,
        on_step: Callable[["Server"], None] = lambda server: None,
        on_figures: OnFigures = lambda member, figures: None,
    ) -> None:
        if mode not in ("bsp", "ssp", "async"):
            raise ValueError(f'mode is "bsp", "ssp" or "async", not {mode!r}')
        if domain not in (None, "gradient", "update") or (domain == "gradient" and optimizer is None):
            raise ValueError(f'domain is "update", or with an optimizer "gradient", not {domain!r}')
        check_policy(policy)
        check_timeout(timeout)
        if expect < 1 or save_every < 1:
            raise ValueError(f"expect and save_every count from 1, not {expect} and {save_every}")
        self.domain = domain if domain is not None else "update" if optimizer is None else "gradient"
        if optimizer is None:  # subtracts what it gets: changes are pushed as start - end
            optimizer = torch.optim.SGD(trained(model).values(), lr=1.0)
        self.model, self.optimizer, self.mode = model, optimizer, mode
        self.policy, self.expect = policy, expect
        # To send every entry is to send the parameters in full.
        self.codec = None if codec is None or codec == "dense" else server_codec(codec)
        self.layout = Layout.of(model, cut_for(optimizer, self.codec, cut))
        self.bound = {"bsp": 0, "ssp": bound, "async": None}[mode]
        self.timeout, self._save_every = timeout, save_every
        self._buffers = Buffers(model)
        folder = Path(checkpoint) if checkpoint is not None else None
        self._checkpoint = CheckpointWriter(folder) if folder is not None else None
        self._aggregator = Aggregator(model, optimizer, self.layout, reduce)
        state: dict[str, Any] = {"step": 0, "accepted": {}, "extra": {}, "pending": []}
        if folder is not None:
            state = load_checkpoint(folder, model, optimizer, self.layout.cut) or state
        self._last_step = self._owner_step = self._resumed_at = int(state["step"])
        if self._resumed_at:
            log.info("the server resumes at step %d", self._resumed_at)
        self.extra: dict[str, float] = state["extra"]  # figures of the owner that are saved in the checkpoint
        self.clock = Clock[Member](len(self.layout.numbers), self.bound, self._resumed_at, phased=phased)
        terms: dict[str, Any] = {"tell": {**(tell or {}), "on_loss": check_on_loss(on_loss)}, "timeout": timeout}
        terms |= {"bound": self.bound, "policy": policy, "window": window, "cut": self.layout.cut}
        self._check = HelloCheck(recipe, model, self.domain)
        self.membership = Membership(
            self._check.applicant, terms, self.clock, len(self.layout.layers), expect=expect, stall=stall
        )
        self.membership.accepted, self.membership.on_leave = state["accepted"], self._on_leave
        self._on_step, self._on_figures = on_step, on_figures
        self._places = list(self.layout.places())
        for part, clock, slot, data in sorted(state["pending"], key=lambda each: each[1:3]):
            self._aggregator.keep(slot, part, clock, self._read(part, data.numpy().data, lossy=state["lossy"]))
        for part, clock in sorted({(part, clock) for part, clock, _, _ in state["pending"]}):
            self._aggregator.apply(part, clock)
        self._sizes: dict[int, int] = {}  # bytes of the last reply, by part
        self._ready: dict[int, Member] = {}  # members, by session, whose replies may fit in their windows now
        self._ended: str | None = None  # why training has ended, once the workers are told
        self.remaining: set[Peer] = set()  # after the end: members that have not confirmed that they know of it
        self.stopped: str | None = None
        self._max_steps: int | None = None
        self.applied_at = self._now = 0.0  # when the last step was complete, and when the timer was called last

    # For its owner

    def run(self, listener: Listener | str, *, max_steps: int | None = None) -> str:
        """Serve until `stop` is called or so many steps are complete; return why it ended. Closes the listener.

        An address must be on the loopback interface and uses no keys. For others make the listener by
        `transport.addresses.listen`.
        """
        self.listener = listen(listener) if isinstance(listener, str) else listener
        self._max_steps = max_steps
        self._check_end()
        return serve(self, self.listener)

    def stop(self, reason: str) -> None:
        """End the training: workers are told, and `run` returns. Any thread or signal handler may call this."""
        self.stopped = self.stopped or reason

    def save(self) -> bool:
        """Write a checkpoint now; return False if there is no folder for it or it cannot be written."""
        if self._checkpoint is None:
            return False
        # Workers do not repeat what was accepted: gradients that wait for their steps are saved, too. A server that
        # begins with them applies them, as if all workers had left, and goes on at the first step without any.
        step, pending = max([*self.clock.lowest, *self.clock.opened]), self._aggregator.pending()
        accepted = {token: pushes.plain() for token, pushes in self.membership.all_accepted().items()}
        figures = {"step": step, "accepted": accepted, "pending": pending}
        figures |= {"cut": self.layout.cut, "lossy": self._lossy, "extra": self.extra}
        return self._checkpoint.save(self.model, self.optimizer, figures)

    def waiting(self) -> Waiting | None:
        """Return what the server waits for and how long it has, or None if it waits for nothing. Any thread may ask.

        Before the training: workers to join. In the modes "bsp" and "ssp": workers to push the next step. Seconds are
        counted until the last turn of the server, which takes one every quarter of a second.
        """
        return None if self.stopped is not None else self.membership.awaited(self.applied_at, self._now)

    @property
    def updates(self) -> int:
        """The number of updates of parts so far, by one worker or by all together."""
        return self._aggregator.updates

    # The state machine

    def call_owner(self) -> bool:
        """If steps have become complete since the last call, call `on_step` and save; return whether they have."""
        before, self._owner_step = self._owner_step, self.clock.step
        if self._owner_step <= before or self._ended is not None:
            return False
        self._on_step(self)
        if self._owner_step // self._save_every > before // self._save_every:  # several steps may complete at once
            self.save()
        self._check_end()
        return True

    def _check_end(self) -> None:
        if self._max_steps is not None and self.clock.step >= self._max_steps:
            self.stop("max_steps")

    def excuse(self, seconds: float) -> None:
        """Do not count seconds in which the owner was busy as silence of the workers."""
        self.membership.excuse(seconds)

    def open(self, piece_bytes: int | None, now: float, *, session: int) -> None:
        """Begin to serve. piece_bytes: of a transport that may lose parts of messages, the bytes of such a part.

        session: the number before the first session's. It should be random, so that a restarted server reuses none.
        """
        values, start = self._aggregator.values, self._resumed_at
        self._lossy = piece_bytes is not None
        if piece_bytes is None:
            self.replicas = Replicas(self.layout, values, self.codec, start)
        else:
            self.replicas = LossyReplicas(self.layout, values, self.codec, start, budget=piece_bytes)
            self._check.shards = True
        self.membership.open(now, session)
        self._now = now

    def receive(self, peer: Peer, parts: Parts, now: float) -> None:
        """Do what a message asks for, or refuse it."""
        member: Member | None = None
        membership = self.membership
        try:
            message = parse(parts)
            member = membership.find(peer, message.session)
            if self._ended is not None:
                self._on_late_message(peer, message)
            elif message.kind is MessageKind.HELLO:
                membership.hello(peer, message, now)
            elif member is not None:
                member.heard = now
                self._on_message(member, message, sum(map(len, parts)), now)
            elif message.kind is MessageKind.LEAVE:
                membership.withdraw(peer)
            else:
                membership.ask_to_rejoin(peer, message.session, "the server does not know this session")
        except (MessageError, FrameError) as error:
            if self._ended is None:
                membership.refuse(peer, member or membership.by_peer(peer), error, now)
        self._on_progress(now)

    def on_report(self, peer: Peer, ticket: int, lost: frozenset[int], now: float) -> None:
        """Handle the transport's report on a delta in shards, which takes the place of a RECEIVED message."""
        settled = self.replicas.settle(peer, ticket, lost) if isinstance(self.replicas, LossyReplicas) else None
        session, size = settled or (0, 0)
        member = self.membership.find(peer, session)
        if member is not None:
            try:
                self._on_received(member, size)
            except (MessageError, FrameError) as error:
                self.membership.refuse(peer, member, error, now)

    def on_gap(self, peer: Peer, now: float) -> None:
        """Restart a member's session: with a connection the transport may have lost a report, which nothing repeats."""
        member = self.membership.by_peer(peer)
        if member is not None and self._ended is None:
            self._restart_session(member, now)
            self._on_progress(now)

    def on_unreachable(self, session: int, now: float) -> None:
        """Evict a member to which a message could not be sent."""
        member = self.membership.active.get(session)
        if member is not None and self._ended is None:
            self.membership.evict(member, "it cannot be reached", now)
            self._on_progress(now)

    def on_timer(self, now: float) -> None:
        """Evict workers that are silent or stalled; to be called a few times in each `timeout`."""
        self._now = now
        self.membership.evict_silent(now)
        if self._resumed_at:  # workers that come back later join then
            self.membership.start_late(now)
        self._on_progress(now)

    def on_end(self, reason: str) -> None:
        """End the training: tell all workers. From now on messages are only answered."""
        self._ended = self.stopped = self.stopped or reason
        self.remaining = self.membership.announce_end(self._ended)

    def on_ticket(self, sent: Outgoing, ticket: int | None) -> None:
        """Note the transport's ticket of a message in shards; None if all of it will arrive."""
        if isinstance(self.replicas, LossyReplicas):
            self.replicas.sent(sent.session, sent.place[:2], sent.peer, ticket)

    def next_outgoing(self, now: float) -> Outgoing | None:
        """Return what is to be done next for a peer, or None for now.

        Replies are made here, one at a time, so that a transport can send one while the next is encoded.
        """
        outgoing = self.membership.outgoing
        while not outgoing and self._ready:
            session, member = next(iter(self._ready.items()))
            del self._ready[session]
            if session in self.membership.active and self._reply(member, now):
                self._ready[session] = member  # behind the others
        return outgoing.popleft() if outgoing else None

    # Messages

    def _on_message(self, member: Member, message: Message, size: int, now: float) -> None:
        if not member.counter.follows(message):
            self._restart_session(member, now)
            return
        member.received += size
        if message.kind is MessageKind.PUSH:
            self._on_push(member, message, now)
        elif message.kind is MessageKind.PULL:
            self._on_pull(member, self._number(message), message.clock, full=bool(message.number))
        elif message.kind is MessageKind.RECEIVED:
            self._on_received(member, message.number)
        elif message.kind is MessageKind.HEARTBEAT:
            if len(message.body):
                self._on_worker_figures(member, message, now)
            self.membership.send(member, Message(MessageKind.HEARTBEAT, member.session))
        elif message.kind is MessageKind.BUFFERS and len(message.body):
            self._buffers.update(message.body)
        elif message.kind is MessageKind.BUFFERS:
            self.membership.send(member, Message(MessageKind.BUFFERS, member.session, body=self._buffers.body()))
        elif message.kind is MessageKind.LEAVE:
            log.info("%s leaves", member.label)
            self.membership.leave(member, now)
        else:
            raise MessageError(f"a worker does not send {message.kind.name} messages")

    def _on_late_message(self, peer: Peer, message: Message) -> None:
        """After the end: note that a member leaves, and tell others that training has ended.

        A member that was not reached goes on with heartbeats. One that has ended its session by itself ignores a STOP
        message of that session, and sends HELLO.
        """
        if message.kind is MessageKind.LEAVE:
            self.remaining.discard(peer)
        elif peer not in self.remaining or message.kind in (MessageKind.HELLO, MessageKind.HEARTBEAT):
            self.membership.send_outside(peer, with_json(MessageKind.STOP, message.session, reason=self._ended))

    def _restart_session(self, member: Member, now: float) -> None:
        self.membership.evict(member, "messages between it and the server were lost", now)
        self.membership.ask_to_rejoin(member.peer, member.session, "messages were lost on the way")

    def _number(self, message: Message) -> int:
        number = self.layout.numbers.get((message.layer, message.part))
        if number is None:
            raise MessageError(f"there is no part {message.part} of a layer {message.layer}")
        return number

    def _on_worker_figures(self, member: Member, message: Message, now: float) -> None:
        """Pass figures on to the owner; those beyond a limit are ignored, because they are logged."""
        if member.reports.tokens(now) >= 1.0:
            member.reports.left -= 1.0
            member.figures = read_figures(message, len(self.layout.layers))
            try:
                self._on_figures(member, member.figures)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                raise MessageError(f"a worker's figures are invalid: {error}") from error
        elif not member.warned:
            member.warned = True
            log.warning("%s reports figures too often: the server ignores some of them", member.label)

    # Pushes and progress

    def _on_push(self, member: Member, message: Message, now: float) -> None:
        number, clock = self._number(message), message.clock
        frame = self._read(number, message.body, lossy=self._lossy)
        size = frame.size if isinstance(frame, ReceivedShards) else len(message.body)
        fresh = self.clock.push(member.session, number, clock)
        if fresh:
            self._aggregator.keep(member.slot, number, clock, frame)
            if isinstance(frame, ReceivedShards):
                member.note_lost(number, clock, frame.lost, self.bound)
        staleness = self._lowest_steps() if self.policy == "stalest" else b""
        ack = Message(MessageKind.ACK, member.session, message.layer, message.part, clock, size, staleness)
        self.membership.send(member, ack)
        if fresh:
            if member.reached > clock:
                member.steps.append(now)
                member.reports.left += REPORTS_PER_STEP
                member.blocking_since = None  # it makes progress, even if it is slower than the others
            self._apply(number, clock)

    def _read(self, number: int, body: Buffer, *, lossy: bool) -> FrameReader | ReceivedShards:
        """Check a gradient of a part."""
        numels = self.layout.numels[self._places[number]]
        return ReceivedShards(body, numels) if lossy else FrameReader(Frame.from_bytes(memoryview(body)), numels)

    def _apply(self, number: int, clock: int) -> None:
        """Apply a gradient that was accepted, or with a bound all of its step if that is complete."""
        if self.clock.bound is None:
            self._aggregator.apply(number, clock, len(self.membership.active))
            self.replicas.changed(*self._places[number])
            self.clock.settle(number)
        else:
            self._complete(number)

    def _complete(self, number: int) -> None:
        """Apply the complete steps of a part, and answer the pulls that waited for them."""
        before = self.clock.lowest[number]
        while self.clock.complete(number):
            self._aggregator.apply(number, self.clock.lowest[number])
            self.clock.lowest[number] += 1
            self.replicas.changed(*self._places[number])
        if self.clock.lowest[number] > before:
            ready = range(len(self._places)) if self.clock.phased else [number]
            for member in self.membership.active.values():
                for each in ready:
                    self._release(member, each)

    def _on_leave(self, member: Member) -> None:
        """Forget a member that has left, and apply the steps that are complete without it."""
        self._ready.pop(member.session, None)
        self.replicas.forget(member.session)
        for number in range(len(self._places)):
            if self.clock.bound is not None:
                self._complete(number)
            else:
                self.clock.settle(number)

    def _on_progress(self, now: float) -> None:
        """Note when a step has become complete in all parts, and ask a worker for its buffers from time to time."""
        before, self._last_step = self._last_step, self.clock.step
        if self._last_step <= before:
            return
        self.applied_at, members = now, self.membership.active
        if self._buffers and self._last_step // BUFFERS_EVERY > before // BUFFERS_EVERY and members:
            asked = min(members.values(), key=lambda member: member.slot)
            self.membership.send(asked, Message(MessageKind.BUFFERS, asked.session))

    def _lowest_steps(self) -> bytes:
        """Return for each layer the lowest step and how many workers are still at it, as an ACK carries them."""
        steps = self.clock.lowest
        layers = groupby(range(len(self._places)), key=lambda number: self._places[number][0])
        behind = (min(numbers, key=steps.__getitem__) for _, numbers in layers)  # each layer's part that is last
        return b"".join(STALENESS.pack(steps[number], self.clock.holders(number)) for number in behind)

    # Pulls

    def _on_pull(self, member: Member, number: int, clock: int, *, full: bool) -> None:
        """Take a pull of a part, and answer it if it need not wait."""
        member.note_pull(number, clock, full=full)
        self._release(member, number)

    def _release(self, member: Member, number: int) -> None:
        """Answer a member's pull of a part if the part is fresh enough by now."""
        pending = member.pending.get(number)
        if pending is not None and self.clock.may_use(number, pending[0]):
            clock, full = member.pending.pop(number)
            layer, part = self._places[number]
            # A request has no field for a pull in full: the complement of the part's number stands for it.
            size = self._sizes.get(number, _ASSUMED_BYTES)
            member.pool.put(Request("pull", layer, ~part if full else part, clock, size))
            self._ready[member.session] = member

    def _on_received(self, member: Member, size: int) -> None:
        """Note that replies of so many bytes have arrived at a member."""
        member.pool.done(size)
        self._ready[member.session] = member

    def _reply(self, member: Member, now: float) -> bool:
        """Queue the next reply that fits in the member's window; return whether there was one."""
        request = member.pool.next()
        if request is None:
            return False
        full = request.part < 0
        layer, part = request.layer, ~request.part if full else request.part
        number = self.layout.numbers[layer, part]
        try:
            reply = self.replicas.reply(member.session, layer, part, full=full)
        except MessageError as error:
            log.warning("the server cannot answer a pull of %s: %s", member.label, error)
            self.on_unreachable(member.session, now)
            return False
        if reply.full == (not self.replicas.deltas):
            self._sizes[number] = reply.size
        member.pool.sent(request, reply.size)
        member.replied[layer, part] = request.clock
        parts = range(len(self.layout.layers[layer].parts))
        member.pool.known.here[layer] = min(member.replied.get((layer, p), -1) for p in parts)
        member.unanswered.discard(number)
        # With a bound the worker is told how many steps are complete, without one how many updates there were.
        version = reply.version if self.clock.bound is None else self.clock.lowest[number]
        kind = MessageKind.FULL if reply.full else MessageKind.DELTA
        message = Message(kind, member.session, layer, part, request.clock, version, reply.body)
        self.membership.send(member, message, reply.shards if self._lossy and not reply.full else None)
        return True
