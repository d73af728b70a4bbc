"""Adaptive: a selection that chooses the density with the most descent per cost at every step (CAT's rule).

It estimates the descent of every number of entries from one histogram of a sample of gradient + residual, and divides
it by the cost of sending them. The density changes slowly, so that frames keep their size, and stays within bounds.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch

from thinwire import _native
from thinwire.codec.feedback import Vector
from thinwire.codec.selection import Cutoff, Group, MagnitudeHistogram, Selection, Threshold, entry_count
from thinwire.codec.values import SEEDS
from thinwire.tune.cost import Array, Cost, Measured


@dataclass(frozen=True)
class MagnitudeCurve:
    """Sums over the largest entries of a vector of n elements, as functions of their number, from a histogram."""

    found: MagnitudeHistogram
    n: int

    @cached_property
    def _scale(self) -> float:
        return self.n / max(self.found.taken, 1)

    @cached_property
    def counts(self) -> Array:
        """The number of entries down to each bin's lower edge, beginning with 0."""
        return self._summed(self.found.counts)

    @cached_property
    def magnitudes(self) -> Array:
        """The sum of magnitudes of so many largest entries."""
        return self._summed(self.found.counts * (self.found.low + self.found.high) / 2.0)

    @cached_property
    def squares(self) -> Array:
        """The sum of squares of so many largest entries, with magnitudes spread evenly within a bin."""
        low, high = self.found.low, self.found.high
        return self._summed(self.found.counts * (low * low + low * high + high * high) / 3.0)

    def _summed(self, parts: Array) -> Array:
        sums = np.zeros(len(parts) + 1)
        np.cumsum(parts, out=sums[1:])
        return sums * self._scale

    @property
    def empty(self) -> bool:
        """Whether all entries are zero."""
        return not len(self.found.counts) or not self.squares[-1] > 0.0

    def alpha(self, entries: Array) -> Array:
        """CAT's alpha: the share of the squared norm in so many of the largest entries."""
        return np.asarray(np.interp(entries, self.counts, self.squares) / self.squares[-1])

    def beta(self, entries: Array) -> Array:
        """CAT's beta: the same if only signs and one scale are sent."""
        sums = np.interp(entries, self.counts, self.magnitudes)
        return np.asarray(sums * sums / (np.maximum(entries, 1e-9) * self.squares[-1]))

    def omega(self, entries: Array) -> Array:
        """CAT's omega: the same for an unbiased random selection, ||g||^2 / E ||sent||^2."""
        scales = self.scales(entries)
        above, at = self._above(scales, self.squares), self._above(scales, self.magnitudes)
        return np.asarray(self.squares[-1] / (above + scales * (self.magnitudes[-1] - at)))

    def scales(self, entries: Array) -> Array:
        """The magnitude to which smaller ones are rounded at random, or to zero, for an expected number of entries."""
        low = np.maximum(self.found.low, 1e-38)
        rest = self.magnitudes[-1] - self.magnitudes
        # Expected entries where the scale is each bin's lower edge; before the first, where it exceeds all.
        expected = self.counts[1:] + rest[1:] / low
        top = self.magnitudes[-1] / self.found.high[0]
        beyond = self.magnitudes[-1] / np.maximum(entries, 1e-9)
        edges, at = np.concatenate([[self.found.high[0]], low]), np.concatenate([[top], expected])
        inside = np.exp(np.interp(entries, np.maximum.accumulate(at), np.log(edges)))
        return np.asarray(np.where(entries < top, beyond, inside))

    def _above(self, scales: Array, sums: Array) -> Array:
        """Sums over the magnitudes above each scale."""
        edges = np.concatenate([[self.found.high[0]], self.found.low])[::-1]
        return np.asarray(np.interp(scales, edges, sums[::-1]))

    def threshold(self, entries: float) -> tuple[float, int]:
        """A threshold that about so many magnitudes exceed, and how many entries equal to it are sent too."""
        place = int(np.searchsorted(self.counts, entries, side="left"))
        if place == 0 or place >= len(self.counts):
            return 0.0, 0
        low, high = self.found.low[place - 1], self.found.high[place - 1]
        before, until = self.counts[place - 1], self.counts[place]
        if low == high:  # all magnitudes of the bin are equal
            return float(low), max(1, round(entries - before))
        share = (entries - before) / (until - before)
        threshold = high * (low / high) ** share
        # At the end of the bin its smallest magnitude must exceed the threshold too.
        return float(np.nextafter(np.float32(low), np.float32(0.0)) if share >= 1.0 else threshold), 0


Rule = Literal["plain", "sign", "stochastic"]
Agree = Literal["min", "max", "mean"]

# Entries above the threshold that a sample should contain, and the largest sample. Fewer than TopK takes, because the
# density changes slowly anyway.
_EXCEED = 500
_MOST = 1 << 20
# Numbers of entries that are compared, evenly spaced on a logarithmic scale.
_CANDIDATES = 256


@dataclass(frozen=True)
class Adaptive(Selection):
    """Sends the density with the most descent for its cost, between `floor` and `ceiling`.

    rule: "plain" (the entries as they are), "sign" (for the values `Sign`), or "stochastic": entries are chosen at
        random in proportion to their magnitude and scaled up, which is unbiased; it needs `NoFeedback()`.
    start: the density until the cost is known. smooth: the part of the way to the best density that a step goes.
    agree: all ranks of a link use the smallest, largest or geometric mean density; None: each rank uses its own.
    bits, elements: bits of a value, and elements of the model; `attach` fills them in.
    """

    cost: Cost = field(default_factory=Measured)
    rule: Rule = field(default="plain", kw_only=True)
    floor: float = field(default=0.001, kw_only=True)
    ceiling: float = field(default=0.1, kw_only=True)
    start: float = field(default=0.01, kw_only=True)
    smooth: float = field(default=0.2, kw_only=True)
    agree: Agree | None = field(default="mean", kw_only=True)
    bits: float | None = field(default=None, kw_only=True, repr=False)
    elements: int | None = field(default=None, kw_only=True, repr=False)
    seed: int = field(default=0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.rule not in ("plain", "sign", "stochastic"):
            raise ValueError(f'the rule is "plain", "sign" or "stochastic", not {self.rule!r}')
        if self.agree not in ("min", "max", "mean", None):
            raise ValueError(f'agree is "min", "max", "mean" or None, not {self.agree!r}')
        if not 0.0 < self.floor <= self.start <= self.ceiling <= 1.0:
            raise ValueError(
                f"Adaptive needs 0 < floor <= start <= ceiling <= 1, not {self.floor}, {self.start}, {self.ceiling}"
            )
        if not 0.0 < self.smooth <= 1.0:
            raise ValueError(f"smooth lies in (0, 1], not {self.smooth}; 1 uses the best density at once")

    def within(self, *, bits: float, elements: int, seed: int) -> "Adaptive":
        """The same selection for a model of so many elements, with values of so many bits."""
        return replace(
            self,
            bits=bits if self.bits is None else self.bits,
            elements=elements if self.elements is None else self.elements,
            seed=seed,
        )

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        # 1. One histogram of a sample, fine enough for the density of late.
        wanted = min(int(_EXCEED / state.get("density", self.start)), _MOST)
        curve = MagnitudeCurve(group.histogram(wanted, step), group.n)
        if curve.empty:
            return Cutoff(0.0)
        # 2. The best density of all, and one step towards it.
        density = self._approach(self.best(curve) if self.cost.known else self.start, state)
        # 3. The threshold that gives it.
        entries = float(min(max(density * group.n, 1.0), group.n))
        if self.rule == "stochastic":
            scale = float(curve.scales(np.array([entries]))[0])
            seed = _native.mix(_native.mix(self.seed & SEEDS ^ step) ^ key)
            group.vectors = [_rounded(v, scale, _native.mix(seed + i)) for i, v in enumerate(group.vectors)]
            return Cutoff(0.0)
        return Cutoff(*curve.threshold(entries))

    def best(self, curve: MagnitudeCurve) -> float:
        """The density with the most descent for its cost."""
        entries = _candidates(max(self.floor * curve.n, 1.0), max(self.ceiling * curve.n, 1.0))
        gain = {"plain": curve.alpha, "sign": curve.beta, "stochastic": curve.omega}[self.rule](entries)
        # The cost is that of a whole step: assume that the other tensors send the same density.
        step_bits = self.frame_bits(entries, curve.n) * max((self.elements or curve.n) / curve.n, 1.0)
        return float(entries[np.argmax(gain / self.cost.of(step_bits))]) / curve.n

    def frame_bits(self, entries: Array, n: int) -> Array:
        """Approximate bits of so many entries of n: their values, and positions near the entropy."""
        value = 1.0 if self.rule == "sign" else 8.0 if self.bits is None else self.bits
        return np.asarray(entries * (value + 1.6 + np.log2(np.maximum(n / np.maximum(entries, 1.0), 1.0))))

    def _approach(self, best: float, state: dict[str, float]) -> float:
        """Move the density part of the way, on a logarithmic scale, to what the ranks agreed on or to the own best."""
        state["wish"] = best
        aim = state.get("agreed", best) if self.agree is not None else best
        if "density" not in state:
            state["density"] = aim
        before = math.log(state["density"])
        state["density"] = math.exp(before + self.smooth * (math.log(aim) - before))
        return min(max(state["density"], self.floor), self.ceiling)

    def agreed(self, wishes: list[float]) -> float:
        """The density that follows from all ranks' best ones."""
        if self.agree == "mean":
            return math.exp(sum(map(math.log, wishes)) / len(wishes))
        return min(wishes) if self.agree == "min" else max(wishes)

    def for_sums(self, factor: float) -> Selection:
        # Values that were rounded at random are unbiased; selecting again without a residual would not be.
        return Threshold(0.0) if self.rule == "stochastic" else self.scaled(factor)

    def rescale(self, factor: float, state: dict[str, float]) -> None:
        """Densities have no unit."""

    def expected(self, n: int, step: int) -> int:
        # If only bits count, the rule goes to its floor: do not make the first messages ten times as large.
        return entry_count(self.floor if self.cost.bits_alone else self.start, n)


@lru_cache(maxsize=1024)
def _candidates(least: float, most: float) -> Array:
    """The numbers of entries to compare."""
    return np.unique(np.round(np.geomspace(least, most, _CANDIDATES)))


def _rounded(vector: Vector, scale: float, seed: int) -> Vector:
    """Round magnitudes below the scale to the scale or to zero, at random, so that the mean is unchanged."""
    if vector.kept is not None:
        raise ValueError('the rule "stochastic" is right on average without a residual: use NoFeedback()')
    x = vector.accumulated()
    generator = torch.Generator(x.device).manual_seed(seed & (1 << 63) - 1)
    drawn = torch.rand(x.shape, generator=generator, device=x.device)
    up = torch.where(drawn * scale < x.abs(), torch.full_like(x, scale).copysign(x), torch.zeros_like(x))
    return replace(vector, gradient=torch.where(x.abs() >= scale, x, up))
