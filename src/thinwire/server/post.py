"""Post: everything that leaves the server, and whom it did not reach.

A member's messages are counted, in its session; strangers are spoken to outside of any.
"""

import logging
import time
from collections.abc import Sequence

from thinwire.errors import FrameError
from thinwire.server.handshake import MOST_WORKERS
from thinwire.server.members import Member, Members
from thinwire.server.messages import Kind, Message, MessageError, parse, with_json
from thinwire.transport.base import Buffer, Listener, Peer

log = logging.getLogger("thinwire.server")


class Post:
    """Sends for the server. Its listener is there from `run` on."""

    listener: Listener

    def __init__(self) -> None:
        self.lost: list[Member] = []  # a message to them could not be sent
        self._refused: dict[Peer, None] = {}  # of late

    def tell(self, peer: Peer, message: Message) -> None:
        """Send outside of any session."""
        self.listener.send(peer, message.parts())

    def send(self, member: Member, message: Message) -> None:
        """Send in a member's session. If that fails it would wait in vain for what it lacks: it is lost."""
        parts = message.parts(member.counter.next(message.kind))
        member.sent += sum(map(len, parts))
        if not self.listener.send(member.peer, parts):
            self.lost.append(member)

    def send_pieces(self, member: Member, message: Message, pieces: Sequence[Buffer]) -> int | None:
        """Send a body that may arrive in part; returns the transport's ticket."""
        head = bytes(message.parts(member.counter.next(message.kind))[0])
        member.sent += len(head) + sum(map(len, pieces))
        return self.listener.send_pieces(member.peer, head, pieces)

    def refuse(self, peer: Peer, member: Member | None, error: MessageError | FrameError) -> None:
        """Say what was wrong with a message; once to the log, which whoever goes on and on must not fill."""
        short = " ".join(str(error).split())[:300]
        if peer not in self._refused:
            self._refused[peer] = None
            while len(self._refused) > MOST_WORKERS:
                self._refused.pop(next(iter(self._refused)))
            log.warning("%s is refused: %s", "a stranger" if member is None else member.label, short)
        self.tell(peer, with_json(Kind.REFUSED, member.session if member is not None else 0, reason=short))

    def part(self, members: Members, reason: str, seconds: float) -> None:
        """Tell everybody that it is over; those who come in these seconds too."""
        for member in members.active.values():
            self.tell(member.peer, with_json(Kind.STOP, member.session, reason=reason))
        for waiting in members.waiting.values():
            self.tell(waiting.peer, with_json(Kind.STOP, reason=reason))
        left = {member.peer for member in members.active.values()}
        # Nothing follows from reports any more.
        self.listener.on_report = lambda peer, ticket, lost: None
        self.listener.on_gap = lambda peer: None
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            for peer, parts in self.listener.poll(0.1):
                try:
                    message = parse(parts)
                except MessageError:
                    continue
                if message.kind is Kind.BYE:
                    left.discard(peer)
                elif peer not in left:
                    self.tell(peer, with_json(Kind.STOP, message.session, reason=reason))
