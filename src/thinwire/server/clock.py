"""Clock: who has pushed what, which step of a part is complete, and who may go on.

A step of a part is complete when every worker that takes part in it has pushed it. A worker may use a part at clock c
while c - lowest <= bound: 0 is bulk synchronous, None is asynchronous. Parts are counted by themselves, so that one
can be on its way back while the next is still on its way out; `phased` lets all wait for all, as in the paper.
"""

from dataclasses import dataclass

from thinwire.server.messages import MessageError


@dataclass
class Pushed:
    """One worker as the clock sees it: its first step, and the next that is due of each part."""

    first: int
    due: list[int]

    @property
    def reached(self) -> int:
        """Steps of which everything has been pushed."""
        return min(self.due)

    @property
    def ahead(self) -> int:
        """The first step of which nothing has been pushed."""
        return max(self.due)


class Clock:
    """The clocks of all workers, by part; parts are numbered through all layers."""

    def __init__(self, parts: int, bound: int | None, start: int = 0, *, phased: bool = False) -> None:
        if bound is not None and bound < 0:
            raise ValueError(f"a staleness bound is 0 or more, not {bound}")
        self.bound, self.phased = bound, phased
        self.lowest = [start] * parts  # steps of a part that are complete
        self.opened = [start] * parts  # the first step of which nobody has pushed anything, whoever it was
        self.members: dict[int, Pushed] = {}

    def join(self, worker: int) -> int:
        """Admit a worker; returns its first step, of which nobody has pushed anything yet."""
        first = max(self.lowest) if self.bound is None else max([*self.lowest, *self.opened])
        if not self.members:  # nobody is left to complete the steps before
            self.lowest = [first] * len(self.lowest)
        self.members[worker] = Pushed(first, [first] * len(self.lowest))
        return first

    def leave(self, worker: int) -> None:
        """From now on nobody waits for this worker."""
        self.members.pop(worker, None)

    def push(self, worker: int, part: int, clock: int) -> bool:
        """Note a push; False if it has been counted before. MessageError if it comes out of turn."""
        member = self.members[worker]
        due = member.due[part]
        if clock < due:
            return False
        if clock > due:
            raise MessageError(f"step {clock} of part {part} was pushed before step {due}")
        if not self.may_use(part, clock):
            raise MessageError(f"step {clock} of part {part} exceeds the staleness bound of {self.bound}")
        member.due[part] = clock + 1
        self.opened[part] = max(self.opened[part], clock + 1)
        return True

    def complete(self, part: int) -> bool:
        """Whether the lowest open step of a part has been pushed by all who take part in it.

        A step in which nobody takes part any more is complete too, or those who came later would wait for ever.
        """
        step = self.lowest[part]
        if step >= self.opened[part] and all(m.first <= step for m in self.members.values()):
            return False
        return all(m.due[part] > step for m in self.members.values() if m.first <= step)

    def advance(self, part: int) -> None:
        """The lowest open step of a part has been applied."""
        self.lowest[part] += 1

    def settle(self, part: int) -> None:
        """Asynchronous: the lowest is what all have reached; it never falls when somebody joins."""
        self.lowest[part] = max(self.lowest[part], min((m.due[part] for m in self.members.values()), default=0))

    def may_use(self, part: int, clock: int) -> bool:
        """Whether a worker at this clock may use the part as it is now."""
        return self.bound is None or clock - (self.step if self.phased else self.lowest[part]) <= self.bound

    def holders(self, part: int) -> int:
        """How many workers still owe the lowest open step."""
        step = self.lowest[part]
        return sum(m.first <= step and m.due[part] <= step for m in self.members.values())

    @property
    def step(self) -> int:
        """Steps that are complete in all parts."""
        return min(self.lowest)
