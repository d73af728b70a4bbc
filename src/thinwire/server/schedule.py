"""The schedule: which of the waiting push and pull requests goes over the wire first.

A pool keeps no thread, no lock and no clock of its own: its owner calls it from one place at a time.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class Request:
    """One slice of one layer, one way: a push of gradients, or a pull of parameters."""

    kind: Literal["push", "pull"]
    layer: int  # 0 is used first in the forward pass
    part: int  # slice of the layer
    clock: int  # the step whose gradients are pushed, or that will use the parameters
    size: int  # estimated bytes


@dataclass
class Staleness:
    """What one side knows of the clocks, a figure per layer; its owner updates the lists in place."""

    lowest: list[int]  # c_l: the lowest iteration over the workers, as last heard from the server
    holders: list[int]  # how many workers are at c_l
    here: list[int]  # the clock of this worker's copy: of its oldest slice

    @classmethod
    def at_start(cls, layers: int, workers: int) -> "Staleness":
        """Nobody has pushed anything."""
        return cls([0] * layers, [workers] * layers, [0] * layers)


class Policy(ABC):
    """An order of layers: whatever the policy, the requests of one layer keep the order in which they came.

    A pull that overtook its own layer's push would bring a copy without it: that much staler, and asked for in vain.
    """

    name: ClassVar[str]

    @abstractmethod
    def key(self, request: Request, arrival: int, known: Staleness) -> tuple[int, ...]:
        """The request with the smallest key goes first; `arrival` counts the requests that the pool was given."""


class Fifo(Policy):
    """In the order of arrival."""

    name = "fifo"

    def key(self, request: Request, arrival: int, known: Staleness) -> tuple[int, ...]:
        """The first to come has the smallest key."""
        return (arrival,)


class Filo(Policy):
    """The last to come goes first. It starves: what came early waits for as long as anything newer comes."""

    name = "filo"

    def key(self, request: Request, arrival: int, known: Staleness) -> tuple[int, ...]:
        """The last to come has the smallest key."""
        return (-arrival,)


class Forward(Policy):
    """First needed, first served: in the order in which the next forward pass uses the layers."""

    name = "forward"

    def key(self, request: Request, arrival: int, known: Staleness) -> tuple[int, ...]:
        """The lowest layer first."""
        return (request.layer,)


class Stalest(Policy):
    """Pull the layer whose copy here is stalest; push the layer whose arrival raises the server's minimum."""

    name = "stalest"

    def key(self, request: Request, arrival: int, known: Staleness) -> tuple[int, ...]:
        """Pulls come before pushes: asking takes a few bytes, and a layer's next pull comes after its next push."""
        layer = request.layer
        if request.kind == "pull":
            return (0, known.here[layer], layer)
        raises = known.holders[layer] == 1 and request.clock == known.lowest[layer]
        return (1, not raises, known.lowest[layer], layer)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Fifo(), Filo(), Stalest(), Forward())}


def check_policy(name: str) -> Policy:
    """The policy of that name, or a ValueError that lists them."""
    if name not in POLICIES:
        raise ValueError(f"the policy '{name}' is unknown; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]


class Pool:
    """Requests that wait to be sent, and a window of bytes that may be under way unacknowledged.

    If the best request does not fit in the window nothing goes: a smaller one that slipped by would starve it.
    """

    def __init__(self, policy: str, known: Staleness, window: int) -> None:
        if window < 1:
            raise ValueError(f"the window must be at least 1 byte, not {window}.")
        self.known, self.window, self.under_way = known, window, 0
        self._policy = check_policy(policy)
        self._arrivals = 0
        # A line per layer: only its first can go next, so that a choice looks at layers and not at slices.
        self._lines: dict[int, deque[tuple[int, Request]]] = {}

    def put(self, request: Request) -> None:
        """Let a request wait behind those of its layer: put slices in their order, each one's pull after its push."""
        self._lines.setdefault(request.layer, deque()).append((self._arrivals, request))
        self._arrivals += 1

    def next(self) -> Request | None:
        """Take out the best request and count it as under way; None if none waits or it does not fit now.

        When nothing is under way any one request fits.
        """
        best = min(self._lines.values(), key=self._rank, default=None)
        if best is None:
            return None
        request = best[0][1]
        if self.under_way and self.under_way + request.size > self.window:
            return None
        best.popleft()
        if not best:
            del self._lines[request.layer]
        self.under_way += request.size
        return request

    def sent(self, request: Request, actual_size: int) -> None:
        """Replace a request's estimate by the bytes that it really took."""
        self.under_way += actual_size - request.size

    def done(self, size: int) -> None:
        """Bytes were acknowledged: their credit returns."""
        if size > self.under_way:
            raise ValueError(f"{size} bytes were acknowledged, but only {self.under_way} are under way.")
        self.under_way -= size

    def clear(self) -> list[Request]:
        """Forget what waits and what is under way, as after a lost connection; returns what waited, as it came."""
        waiting = sorted((item for line in self._lines.values() for item in line), key=lambda item: item[0])
        self._lines.clear()
        self.under_way = 0
        return [request for _, request in waiting]

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def _rank(self, line: deque[tuple[int, Request]]) -> tuple[tuple[int, ...], int]:
        arrival, request = line[0]
        return self._policy.key(request, arrival, self.known), arrival
