"""The model of the scheduler: a parameter server and its workers as events, with the pools and policies themselves.

The same case has the same outcome to the last bit: nothing is random, and equal times have a fixed order.
"""

import heapq
from collections.abc import Callable, Sequence

from thinwire.server.case import Case, Doing, Interval, Outcome
from thinwire.server.fluid import Delivery, SharedLink, rounded
from thinwire.server.schedule import Request, check_policy
from thinwire.server.simulated import Answer, SimulatedServer, SimulatedWorker


def simulate(case: Case, policy: str) -> Outcome:
    """Run one policy through a case."""
    return _Simulation(case, check_policy(policy).name).run()


def compare(case: Case, policies: Sequence[str]) -> list[Outcome]:
    """Run several policies through a case, in the order given."""
    for policy in policies:
        check_policy(policy)
    return [simulate(case, policy) for policy in policies]


class _Simulation:
    def __init__(self, case: Case, policy: str) -> None:
        self.case, self.outcome = case, Outcome(policy)
        self.workers = [SimulatedWorker(case, policy, number) for number in range(case.workers)]
        self.server = SimulatedServer(case, policy)
        self.up: SharedLink[Request] = SharedLink(case.workers, case.server_rate)
        self.down: SharedLink[Answer] = SharedLink(case.workers, case.server_rate)
        self.waits = [0.0] * len(case.layers)
        self.lags: list[int] = []
        self.now, self.order = 0.0, 0
        self.stirred = set(range(case.workers))  # for whom something happened, so that something may begin
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> Outcome:
        self._begin()
        while (moment := self._next_time()) is not None:
            self.now = moment
            # Everything of this moment happens before anything is chosen, so that a choice sees all of it.
            for pushed in self.up.advance(moment):
                self._up_through(pushed)
            for pulled in self.down.advance(moment):
                self._down_through(pulled)
            while self.events and self.events[0][0] <= moment:
                heapq.heappop(self.events)[2]()
            self._begin()
        steps = self.case.iterations * self.case.workers
        assert all(worker.clock == self.case.iterations for worker in self.workers), "somebody waits for ever"
        self.outcome.step = self.outcome.makespan / self.case.iterations
        self.outcome.staleness_mean, self.outcome.staleness_max = sum(self.lags) / len(self.lags), max(self.lags)
        self.outcome.waiting = [seconds / steps for seconds in self.waits]
        return self.outcome

    def _next_time(self) -> float | None:
        times = [self.up.next_time(), self.down.next_time(), self.events[0][0] if self.events else None]
        return min((time for time in times if time is not None), default=None)

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (rounded(self.now + seconds), self.order, event))
        self.order += 1

    def _begin(self) -> None:
        """Whatever can begin does: layers' passes, and the requests that fit in the windows."""
        stirred, self.stirred = sorted(self.stirred), set()
        for worker in (self.workers[number] for number in stirred):
            self._compute(worker)
            while (request := worker.pool.next()) is not None:
                self.up.send(worker.number, request, request.size / 1e9)
            while (answer := self.server.answer(worker.number)) is not None:
                self.down.send(worker.number, answer, answer.request.size / 1e9)

    def _compute(self, worker: SimulatedWorker) -> None:
        task = worker.task()
        if task is None:
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
            worker.hear(lowest, holders)
            self.stirred.add(worker.number)

        if request.kind == "push":
            self._note(worker.number, "push", request.layer, request.part, request.clock, delivery.start)
            self.outcome.makespan = rounded(self.now + self.case.latency)
        self._later(self.case.latency, arrive)

    def _down_through(self, delivery: Delivery[Answer]) -> None:
        request, worker = delivery.message.request, self.workers[delivery.lane]
        pool = self.server.pools[worker.number]

        def arrive() -> None:
            worker.take(delivery.message)
            self.stirred.add(worker.number)
            self._later(self.case.latency, acknowledge)

        def acknowledge() -> None:
            pool.done(request.size)
            self.stirred.add(worker.number)

        self._note(worker.number, "pull", request.layer, request.part, request.clock, delivery.start)
        self._later(self.case.latency, arrive)

    def _note(self, worker: int, doing: Doing, layer: int, part: int, clock: int, start: float) -> None:
        self.outcome.intervals.append(Interval(worker, doing, layer, part, clock, start, self.now))
