"""The ledger of a schedule: which gradients were computed, accepted and applied, and what must always hold of them.

Gradients are small integers and the server adds them up, so that all sums are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.server.simulation.events import Violation
from thinwire.server.server import Server

FrameKey = tuple[int, int, int]  # session, part and step
Values = list[float]  # plain lists, because these are a few numbers each


@dataclass
class Accepted:
    """A push that the server has accepted."""

    token: str
    values: Values
    applied: bool = False


@dataclass
class History:
    """What a server has accepted. A server that restarts from a checkpoint goes back to the history of that moment."""

    accepted: dict[FrameKey, Accepted] = field(default_factory=dict)
    waiting: dict[tuple[int, int], list[Accepted]] = field(default_factory=dict)  # by part and step: not applied yet
    totals: dict[tuple[str, int], Values] = field(default_factory=dict)  # by token and part

    def add(self, key: FrameKey, token: str, values: Values) -> None:
        self.accepted[key] = found = Accepted(token, values)
        self.waiting.setdefault(key[1:], []).append(found)
        self.totals[token, key[1]] = plus(self.totals.get((token, key[1])), values)

    def apply(self, part: int, clock: int) -> list[Accepted]:
        found = self.waiting.pop((part, clock), [])
        for each in found:
            each.applied = True
        return found

    def copy(self) -> "History":
        """Return a copy, all of which counts as applied: so it is in a server that begins with a checkpoint."""
        return History(
            {key: Accepted(a.token, a.values, True) for key, a in self.accepted.items()}, {}, {**self.totals}
        )


def plus(first: Values | None, second: Sequence[float]) -> Values:
    """Return the sum of two vectors; None is zero."""
    return list(second) if first is None else [a + b for a, b in zip(first, second, strict=True)]


def flat_values(rows: Sequence[Tensor]) -> Values:
    """Return the values of some tensors."""
    return [value for row in rows for value in row.tolist()]


def check(holds: bool, what: str, *details: Any) -> None:
    """Raise Violation unless something holds."""
    if not holds:
        raise Violation(what + ": " + ", ".join(map(str, details)) if details else what)


class Ledger:
    """Observes a server and its workers."""

    def __init__(self) -> None:
        self.history = History()
        self.saved = History()  # at the last checkpoint
        self.undone: dict[FrameKey, Accepted] = {}  # accepted by a server that has crashed, after its checkpoint
        self._lost: dict[tuple[str, int], Values] = {}  # of these: what their workers will not send again
        self._acknowledged: set[FrameKey] = set()  # by what workers have received
        self._seen: tuple[Server | None, int] = None, 0  # the server that was checked last, and how many had left it
        self.steps = 0  # that were complete, in all servers
        self.pushes = 0

    # The server

    def observe(self, server: Server) -> None:
        """Observe what a server accepts and applies."""
        aggregator, bound = server._aggregator, server.clock.bound
        keep, apply = aggregator.keep, aggregator.apply
        parts = [values for layer in aggregator.values for values in layer]
        due: dict[int, dict[int, int]] = {}  # by session and part: the next step, as seen here

        def kept(slot: int, part: int, clock: int, frame: Any) -> None:
            member = next(m for m in server.membership.active.values() if m.slot == slot)
            key = member.session, part, clock
            check(key not in self.history.accepted, "a push was counted twice", key)
            rows = [torch.zeros_like(row) for row in parts[part]]
            if not frame.non_finite:
                frame.add_to(rows)
            self.history.add(key, member.token, flat_values(rows))
            self.pushes += 1
            due.setdefault(member.session, {})[part] = clock + 1
            if bound is not None:
                for other in server.membership.active.values():
                    reached = due.get(other.session, {}).get(part, other.first)
                    check(clock - reached <= bound, "the staleness bound is broken", key, other.session, reached)
            keep(slot, part, clock, frame)

        def applied(part: int, clock: int, workers: int | None = None) -> None:
            expected = flat_values(parts[part])
            for each in self.history.apply(part, clock):
                expected = [a - b for a, b in zip(expected, each.values, strict=True)]
            apply(part, clock, workers)
            check(flat_values(parts[part]) == expected, "a step is not the sum of its gradients", part, clock)

        aggregator.keep, aggregator.apply = kept, applied  # type: ignore[method-assign]

    def on_save(self) -> None:
        """The server has written a checkpoint."""
        self.saved = self.history.copy()

    def on_crash(self) -> None:
        """The server has crashed, and another one begins at the last checkpoint."""
        for key, accepted in self.history.accepted.items():
            if key not in self.saved.accepted:
                self.undone[key] = accepted
                if key in self._acknowledged:
                    self._lose(key, accepted)
        self.history = self.saved.copy()

    def check_restored(self, server: Server) -> None:
        """A restarted server has everything that its checkpoint had accepted."""
        for part, values in enumerate(values for layer in server._aggregator.values for values in layer):
            total: Values | None = None
            for (_, each), sums in self.history.totals.items():
                total = plus(total, sums) if each == part else total
            found = [-value for value in flat_values(values)]
            check(not any(found) if total is None else found == total, "a checkpoint lacks accepted gradients", part)

    def check_memory(self, server: Server) -> None:
        """What the server keeps is justified by its members."""
        active, parts = server.membership.active, len(server.clock.lowest)
        pending = server._aggregator._pending
        ahead = 1 if server.clock.bound is None else server.clock.bound + 1
        check(len(pending) <= parts * ahead, "the server keeps too many gradients", len(pending))
        check(not server.membership.outgoing, "the server keeps messages that it could send")
        for member in active.values():
            kept = len(member.unanswered) <= parts and len(member.pending) <= parts and len(member.pool) <= parts
            check(kept, "the server keeps too many pulls", member.session)
            lost = len(member.lost) <= parts * max(4, ahead + 1)
            check(lost, "the server keeps too much of what a worker lost", member.session)
        if self._seen == (server, server.membership.left):  # the rest belongs to sessions, and none has ended
            return
        self._seen = server, server.membership.left
        check(server._ready.keys() <= active.keys(), "a worker that has left is still to be answered")
        for place, replicas in server.replicas._at.items():
            check(replicas.keys() <= active.keys(), "the server keeps replicas of workers that have left", place)
        for name in ("_in_flight", "_lost"):
            places = getattr(server.replicas, name, {})
            check(all(session in active for session, _ in places), "the server keeps what a former worker lost", name)
        tickets = getattr(server.replicas, "_tickets", {})
        check(all(each[0] in active for each in tickets.values()), "the server keeps tickets of former workers")

    def check_kept(self, server: Server, messages: int) -> None:
        """The transport keeps no more messages in pieces for a worker than a session and the one before it justify."""
        ahead = 1 if server.clock.bound is None else server.clock.bound + 1
        most = 4 * (ahead + 1) * len(server.clock.lowest)
        check(messages <= most, "the transport keeps too many messages for a worker", messages)

    # A worker

    def on_ack(self, session: int, part: int, clock: int) -> None:
        """A worker has received an acknowledgement, and will not send this gradient again."""
        key = session, part, clock
        check(key in self.history.accepted or key in self.undone, "a push was acknowledged and not accepted", key)
        self._acknowledged.add(key)
        if key in self.undone:
            self._lose(key, self.undone[key])

    def _lose(self, key: FrameKey, undone: Accepted) -> None:
        where = undone.token, key[1]
        self._lost[where] = plus(self._lost.get(where), undone.values)

    def check_worker(self, token: str, part: int, given: Values, residual: Values) -> None:
        """Every gradient that a worker computed was accepted once, or is in its residual."""
        total = residual
        for sums in (self.history.totals, self._lost):
            total = plus(sums.get((token, part)), total) if (token, part) in sums else total
        check(given == total, "gradients were lost or counted twice", token, part, given, total)
