"""Desk: what the server does with each message that arrives.

Messages are checked before they are believed: whoever sends nonsense is refused, with the reason.
"""

import logging
from collections.abc import Callable
from typing import Any

from thinwire.codec.frame import Frame, FrameReader
from thinwire.errors import FrameError
from thinwire.server.answers import Answers
from thinwire.server.attendance import Attendance
from thinwire.server.buffers import Buffers
from thinwire.server.layers import Layout
from thinwire.server.lossy import Arrived
from thinwire.server.members import Member, Members
from thinwire.server.messages import Kind, Message, MessageError, parse
from thinwire.server.post import Post
from thinwire.server.progress import Progress
from thinwire.server.reception import Reception
from thinwire.transport.base import Parts, Peer

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
