"""Membership: which workers take part in the training, how they join, and when the server evicts them.

Until training begins, workers wait for each other. After that a worker joins at once. The server evicts a worker after
`timeout` seconds without a message, and after `stall` seconds without progress in which others wait for it. Nothing
here does I/O or reads a clock: `now` (time.monotonic) is passed in, and messages to send are queued in `outgoing`.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from thinwire.errors import FrameError, MessageError
from thinwire.limits import LogLimit, TokenBucket
from thinwire.server.aggregate import Clock, WorkerClock
from thinwire.server.protocol import (
    MOST_WORKERS,
    AcceptedPushes,
    Applicant,
    Counter,
    LostShards,
    Message,
    MessageKind,
    Waiting,
    with_json,
)
from thinwire.server.schedule import Pool, Staleness
from thinwire.transport.base import Buffer, Outgoing, Peer

log = logging.getLogger("thinwire.server")

CheckHello = Callable[[Message], Applicant]
# How many departed workers' accepted pushes are remembered, so that a returning one restores only what was lost; and
# how many integers that may take.
_REMEMBERED, _REMEMBERED_INTEGERS = 1024, 1 << 20
# The number of a part's last steps whose lost shards are remembered at least: the transport may not have reported them.
_UNREPORTED = 4
# The number of recent steps that a worker's rate is computed from.
_RECENT = 20
# `awaited` names so many workers at most.
_NAMED = 3
# Seconds without a HELLO after which a worker that waits for the start counts as gone.
_WAITING_TIMEOUT = 6.0
# Reports of figures that a worker may send: at once, in each second, and for each step that it has pushed.
_REPORTS, _REPORTS_PER_SECOND, REPORTS_PER_STEP = 100.0, 10.0, 2.0


@dataclass(kw_only=True)
class Member(WorkerClock):
    """One worker that takes part in the training: its session, its progress, and what it is owed."""

    peer: Peer
    session: int
    slot: int
    token: str
    name: str
    pool: Pool
    heard: float  # when its last message arrived (time.monotonic)
    since: float  # when it joined
    reports: TokenBucket  # of figures, which are handled and may be logged
    accepted_before: AcceptedPushes | None = None  # of its session before, as its WELCOME message said
    lost: LostShards = field(default_factory=dict)  # of recent pushes
    welcome: Message | None = None  # sent again if it repeats its HELLO before anything else
    counter: Counter = field(default_factory=Counter)
    pending: dict[int, tuple[int, bool]] = field(default_factory=dict)  # pulls that wait, by part: step, in full
    unanswered: set[int] = field(default_factory=set)  # parts whose pulls have no reply yet
    replied: dict[tuple[int, int], int] = field(default_factory=dict)  # by (layer, part): the step of the last reply
    blocking_since: float | None = None  # since when other workers wait for it
    received: int = 0  # bytes
    sent: int = 0  # bytes
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    figures: dict[str, Any] = field(default_factory=dict)
    warned: bool = False  # that it reports figures too often

    @property
    def accepted(self) -> AcceptedPushes | None:
        """Which of its pushes are accepted, as its next WELCOME must say."""
        # A worker that never sent anything may not have received its WELCOME, and still needs what that one said.
        return AcceptedPushes(self.session, self.due, self.lost) if self.received else self.accepted_before

    def note_lost(self, part: int, clock: int, ranges: list[tuple[int, int]], bound: int | None) -> None:
        """Note which shards of an accepted push were lost."""
        self.lost.pop((part, clock - max(_UNREPORTED, (bound or 0) + 2)), None)
        if ranges:
            self.lost[part, clock] = ranges

    def note_pull(self, part: int, clock: int, *, full: bool) -> None:
        """Note a pull. A member may have one of a part at a time, and only after its push of the step before."""
        if part in self.unanswered:
            raise MessageError(f"a pull of part {part} waits already")
        if clock != self.due[part]:
            raise MessageError(f"part {part} was pulled for step {clock}, and step {self.due[part]} is due")
        self.unanswered.add(part)
        self.pending[part] = clock, full

    @property
    def label(self) -> str:
        """The worker's slot and name, for messages."""
        return f"worker {self.slot} ({self.name})"

    def rate(self) -> float:
        """Return the worker's recent steps per second."""
        steps = list(self.steps)
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 and steps[-1] > steps[0] else 0.0


class Membership:
    """All workers: those in the training by session, those that wait for its start, and what is known of the rest.

    check: returns the worker that sent a HELLO message, or raises MessageError. layers: their number.
    terms: what the WELCOME message tells every worker.
    expect: training begins when so many workers have said HELLO.
    on_leave: called with every member that has left or was evicted; set by the server.
    """

    on_leave: Callable[[Member], None]

    def __init__(
        self, check: CheckHello, terms: dict[str, Any], clock: Clock[Member], layers: int, *, expect: int, stall: float
    ) -> None:
        self._check, self._terms, self.clock, self._layers = check, terms, clock, layers
        self._expect, self._timeout, self._stall = expect, terms["timeout"], stall
        self.active = clock.workers  # by session
        self.outgoing: deque[Outgoing] = deque()
        self.waiting: dict[str, tuple[Peer, Applicant, float]] = {}  # by token, with the time of the last HELLO
        self.accepted: dict[str, AcceptedPushes] = {}  # of workers that have left, by token
        self.joined = self.left = 0
        self._refusals = LogLimit(log, logging.WARNING)
        self._stalled: deque[int] = deque(maxlen=MOST_WORKERS)  # sessions that were ended for lack of progress
        # Whether training has begun; and when, or before that when the server was opened.
        self.started, self.started_at = False, math.inf

    def open(self, now: float, session: int) -> None:
        """Begin to admit workers, whose sessions are numbered after `session`."""
        self.left_at = self._checked = self.started_at = now
        self._last_session = session

    def find(self, peer: Peer, session: int) -> Member | None:
        """Return the member with this session, if it sends from this peer."""
        member = self.active.get(session)
        return member if member is not None and member.peer == peer else None

    def by_peer(self, peer: Peer) -> Member | None:
        """Return the member that sends from this peer."""
        return next((member for member in self.active.values() if member.peer == peer), None)

    def awaited(self, applied_at: float, now: float) -> Waiting | None:
        """Return what the server waits for, None for nothing; `applied_at` is when the last step was complete."""
        if not self.started:
            missing = max(0, self._expect - len(self.waiting))
            return Waiting(f"{missing} of {self._expect} workers to join", max(0.0, now - self.started_at))
        if not self.active:
            return Waiting("a worker to join, because all have left", max(0.0, now - self.left_at))
        step, late = self.clock.step, self.clock.late()
        if self.clock.bound is None or not late:
            return None
        named = ", ".join(member.label for member in sorted(late.values(), key=lambda member: member.slot)[:_NAMED])
        more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
        return Waiting(f"{named}{more} to push step {step}", max(0.0, now - max(applied_at, self.started_at)))

    def send_outside(self, peer: Peer, message: Message) -> None:
        """Queue a message that belongs to no session, and so is not numbered."""
        self.outgoing.append(Outgoing(message.parts(), peer=peer))

    def send(self, member: Member, message: Message, shards: Sequence[Buffer] | None = None) -> None:
        """Queue a message in a member's session. shards: its body, any of which may be lost."""
        parts = message.parts(member.counter.next(message.kind))
        member.sent += sum(map(len, [*parts, *(shards or ())]))
        place = message.layer, message.part, message.clock
        self.outgoing.append(Outgoing(parts, shards, place, member.peer, member.session))

    def _forget(self, peer: Peer) -> None:
        self.outgoing.append(Outgoing(peer=peer, action="forget"))

    # Joining

    def hello(self, peer: Peer, message: Message, now: float) -> None:
        """Admit the sender of a HELLO message, or let it wait for the start of the training."""
        applicant = self._check(message)
        before = next((member for member in self.active.values() if member.token == applicant.token), None)
        if before is not None:
            if before.peer == peer and not before.received and before.welcome is not None:
                self.send_outside(peer, before.welcome)  # its HELLO was repeated before it was answered
                return
            self.leave(before, now, keep_connection=before.peer == peer)
        if len(self.active) + len(self.waiting) >= MOST_WORKERS and applicant.token not in self.waiting:
            raise MessageError(f"the server has {MOST_WORKERS} workers already")
        self.outgoing.append(Outgoing(peer=peer, action="keep"))
        if self.started:
            self._admit(peer, applicant, now)
            return
        if (waiting := self.waiting.get(applicant.token)) is not None and waiting[0] != peer:
            self._forget(waiting[0])
        self.waiting[applicant.token] = peer, applicant, now
        self.send_outside(peer, Message(MessageKind.HEARTBEAT))  # shows the worker that the server is alive
        if len(self.waiting) >= self._expect:
            self._start(now)

    def start_late(self, now: float) -> None:
        """After a restart, begin with the workers that are back when the others have had `timeout` seconds."""
        if not self.started and self.waiting and now - self.started_at > self._timeout:
            self._start(now)

    def withdraw(self, peer: Peer) -> None:
        """Remove a worker that leaves while it waits for the start."""
        self._stop_waiting(lambda each: each[0] == peer)

    def _stop_waiting(self, gone: Callable[[tuple[Peer, Applicant, float]], bool]) -> None:
        for token, each in [(token, each) for token, each in self.waiting.items() if gone(each)]:
            del self.waiting[token]
            self._forget(each[0])

    def _start(self, now: float) -> None:
        self.started, self.started_at = True, now
        waiting, self.waiting = self.waiting, {}
        last = len(waiting)
        for peer, applicant, _ in sorted(waiting.values(), key=lambda w: last if w[1].slot is None else w[1].slot):
            self._admit(peer, applicant, now)

    def _admit(self, peer: Peer, applicant: Applicant, now: float) -> None:
        self._last_session += 1
        session, slot = self._last_session, self._free_slot(applicant.slot)
        pool = Pool(self._terms["policy"], Staleness.at_start(self._layers, 1), self._terms["window"])
        who = partial(Member, peer=peer, session=session, slot=slot, token=applicant.token, name=applicant.name)
        reports = TokenBucket(_REPORTS_PER_SECOND, _REPORTS, now)
        member = self.clock.join(session, partial(who, pool=pool, heard=now, since=now, reports=reports))
        before = member.accepted_before = self.accepted.pop(member.token, None)
        self.joined += 1
        log.info("%s joins at step %d", member.label, member.first)
        own = {"slot": slot, "first": member.first, "accepted": None if before is None else before.plain()}
        member.welcome = with_json(MessageKind.WELCOME, session, **own, **self._terms)
        self.send(member, member.welcome)

    def _free_slot(self, wanted: int | None) -> int:
        """Return the slot that a worker asks for if it is free, or else the lowest free one."""
        taken = {member.slot for member in self.active.values()}
        if wanted is not None and wanted not in taken:
            return wanted
        return next(i for i in range(len(taken) + 1) if i not in taken)

    # Leaving

    def evict_silent(self, now: float) -> None:
        """Evict members without a message for too long, and those that others have waited for too long."""
        if now - self._checked < min(0.25, self._timeout / 8):
            return
        self._checked = now
        blocking, evicted, stalled = self.clock.blocking(), [], f"it has made no progress for {self._stall:g} s"
        for member in self.active.values():
            if member.session not in blocking:
                member.blocking_since = None
            elif member.blocking_since is None:
                member.blocking_since = now
            if now - member.heard > self._timeout:
                evicted.append((member, f"no message of it has arrived for {self._timeout:g} s"))
            elif member.blocking_since is not None and now - member.blocking_since > self._stall:
                evicted.append((member, f"{stalled} while others wait for it"))
                self._stalled.append(member.session)
        for member, reason in evicted:
            self.evict(member, reason, now)
        longest = max(self._timeout, _WAITING_TIMEOUT)
        self._stop_waiting(lambda each: now - each[2] > longest)

    def evict(self, member: Member, reason: str, now: float) -> None:
        """Remove a member that did not leave by itself."""
        log.warning("the server evicts %s: %s", member.label, reason)
        self.leave(member, now)

    def leave(self, member: Member, now: float, *, keep_connection: bool = False) -> None:
        """Remove a member: no step waits for it any more. Its accepted pushes stay accepted."""
        self.clock.leave(member.session)
        known = member.accepted
        self.accepted.pop(member.token, None)
        if known is not None:
            self.accepted[member.token] = known
        while len(self.accepted) > max(16, min(_REMEMBERED, _REMEMBERED_INTEGERS // len(member.due))):
            self.accepted.pop(next(iter(self.accepted)))  # the oldest
        self.left += 1
        self.left_at = now
        if not keep_connection:
            self._forget(member.peer)
        self.on_leave(member)

    def refuse(self, peer: Peer, member: Member | None, error: MessageError | FrameError, now: float) -> None:
        """Tell a peer what is wrong with its message, and end its session."""
        short = " ".join(str(error).split())[:300]
        sender = "an unknown peer" if member is None else member.label
        self._refusals.say(now, "the server refuses a message of %s: %s", sender, short)
        session = member.session if member is not None else 0
        self.send_outside(peer, with_json(MessageKind.REFUSED, session, reason=short))
        if member is not None:
            self.leave(member, now)
        else:
            self._forget(peer)

    def ask_to_rejoin(self, peer: Peer, session: int, reason: str) -> None:
        """Tell a peer that its session is unknown or over, so that it sends HELLO again.

        A worker that was evicted for lack of progress is told to compute its step first: if it joined at once, the
        others would wait for it again.
        """
        later = session in self._stalled
        reason = "it made no progress while others waited for it" if later else reason
        self.send_outside(peer, with_json(MessageKind.REJOIN, session, reason=reason, later=later))
        if self.by_peer(peer) is None:
            self._forget(peer)

    def all_accepted(self) -> dict[str, AcceptedPushes]:
        """Return which pushes are accepted, by token, of members and of workers that have left."""
        members = {member.token: known for member in self.active.values() if (known := member.accepted) is not None}
        return self.accepted | members

    # The server's own time

    def excuse(self, seconds: float) -> None:
        """Do not count seconds in which the server itself was busy as silence of the workers."""
        for member in self.active.values():
            member.heard += seconds
            member.blocking_since = None if member.blocking_since is None else member.blocking_since + seconds
        self.waiting = {token: (peer, a, heard + seconds) for token, (peer, a, heard) in self.waiting.items()}

    def announce_end(self, reason: str) -> set[Peer]:
        """Tell all workers that training has ended; return the members' peers, which will answer with LEAVE."""
        for member in self.active.values():
            self.send_outside(member.peer, with_json(MessageKind.STOP, member.session, reason=reason))
        for peer, _, _ in self.waiting.values():
            self.send_outside(peer, with_json(MessageKind.STOP, reason=reason))
        return {member.peer for member in self.active.values()}
