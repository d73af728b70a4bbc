"""Desk: what the server does with each message that arrives.

Messages are checked before they are believed: whoever sends nonsense is refused, with the reason.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import FrameError, MessageError
from thinwire.server.aggregate import Aggregator, Clock
from thinwire.server.layout import Buffers, Layout
from thinwire.server.membership import Member, Members, Post, Reception
from thinwire.server.protocol import STALENESS, Kind, Message, parse, with_json
from thinwire.server.replicas import Arrived, LossyViews, Views
from thinwire.server.schedule import Request
from thinwire.transport.base import Parts, Peer

log = logging.getLogger("thinwire.server")

# What an answer is taken to be before the first of its part is known.
GUESS = 1 << 18


class Answers:
    """Answers the pulls of all members."""

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        views: Views,
        post: Post,
    ) -> None:
        self._layout, self._clock, self._views, self._post = layout, clock, views, post
        self._places = list(layout.places())
        self._sizes: dict[tuple[int, int], int] = {}

    def ask(self, member: Member, number: int, clock: int, *, whole: bool) -> None:
        """Note a pull, and let it go if it need not wait. One of a part at a time, each after its push."""
        if number in member.asked:
            raise MessageError(f"a pull of part {number} waits already")
        due = self._clock.members[member.session].due[number]
        if clock != due:
            raise MessageError(f"part {number} was pulled for step {clock}, and step {due} is due")
        member.asked.add(number)
        member.parked[number] = clock, whole
        self.release(member, number)

    def release(self, member: Member, number: int) -> None:
        """Let the pull of a part go if it need not wait any more."""
        waiting = member.parked.get(number)
        if waiting is not None and self._clock.may_use(number, waiting[0]):
            clock, whole = member.parked.pop(number)
            layer, part = self._places[number]
            size = self._sizes.get((layer, part), GUESS)
            # The sign of the part tells how it was asked for.
            member.pool.put(Request("pull", layer, ~part if whole else part, clock, size))
            self.flush(member)

    def got(self, member: Member, size: int) -> None:
        """An answer of so many bytes has arrived."""
        if size > member.pool.under_way:
            raise MessageError(f"{size} bytes have arrived, of which {member.pool.under_way} were sent")
        member.pool.done(size)
        self.flush(member)

    def flush(self, member: Member) -> None:
        """Send what fits in the window."""
        while (request := member.pool.next()) is not None:
            whole = request.part < 0
            layer, part = request.layer, ~request.part if whole else request.part
            number = self._layout.numbers[layer, part]
            try:
                answer = self._views.answer(member.session, layer, part, whole=whole)
            except MessageError as error:  # found while somebody else's message is handled: it is not that one's fault
                log.warning("%s cannot be answered: %s", member.label, error)
                self._post.lost.append(member)
                return
            if answer.whole == (not self._views.deltas):
                self._sizes[layer, part] = answer.size
            member.pool.sent(request, answer.size)
            member.answered[layer, part] = request.clock
            parts = range(len(self._layout.layers[layer].parts))
            member.pool.known.here[layer] = min(member.answered.get((layer, p), -1) for p in parts)
            member.asked.discard(number)
            # With a bound, what a worker wants to know is the steps inside; without one, how many changes there were.
            edition = answer.edition if self._clock.bound is None else self._clock.lowest[number]
            kind = Kind.WHOLE if answer.whole else Kind.DELTA
            message = Message(kind, member.session, layer, part, request.clock, edition, answer.body)
            if isinstance(self._views, LossyViews) and not answer.whole:
                ticket = self._post.send_pieces(member, message, answer.shards)
                self._views.under_way(member.session, layer, part, member.peer, ticket)
            else:
                self._post.send(member, message)


class Progress:
    """Moves the parts of the model on; `noted` is called whenever one may have completed a step of all."""

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        aggregator: Aggregator,
        views: Views,
        answers: Answers,
        members: Members,
        noted: Callable[[], None],
    ) -> None:
        self._places = list(layout.places())
        self._clock, self._aggregator, self._views = clock, aggregator, views
        self._answers, self._members, self._noted = answers, members, noted

    def take(self, member: Member, number: int, clock: int, frame: FrameReader | Arrived) -> bool:
        """Keep a gradient; False if it was counted before. `follow` must come after one that was not."""
        fresh = self._clock.push(member.session, number, clock)
        if fresh:
            self._aggregator.keep(member.slot, number, clock, frame)
        return fresh

    def follow(self, member: Member, number: int, clock: int) -> None:
        """What follows from a gradient that was taken."""
        if self._clock.members[member.session].reached > clock:
            member.steps.append(time.monotonic())
            member.holding = None  # it goes on, if slower than the others
        if self._clock.bound is None:
            self._apply_one(member, number, clock)
        else:
            self._complete(number)

    def left(self) -> None:
        """Somebody has left: what the others waited for may be complete without it."""
        for number in range(len(self._places)):
            if self._clock.bound is not None:
                self._complete(number)
            else:
                self._clock.settle(number)
        self._noted()

    def holding_up(self) -> list[int]:
        """The one worker, if any, that all others wait for."""
        reached = sorted((member.reached, session) for session, member in self._clock.members.items())
        alone = len(reached) > 1 and self._clock.bound is not None and reached[0][0] < reached[1][0]
        return [reached[0][1]] if alone else []

    def staleness(self) -> bytes:
        """Per layer: the lowest step, and how many workers hold it."""
        lowest: dict[int, int] = {}  # the part of each layer that is furthest behind
        for number, (layer, _) in enumerate(self._places):
            if layer not in lowest or self._clock.lowest[number] < self._clock.lowest[lowest[layer]]:
                lowest[layer] = number
        return b"".join(STALENESS.pack(self._clock.lowest[i], self._clock.holders(i)) for i in lowest.values())

    def _complete(self, number: int) -> None:
        """Apply the steps of a part that are complete, and answer those who waited for them."""
        moved = False
        while self._clock.complete(number):
            self._aggregator.apply(number, self._clock.lowest[number])
            self._clock.advance(number)
            self._views.changed(*self._places[number])
            moved = True
        if moved:
            ready = range(len(self._places)) if self._clock.phased else [number]
            for member in self._members.active.values():
                for each in ready:
                    self._answers.release(member, each)
            self._noted()

    def _apply_one(self, member: Member, number: int, clock: int) -> None:
        self._aggregator.apply_one(member.slot, number, clock, len(self._members.active))
        self._views.changed(*self._places[number])
        self._clock.settle(number)
        self._noted()


log = logging.getLogger("thinwire.server")


class Attendance:
    """Lets go of members after `timeout` seconds of silence or `stall` seconds without progress, and as they leave."""

    def __init__(
        self,
        members: Members,
        clock: Clock,
        views: Views,
        progress: Progress,
        post: Post,
        *,
        timeout: float,
        stall: float,
    ) -> None:
        self._members, self._clock, self._views = members, clock, views
        self._progress, self._post = progress, post
        self._timeout, self._stall = timeout, stall
        self._watched = time.monotonic()

    def watch(self, heard: set[Peer]) -> None:
        """Nobody waits for those who are silent, or who hold up everybody else."""
        now = time.monotonic()
        for member in self._members.active.values():
            if member.peer in heard:  # before anything else takes its time
                member.heard = now
        if now - self._watched < min(0.25, self._timeout / 8):
            return
        self._watched = now
        for member, reason in self._members.silent(self._timeout, self._stall, self._progress.holding_up()):
            self.drop(member, reason)
        self._members.tidy(self._timeout)

    def drop_lost(self) -> None:
        """Let go of those whom a message did not reach."""
        while self._post.lost:  # to drop one may be to answer others, who may be lost too
            member = self._post.lost.pop()
            if member.session in self._members.active:
                self.drop(member, "it cannot be reached")

    def drop(self, member: Member, reason: str) -> None:
        """Let go of a member that did not say goodbye."""
        log.warning("%s is out: %s", member.label, reason)
        self.leave(member)

    def leave(self, member: Member, stays: bool = False) -> None:
        """Nobody waits for this worker any more; what it pushed before stays counted. Its connection may stay."""
        self._members.active.pop(member.session, None)
        self._members.remember(member, self._clock.members[member.session].due)
        self._members.left += 1
        self._clock.leave(member.session)
        self._views.forget(member.session)
        if not stays:
            self._post.listener.forget(member.peer)
        self._progress.left()

    def forget(self, peer: Peer, session: int, reason: str) -> None:
        """Tell somebody that its session is over, whether there ever was one or not: it may say hello again."""
        self._post.tell(peer, with_json(Kind.AGAIN, session, reason=reason))
        if self._members.by_peer(peer) is None:
            self._post.listener.forget(peer)


log = logging.getLogger("thinwire.server")

OnFigures = Callable[[Member, dict[str, Any]], None]
# What a peer did not get of the message with a ticket; returns the session and all its bytes, if they are known.
Settle = Callable[[Peer, int, frozenset[int]], tuple[int, int] | None]


class Desk:
    """Takes all messages, of members and of strangers."""

    def __init__(
        self,
        layout: Layout,
        members: Members,
        reception: Reception,
        attendance: Attendance,
        progress: Progress,
        answers: Answers,
        buffers: Buffers,
        post: Post,
        *,
        staleness: bool,
        on_figures: OnFigures,
        settle: Settle,
    ) -> None:
        self._layout, self._progress, self._answers = layout, progress, answers
        self._members, self._reception, self._attendance = members, reception, attendance
        self._buffers, self._post, self._settle = buffers, post, settle
        self._staleness, self._on_figures = staleness, on_figures  # whether workers want to know it with each ACK
        self._handlers: dict[Kind, Callable[[Member, Message], None]] = {
            Kind.PUSH: self._on_push,
            Kind.PULL: self._on_pull,
            Kind.GOT: lambda member, message: self._answers.got(member, message.number),
            Kind.BEAT: self._on_beat,
            Kind.BUFFERS: self._on_buffers,
            Kind.BYE: self._on_bye,
        }

    def take(self, peer: Peer, parts: Parts) -> None:
        """Do what a message asks for, or refuse whoever sent it."""
        member: Member | None = None
        try:
            message = parse(parts)
            member = self._members.find(peer, message.session)
            if message.kind is Kind.HELLO:
                self._reception.hello(peer, message, self._attendance.leave)
            elif member is None:
                self._of_stranger(peer, message)
            else:
                self._of_member(member, message, sum(map(len, parts)))
        except (MessageError, FrameError) as error:
            self._refuse(peer, member or self._members.by_peer(peer), error)

    def reported(self, peer: Peer, ticket: int, lost: frozenset[int]) -> None:
        """A delta in pieces has arrived, but for these: a report stands for a GOT."""
        settled = self._settle(peer, ticket, lost)
        member = None if settled is None else self._members.find(peer, settled[0])
        if settled is None or member is None:
            return
        try:
            self._answers.got(member, settled[1])
        except (MessageError, FrameError) as error:
            self._refuse(peer, member, error)

    def missed(self, peer: Peer) -> None:
        """Something of a worker's was lost with a connection, perhaps a report, which nothing else would show."""
        member = self._members.by_peer(peer)
        if member is not None:
            self._begin_again(member)

    def _begin_again(self, member: Member) -> None:
        reason = "messages were lost on the way"
        self._attendance.drop(member, reason)
        self._attendance.forget(member.peer, member.session, reason)

    def _refuse(self, peer: Peer, member: Member | None, error: MessageError | FrameError) -> None:
        self._post.refuse(peer, member, error)
        if member is not None:
            self._attendance.leave(member)
        else:
            self._post.listener.forget(peer)

    def _of_stranger(self, peer: Peer, message: Message) -> None:
        if message.kind is Kind.BYE:
            self._members.waiting = {t: w for t, w in self._members.waiting.items() if w.peer != peer}
        else:
            self._attendance.forget(peer, message.session, "the server does not know this session")

    def _of_member(self, member: Member, message: Message, size: int) -> None:
        if not member.counter.follows(message):
            self._begin_again(member)
            return
        member.received += size
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MessageError(f"a worker does not send a {message.kind.name}")
        handler(member, message)

    def _number(self, message: Message) -> int:
        number = self._layout.numbers.get((message.layer, message.part))
        if number is None:
            raise MessageError(f"there is no part {message.part} of a layer {message.layer}")
        return number

    def _on_push(self, member: Member, message: Message) -> None:
        layer, part, clock = message.layer, message.part, message.clock
        number = self._number(message)
        numels, size = self._layout.numels(layer, part), len(message.body)
        frame: FrameReader | Arrived
        if self._post.listener.piece_bytes is None:
            frame = FrameReader(Frame.from_bytes(memoryview(message.body)), numels)
        else:
            frame = Arrived(message.body, numels)
            size = frame.size
        fresh = self._progress.take(member, number, clock, frame)
        known = self._progress.staleness() if self._staleness else b""
        self._post.send(member, Message(Kind.ACK, member.session, layer, part, clock, size, known))
        if fresh:
            self._progress.follow(member, number, clock)

    def _on_pull(self, member: Member, message: Message) -> None:
        self._answers.ask(member, self._number(message), message.clock, whole=bool(message.number))

    def _on_beat(self, member: Member, message: Message) -> None:
        if len(message.body):
            member.figures = message.json
            try:
                self._on_figures(member, member.figures)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                raise MessageError(f"a worker's figures make no sense: {error}") from error
        self._post.send(member, Message(Kind.BEAT, member.session))

    def _on_buffers(self, member: Member, message: Message) -> None:
        if len(message.body):
            self._buffers.take(message.body)
        else:
            self._post.send(member, Message(Kind.BUFFERS, member.session, body=self._buffers.body()))

    def _on_bye(self, member: Member, message: Message) -> None:
        log.info("%s leaves", member.label)
        self._attendance.leave(member)
