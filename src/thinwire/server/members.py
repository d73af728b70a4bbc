"""Members: the server's book of its workers: sessions, slots, what is on its way to them, and their figures."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from thinwire.server.schedule import Pool
from thinwire.transport.base import Peer

# Departed workers whose counted pushes are remembered, so that a returning one gives back just what was lost.
_REMEMBERED = 1024
# Steps whose times tell a worker's rate.
_RECENT = 20


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
    progressed: float  # when it last pushed
    parked: dict[int, tuple[int, bool]] = field(default_factory=dict)  # pulls that wait, by part: clock, whole
    answered: dict[tuple[int, int], int] = field(default_factory=dict)  # by (layer, part): the clock of its copy
    received: int = 0  # bytes
    sent: int = 0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    figures: dict[str, Any] = field(default_factory=dict)

    def rate(self) -> float:
        """Steps per second of late."""
        if len(self.steps) < 2 or self.steps[-1] <= self.steps[0]:
            return 0.0
        return (len(self.steps) - 1) / (self.steps[-1] - self.steps[0])


@dataclass
class Waiting:
    """A worker that has said hello before training began."""

    peer: Peer
    hello: dict[str, Any]
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

    def by_token(self, token: str) -> Member | None:
        return next((member for member in self.active.values() if member.token == token), None)

    def slot(self, wanted: int | None) -> int:
        """The slot that a worker asks for if it is free, or else the lowest free one."""
        taken = {member.slot for member in self.active.values()}
        if wanted is not None and wanted >= 0 and wanted not in taken:
            return wanted
        return next(i for i in range(len(taken) + 1) if i not in taken)

    def remember(self, token: str, due: list[int]) -> None:
        """Note which pushes of a departed worker have been counted."""
        self.counted.pop(token, None)
        self.counted[token] = due
        while len(self.counted) > _REMEMBERED:
            self.counted.pop(next(iter(self.counted)))

    def silent(self, timeout: float, stall: float, holding: set[int]) -> list[tuple[Member, str]]:
        """Members that have not been heard for too long, or that have let all others wait for too long."""
        now = time.monotonic()
        found = []
        for member in self.active.values():
            if now - member.heard > timeout:
                found.append((member, f"nothing was heard of it for {timeout:g} s"))
            elif member.session in holding and now - member.progressed > stall:
                found.append((member, f"it has made no progress for {stall:g} s while the others wait"))
        return found

    def excuse(self, seconds: float) -> None:
        """The server was busy itself for so long: that was nobody's silence."""
        for member in self.active.values():
            member.heard += seconds
            member.progressed += seconds
        for waiting in self.waiting.values():
            waiting.heard += seconds
