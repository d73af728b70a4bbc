"""Selection: which entries travel.

A selection looks at a group of vectors and returns a `Cut` (a threshold, and how many of the entries equal to it
may pass) or, for random selection, `Strata`. It knows nothing of names, networks and memories.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from thinwire import _native
from thinwire.codec.values import SEEDS
from thinwire.codec.vectors import Group

Density = float | Callable[[int], float]


def density_at(density: Density, step: int) -> float:
    """The density for a step, checked: a schedule may be a user's."""
    value = float(density(step)) if callable(density) else float(density)
    if not 0.0 < value <= 1.0:
        raise ValueError(f"a density must lie in (0, 1], not {value} (step {step})")
    return value


def check_density(density: Density) -> None:
    """Reject an impossible constant at construction, where the user sees it; schedules are checked in use."""
    if not callable(density):
        density_at(density, 0)


@dataclass(frozen=True)
class Scaled:
    """Another density times a factor, up to everything."""

    density: Density
    factor: float

    def __call__(self, step: int) -> float:
        return min(1.0, self.factor * density_at(self.density, step))


@dataclass(frozen=True)
class Warmup:
    """DGC's warm-up: each density for `steps_each` steps, then the last one for ever."""

    densities: Sequence[float]
    steps_each: int

    def __post_init__(self) -> None:
        if not self.densities or self.steps_each < 1:
            raise ValueError("Warmup needs at least one density and steps_each of at least 1")
        for density in self.densities:
            check_density(density)
        object.__setattr__(self, "densities", tuple(self.densities))

    def __call__(self, step: int) -> float:
        return self.densities[min(step // self.steps_each, len(self.densities) - 1)]


@dataclass
class AccuracyCutoff:
    """SparsifyGradients' variable cutoff: one percentile until the accuracy passes a level, then another.

    Call `update(accuracy)` after each evaluation, with the same figure on every rank.
    """

    percentile: float = 90.0
    later: float = 80.0
    level: float = 0.8
    _passed: bool = field(default=False, init=False)

    def update(self, accuracy: float) -> None:
        """Tell it the accuracy of late."""
        self._passed = self._passed or accuracy > self.level

    def __call__(self, step: int) -> float:
        return 1.0 - (self.later if self._passed else self.percentile) / 100.0


# Entries above the threshold that a sample should hold: the kept count is then off by about 1/sqrt of this.
_EXCEED = 1500
_SAMPLE = 1 << 18
# A sample is copied: more elements would take more memory than a very low density is worth.
_MOST = 1 << 21


@dataclass(frozen=True)
class Cut:
    """Entries whose magnitude exceeds `threshold` travel, and the first `ties` of those equal to it."""

    threshold: float
    ties: int = 0


@dataclass(frozen=True)
class Strata:
    """One entry at a random place in each of `count` equal parts; the seed alone tells the places."""

    count: int
    seed: int


class Selection(ABC):
    """Turns a group of vectors into a cut. Frozen; what it must remember lives in the `state` that it is given."""

    shares_threshold: ClassVar[bool] = True  # whether one cut can serve several tensors (scope="global")
    foreseen: ClassVar[bool] = True  # whether `expected` knows more than that no more than all can pass

    @abstractmethod
    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut | Strata:
        """The entries to send at this step. `key` tells groups apart and is the same on every rank."""

    def learn(self, selected: int, magnitudes: float, state: dict[str, float]) -> None:
        """What became of the cut: entries selected and the sum of their magnitudes."""

    def rescale(self, factor: float, state: dict[str, float]) -> None:
        """The unit of the gradients changed: what is remembered is in that unit, unless a selection says otherwise."""
        for key in state:
            state[key] *= factor

    def expected(self, n: int, step: int) -> int:
        """Entries that n elements are expected to yield; n where nothing is known."""
        return n

    def scaled(self, factor: float) -> "Selection":
        """The same rule for `factor` times the entries, where it has a density."""
        return self

    def again(self, factor: float) -> "Selection":
        """What selects from the sums of all that it selected: the same rule, unless that would spoil a mean."""
        return self.scaled(factor)


def count_of(density: float, n: int) -> int:
    """Entries that a density means: at least one of any that exist."""
    return min(n, max(1, math.floor(density * n + 0.5)))


def _sampled(group: Group, density: float, step: int) -> Cut | None:
    """A sampled cut, or None where so much of the group would be sampled that exact is as cheap."""
    wanted = min(int(_EXCEED / density), _MOST)
    if 2 * wanted >= group.n:
        return None
    ((threshold, above),) = group.sampled([density], wanted, step)
    return Cut(threshold, _ties(threshold, density - above, group.n))


def _ties(threshold: float, missing: float, n: int) -> int:
    """Entries equal to the threshold that may pass to make up a missing share; zeros never do."""
    return max(0, math.floor(missing * n + 0.5)) if threshold > 0.0 else 0


@dataclass(frozen=True)
class TopK(Selection):
    """The share `density` of the entries with the largest magnitudes; of equal ones the first.

    Zeros never travel. By default the threshold comes from a sample (the kept share is within a few per cent of
    the density); `exact=True` gives exactly the k largest.
    """

    density: Density
    exact: bool = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut:
        density = density_at(self.density, step)
        k = count_of(density, group.n)
        if k == group.n:
            return Cut(0.0)
        cut = None if self.exact else _sampled(group, density, step)
        if cut is not None:
            return cut
        value, greater, _ = group.order_statistic(k - 1)
        return Cut(value, k - greater if value > 0.0 else 0)

    def expected(self, n: int, step: int) -> int:
        return count_of(density_at(self.density, step), n)

    def scaled(self, factor: float) -> "TopK":
        return TopK(Scaled(self.density, factor), self.exact)


@dataclass(frozen=True)
class Percentile(Selection):
    """SparsifyGradients' rule: magnitudes strictly above this percentile of the magnitudes travel.

    The exact percentile interpolates linearly between the two nearest magnitudes, as numpy does.
    """

    percentile: float | Density = 90.0
    exact: bool = False

    def __post_init__(self) -> None:
        if not callable(self.percentile) and not 0.0 <= self.percentile < 100.0:
            raise ValueError(f"a percentile must lie in [0, 100), not {self.percentile}")

    def _percent(self, step: int) -> float:
        if callable(self.percentile):
            return 100.0 * (1.0 - density_at(self.percentile, step))
        return self.percentile

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut:
        percent = self._percent(step)
        cut = None if self.exact else _sampled(group, 1.0 - percent / 100.0, step)
        return Cut(cut.threshold if cut is not None else self._interpolated(group, percent))

    @staticmethod
    def _interpolated(group: Group, percent: float) -> float:
        place = percent / 100.0 * (group.n - 1)
        below = math.floor(place)
        rank = group.n - 1 - below
        low, greater, _ = group.order_statistic(rank)
        if rank == 0 or rank - 1 >= greater:
            return low
        high = group.order_statistic(rank - 1)[0]
        threshold = float(torch.tensor(low + (high - low) * (place - below), dtype=torch.float32))
        # Rounding to float32 must not lift the threshold to the magnitude that lies above the percentile.
        return threshold if threshold < high else low

    def expected(self, n: int, step: int) -> int:
        return count_of(1.0 - self._percent(step) / 100.0, n)

    def scaled(self, factor: float) -> "Percentile":
        return Percentile(Scaled(lambda step: 1.0 - self._percent(step) / 100.0, factor), self.exact)


@dataclass(frozen=True)
class Threshold(Selection):
    """Magnitudes above a fixed value travel."""

    foreseen: ClassVar[bool] = False
    value: float

    def __post_init__(self) -> None:
        if not (self.value >= 0.0 and math.isfinite(self.value)):
            raise ValueError(f"a threshold must be finite and not negative, not {self.value}")

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut:
        return Cut(self.value)


@dataclass(frozen=True)
class StdDev(Selection):
    """Magnitudes above `deviations` standard deviations travel."""

    deviations: float = 2.0
    exact: bool = False

    def __post_init__(self) -> None:
        if not (self.deviations > 0.0 and math.isfinite(self.deviations)):
            raise ValueError(f"a number of standard deviations must be positive, not {self.deviations}")

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut:
        if self.exact:
            group.settle()
        return Cut(self.deviations * group.moments(group.n if self.exact else _SAMPLE, step).deviation)

    def expected(self, n: int, step: int) -> int:
        return min(n, math.ceil(n / self.deviations**2))  # of values around zero at the most (Chebyshev)


@dataclass(frozen=True)
class Dynamic(Selection):
    """Tsai's rule: the next threshold is the mean of the magnitudes above the present one; no sort.

    The mean of what exceeds a threshold always exceeds it too, so the bare rule climbs until nothing is sent.
    The threshold is therefore kept where a sample says that between `floor` and `ceiling` of the entries pass.
    It starts at `start`, or at the mean magnitude.
    """

    floor: float = 0.001
    ceiling: float = 0.1
    start: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.floor <= self.ceiling <= 1.0:
            raise ValueError(f"Dynamic needs 0 < floor <= ceiling <= 1, not {self.floor} and {self.ceiling}")

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut:
        # Whether this group starves or floods is seen from few exceeding entries: a fifth of TopK's sample.
        wanted = int(_EXCEED / 5 / self.floor)
        (low, _), (high, above) = group.sampled([self.ceiling, self.floor], wanted, step)
        threshold = state.get("threshold", self.start)
        if threshold is None:
            found = group.moments(_SAMPLE, step)
            threshold = found.magnitudes / max(found.count, 1)
        threshold = min(max(threshold, low), high)
        state["threshold"] = threshold
        # At the upper limit ties keep the floor; below it enough entries exceed the threshold.
        return Cut(threshold, _ties(threshold, self.floor - above, group.n) if threshold == high else 0)

    def learn(self, selected: int, magnitudes: float, state: dict[str, float]) -> None:
        state["threshold"] = magnitudes / selected if selected else state["threshold"] / 2.0

    def expected(self, n: int, step: int) -> int:
        return count_of(self.ceiling, n)


@dataclass(frozen=True)
class RandomK(Selection):
    """The share `density` of the entries, at random places that every rank derives from the same seed and step."""

    density: Density
    seed: int = 0
    shares_threshold: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def again(self, factor: float) -> Selection:
        return Threshold(0.0)  # positions are the same on all ranks: selecting again would thin out what has no fill-in

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Strata:
        seed = _native.mix(_native.mix(_native.mix(self.seed & SEEDS) ^ step) ^ key)
        return Strata(count_of(density_at(self.density, step), group.n), seed)

    def expected(self, n: int, step: int) -> int:
        return count_of(density_at(self.density, step), n)
