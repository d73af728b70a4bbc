"""A discrete-event simulation of request scheduling: a parameter server, its workers, and the real scheduling pools.

It is deterministic: nothing is random, and events at the same time have a fixed order.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from thinwire.server.schedule import Pool, Request, Staleness
from thinwire.tools.race.profile import LayerTimes

Doing = Literal["forward", "backward", "push", "pull"]
Answer = tuple[Request, int]  # a pull, and the version of its slice


@dataclass(frozen=True)
class Case:
    """What is simulated. Times are in seconds; a tuple has one figure per layer or per worker."""

    layers: tuple[LayerTimes, ...]
    workers: int
    iterations: int
    staleness: int = 0  # B: step c may use parameters that include all pushes of the steps before c - B
    slices: tuple[int, ...] = ()  # of each layer; empty: one each
    versions: Literal["slice", "layer"] = "slice"  # the unit that the server counts, and answers when it is complete
    waits_for: Literal["answer", "copy"] = "answer"  # of this step's pull, or any copy within the bound
    window: float | None = None  # seconds of transfer in flight; None: two of the largest slices
    server_rate: float = 1.0  # rate of the server's link over a worker's
    latency: float = 0.0  # one-way delay
    slowness: tuple[float, ...] = ()  # of each worker: factor on its computation; empty: 1 each

    def __post_init__(self) -> None:
        layers, slow = len(self.layers), self.slowness
        _check(layers > 0, "there must be at least one layer")
        _check(self.workers > 0, f"there must be at least one worker, not {self.workers}")
        _check(self.iterations > 0, f"there must be at least one iteration, not {self.iterations}")
        _check(self.staleness >= 0, f"the staleness bound must be 0 or more, not {self.staleness}")
        _check(len(self.slices) in (0, layers), f"{layers} layers need {layers} numbers of slices")
        _check(all(n > 0 for n in self.slices), "a layer must have at least one slice")
        _check(len(slow) in (0, self.workers), f"{self.workers} workers need {self.workers} figures of slowness")
        _check(all(0 < n < math.inf for n in slow), "the slowness of a worker must be more than 0")
        _check(self.versions in ("slice", "layer"), f'versions are of a "slice" or a "layer", not {self.versions!r}')
        _check(self.waits_for in ("answer", "copy"), f'waits_for is an "answer" or a "copy", not {self.waits_for!r}')
        _check(0 < self.server_rate < math.inf, f"the server's rate must be more than 0, not {self.server_rate}")
        _check(0 <= self.latency < math.inf, f"the latency must be 0 or more, not {self.latency}")
        _check(self.window is None or 0 < self.window < math.inf, f"the window must be more than 0, not {self.window}")

    def slices_of(self, layer: int) -> int:
        """Return in how many slices a layer is sent."""
        return self.slices[layer] if self.slices else 1

    def part_seconds(self, layer: int) -> float:
        """Return the transfer time of one slice on a worker's link."""
        return self.layers[layer].transfer / self.slices_of(layer)

    def window_seconds(self) -> float:
        """Return the window of every pool; two slices keep the link busy while acknowledgements travel."""
        return self.window or 2 * max(self.part_seconds(layer) for layer in range(len(self.layers)))


def even_slices(layers: Sequence[LayerTimes], of_largest: int) -> tuple[int, ...]:
    """Return the number of equal slices of each layer, where the largest layer has `of_largest` slices."""
    _check(of_largest > 0, f"the largest layer must have at least one slice, not {of_largest}")
    size = max(layer.transfer for layer in layers) / of_largest
    return tuple(max(1, math.ceil(layer.transfer / size - 1e-9)) if size else 1 for layer in layers)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"{otherwise}.")


@dataclass(frozen=True)
class Interval:
    """What a worker or its link did from `start` to `end`."""

    worker: int
    doing: Doing
    layer: int
    part: int
    clock: int
    start: float
    end: float


@dataclass
class ScheduleOutcome:
    """The result of one policy in a case; times are in seconds."""

    policy: str
    makespan: float = 0.0  # time at which the last push arrives
    step: float = 0.0  # makespan over iterations
    staleness_mean: float = 0.0  # steps by which the used parameters were behind
    staleness_max: int = 0
    waiting: list[float] = field(default_factory=list)  # per layer: mean time that a forward pass waited for it
    intervals: list[Interval] = field(default_factory=list)


def winner(outcomes: Sequence[ScheduleOutcome]) -> ScheduleOutcome:
    """Return the outcome with the least makespan; ties go to less staleness, then to policies other than filo."""
    return min(outcomes, key=lambda outcome: (outcome.makespan, outcome.staleness_mean, outcome.policy == "filo"))


T = TypeVar("T")

# Times are rounded to a nanosecond, so that rounding errors do not separate simultaneous events.
DIGITS, TICK = 9, 1e-9


@dataclass(frozen=True)
class Delivery(Generic[T]):
    """A delivered message, with the begin of its transfer."""

    lane: int
    message: T
    start: float


class SharedLink(Generic[T]):
    """One direction of all links: a lane per worker, each of which keeps the order of its messages.

    A size is the transfer time in seconds on an idle worker's link; the server's link is `server_rate` times as fast.
    """

    def __init__(self, lanes: int, server_rate: float) -> None:
        self._server_rate = server_rate
        self._queues: list[deque[tuple[float, T]]] = [deque() for _ in range(lanes)]
        self._started = [0.0] * lanes
        # All active lanes get the same rate, so one count of served seconds holds for all of them.
        self._service = 0.0
        self._at = 0.0
        self._ends: list[tuple[float, int]] = []  # service at which each active lane's first message is delivered

    def send(self, lane: int, message: T, size: float) -> None:
        """Append a message to a lane, at the time of the last `advance`."""
        self._queues[lane].append((size, message))
        if len(self._queues[lane]) == 1:
            self._begin(lane, self._service)

    def next_time(self) -> float | None:
        """Return when the next message is delivered if nothing else is sent before."""
        if not self._ends:
            return None
        return max(self._at, round(self._at + (self._ends[0][0] - self._service) / self._rate(), DIGITS))

    def advance(self, now: float) -> list[Delivery[T]]:
        """Advance the time, no further than `next_time`; return the delivered messages."""
        if self._ends:
            self._service += (now - self._at) * self._rate()
        self._at = now
        through = []
        while self._ends and self._ends[0][0] <= self._service + TICK:
            end, lane = heapq.heappop(self._ends)
            _, message = self._queues[lane].popleft()
            through.append(Delivery(lane, message, self._started[lane]))
            if self._queues[lane]:
                self._begin(lane, end)
        return through

    def _rate(self) -> float:
        return min(1.0, self._server_rate / len(self._ends))

    def _begin(self, lane: int, service: float) -> None:
        self._started[lane] = self._at
        heapq.heappush(self._ends, (service + self._queues[lane][0][0], lane))


def _size(seconds: float) -> int:
    # Pools count whole bytes; here a byte is what a worker's link carries in a nanosecond.
    return round(seconds * 1e9)


def _window(case: Case) -> int:
    return max(1, _size(case.window_seconds()))


def _zeros(case: Case) -> list[list[int]]:
    return [[0] * case.slices_of(layer) for layer in range(len(case.layers))]


class SimulatedWorker:
    """One worker: its requests, its position in the step, and whether it computes."""

    def __init__(self, case: Case, policy: str, number: int) -> None:
        self.case, self.number = case, number
        self.pool = Pool(policy, Staleness.at_start(len(case.layers), case.workers), _window(case))
        self.slowness = case.slowness[number] if case.slowness else 1.0
        self.clock, self.place = 0, 0  # positions in a step: forward of each layer, then backward
        self.busy, self.ready_since = False, 0.0
        self.copy = _zeros(case)  # the version of each slice
        self.answered = _zeros(case)  # the clock of each slice's last answer

    def task(self) -> tuple[Doing, int] | None:
        """Return the pass that it computes next, or None if it computes or is done."""
        layers = len(self.case.layers)
        if self.busy or self.clock == self.case.iterations:
            return None
        return ("forward", self.place) if self.place < layers else ("backward", 2 * layers - 1 - self.place)

    def lag(self, layer: int) -> int:
        """Return how many steps its copy of a layer is behind."""
        return self.clock - min(self.copy[layer])

    def may_use(self, layer: int) -> bool:
        """Return whether a forward pass may use a layer now."""
        if self.case.waits_for == "answer":
            return min(self.answered[layer]) >= self.clock
        return self.lag(layer) <= self.case.staleness

    def finish(self, doing: Doing, layer: int, now: float) -> None:
        """Finish a layer's pass; after a backward pass each slice is pushed, and pulled for the next step."""
        if doing == "backward":
            self._request(layer)
        self.busy, self.place, self.ready_since = False, self.place + 1, now
        if self.place == 2 * len(self.case.layers):
            self.clock, self.place = self.clock + 1, 0

    def _request(self, layer: int) -> None:
        parts, size = range(self.case.slices_of(layer)), _size(self.case.part_seconds(layer))
        requests = [Request("push", layer, part, self.clock, size) for part in parts]
        if self.clock + 1 < self.case.iterations:
            requests += [Request("pull", layer, part, self.clock + 1, 0) for part in parts]
        if self.case.versions == "slice":  # of a layer, no pull can be answered before the last push has arrived
            requests.sort(key=lambda request: request.part)
        for request in requests:
            self.pool.put(request)

    def take(self, answer: Answer) -> None:
        """Receive a slice; a copy of a layer is as new as its oldest slice."""
        request, version = answer
        self.copy[request.layer][request.part], self.answered[request.layer][request.part] = version, request.clock
        self.pool.known.here[request.layer] = min(self.copy[request.layer])


class SimulatedServer:
    """The server: the pushes that have arrived, the pulls that wait, and a pool of answers for each worker."""

    def __init__(self, case: Case, policy: str) -> None:
        self.case, layers, workers = case, len(case.layers), case.workers
        # The clock of each worker, of each slice of each layer.
        self.clocks = [[[0] * workers for _ in range(case.slices_of(layer))] for layer in range(layers)]
        self.sent = [_zeros(case) for _ in range(workers)]  # the version of each slice that was sent to each worker
        self.lowest, self.holders = [0] * layers, [workers] * layers
        known = [Staleness(self.lowest, self.holders, [0] * layers) for _ in range(workers)]
        self.pools = [Pool(policy, one, _window(case)) for one in known]
        self.asked: list[list[tuple[int, Request]]] = [[] for _ in range(layers)]  # waiting pulls, with their workers

    def version(self, layer: int, part: int) -> int:
        """Return the number of complete steps of a slice, or of its whole layer."""
        return min(self.clocks[layer][part]) if self.case.versions == "slice" else self.lowest[layer]

    def take(self, number: int, request: Request) -> set[int]:
        """Count a push, or keep a pull until its version is reached; return the workers that now have an answer."""
        layer = request.layer
        if request.kind == "pull":
            self.asked[layer].append((number, request))
        else:
            self.clocks[layer][request.part][number] += 1
            slowest = [min(clocks) for clocks in zip(*self.clocks[layer], strict=True)]
            self.lowest[layer], self.holders[layer] = min(slowest), slowest.count(min(slowest))
        waiting, self.asked[layer] = self.asked[layer], []
        answered, size = set(), _size(self.case.part_seconds(layer))
        for worker, pull in waiting:
            if self.version(layer, pull.part) >= pull.clock - self.case.staleness:
                self.pools[worker].put(Request("pull", layer, pull.part, pull.clock, size))
                answered.add(worker)
            else:
                self.asked[layer].append((worker, pull))
        return answered

    def answer(self, number: int) -> Answer | None:
        """Return the next answer to a worker; its version is that of the time at which it is sent."""
        pool, sent = self.pools[number], self.sent[number]
        if (request := pool.next()) is None:
            return None
        layer, part = request.layer, request.part
        sent[layer][part] = version = self.version(layer, part)
        pool.known.here[layer] = min(sent[layer])
        return request, version


def simulate(case: Case, policy: str) -> ScheduleOutcome:
    """Simulate a case with one policy."""
    return _Simulation(case, policy, lambda: None).run()


def compare(case: Case, policies: Sequence[str], on_push: Callable[[], None] = lambda: None) -> list[ScheduleOutcome]:
    """Simulate a case with several policies, in the given order; `on_push` is called when a slice has been pushed."""
    simulations = [_Simulation(case, policy, on_push) for policy in policies]  # all are checked before any runs
    return [simulation.run() for simulation in simulations]


class _Simulation:
    def __init__(self, case: Case, policy: str, on_push: Callable[[], None]) -> None:
        self.case, self.outcome, self.on_push = case, ScheduleOutcome(policy), on_push
        self.workers = [SimulatedWorker(case, policy, number) for number in range(case.workers)]
        self.server = SimulatedServer(case, policy)
        self.up: SharedLink[Request] = SharedLink(case.workers, case.server_rate)
        self.down: SharedLink[Answer] = SharedLink(case.workers, case.server_rate)
        self.waits = [0.0] * len(case.layers)
        self.lags: list[int] = []
        self.now, self.order = 0.0, 0
        self.stirred = set(range(case.workers))  # workers that may be able to begin something
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> ScheduleOutcome:
        self._begin()
        while (moment := self._next_time()) is not None:
            self.now = moment
            # All events of this moment come before any choice, so that a choice sees all of them.
            for pushed in self.up.advance(moment):
                self._up_through(pushed)
            for pulled in self.down.advance(moment):
                self._down_through(pulled)
            while self.events and self.events[0][0] <= moment:
                heapq.heappop(self.events)[2]()
            self._begin()
        steps = self.case.iterations * self.case.workers
        assert all(worker.clock == self.case.iterations for worker in self.workers), "a worker waits for ever"
        self.outcome.step = self.outcome.makespan / self.case.iterations
        self.outcome.staleness_mean, self.outcome.staleness_max = sum(self.lags) / len(self.lags), max(self.lags)
        self.outcome.waiting = [seconds / steps for seconds in self.waits]
        return self.outcome

    def _next_time(self) -> float | None:
        times = [self.up.next_time(), self.down.next_time(), self.events[0][0] if self.events else None]
        return min((time for time in times if time is not None), default=None)

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (round(self.now + seconds, DIGITS), self.order, event))
        self.order += 1

    def _begin(self) -> None:
        """Begin what can begin: passes of layers, and requests that fit into the windows."""
        stirred, self.stirred = sorted(self.stirred), set()
        for worker in (self.workers[number] for number in stirred):
            self._compute(worker)
            while (request := worker.pool.next()) is not None:
                self.up.send(worker.number, request, request.size / 1e9)
            while (answer := self.server.answer(worker.number)) is not None:
                self.down.send(worker.number, answer, answer[0].size / 1e9)

    def _compute(self, worker: SimulatedWorker) -> None:
        if (task := worker.task()) is None:
            return
        doing, layer = task
        if doing == "forward":
            if not worker.may_use(layer):
                return
            self.lags.append(worker.lag(layer))
            self.waits[layer] += self.now - worker.ready_since
        worker.busy = True
        start, clock = self.now, worker.clock

        def finish() -> None:
            self._note(worker.number, doing, layer, 0, clock, start)
            worker.finish(doing, layer, self.now)
            self.stirred.add(worker.number)

        self._later(getattr(self.case.layers[layer], doing) * worker.slowness, finish)

    def _up_through(self, delivery: Delivery[Request]) -> None:
        request, worker = delivery.message, self.workers[delivery.lane]

        def arrive() -> None:
            self.stirred |= self.server.take(worker.number, request)
            minima = list(self.server.lowest), list(self.server.holders)
            self._later(self.case.latency, lambda: acknowledge(*minima))

        def acknowledge(lowest: list[int], holders: list[int]) -> None:
            worker.pool.done(request.size)
            worker.pool.known.lowest[:], worker.pool.known.holders[:] = lowest, holders
            self.stirred.add(worker.number)

        if request.kind == "push":
            self.on_push()
            self._note(worker.number, "push", request.layer, request.part, request.clock, delivery.start)
            self.outcome.makespan = round(self.now + self.case.latency, DIGITS)
        self._later(self.case.latency, arrive)

    def _down_through(self, delivery: Delivery[Answer]) -> None:
        (request, _), worker = delivery.message, self.workers[delivery.lane]

        def arrive() -> None:
            worker.take(delivery.message)
            self.stirred.add(worker.number)
            self._later(self.case.latency, acknowledge)

        def acknowledge() -> None:
            self.server.pools[worker.number].done(request.size)
            self.stirred.add(worker.number)

        self._note(worker.number, "pull", request.layer, request.part, request.clock, delivery.start)
        self._later(self.case.latency, arrive)

    def _note(self, worker: int, doing: Doing, layer: int, part: int, clock: int, start: float) -> None:
        self.outcome.intervals.append(Interval(worker, doing, layer, part, clock, start, self.now))
