"""Selection: which entries are sent.

A selection looks at a group of vectors and returns a `Cutoff` (a threshold on magnitudes), a `StratifiedSample` (random
positions) or a `Window` (consecutive positions). It knows nothing of parameter names, residuals and networks.
`NativeGroup` computes a group's statistics with the kernels, `TorchGroup` with torch operations: exact ones are equal,
sampled ones equally accurate.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.feedback import Vector
from thinwire.codec.values import SEEDS


@dataclass(frozen=True)
class Moments:
    """The size of a sample and the sums of x, x^2 and |x| over it."""

    count: int
    sum: float
    squares: float
    magnitudes: float

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        if not self.count:
            return 0.0
        mean = self.sum / self.count
        return float(max(self.squares / self.count - mean * mean, 0.0) ** 0.5)


@dataclass(frozen=True)
class MagnitudeHistogram:
    """The magnitudes of a sample in narrow bins, largest first. Empty bins and zeros are left out."""

    taken: int  # elements of the sample, zeros included
    counts: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]  # the smallest magnitude in each bin
    high: npt.NDArray[np.float64]  # the largest


class Group(ABC):
    """One or several vectors that share a threshold."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self.vectors = list(vectors)
        self.n = sum(v.n for v in vectors)

    def accumulate(self) -> None:
        """Add the gradients to the residuals now. This pays where every element is read more than once."""
        self.vectors = [v.accumulate() for v in self.vectors]

    @abstractmethod
    def sampled_thresholds(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        """Return a threshold for each density, from about `wanted` elements, and the share of them that exceeds it.

        The share is less than the density where many magnitudes are equal. Ties then make up the difference.
        """

    @abstractmethod
    def moments(self, wanted: int, seed: int) -> Moments:
        """Return the moments of about `wanted` sampled elements, or of all."""

    @abstractmethod
    def histogram(self, wanted: int, seed: int) -> MagnitudeHistogram:
        """Return the magnitudes of about `wanted` sampled elements, or of all, in bins about 1 % wide."""

    @abstractmethod
    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        """Return the exact magnitude of a rank (0 is the largest), how many are greater and how many are equal."""


class NativeGroup(Group):
    """A group of CPU tensors; the kernels compute its statistics."""

    def sampled_thresholds(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        return _native.sampled_thresholds([v.args for v in self.vectors], list(densities), wanted, seed)

    def moments(self, wanted: int, seed: int) -> Moments:
        total = [0.0] * 4
        for i, vector in enumerate(self.vectors):
            share = -(-wanted * vector.n // max(self.n, 1))
            for j, part in enumerate(_native.moments(vector.args, share, _native.mix(seed + i))):
                total[j] += part
        return Moments(int(total[0]), *total[1:])

    def histogram(self, wanted: int, seed: int) -> MagnitudeHistogram:
        rows = torch.empty(min(self.n, _native.BINS) + 1, 3, dtype=torch.float64)
        taken, bins = _native.histogram([v.args for v in self.vectors], wanted, seed, rows.data_ptr())
        counts, low, high = rows[:bins].numpy().T
        return MagnitudeHistogram(taken, counts, low, high)

    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        value, greater, equal, accumulated = _native.order_statistic([v.args for v in self.vectors], rank)
        if accumulated:
            self.vectors = [v.after_accumulation() for v in self.vectors]
        return value, greater, equal


class TorchGroup(Group):
    """A group on any device; torch operations compute its statistics. It serves GPUs and tests the kernels."""

    def _sample(self, wanted: int, seed: int) -> Tensor:
        if wanted >= self.n:
            return torch.cat([v.accumulated() for v in self.vectors])
        stride = max(1, self.n // max(wanted, 1))
        return torch.cat([_stratified_sample(v, stride, seed) for v in self.vectors])

    def sampled_thresholds(self, densities: Sequence[float], wanted: int, seed: int) -> list[tuple[float, float]]:
        magnitudes = self._sample(wanted, seed).abs().sort(descending=True).values
        found = []
        for density in densities:
            rank = int(density * len(magnitudes))
            if rank >= len(magnitudes):
                found.append((0.0, 1.0))
            else:
                above = int((magnitudes > magnitudes[rank]).sum())
                found.append((float(magnitudes[rank]), above / len(magnitudes)))
        return found

    def moments(self, wanted: int, seed: int) -> Moments:
        x = self._sample(wanted, seed).double()
        return Moments(x.numel(), float(x.sum()), float(x.square().sum()), float(x.abs().sum()))

    def histogram(self, wanted: int, seed: int) -> MagnitudeHistogram:
        magnitudes = self._sample(wanted, seed).abs()
        places = magnitudes.view(torch.int32).long() >> _native.BIN_SHIFT
        # Magnitudes too small to contribute share the first bin, which is left out.
        bottom = max(int(places.max()) - _native.BINS, 0) if len(places) else 0
        places = places.clamp(min=bottom) - bottom
        counts = torch.bincount(places, minlength=_native.BINS + 1)
        low = torch.full_like(counts, torch.inf, dtype=torch.float32).scatter_reduce_(0, places, magnitudes, "amin")
        high = torch.zeros_like(counts, dtype=torch.float32).scatter_reduce_(0, places, magnitudes, "amax")
        used = counts[1:].nonzero().flatten().flip(0) + 1
        parts = [t[used].double().cpu().numpy() for t in (counts, low, high)]
        return MagnitudeHistogram(len(magnitudes), *parts)

    def order_statistic(self, rank: int) -> tuple[float, int, int]:
        self.accumulate()
        magnitudes = torch.cat([v.accumulated() for v in self.vectors]).abs()
        value = magnitudes.topk(rank + 1).values[-1]
        return float(value), int((magnitudes > value).sum()), int((magnitudes == value).sum())


def _stratified_sample(vector: Vector, stride: int, seed: int) -> Tensor:
    """Return one element at a random position of every `stride` elements.

    A fixed position would pick the same columns of a matrix again and again.
    """
    device = vector.gradient.device
    starts = torch.arange(0, max(vector.n - stride, 0) + 1, stride, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    # A tensor of the group may have fewer elements than the stride.
    positions = starts + torch.randint(min(stride, vector.n), starts.shape, generator=generator, device=device)
    residual = vector.residual[positions] if vector.residual is not None else None
    return replace(vector, gradient=vector.gradient.reshape(-1)[positions], residual=residual).accumulated()


Density = float | Callable[[int], float]


def density_at(density: Density, step: int) -> float:
    """Return the density for a step; ValueError if a schedule gives an impossible one."""
    value = float(density(step)) if callable(density) else float(density)
    if not 0.0 < value <= 1.0:
        raise ValueError(f"a density must lie in (0, 1], not {value} (step {step})")
    return value


def check_density(density: Density) -> None:
    """Raise ValueError for an impossible constant. Schedules are checked when they are used."""
    if not callable(density):
        density_at(density, 0)


@dataclass(frozen=True)
class ScaledDensity:
    """A density schedule: another density times a factor, at most 1."""

    density: Density
    factor: float

    def __call__(self, step: int) -> float:
        return min(1.0, self.factor * density_at(self.density, step))


@dataclass(frozen=True)
class Warmup:
    """DGC's warm-up schedule: each density for `steps_each` steps, then the last one for the rest of training."""

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
    """SparsifyGradients' variable cutoff: one percentile until the accuracy exceeds a level, then another.

    Call `update(accuracy)` after each evaluation, with the same value on every rank.
    """

    percentile: float = 90.0
    later: float = 80.0
    level: float = 0.8
    _passed: bool = field(default=False, init=False)

    def update(self, accuracy: float) -> None:
        """Note the accuracy of the latest evaluation."""
        self._passed = self._passed or accuracy > self.level

    def __call__(self, step: int) -> float:
        return 1.0 - (self.later if self._passed else self.percentile) / 100.0


_SAMPLE = 1 << 18  # elements of the samples that moments are computed from


@dataclass(frozen=True)
class Cutoff:
    """Entries whose magnitude exceeds `threshold` are sent, and the first `ties` of those equal to it."""

    threshold: float
    ties: int = 0


@dataclass(frozen=True)
class StratifiedSample:
    """One entry at a random position in each of `count` equal strata is sent; the seed determines the positions."""

    count: int
    seed: int


@dataclass(frozen=True)
class Window:
    """The entries at the positions `start` to `start + count - 1` are sent, zeros too."""

    start: int
    count: int


Rule = Cutoff | StratifiedSample | Window


class Selection(ABC):
    """Base class: a rule that chooses entries. It is frozen; what it learns is kept in the `state` that it is given."""

    by_threshold: ClassVar[bool] = True  # whether it sends magnitudes above one, which several tensors can share
    predictable: ClassVar[bool] = True  # whether `expected` is an estimate, or only the trivial bound n
    spares_small: ClassVar[bool] = True  # whether tensors below the codec's `min_numel` are sent whole instead

    @abstractmethod
    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Rule:
        """Return which entries to send at this step. `key` identifies the group and is the same on every rank."""

    def learn(self, selected: int, magnitudes: float, state: dict[str, float]) -> None:
        """Take note of how many entries were selected, and of the sum of their magnitudes."""

    def rescale(self, factor: float, state: dict[str, float]) -> None:
        """Multiply the state by a factor when the unit of the gradients changes."""
        for key in state:
            state[key] *= factor

    def expected(self, n: int, step: int) -> int:
        """Return how many of n elements are expected to be sent; n where nothing is known."""
        return n

    def scaled(self, factor: float) -> "Selection":
        """Return the same rule for `factor` times the entries, where it has a density."""
        return self

    def for_ranks(self, world: int) -> "Selection":
        """Return the rule for so many ranks."""
        return self

    def for_sums(self, factor: float) -> "Selection":
        """Return the rule for the second selection of a scatter-reduce, which is from the sums of selected entries."""
        return self.scaled(factor)


# The constants and formulas of TopK are in native/cutoff.cpp: the kernels' one-call encoder applies them as well.
entry_count = _native.entry_count


def _sampled_cutoff(group: Group, density: float, step: int) -> Cutoff | None:
    """Return a cutoff from a sample, or None where an exact one is as cheap."""
    wanted = _native.sample_size(density, group.n)
    if not wanted:
        return None
    ((threshold, above),) = group.sampled_thresholds([density], wanted, step)
    return Cutoff(threshold, _native.allowed_ties(threshold, density - above, group.n))


@dataclass(frozen=True)
class TopK(Selection):
    """Select the share `density` of the entries with the largest magnitudes; of equal magnitudes the first ones.

    Zeros are never sent. By default the threshold comes from a sample, and the share sent is within a few per cent of
    the density. `exact=True` selects exactly the k largest.
    """

    density: Density
    exact: bool = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        density = density_at(self.density, step)
        k = entry_count(density, group.n)
        if k == group.n:
            return Cutoff(0.0)
        cutoff = None if self.exact else _sampled_cutoff(group, density, step)
        if cutoff is not None:
            return cutoff
        value, greater, _ = group.order_statistic(k - 1)
        return Cutoff(value, k - greater if value > 0.0 else 0)

    def expected(self, n: int, step: int) -> int:
        return entry_count(density_at(self.density, step), n)

    def scaled(self, factor: float) -> "TopK":
        return TopK(ScaledDensity(self.density, factor), self.exact)


@dataclass(frozen=True)
class Percentile(Selection):
    """Select the magnitudes strictly above this percentile of all magnitudes, as SparsifyGradients does.

    The percentile may be a schedule of densities. With `exact=True` the percentile interpolates linearly between the
    two nearest magnitudes, as in numpy.
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

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        percent = self._percent(step)
        cutoff = None if self.exact else _sampled_cutoff(group, 1.0 - percent / 100.0, step)
        return Cutoff(cutoff.threshold if cutoff is not None else self._interpolated(group, percent))

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
        # Rounding to float32 must not raise the threshold to the magnitude above the percentile.
        return threshold if threshold < high else low

    def expected(self, n: int, step: int) -> int:
        return entry_count(1.0 - self._percent(step) / 100.0, n)

    def scaled(self, factor: float) -> "Percentile":
        return Percentile(ScaledDensity(lambda step: 1.0 - self._percent(step) / 100.0, factor), self.exact)


@dataclass(frozen=True)
class Threshold(Selection):
    """Select the magnitudes above a fixed value."""

    predictable: ClassVar[bool] = False
    value: float

    def __post_init__(self) -> None:
        if not (self.value >= 0.0 and math.isfinite(self.value)):
            raise ValueError(f"a threshold must be finite and not negative, not {self.value}")

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        return Cutoff(self.value)


@dataclass(frozen=True)
class StdDev(Selection):
    """Select the magnitudes above `deviations` standard deviations."""

    deviations: float = 2.0
    exact: bool = False

    def __post_init__(self) -> None:
        if not (self.deviations > 0.0 and math.isfinite(self.deviations)):
            raise ValueError(f"a number of standard deviations must be positive, not {self.deviations}")

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        if self.exact:
            group.accumulate()
        return Cutoff(self.deviations * group.moments(group.n if self.exact else _SAMPLE, step).deviation)

    def expected(self, n: int, step: int) -> int:
        return min(n, math.ceil(n / self.deviations**2))  # an upper bound for values around zero (Chebyshev)


@dataclass(frozen=True)
class Dynamic(Selection):
    """Select by Tsai's moving threshold: the next threshold is the mean of the magnitudes above the present one.

    That mean always exceeds the threshold, so the rule alone would raise it until nothing is sent. The threshold is
    therefore limited to the range in which, according to a sample, a share between `floor` and `ceiling` is sent. It
    starts at `start`, or at the mean magnitude.
    """

    floor: float = 0.001
    ceiling: float = 0.1
    start: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.floor <= self.ceiling <= 1.0:
            raise ValueError(f"Dynamic needs 0 < floor <= ceiling <= 1, not {self.floor} and {self.ceiling}")

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        # The limits need less accuracy than TopK's threshold: a fifth of its sample is enough.
        wanted = int(_native.SAMPLED_ABOVE / 5 / self.floor)
        (low, _), (high, above) = group.sampled_thresholds([self.ceiling, self.floor], wanted, step)
        threshold = state.get("threshold", self.start)
        if threshold is None:
            found = group.moments(_SAMPLE, step)
            threshold = found.magnitudes / max(found.count, 1)
        threshold = min(max(threshold, low), high)
        state["threshold"] = threshold
        # At the upper limit ties make up the share `floor`; below it enough entries exceed the threshold.
        ties = _native.allowed_ties(threshold, self.floor - above, group.n) if threshold == high else 0
        return Cutoff(threshold, ties)

    def learn(self, selected: int, magnitudes: float, state: dict[str, float]) -> None:
        state["threshold"] = magnitudes / selected if selected else state["threshold"] / 2.0

    def expected(self, n: int, step: int) -> int:
        return entry_count(self.ceiling, n)


@dataclass(frozen=True)
class RandomK(Selection):
    """Select the share `density` of the entries at random positions, which all ranks derive from seed and step."""

    density: Density
    seed: int = 0
    by_threshold: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def for_sums(self, factor: float) -> Selection:
        return Threshold(0.0)  # all ranks send the same positions, so the sums have no more entries than one rank sends

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> StratifiedSample:
        seed = _native.mix(_native.mix(_native.mix(self.seed & SEEDS) ^ step) ^ key)
        return StratifiedSample(entry_count(density_at(self.density, step), group.n), seed)

    def expected(self, n: int, step: int) -> int:
        return entry_count(density_at(self.density, step), n)


@dataclass(frozen=True)
class Rotate(Selection):
    """Select a window of consecutive entries that moves on at every step, the same on all ranks.

    Every entry is sent once in `period` = ceil(1 / share) steps. The positions take no bytes, zeros are sent as well,
    and the size of a frame is known beforehand. A window has at least `min_window` entries. A smaller tensor is sent
    whole once in a period, whatever the codec's `min_numel` is. Tensors begin at different phases of the period, which
    evens out the sizes of frames.
    """

    share: Density
    min_window: int = 256
    by_threshold: ClassVar[bool] = False
    spares_small: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_density(self.share)
        if self.min_window < 1:
            raise ValueError(f"a window has at least one entry, not {self.min_window}")

    def for_sums(self, factor: float) -> Selection:
        return self  # all ranks send the same windows, and their sums are sent whole

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Window:
        return self.window(group.n, step, key)

    def period(self, step: int) -> int:
        """Return in how many steps every entry is sent once."""
        # The quotient of floats may exceed a whole number by its rounding error: 1 / (1 / 49) is 49.00000000000001.
        return max(1, math.ceil(1.0 / density_at(self.share, step) - 1e-9))

    def window_size(self, n: int, step: int) -> int:
        """Return the entries of all windows of a tensor of n elements but its last, which may have fewer."""
        return max(-(-n // self.period(step)), min(n, self.min_window))

    def window(self, n: int, step: int, key: int) -> Window:
        """Return the window of a tensor of n elements at a step; it is empty in some steps of a short tensor."""
        period = self.period(step)
        if period == 1:
            return Window(0, n)
        size = self.window_size(n, step)
        start = min(n, (step + key) % period * size)
        return Window(start, min(size, n - start))

    def expected(self, n: int, step: int) -> int:
        return -(-n // self.period(step))
