"""Largest: the largest of the last so many numbers, found without looking at all of them."""

from collections import deque


class Largest:
    """The largest of the last so many numbers, none of them negative; 0 if there is none yet."""

    def __init__(self, count: int) -> None:
        self._count, self._number = count, 0
        self._falling: deque[tuple[int, float]] = deque()  # those that no later one exceeds, and their numbers

    def add(self, value: float) -> None:
        """One more."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        self._number += 1
        falling.append((self._number, value))
        if falling[0][0] <= self._number - self._count:
            falling.popleft()

    @property
    def largest(self) -> float:
        return self._falling[0][1] if self._falling else 0.0
