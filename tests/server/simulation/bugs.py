"""Deliberate bugs, which the simulation must find. Each is a patch that is applied for the time of a schedule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from thinwire.server.aggregate import Aggregator, Clock
from thinwire.server.client import Client, PushQueue
from thinwire.server.membership import Membership
from thinwire.server.protocol import Counter, MessageKind
from thinwire.server.replicas import LossyReplicas, Replicas
from thinwire.server.server import Server
from thinwire.transport.udp import packet
from thinwire.transport.udp.session import EnvelopeQueue, ReorderBuffer

Wrap = Callable[..., Callable[..., Any]]


def _ack_forgotten(send: Callable[..., None]) -> Callable[..., None]:
    def forgetful(self: Membership, member: Any, message: Any, shards: Any = None) -> None:
        if not (message.kind is MessageKind.ACK and message.clock % 4 == 3):
            send(self, member, message, shards)

    return forgetful


def _stale_session_kept(hello: Callable[..., None]) -> Callable[..., None]:
    def negligent(self: Membership, peer: bytes, message: Any, now: float) -> None:
        token = message.json["token"]
        before = [member for member in self.active.values() if member.token == token]
        for member in before:
            member.token = "another worker"  # so that its session does not end
        hello(self, peer, message, now)
        for member in before:
            member.token = token

    return negligent


def _double_apply(apply: Callable[..., None]) -> Callable[..., None]:
    def twice(self: Aggregator, part: int, clock: int, workers: int | None = None) -> None:
        frames = dict(self._pending.get((part, clock), {}))
        apply(self, part, clock, workers)
        if len(frames) > 1 and clock % 5 == 4:
            self._pending[part, clock] = frames
            apply(self, part, clock, workers)

    return twice


def _accepted_pushes_restored(restart: Callable[..., None]) -> Callable[..., None]:
    return lambda self, accepted, restore: restart(self, None, restore=restore)


def _accepted_steps_forgotten(leave: Callable[..., None]) -> Callable[..., None]:
    def forgetful(self: Membership, member: Any, now: float, **options: Any) -> None:
        leave(self, member, now, **options)
        self.accepted.pop(member.token, None)

    return forgetful


def _unnoticed_gap(follows: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, message: follows(self, message) or True


def _loose_bound(may_use: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, part, clock: may_use(self, part, clock - 1)


def _incomplete_after_leave(on_leave: Callable[..., None]) -> Callable[..., None]:
    def lazy(self: Server, member: Any) -> None:
        self._ready.pop(member.session, None)
        self.replicas.forget(member.session)

    return lazy


def _replica_kept(forget: Callable[..., None]) -> Callable[..., None]:
    return lambda self, session: None


def _pending_not_saved(pending: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda self: []


def _silence_ignored(evict_silent: Callable[..., None]) -> Callable[..., None]:
    return lambda self, now: None


def _window_not_freed(received: Callable[..., None]) -> Callable[..., None]:
    return lambda self, member, size: received(self, member, size if size % 3 else 0)


def _lost_push_not_restored(report: Callable[..., None]) -> Callable[..., None]:
    return lambda self, ticket, lost, restore: report(self, ticket, frozenset(), restore=restore)


def _lost_delta_not_repeated(settle: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, peer, ticket, lost: settle(self, peer, ticket, frozenset())


def _rejoin_keeps_session(rejoin: Callable[..., None]) -> Callable[..., None]:
    return lambda self, reason, deferred=False: None


def _loss_not_acknowledged(missing_ranges: Callable[..., Any]) -> Callable[..., Any]:
    return lambda count, arrived: ()


def _end_marker_forgotten(release: Callable[..., None]) -> Callable[..., None]:
    return lambda self, number, end_marker: release(self, number, end_marker) if number % 7 else None


def _end_told_once(on_late_message: Callable[..., None]) -> Callable[..., None]:
    def silent(self: Server, peer: bytes, message: Any) -> None:
        if message.kind is MessageKind.LEAVE or peer not in self.remaining:
            on_late_message(self, peer, message)

    return silent


def _gap_hidden(add: Callable[..., bool]) -> Callable[..., bool]:
    def negligent(self: ReorderBuffer, *arguments: Any, **options: Any) -> bool:
        highest = self._highest
        new = add(self, *arguments, **options)
        if not new:  # a control packet was faster than TCP, which may have lost others before
            self._highest = highest
        return new

    return negligent


def _old_parameters_sent(changed: Callable[..., None]) -> Callable[..., None]:
    def lazy(self: Replicas, layer: int, part: int) -> None:
        body = self._bodies.get((layer, part))
        changed(self, layer, part)
        if body is not None:
            self._bodies[layer, part] = body

    return lazy


# By name: the class or module, its method, and what the bug makes of it.
BUGS: dict[str, tuple[Any, str, Wrap]] = {
    "ack-forgotten": (Membership, "send", _ack_forgotten),
    "stale-session-kept": (Membership, "hello", _stale_session_kept),
    "double-apply": (Aggregator, "apply", _double_apply),
    "accepted-pushes-restored": (PushQueue, "restart", _accepted_pushes_restored),
    "accepted-steps-forgotten": (Membership, "leave", _accepted_steps_forgotten),
    "unnoticed-gap": (Counter, "follows", _unnoticed_gap),
    "loose-bound": (Clock, "may_use", _loose_bound),
    "incomplete-after-leave": (Server, "_on_leave", _incomplete_after_leave),
    "replica-kept": (Replicas, "forget", _replica_kept),
    "pending-not-saved": (Aggregator, "pending", _pending_not_saved),
    "silence-ignored": (Membership, "evict_silent", _silence_ignored),
    "window-not-freed": (Server, "_on_received", _window_not_freed),
    "lost-push-not-restored": (PushQueue, "report", _lost_push_not_restored),
    "lost-delta-not-repeated": (LossyReplicas, "settle", _lost_delta_not_repeated),
    "rejoin-keeps-session": (Client, "_rejoin", _rejoin_keeps_session),
    "loss-not-acknowledged": (packet, "missing_ranges", _loss_not_acknowledged),
    "end-marker-forgotten": (EnvelopeQueue, "release", _end_marker_forgotten),
    "end-told-once": (Server, "_on_late_message", _end_told_once),
    "gap-hidden": (ReorderBuffer, "add", _gap_hidden),
    "old-parameters-sent": (Replicas, "changed", _old_parameters_sent),
}

# A seed that finds each of them, for `make test`.
RECORDED = {
    "ack-forgotten": 1,
    "stale-session-kept": 85,
    "double-apply": 1,
    "accepted-pushes-restored": 14,
    "accepted-steps-forgotten": 14,
    "unnoticed-gap": 31,
    "loose-bound": 1,
    "incomplete-after-leave": 1,
    "replica-kept": 0,
    "pending-not-saved": 55,
    "silence-ignored": 0,
    "window-not-freed": 2,
    "lost-push-not-restored": 12,
    "lost-delta-not-repeated": 52,
    "rejoin-keeps-session": 0,
    "loss-not-acknowledged": 12,
    "end-marker-forgotten": 10,
    "end-told-once": 271,
    "gap-hidden": 1933,
    "old-parameters-sent": 6,
}


@contextmanager
def bug(name: str | None) -> Iterator[None]:
    """Let the code have a bug; None for the code as it is."""
    if name is None:
        yield
        return
    owner, method, wrap = BUGS[name]
    with mock.patch.object(owner, method, wrap(getattr(owner, method))):
        yield
