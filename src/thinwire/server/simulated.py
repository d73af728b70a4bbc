"""The two sides of the modelled server: a worker and the server, with the real pools and no time of their own."""

from dataclasses import dataclass

from thinwire.server.case import Case, Doing
from thinwire.server.schedule import Pool, Request, Staleness


def _size(seconds: float) -> int:
    # Pools count whole bytes; in the model a byte is what a worker's link carries in a nanosecond.
    return round(seconds * 1e9)


def _window(case: Case) -> int:
    return max(1, _size(case.window_seconds()))


class SimulatedWorker:
    """One worker: its requests, its place in the step, and whether it computes."""

    def __init__(self, case: Case, policy: str, number: int) -> None:
        self.case, self.number = case, number
        self.pool = Pool(policy, Staleness.at_start(len(case.layers), case.workers), _window(case))
        self.slowness = case.slowness[number] if case.slowness else 1.0
        self.clock, self.place = 0, 0  # places of a step: forward of each layer, then backward of each
        self.busy, self.ready_since = False, 0.0
        self.copy = [[0] * case.slices_of(layer) for layer in range(len(case.layers))]  # versions of the slices

    def task(self) -> tuple[Doing, int] | None:
        """What it would compute next, unless it computes or is done."""
        layers = len(self.case.layers)
        if self.busy or self.clock == self.case.iterations:
            return None
        return ("forward", self.place) if self.place < layers else ("backward", 2 * layers - 1 - self.place)

    def lag(self, layer: int) -> int:
        """How many steps its copy of a layer is behind."""
        return self.clock - self.pool.known.here[layer]

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
        pulls = [Request("pull", layer, part, self.clock, 0) for part in parts]
        if self.case.versions == "layer":
            return pushes + pulls  # no pull can bring this step before its last push is there
        return [request for pair in zip(pushes, pulls, strict=True) for request in pair]

    def take(self, answer: "Answer") -> None:
        """A slice has come; a copy is as new as its oldest slice."""
        layer, part = answer.request.layer, answer.request.part
        self.copy[layer][part] = answer.version
        self.pool.known.here[layer] = min(self.copy[layer])
        answer.minima.tell(self.pool.known)


@dataclass(frozen=True)
class Minima:
    """c_l and its holders, as the server knows them at one moment."""

    lowest: list[int]
    holders: list[int]

    def tell(self, known: Staleness) -> None:
        known.lowest[:], known.holders[:] = self.lowest, self.holders


@dataclass(frozen=True)
class Answer:
    """A slice of the parameters on its way to a worker."""

    request: Request
    version: int
    minima: Minima


class SimulatedServer:
    """The server: what has arrived, who waits for which version, and a pool of answers per worker."""

    def __init__(self, case: Case, policy: str) -> None:
        self.case, layers, workers = case, len(case.layers), case.workers
        # The clock of each worker, of each slice of each layer.
        self.clocks = [[[0] * workers for _ in range(case.slices_of(layer))] for layer in range(layers)]
        self.lowest, self.holders = [0] * layers, [workers] * layers
        known = [Staleness(self.lowest, self.holders, [0] * layers) for _ in range(workers)]
        self.pools = [Pool(policy, one, _window(case)) for one in known]
        self.asked: list[list[tuple[int, Request]]] = [[] for _ in range(layers)]  # pulls that wait, and whose

    def minima(self) -> Minima:
        """The clocks as they are now, for a message."""
        return Minima(list(self.lowest), list(self.holders))

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
            if self.version(layer, pull.part) >= pull.clock + 1 - self.case.staleness:
                self.pools[worker].put(Request("pull", layer, pull.part, pull.clock, size))
                answered.add(worker)
            else:
                self.asked[layer].append((worker, pull))
        return answered

    def answer(self, number: int) -> Answer | None:
        """The next answer to a worker. It is made when it goes, not when it was asked for: it is that much newer."""
        request = self.pools[number].next()
        if request is None:
            return None
        return Answer(request, self.version(request.layer, request.part), self.minima())
