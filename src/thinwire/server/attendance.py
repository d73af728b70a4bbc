"""Attendance: who is out, and what follows from it: nobody may wait for a worker that is gone."""

import logging
import time

from thinwire.server.clock import Clock
from thinwire.server.members import Member, Members
from thinwire.server.messages import Kind, with_json
from thinwire.server.post import Post
from thinwire.server.progress import Progress
from thinwire.server.views import Views
from thinwire.transport.base import Peer

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
