"""Schedule: which of the waiting push and pull requests is sent first.

A pool has no thread, lock or clock. Its owner calls it from one thread.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import MessageError


@dataclass(frozen=True)
class Request:
    """A push of the gradients, or a pull of the parameters, of one part of a layer."""

    kind: Literal["push", "pull"]
    layer: int  # 0 is used first in the forward pass
    part: int  # of the layer
    clock: int  # the step whose gradients are pushed, or that will use the parameters
    size: int  # estimated bytes


@dataclass
class Staleness:
    """What one side knows of the workers' steps, one figure per layer; its owner updates the lists in place."""

    lowest: list[int]  # c_l: the lowest step over the workers, as the server last reported it
    holders: list[int]  # how many workers are at c_l
    here: list[int]  # the step of this worker's parameters: of the layer's oldest part

    @classmethod
    def at_start(cls, layers: int, workers: int) -> "Staleness":
        """Return the figures before any worker has pushed anything."""
        return cls([0] * layers, [workers] * layers, [0] * layers)


# The request with the smallest key goes first. The second argument counts the requests that the pool was given before.
# Requests of one layer stay in the order in which they were made, with every policy: a pull that overtook the push of
# its own layer would bring parameters that lack that push.
Policy = Callable[[Request, int, Staleness], tuple[int, ...]]


def _stalest(request: Request, arrival: int, known: Staleness) -> tuple[int, ...]:
    """Pull the layer whose parameters here are stalest; push the layer that raises the lowest step of all workers.

    Pulls come before pushes: a pull takes a few bytes, and a layer's next pull is made after its next push.
    """
    layer = request.layer
    if request.kind == "pull":
        return (0, known.here[layer], layer)
    raises = known.holders[layer] == 1 and request.clock == known.lowest[layer]
    return (1, not raises, known.lowest[layer], layer)


POLICIES: dict[str, Policy] = {
    "fifo": lambda request, arrival, known: (arrival,),
    "filo": lambda request, arrival, known: (-arrival,),  # an early request waits as long as newer ones come
    "stalest": _stalest,
    "forward": lambda request, arrival, known: (request.layer,),  # the order in which the next forward pass uses layers
}


def check_policy(name: str) -> str:
    """Return the name of a policy; ValueError lists those that exist."""
    if name not in POLICIES:
        raise ValueError(f"the policy '{name}' is unknown; choose one of {', '.join(POLICIES)}.")
    return name


class Pool:
    """Requests that wait to be sent, and a window that limits the bytes in flight (sent and not acknowledged).

    If the best request does not fit in the window, no request is sent: smaller ones that overtook it could starve it.
    """

    def __init__(self, policy: str, known: Staleness, window: int) -> None:
        if window < 1:
            raise ValueError(f"the window must be at least 1 byte, not {window}.")
        self.known, self.window, self.in_flight = known, window, 0
        self._policy = POLICIES[check_policy(policy)]
        self._arrivals = 0
        # One queue per layer. Only its first request can be next, so that `next` compares layers and not parts.
        self._queues: dict[int, deque[tuple[int, Request]]] = {}

    def put(self, request: Request) -> None:
        """Add a request behind those of its layer. Add parts in their order, and each part's pull after its push."""
        self._queues.setdefault(request.layer, deque()).append((self._arrivals, request))
        self._arrivals += 1

    def next(self) -> Request | None:
        """Remove and return the best request and count it as in flight; None if none waits or it does not fit now.

        When nothing is in flight any request fits.
        """
        if not self._queues:
            return None
        best = min(self._queues.values(), key=self._rank)
        request = best[0][1]
        if self.in_flight and self.in_flight + request.size > self.window:
            return None
        best.popleft()
        if not best:
            del self._queues[request.layer]
        self.in_flight += request.size
        return request

    def sent(self, request: Request, actual_size: int) -> None:
        """Replace a request's estimated bytes by the bytes that it really took."""
        self.in_flight += actual_size - request.size

    def done(self, size: int) -> None:
        """Note that bytes were acknowledged: the window is free for others again. MessageError if they are too many."""
        if size > self.in_flight:
            raise MessageError(f"{size} bytes were acknowledged, but only {self.in_flight} are in flight")
        self.in_flight -= size

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def _rank(self, queue: deque[tuple[int, Request]]) -> tuple[tuple[int, ...], int]:
        arrival, request = queue[0]
        return self._policy(request, arrival, self.known), arrival
