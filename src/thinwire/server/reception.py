"""Reception: how workers come in: before training begins they wait for each other, later they join at once."""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.server.clock import Clock
from thinwire.server.handshake import MOST_WORKERS, Applicant, Door
from thinwire.server.layers import Layout
from thinwire.server.members import Member, Members, Waiting
from thinwire.server.messages import Kind, Message, MessageError, with_json
from thinwire.server.post import Post
from thinwire.server.schedule import Pool, Staleness
from thinwire.transport.base import Peer

log = logging.getLogger("thinwire.server")


@dataclass(frozen=True)
class Terms:
    """What every worker is told when it comes in."""

    bound: int | None
    policy: str
    window: int
    cut: int
    timeout: float
    tell: dict[str, Any]


class Reception:
    """Lets workers in. Training begins when `expect` of them are there."""

    def __init__(
        self, door: Door, terms: Terms, layout: Layout, clock: Clock, members: Members, post: Post, expect: int
    ) -> None:
        self.door, self._terms, self._layout = door, terms, layout
        self._clock, self._members, self._post, self._expect = clock, members, post, expect
        self._sessions = secrets.randbits(30)  # a restarted server must not give a session out again
        self.started = False
        self.started_at = time.monotonic()

    def hello(self, peer: Peer, message: Message, leave: Callable[[Member, bool], None]) -> None:
        """Somebody wants to come in; `leave` ends a session that it had before, and its connection may stay."""
        applicant = self.door.check(message)
        before = self._members.by_token(applicant.token)
        if before is not None and before.peer == peer and not before.received and before.welcome is not None:
            self._post.tell(peer, before.welcome)  # it asked twice before we answered
            return
        if before is not None:
            leave(before, before.peer == peer)
        if len(self._members.active) + len(self._members.waiting) >= MOST_WORKERS:
            raise MessageError(f"the server has {MOST_WORKERS} workers already")
        if self.started:
            self._admit(peer, applicant)
            return
        self._members.waiting[applicant.token] = Waiting(peer, applicant, time.monotonic())
        self._post.tell(peer, Message(Kind.BEAT))  # it waits, and knows that we live
        if len(self._members.waiting) >= self._expect:
            self.start()

    def start(self) -> None:
        """Training begins with those who wait; after a restart with those who are back."""
        if not self._members.waiting:
            return
        self.started = True
        self.started_at = time.monotonic()
        waiting, self._members.waiting = self._members.waiting, {}
        last = len(waiting)
        for each in sorted(waiting.values(), key=lambda w: last if w.applicant.slot is None else w.applicant.slot):
            self._admit(each.peer, each.applicant)

    def start_after(self, seconds: float) -> None:
        """Do not wait any longer than this for those who have not come."""
        if not self.started and time.monotonic() - self.started_at > seconds:
            self.start()

    def _admit(self, peer: Peer, applicant: Applicant) -> None:
        self._sessions += 1
        session, token, name = self._sessions, applicant.token, applicant.name
        first, slot = self._clock.join(session), self._members.slot(applicant.slot)
        pool = Pool(self._terms.policy, Staleness.at_start(len(self._layout.layers), 1), self._terms.window)
        now = time.monotonic()
        member = Member(peer, session, slot, token, name, first, pool, now, now)
        member.counted = self._members.counted.pop(token, None)
        self._members.active[session] = member
        self._members.joined += 1
        log.info("%s joins at step %d", member.label, first)
        own = {"slot": slot, "first": first, "counted": member.counted}
        member.welcome = with_json(Kind.WELCOME, session, **own, **asdict(self._terms))
        self._post.send(member, member.welcome)
