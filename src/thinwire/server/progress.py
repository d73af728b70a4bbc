"""Progress: checked gradients become steps of the model, and the pulls that waited for them are answered."""

import time
from collections.abc import Callable

from thinwire.codec.frame import FrameReader
from thinwire.server.aggregate import Aggregator
from thinwire.server.answers import Answers
from thinwire.server.clock import Clock
from thinwire.server.layers import Layout
from thinwire.server.lossy import Arrived
from thinwire.server.members import Member, Members
from thinwire.server.messages import STALENESS
from thinwire.server.views import Views


class Progress:
    """Moves the parts of the model on; `noted` is called whenever one may have completed a step of all."""

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        aggregator: Aggregator,
        views: Views,
        answers: Answers,
        members: Members,
        noted: Callable[[], None],
    ) -> None:
        self._places = list(layout.places())
        self._clock, self._aggregator, self._views = clock, aggregator, views
        self._answers, self._members, self._noted = answers, members, noted

    def take(self, member: Member, number: int, clock: int, frame: FrameReader | Arrived) -> bool:
        """Keep a gradient; False if it was counted before. `follow` must come after one that was not."""
        fresh = self._clock.push(member.session, number, clock)
        if fresh:
            self._aggregator.keep(member.slot, number, clock, frame)
        return fresh

    def follow(self, member: Member, number: int, clock: int) -> None:
        """What follows from a gradient that was taken."""
        if self._clock.members[member.session].reached > clock:
            member.steps.append(time.monotonic())
            member.holding = None  # it goes on, if slower than the others
        if self._clock.bound is None:
            self._apply_one(member, number, clock)
        else:
            self._complete(number)

    def left(self) -> None:
        """Somebody has left: what the others waited for may be complete without it."""
        for number in range(len(self._places)):
            if self._clock.bound is not None:
                self._complete(number)
            else:
                self._clock.settle(number)
        self._noted()

    def holding_up(self) -> list[int]:
        """The one worker, if any, that all others wait for."""
        reached = sorted((member.reached, session) for session, member in self._clock.members.items())
        alone = len(reached) > 1 and self._clock.bound is not None and reached[0][0] < reached[1][0]
        return [reached[0][1]] if alone else []

    def staleness(self) -> bytes:
        """Per layer: the lowest step, and how many workers hold it."""
        lowest: dict[int, int] = {}  # the part of each layer that is furthest behind
        for number, (layer, _) in enumerate(self._places):
            if layer not in lowest or self._clock.lowest[number] < self._clock.lowest[lowest[layer]]:
                lowest[layer] = number
        return b"".join(STALENESS.pack(self._clock.lowest[i], self._clock.holders(i)) for i in lowest.values())

    def _complete(self, number: int) -> None:
        """Apply the steps of a part that are complete, and answer those who waited for them."""
        moved = False
        while self._clock.complete(number):
            self._aggregator.apply(number, self._clock.lowest[number])
            self._clock.advance(number)
            self._views.changed(*self._places[number])
            moved = True
        if moved:
            ready = range(len(self._places)) if self._clock.phased else [number]
            for member in self._members.active.values():
                for each in ready:
                    self._answers.release(member, each)
            self._noted()

    def _apply_one(self, member: Member, number: int, clock: int) -> None:
        self._aggregator.apply_one(member.slot, number, clock, len(self._members.active))
        self._views.changed(*self._places[number])
        self._clock.settle(number)
        self._noted()
