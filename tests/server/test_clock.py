"""Clock: in any order of joins, leaves and pushes, nothing counts twice, the bound holds, and there is no deadlock."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import MessageError
from thinwire.server.aggregate import Clock, WorkerClock

PARTS = 3


class Room:
    """A clock and correct workers, which push a part's step when all parts are fresh enough for it."""

    def __init__(self, bound: int | None, phased: bool) -> None:
        self.clock = Clock[WorkerClock](PARTS, bound, phased=phased)
        self.counted: set[tuple[int, int, int]] = set()
        self.applied: list[tuple[int, int]] = []
        self.names = 0

    def join(self) -> None:
        self.names += 1
        first = self.clock.join(self.names, WorkerClock).first
        for part in range(PARTS):  # nobody has pushed anything of its first step, and none of it is applied
            assert first >= self.clock.lowest[part]
            assert self.clock.bound is None or not any(p == part and c >= first for _, p, c in self.counted)

    def leave(self, worker: int) -> None:
        self.clock.leave(worker)
        for part in range(PARTS):
            self._settle(part)

    def can_push(self, worker: int, part: int) -> bool:
        member = self.clock.workers[worker]
        step = min(member.due)
        return member.due[part] == step and all(self.clock.may_use(p, step) for p in range(PARTS))

    def push(self, worker: int, part: int) -> None:
        step = self.clock.workers[worker].due[part]
        assert self.clock.push(worker, part, step)
        assert (worker, part, step) not in self.counted
        self.counted.add((worker, part, step))
        assert not self.clock.push(worker, part, step), "a second time it does not count"
        if self.clock.bound is not None:
            assert step - self.clock.lowest[part] <= self.clock.bound
        self._settle(part)

    def _settle(self, part: int) -> None:
        if self.clock.bound is None:
            before = self.clock.lowest[part]
            self.clock.settle(part)
            assert self.clock.lowest[part] >= before
            return
        while self.clock.complete(part):
            step = self.clock.lowest[part]
            assert (part, step) not in self.applied
            self.applied.append((part, step))
            self.clock.lowest[part] += 1


actions = st.lists(st.tuples(st.sampled_from(["join", "leave", "push"]), st.integers(0, 99)))


@settings(max_examples=150)
@given(actions, st.sampled_from([0, 1, 3, None]), st.booleans())
def test_any_order_of_joins_and_pushes_is_consistent(actions: list[Any], bound: int | None, phased: bool) -> None:
    room = Room(bound, phased)
    for action, which in actions:
        members = list(room.clock.workers)
        if action == "join" and len(members) < 5:
            room.join()
        elif action == "leave" and members:
            room.leave(members[which % len(members)])
        elif action == "push":
            ready = [(w, p) for w in members for p in range(PARTS) if room.can_push(w, p)]
            if ready:
                room.push(*ready[which % len(ready)])
        if room.clock.workers:  # no deadlock: some worker can always push
            assert any(room.can_push(w, p) for w in room.clock.workers for p in range(PARTS))
    # The workers that are left reach any step, and then everything that was accepted of it has been applied.
    goal = max((m.ahead for m in room.clock.workers.values()), default=0) + 2
    while room.clock.workers and min(m.reached for m in room.clock.workers.values()) < goal:
        behind = min(room.clock.workers, key=lambda w: room.clock.workers[w].reached)
        part = min(range(PARTS), key=lambda p: room.clock.workers[behind].due[p])
        assert room.can_push(behind, part)
        room.push(behind, part)
    if bound is not None:
        done = set(room.applied)
        assert all((p, c) in done for _, p, c in room.counted if c < room.clock.step)


def test_all_workers_that_owe_the_lowest_step_block_once_another_waits() -> None:
    clock = Clock[WorkerClock](1, 0)
    for session in (1, 2, 3):
        clock.join(session, WorkerClock)
    assert clock.blocking() == set()  # nobody is ahead
    clock.push(3, 0, 0)
    assert clock.blocking() == {1, 2}
    clock.push(1, 0, 0)
    assert clock.blocking() == {2}
    stale = Clock[WorkerClock](1, 1)
    for session in (1, 2, 3):
        stale.join(session, WorkerClock)
    stale.push(3, 0, 0)
    assert stale.blocking() == set()  # the bound lets it continue
    stale.push(3, 0, 1)
    assert stale.blocking() == {1, 2}
    free = Clock[WorkerClock](1, None)
    free.join(1, WorkerClock), free.join(2, WorkerClock)
    free.push(1, 0, 0)
    assert free.blocking() == set()


def test_pushes_out_of_turn_or_ahead_of_the_bound_are_refused() -> None:
    clock = Clock[WorkerClock](1, 1)
    clock.join(1, WorkerClock), clock.join(2, WorkerClock)
    with pytest.raises(MessageError, match="before step 0"):
        clock.push(1, 0, 5)
    assert clock.push(1, 0, 0)
    assert clock.push(1, 0, 1)
    with pytest.raises(MessageError, match="exceeds the staleness bound"):
        clock.push(1, 0, 2)
    with pytest.raises(ValueError, match="0 or more"):
        Clock(1, -1)
