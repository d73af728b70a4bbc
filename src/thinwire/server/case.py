"""What the model of the scheduler is asked, and what it answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from thinwire.server.times import LayerTimes

Doing = Literal["forward", "backward", "push", "pull"]


@dataclass(frozen=True)
class Case:
    """What is simulated. Times are seconds; a tuple has one figure per layer or per worker."""

    layers: tuple[LayerTimes, ...]
    workers: int
    iterations: int
    staleness: int = 0  # B: step c may use a copy that has all pushes of the steps before c - B
    slices: tuple[int, ...] = ()  # of each layer; empty: one each
    versions: Literal["slice", "layer"] = "slice"  # what the server counts, and answers as soon as it is whole
    waits_for: Literal["answer", "copy"] = "answer"  # a forward pass: to this step's pull, or any within the bound
    window: float | None = None  # seconds of transfer under way unacknowledged; None: two of the largest slices
    server_rate: float = 1.0  # the server's link, in links of a worker
    latency: float = 0.0  # one way
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
        _check(self.waits_for in ("answer", "copy"), f'one waits for an "answer" or a "copy", not {self.waits_for!r}')
        _check(0 < self.server_rate < math.inf, f"the server's rate must be more than 0, not {self.server_rate}")
        _check(0 <= self.latency < math.inf, f"the latency must be 0 or more, not {self.latency}")
        _check(self.window is None or 0 < self.window < math.inf, f"the window must be more than 0, not {self.window}")

    def slices_of(self, layer: int) -> int:
        """In how many parts a layer travels."""
        return self.slices[layer] if self.slices else 1

    def part_seconds(self, layer: int) -> float:
        """What one slice takes on a worker's link."""
        return self.layers[layer].transfer / self.slices_of(layer)

    def window_seconds(self) -> float:
        """The window of every pool: one slice arrives while the other's acknowledgement is on its way."""
        return self.window or 2 * max(self.part_seconds(layer) for layer in range(len(self.layers)))


def even_slices(layers: Sequence[LayerTimes], of_largest: int) -> tuple[int, ...]:
    """Cut every layer into slices of one size, as the server does; the layer that takes longest into so many."""
    _check(of_largest > 0, f"the largest layer must have at least one slice, not {of_largest}")
    size = max(layer.transfer for layer in layers) / of_largest
    return tuple(max(1, math.ceil(layer.transfer / size - 1e-9)) if size else 1 for layer in layers)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"{otherwise}.")


@dataclass(frozen=True)
class Interval:
    """What a worker, or its link, did from `start` to `end`."""

    worker: int
    doing: Doing
    layer: int
    part: int
    clock: int
    start: float
    end: float


@dataclass
class Outcome:
    """What one policy makes of a case, in seconds."""

    policy: str
    makespan: float = 0.0  # until the last push has arrived
    step: float = 0.0  # makespan over iterations
    staleness_mean: float = 0.0  # steps by which the copies that were used lagged behind
    staleness_max: int = 0
    waiting: list[float] = field(default_factory=list)  # per layer: how long a forward pass waited for it, mean
    intervals: list[Interval] = field(default_factory=list)


def winner(outcomes: Sequence[Outcome]) -> Outcome:
    """The least makespan; of equal ones the least staleness, then one that does not starve, then the first named."""
    return min(outcomes, key=lambda outcome: (outcome.makespan, outcome.staleness_mean, outcome.policy == "filo"))
