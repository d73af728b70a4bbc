"""The two sides of the modelled server: a worker and the server, with the real pools and no time of their own."""

from dataclasses import dataclass

from thinwire.server.case import Case, Doing
from thinwire.server.schedule import Pool, Request, Staleness


def _size(seconds: float) -> int:
    # Pools count whole bytes; in the model a byte is what a worker's link carries in a nanosecond.
    return round(seconds * 1e9)


def _window(case: Case) -> int:
    return max(1, _size(case.window_seconds()))


def _zeros(case: Case) -> list[list[int]]:
    """A figure for each slice of each layer."""
    return [[0] * case.slices_of(layer) for layer in range(len(case.layers))]


class SimulatedWorker:
    """One worker: its requests, its place in the step, and whether it computes."""

    def __init__(self, case: Case, policy: str, number: int) -> None:
        self.case, self.number = case, number
        self.pool = Pool(policy, Staleness.at_start(len(case.layers), case.workers), _window(case))
        self.slowness = case.slowness[number] if case.slowness else 1.0
        self.clock, self.place = 0, 0  # places of a step: forward of each layer, then backward of each
        self.busy, self.ready_since = False, 0.0
        self.copy = _zeros(case)  # the version of each slice
        self.answered = _zeros(case)  # the clock of each slice's last answer

    def task(self) -> tuple[Doing, int] | None:
        """What it would compute next, unless it computes or is done."""
        layers = len(self.case.layers)
        if self.busy or self.clock == self.case.iterations:
            return None
        return ("forward", self.place) if self.place < layers else ("backward", 2 * layers - 1 - self.place)

    def lag(self, layer: int) -> int:
        """How many steps its copy of a layer is behind."""
        return self.clock - min(self.copy[layer])

    def may_use(self, layer: int) -> bool:
        """Whether a forward pass need not wait for a layer."""
        if self.case.waits_for == "answer":
            return min(self.answered[layer]) >= self.clock
        return self.lag(layer) <= self.case.staleness

    def finish(self, doing: Doing, layer: int, now: float) -> None:
        """A layer's pass is done; after its backward pass each slice is pushed, and pulled for the next step."""
        if doing == "backward":
            for request in self._requests(layer):
                self.pool.put(request)
        self.busy, self.place, self.ready_since = False, self.place + 1, now
        if self.place == 2 * len(self.case.layers):
            self.clock, self.place = self.clock + 1, 0

    def _requests(self, layer: int) -> list[Request]:
        parts, size = range(self.case.slices_of(layer)), _size(self.case.part_seconds(layer))
        pushes = [Request("push", layer, part, self.clock, size) for part in parts]
        if self.clock + 1 == self.case.iterations:
            return pushes
        pulls = [Request("pull", layer, part, self.clock + 1, 0) for part in parts]
        if self.case.versions == "layer":
            return pushes + pulls  # no pull can bring this step before its last push is there
        return [request for pair in zip(pushes, pulls, strict=True) for request in pair]

    def take(self, answer: "Answer") -> None:
        """A slice has come; a copy is as new as its oldest slice."""
        layer, part = answer.request.layer, answer.request.part
        self.copy[layer][part], self.answered[layer][part] = answer.version, answer.request.clock
        self.pool.known.here[layer] = min(self.copy[layer])

    def hear(self, lowest: list[int], holders: list[int]) -> None:
        """An acknowledgement told where the server's minima are."""
        self.pool.known.lowest[:], self.pool.known.holders[:] = lowest, holders


@dataclass(frozen=True)
class Answer:
    """A slice of the parameters on its way to a worker."""

    request: Request
    version: int


class SimulatedServer:
    """The server: what has arrived, who waits for which version, and a pool of answers per worker."""

    def __init__(self, case: Case, policy: str) -> None:
        self.case, layers, workers = case, len(case.layers), case.workers
        # The clock of each worker, of each slice of each layer.
        self.clocks = [[[0] * workers for _ in range(case.slices_of(layer))] for layer in range(layers)]
        self.sent = [_zeros(case) for _ in range(workers)]  # the version of each slice that went to each worker
        self.lowest, self.holders = [0] * layers, [workers] * layers
        known = [Staleness(self.lowest, self.holders, [0] * layers) for _ in range(workers)]
        self.pools = [Pool(policy, one, _window(case)) for one in known]
        self.asked: list[list[tuple[int, Request]]] = [[] for _ in range(layers)]  # pulls that wait, and whose

    def version(self, layer: int, part: int) -> int:
        """All pushes of the clocks before it have arrived: of this slice, or of its whole layer."""
        return min(self.clocks[layer][part]) if self.case.versions == "slice" else self.lowest[layer]

    def take(self, number: int, request: Request) -> set[int]:
        """A push counts, a pull waits until its version is reached; returns the workers that now have an answer."""
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
        """The next answer to a worker. It is made when it goes, not when it was asked for: it is that much newer."""
        pool, sent = self.pools[number], self.sent[number]
        request = pool.next()
        if request is None:
            return None
        layer, part = request.layer, request.part
        sent[layer][part] = version = self.version(layer, part)
        pool.known.here[layer] = min(sent[layer])
        return Answer(request, version)
