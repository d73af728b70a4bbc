"""Virtual time: events that happen in the order of their times."""

import heapq
import random
import zlib
from collections.abc import Callable
from typing import Any


class Violation(AssertionError):
    """Something that must always hold did not hold."""


class Events:
    """A queue of events, the random numbers of the schedule, and a digest of everything that has happened."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        self.now = 1000.0
        self.digest = 0
        self.handled = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """Let something happen after so many seconds. Events of the same time happen in the order of these calls."""
        self._serial += 1
        heapq.heappush(self._queue, (self.now + seconds, self._serial, what, arguments))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let events happen up to a time or until a condition holds; return whether it holds."""
        while not (found := done()) and self._queue and self._queue[0][0] <= until:
            self.now, serial, what, arguments = heapq.heappop(self._queue)
            self.handled += 1
            self.note(serial.to_bytes(8, "little"))
            what(*arguments)
        if not found:
            self.now = max(self.now, until)
        return found

    def note(self, data: bytes) -> None:
        """Add bytes to the digest, by which two runs of a seed are compared."""
        self.digest = zlib.crc32(data, self.digest)
