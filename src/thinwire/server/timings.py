"""Timings: where the time of a worker's steps goes."""

import threading
import time
from dataclasses import dataclass, field

Event = tuple[float, int, int]  # when (time.monotonic), layer, step


@dataclass
class StepTimes:
    """Seconds that the parts of one step took, and when they happened (time.monotonic).

    A step begins when the gradients of the step before are computed, by waiting for parameters.
    """

    synchronise: float = 0.0
    compute: float = 0.0
    aggregate: float = 0.0
    sent_entries: int = 0  # for the step before
    began: float = 0.0  # the gradients of the step before were computed
    ready: float = 0.0  # the last wait for parameters ended
    computed: float = 0.0  # the backward pass ended
    waits: dict[int, float] = field(default_factory=dict)  # by layer
    staleness: dict[int, int] = field(default_factory=dict)  # by layer


class WorkerTimings:
    """What the two threads of a worker note: the client's when messages came, the worker's how long it waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first_reply: dict[int, float] = {}
        self._sent_entries: dict[int, int] = {}  # by step
        self._staleness: dict[int, dict[int, int]] = {}
        self.keep = False  # whether to keep the events below, for profiles
        self.ready: list[Event] = []  # a layer's gradients were computed
        self.pushes: list[Event] = []
        self.acks: list[Event] = []
        self.last = StepTimes()  # of the step that ended last
        self.begin()

    def sent(self, clock: int, entries: int) -> None:
        """Note that so many entries of a step's gradients were sent."""
        with self._lock:
            self._sent_entries[clock] = self._sent_entries.get(clock, 0) + entries

    def replied(self, clock: int) -> None:
        """Note that the server has sent some of the parameters for a step."""
        with self._lock:
            self._first_reply.setdefault(clock, time.monotonic())
            self._first_reply = {c: when for c, when in self._first_reply.items() if c >= clock - 8}

    def note(self, events: list[Event], layer: int, clock: int) -> None:
        """Append to one of the lists of events, if they are kept."""
        if self.keep:
            events.append((time.monotonic(), layer, clock))

    def arrived(self, layer: int, clock: int, staleness: int) -> None:
        """Note that a layer's parameters for a step are complete, and how stale they are."""
        with self._lock:
            self._staleness.setdefault(clock, {})[layer] = staleness

    # For the worker's thread

    def begin(self) -> None:
        """Begin the first step; waits before it belong to no step."""
        now = time.monotonic()
        self._times = StepTimes(began=now, ready=now)

    def waited(self, layers: list[int], clock: int, began: float) -> None:
        """Note the end of a wait for these layers' parameters for a step."""
        ended = time.monotonic()
        with self._lock:  # the server's first reply divides aggregation from synchronisation
            first = min(max(self._first_reply.get(clock, ended), began), ended)
        self._times.aggregate += first - began
        self._times.synchronise += ended - first
        self._times.ready = ended
        for layer in layers:
            self._times.waits[layer] = self._times.waits.get(layer, 0.0) + (ended - began) / len(layers)

    def computed(self) -> None:
        """Note that the gradients of a step are computed."""
        self._times.computed = time.monotonic()

    def end_step(self, clock: int) -> None:
        """End a step, all of whose gradients have been handed to the client."""
        times = self._times
        with self._lock:
            done = [c for c in self._sent_entries if c < clock]  # this step's may still be on their way
            times.sent_entries = self._sent_entries[max(done)] if done else 0
            self._sent_entries = {c: entries for c, entries in self._sent_entries.items() if c >= clock}
            times.staleness = self._staleness.pop(clock, {})
            self._staleness = {c: found for c, found in self._staleness.items() if c >= clock - 8}
        times.compute = max(0.0, times.computed - times.began - times.aggregate - times.synchronise)
        self.last, self._times = times, StepTimes(began=times.computed)
