"""The links of the model: every worker has its own, and all of them meet in the server's.

Streams that are active at once share the server's link equally, as TCP shares it, and none exceeds its own link.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Times are rounded to a nanosecond, so that what should happen together does in spite of floating point.
TICK = 1e-9


def rounded(seconds: float) -> float:
    """A time on the grid of nanoseconds."""
    return round(seconds, 9)


@dataclass(frozen=True)
class Delivery(Generic[T]):
    """A message that has come through, and when it was first and last on the wire."""

    lane: int
    message: T
    start: float
    end: float


class SharedLink(Generic[T]):
    """One direction of all links: a lane per worker, in each of which messages keep their order.

    A size is the seconds that a message takes on a worker's link alone; the server's link is `server_rate`
    times as fast as one worker's.
    """

    def __init__(self, lanes: int, server_rate: float) -> None:
        self._server_rate = server_rate
        self._queues: list[deque[tuple[float, T]]] = [deque() for _ in range(lanes)]
        self._started = [0.0] * lanes
        # All active streams get the same rate, so one count of seconds of service serves them all.
        self._service = 0.0
        self._at = 0.0
        self._ends: list[tuple[float, int]] = []  # service at which each active lane's first message is through

    def send(self, lane: int, message: T, size: float) -> None:
        """Put a message at the end of a lane, at the time that the link was last advanced to."""
        self._queues[lane].append((size, message))
        if len(self._queues[lane]) == 1:
            self._begin(lane, self._service)

    def next_time(self) -> float | None:
        """When the next message will be through if nothing else is sent before."""
        if not self._ends:
            return None
        return max(self._at, rounded(self._at + (self._ends[0][0] - self._service) / self._rate()))

    def advance(self, now: float) -> list[Delivery[T]]:
        """Let time pass, no further than `next_time`; returns what has come through."""
        if self._ends:
            self._service += (now - self._at) * self._rate()
        self._at = now
        through = []
        while self._ends and self._ends[0][0] <= self._service + TICK:
            end, lane = heapq.heappop(self._ends)
            _, message = self._queues[lane].popleft()
            through.append(Delivery(lane, message, self._started[lane], now))
            if self._queues[lane]:
                self._begin(lane, end)
        return through

    def _rate(self) -> float:
        return min(1.0, self._server_rate / len(self._ends))

    def _begin(self, lane: int, service: float) -> None:
        self._started[lane] = self._at
        heapq.heappush(self._ends, (service + self._queues[lane][0][0], lane))
