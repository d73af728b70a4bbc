"""Members: the server's book of its workers: sessions, slots, what is on its way to them, and their figures."""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from thinwire.server.handshake import Applicant
from thinwire.server.messages import Counter, Message
from thinwire.server.schedule import Pool
from thinwire.transport.base import Peer

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
