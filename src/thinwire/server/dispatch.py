"""Dispatch: what the server does with each message that arrives.

Messages are checked before they are used. The server refuses an invalid message and tells its sender why.
"""

import logging
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import FrameError, MessageError
from thinwire.server.aggregate import Aggregator
from thinwire.server.layout import Buffers
from thinwire.server.membership import Member, Membership
from thinwire.server.protocol import STALENESS, Message, MessageKind, parse, read_figures
from thinwire.server.replicas import LossyReplicas, ReceivedShards, Replicas
from thinwire.server.schedule import Request
from thinwire.transport.base import Parts, Peer

log = logging.getLogger("thinwire.server")

OnFigures = Callable[[Member, dict[str, Any]], None]
# The assumed bytes of a reply before the first one of its part is known.
_ASSUMED_BYTES = 1 << 18


class PullHandler:
    """Answers the pulls of all members, each when its part is fresh enough and fits in the member's window."""

    def __init__(self, replicas: Replicas, membership: Membership) -> None:
        self._replicas, self._membership = replicas, membership
        self._layout, self._clock = replicas.layout, membership.clock
        self._places = list(self._layout.places())
        self._sizes: dict[tuple[int, int], int] = {}

    def pull(self, member: Member, number: int, clock: int, *, full: bool) -> None:
        """Take a pull of a part, and answer it if it need not wait.

        A member may have one pull of a part at a time, and only after its push of the step before.
        """
        if number in member.unanswered:
            raise MessageError(f"a pull of part {number} waits already")
        due = self._clock.workers[member.session].due[number]
        if clock != due:
            raise MessageError(f"part {number} was pulled for step {clock}, and step {due} is due")
        member.unanswered.add(number)
        member.pending[number] = clock, full
        self.release(member, number)

    def release(self, member: Member, number: int) -> None:
        """Answer a member's pull of a part if the part is fresh enough by now."""
        pending = member.pending.get(number)
        if pending is not None and self._clock.may_use(number, pending[0]):
            clock, full = member.pending.pop(number)
            layer, part = self._places[number]
            size = self._sizes.get((layer, part), _ASSUMED_BYTES)
            # A request has no field for a pull in full: the complement of the part's number stands for it.
            member.pool.put(Request("pull", layer, ~part if full else part, clock, size))
            self._flush(member)

    def received(self, member: Member, size: int) -> None:
        """Note that replies of so many bytes have arrived at a member."""
        if size > member.pool.in_flight:
            raise MessageError(f"{size} bytes have arrived, of which {member.pool.in_flight} were sent")
        member.pool.done(size)
        self._flush(member)

    def _flush(self, member: Member) -> None:
        """Send the replies that fit in the member's window."""
        while (request := member.pool.next()) is not None:
            full = request.part < 0
            layer, part = request.layer, ~request.part if full else request.part
            number = self._layout.numbers[layer, part]
            try:
                reply = self._replicas.reply(member.session, layer, part, full=full)
            except MessageError as error:  # the message being handled may be another member's, which is not at fault
                log.warning("the server cannot answer a pull of %s: %s", member.label, error)
                self._membership.unreachable.append(member)
                return
            if reply.full == (not self._replicas.deltas):
                self._sizes[layer, part] = reply.size
            member.pool.sent(request, reply.size)
            member.replied[layer, part] = request.clock
            parts = range(len(self._layout.layers[layer].parts))
            member.pool.known.here[layer] = min(member.replied.get((layer, p), -1) for p in parts)
            member.unanswered.discard(number)
            # With a bound the worker is told how many steps are complete, without one how many updates there were.
            version = reply.version if self._clock.bound is None else self._clock.lowest[number]
            kind = MessageKind.FULL if reply.full else MessageKind.DELTA
            message = Message(kind, member.session, layer, part, request.clock, version, reply.body)
            if isinstance(self._replicas, LossyReplicas) and not reply.full:
                ticket = self._membership.send(member, message, reply.shards)
                self._replicas.sent(member.session, layer, part, member.peer, ticket)
            else:
                self._membership.send(member, message)


class MessageDispatcher:
    """Handles all messages, of members and of unknown peers, and applies pushed gradients as the clock allows.

    staleness: whether each ACK tells the worker how far the others are.
    on_advance: called whenever a step may have become complete in all parts.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        replicas: Replicas,
        buffers: Buffers,
        membership: Membership,
        *,
        staleness: bool,
        on_figures: OnFigures,
        on_advance: Callable[[], None],
    ) -> None:
        self._aggregator, self._replicas, self._buffers, self._membership = aggregator, replicas, buffers, membership
        self._staleness, self._on_figures, self._on_advance = staleness, on_figures, on_advance
        self._layout, self._clock, membership.on_leave = replicas.layout, membership.clock, self._member_left
        self._pulls = PullHandler(replicas, membership)
        self._places = list(self._layout.places())

    def handle(self, peer: Peer, parts: Parts) -> None:
        """Do what a message asks for, or refuse it."""
        member: Member | None = None
        try:
            message = parse(parts)
            member = self._membership.find(peer, message.session)
            if message.kind is MessageKind.HELLO:
                self._membership.hello(peer, message)
            elif member is not None:
                self._handle_member(member, message, sum(map(len, parts)))
            elif message.kind is MessageKind.LEAVE:
                self._membership.withdraw(peer)
            else:
                self._membership.ask_to_rejoin(peer, message.session, "the server does not know this session")
        except (MessageError, FrameError) as error:
            self._membership.refuse(peer, member or self._membership.by_peer(peer), error)

    def handle_report(self, peer: Peer, ticket: int, lost: frozenset[int]) -> None:
        """Handle the transport's report on a delta in shards, which takes the place of a RECEIVED message."""
        session, size = self._replicas.settle(peer, ticket, lost) or (0, 0)
        member = self._membership.find(peer, session)
        if member is not None:
            try:
                self._pulls.received(member, size)
            except (MessageError, FrameError) as error:
                self._membership.refuse(peer, member, error)

    def handle_gap(self, peer: Peer) -> None:
        """Restart a member's session: with a connection the transport may have lost a report, which nothing repeats."""
        member = self._membership.by_peer(peer)
        if member is not None:
            self._restart_session(member)

    def _member_left(self, member: Member) -> None:
        """Forget a member that has left, and apply the steps that are complete without it."""
        self._replicas.forget(member.session)
        for number in range(len(self._places)):
            if self._clock.bound is not None:
                self._complete(number)
            else:
                self._clock.settle(number)
        self._on_advance()

    def _restart_session(self, member: Member) -> None:
        self._membership.evict(member, "messages between it and the server were lost")
        self._membership.ask_to_rejoin(member.peer, member.session, "messages were lost on the way")

    def _handle_member(self, member: Member, message: Message, size: int) -> None:
        if not member.counter.follows(message):
            self._restart_session(member)
            return
        member.received += size
        if message.kind is MessageKind.PUSH:
            self._on_push(member, message)
        elif message.kind is MessageKind.PULL:
            self._pulls.pull(member, self._number(message), message.clock, full=bool(message.number))
        elif message.kind is MessageKind.RECEIVED:
            self._pulls.received(member, message.number)
        elif message.kind is MessageKind.HEARTBEAT:
            self._on_heartbeat(member, message)
        elif message.kind is MessageKind.BUFFERS and len(message.body):
            self._buffers.update(message.body)
        elif message.kind is MessageKind.BUFFERS:
            self._membership.send(member, Message(MessageKind.BUFFERS, member.session, body=self._buffers.body()))
        elif message.kind is MessageKind.LEAVE:
            log.info("%s leaves", member.label)
            self._membership.leave(member)
        else:
            raise MessageError(f"a worker does not send {message.kind.name} messages")

    def _number(self, message: Message) -> int:
        number = self._layout.numbers.get((message.layer, message.part))
        if number is None:
            raise MessageError(f"there is no part {message.part} of a layer {message.layer}")
        return number

    def _on_push(self, member: Member, message: Message) -> None:
        layer, part, clock = message.layer, message.part, message.clock
        number = self._number(message)
        numels, size = self._layout.numels(layer, part), len(message.body)
        frame: FrameReader | ReceivedShards
        if self._membership.listener.piece_bytes is None:
            frame = FrameReader(Frame.from_bytes(memoryview(message.body)), numels)
        else:
            frame = ReceivedShards(message.body, numels)
            size = frame.size
        fresh = self._clock.push(member.session, number, clock)
        if fresh:
            self._aggregator.keep(member.slot, number, clock, frame)
        staleness = self._lowest_steps() if self._staleness else b""
        self._membership.send(member, Message(MessageKind.ACK, member.session, layer, part, clock, size, staleness))
        if fresh:
            self._apply(member, number, clock)

    def _apply(self, member: Member, number: int, clock: int) -> None:
        """Apply a gradient that was accepted, or with a bound all of its step if that is complete."""
        if self._clock.workers[member.session].reached > clock:
            member.steps.append(time.monotonic())
            member.allowance.earn()
            member.blocking_since = None  # it makes progress, even if it is slower than the others
        if self._clock.bound is None:
            self._aggregator.apply(number, clock, len(self._membership.active))
            self._replicas.changed(*self._places[number])
            self._clock.settle(number)
            self._on_advance()
        else:
            self._complete(number)

    def _complete(self, number: int) -> None:
        """Apply the complete steps of a part, and answer the pulls that waited for them."""
        before = self._clock.lowest[number]
        while self._clock.complete(number):
            self._aggregator.apply(number, self._clock.lowest[number])
            self._clock.advance(number)
            self._replicas.changed(*self._places[number])
        if self._clock.lowest[number] > before:
            ready = range(len(self._places)) if self._clock.phased else [number]
            for member in self._membership.active.values():
                for each in ready:
                    self._pulls.release(member, each)
            self._on_advance()

    def _lowest_steps(self) -> bytes:
        """Return for each layer the lowest step and how many workers are still at it, as an ACK carries them."""
        steps = self._clock.lowest
        layers = groupby(range(len(self._places)), key=lambda number: self._places[number][0])
        behind = (min(numbers, key=steps.__getitem__) for _, numbers in layers)  # each layer's part that is last
        return b"".join(STALENESS.pack(steps[number], self._clock.holders(number)) for number in behind)

    def _on_heartbeat(self, member: Member, message: Message) -> None:
        if len(message.body):
            self._take_figures(member, message, time.monotonic())
        self._membership.send(member, Message(MessageKind.HEARTBEAT, member.session))

    def _take_figures(self, member: Member, message: Message, now: float) -> None:
        """Pass figures on to the owner; beyond the member's allowance they are ignored, because they are logged."""
        if member.allowance.take(now):
            member.figures = read_figures(message, len(self._layout.layers))
            try:
                self._on_figures(member, member.figures)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                raise MessageError(f"a worker's figures are invalid: {error}") from error
        elif not member.allowance.warned:
            member.allowance.warned = True
            log.warning("%s reports figures too often: the server ignores some of them", member.label)
