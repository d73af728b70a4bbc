"""Density: the share of entries that travels, as a number or as a function of the step.

A schedule is any callable from step to density; the two of the papers are here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
