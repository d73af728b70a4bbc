"""Pace: where a worker's time goes: computing, aggregation, synchronisation; and how stale its layers are.

Waiting for the first answer to a step is aggregation: the server still gathers gradients. Waiting after it is model
synchronisation: parameters are under way. What overlaps with computing is not waited for and not counted.
"""

import threading
import time
from dataclasses import dataclass, field


@dataclass
class StepTimes:
    """Seconds of one step, and what happened when (time.monotonic).

    A step begins where the one before had computed its gradients: with waiting for what became of them.
    """

    synchronise: float = 0.0
    compute: float = 0.0
    aggregate: float = 0.0
    encode: float = 0.0
    kept: int = 0  # entries that were sent for the step before
    began: float = 0.0  # the step before had been computed
    ready: float = 0.0  # the last wait for parameters had ended
    computed: float = 0.0  # the backward pass had ended
    waits: dict[int, float] = field(default_factory=dict)  # by layer
    staleness: dict[int, int] = field(default_factory=dict)  # by layer


class Pace:
    """Notes of two threads: the courier's on what came when, the worker's on how long it waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first_answer: dict[int, float] = {}
        self._encoded: dict[int, tuple[float, int]] = {}  # by clock: seconds, and entries that were kept
        self._stale: dict[int, dict[int, int]] = {}
        # (when, layer, clock), for orders and profiles: gradients ready, pushes, acknowledgements, parameters here
        self.ready: list[tuple[float, int, int]] = []
        self.pushes: list[tuple[float, int, int]] = []
        self.acks: list[tuple[float, int, int]] = []
        self.arrivals: list[tuple[float, int, int]] = []
        self.keep = False  # whether to keep those

    def encoded(self, clock: int, seconds: float, kept: int) -> None:
        with self._lock:
            before = self._encoded.get(clock, (0.0, 0))
            self._encoded[clock] = before[0] + seconds, before[1] + kept

    def answered(self, clock: int) -> None:
        with self._lock:
            self._first_answer.setdefault(clock, time.monotonic())
            for old in [c for c in self._first_answer if c < clock - 8]:
                del self._first_answer[old]

    def note(self, events: list[tuple[float, int, int]], layer: int, clock: int) -> None:
        """Keep one of the lists above, if anybody wants them."""
        if self.keep:
            events.append((time.monotonic(), layer, clock))

    def arrived(self, layer: int, clock: int, staleness: int) -> None:
        with self._lock:
            self._stale.setdefault(clock, {})[layer] = staleness
        self.note(self.arrivals, layer, clock)

    def divide(self, clock: int, began: float, ended: float) -> tuple[float, float]:
        """A wait for parameters of this step as (aggregation, synchronisation)."""
        with self._lock:
            first = min(max(self._first_answer.get(clock, ended), began), ended)
        return first - began, ended - first

    def close_step(self, times: StepTimes, clock: int) -> None:
        """Note what was sent for the step before (this one's may still be under way), and how stale layers were."""
        with self._lock:
            done = [c for c in self._encoded if c < clock]
            times.encode, times.kept = self._encoded[max(done)] if done else (0.0, 0)
            for old in done:
                del self._encoded[old]
            times.staleness = self._stale.pop(clock, {})
            for old in [c for c in self._stale if c < clock - 8]:
                del self._stale[old]


class Stopwatch:
    """Times the steps of the worker's thread; `last` is the step that has ended."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._times = StepTimes(began=time.monotonic())
        self.last = StepTimes()

    def begin(self) -> None:
        """The first step begins: what was waited for before is none's."""
        now = time.monotonic()
        self._times = StepTimes(began=now, ready=now)

    def waited(self, layers: list[int], clock: int, began: float) -> None:
        """A wait for these layers, for this step, has ended."""
        ended = time.monotonic()
        aggregate, synchronise = self._pace.divide(clock, began, ended)
        self._times.aggregate += aggregate
        self._times.synchronise += synchronise
        self._times.ready = ended
        for layer in layers:
            self._times.waits[layer] = self._times.waits.get(layer, 0.0) + (ended - began) / len(layers)

    def computed(self) -> None:
        """The gradients of a step are there."""
        self._times.computed = time.monotonic()

    def end_step(self, clock: int) -> None:
        """All gradients of a step have been handed over."""
        times = self._times
        self._pace.close_step(times, clock)
        times.compute = max(0.0, times.computed - times.began - times.aggregate - times.synchronise)
        self.last, self._times = times, StepTimes(began=times.computed)
