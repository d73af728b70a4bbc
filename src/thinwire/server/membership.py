"""Reception: how workers come in: before training begins they wait for each other, later they join at once."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.errors import FrameError, MessageError
from thinwire.server.aggregate import Clock
from thinwire.server.layout import Layout
from thinwire.server.protocol import MOST_WORKERS, Applicant, Counter, Door, Kind, Message, parse, with_json
from thinwire.server.schedule import Pool, Staleness
from thinwire.transport.base import Buffer, Listener, Peer

# Departed workers whose counted pushes are remembered, so that a returning one gives back just what was lost; and
# how many numbers that may take.
_REMEMBERED, _NUMBERS = 1024, 1 << 20
# Steps whose times tell a worker's rate.
_RECENT = 20
# Seconds after which a worker that waits for the start and does not say hello any more is taken for gone.
_WAITS = 6.0


@dataclass
class Member:
    """One worker that is in."""

    peer: Peer
    session: int
    slot: int
    token: str
    name: str
    first: int
    pool: Pool
    heard: float
    since: float  # when it joined
    counted: list[int] | None = None  # what it was told of its session before
    welcome: Message | None = None  # said again if it says hello again before anything else
    counter: Counter = field(default_factory=Counter)
    parked: dict[int, tuple[int, bool]] = field(default_factory=dict)  # pulls that wait, by part: clock, whole
    answered: dict[tuple[int, int], int] = field(default_factory=dict)  # by (layer, part): the clock of its copy
    asked: set[int] = field(default_factory=set)  # parts whose pulls have not been answered
    holding: float | None = None  # since when all others wait for it
    received: int = 0  # bytes
    sent: int = 0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    figures: dict[str, Any] = field(default_factory=dict)

    def known(self, due: list[int]) -> list[int] | None:
        """Which of its pushes count, as it will have to be told: `due`, or what the session before was told."""
        # One that never spoke may not have heard its welcome: what it would ask for is still the session before.
        return due if self.received else self.counted

    @property
    def label(self) -> str:
        return f"worker {self.slot} ({self.name})"

    def rate(self) -> float:
        """Steps per second of late."""
        steps = list(self.steps)
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 and steps[-1] > steps[0] else 0.0


@dataclass
class Waiting:
    """A worker that has said hello before training began."""

    peer: Peer
    applicant: Applicant
    heard: float


class Members:
    """All workers, by session; those that wait for the start; and what was counted of those that left."""

    def __init__(self) -> None:
        self.active: dict[int, Member] = {}
        self.waiting: dict[str, Waiting] = {}
        self.counted: dict[str, list[int]] = {}
        self.joined = 0
        self.left = 0

    def find(self, peer: Peer, session: int) -> Member | None:
        """The member that speaks from there in this session."""
        member = self.active.get(session)
        return member if member is not None and member.peer == peer else None

    def by_peer(self, peer: Peer) -> Member | None:
        return next((member for member in self.active.values() if member.peer == peer), None)

    def by_token(self, token: str) -> Member | None:
        return next((member for member in self.active.values() if member.token == token), None)

    def slot(self, wanted: int | None) -> int:
        """The slot that a worker asks for if it is free, or else the lowest free one."""
        taken = {member.slot for member in self.active.values()}
        if wanted is not None and wanted not in taken:
            return wanted
        return next(i for i in range(len(taken) + 1) if i not in taken)

    def remember(self, member: Member, due: list[int]) -> None:
        """Note which pushes of a departed worker have been counted."""
        known = member.known(due)
        self.counted.pop(member.token, None)
        if known is not None:
            self.counted[member.token] = known
        most = max(16, min(_REMEMBERED, _NUMBERS // len(due)))
        while len(self.counted) > most:
            self.counted.pop(next(iter(self.counted)))

    def silent(self, timeout: float, stall: float, holding: Collection[int]) -> list[tuple[Member, str]]:
        """Members that have not been heard for too long, or that have let all others wait for too long."""
        now = time.monotonic()
        found = []
        for member in self.active.values():
            if member.session not in holding:
                member.holding = None
            elif member.holding is None:
                member.holding = now
            if now - member.heard > timeout:
                found.append((member, f"nothing was heard of it for {timeout:g} s"))
            elif member.holding is not None and now - member.holding > stall:
                found.append((member, f"it has made no progress for {stall:g} s while the others wait"))
        return found

    def tidy(self, timeout: float) -> None:
        """Let go of those that wait no longer."""
        now = time.monotonic()
        self.waiting = {t: w for t, w in self.waiting.items() if now - w.heard <= max(timeout, _WAITS)}

    def excuse(self, seconds: float) -> None:
        """The server was busy itself for so long: that was nobody's silence."""
        for member in self.active.values():
            member.heard += seconds
            member.holding = None if member.holding is None else member.holding + seconds
        for waiting in self.waiting.values():
            waiting.heard += seconds


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
