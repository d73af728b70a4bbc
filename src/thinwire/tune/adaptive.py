"""Adaptive: as many entries as pay, by CAT's rule, at every step.

Of all numbers of entries it takes the one that buys the most descent per cost, on gradient + memory, from one
histogram of a sample. The number moves slowly, so that frames keep their size, and stays between two densities.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch

from thinwire import _native
from thinwire.codec.selection import Cutoff, Selection, Threshold, entry_count
from thinwire.codec.values import SEEDS
from thinwire.codec.vectors import Group, MagnitudeHistogram, Vector
from thinwire.tune.cost import Array, Cost, Measured


@dataclass(frozen=True)
class Law:
    """The law of a vector of n elements; counts are of the vector, not of the sample."""

    found: MagnitudeHistogram
    n: int

    @cached_property
    def _scale(self) -> float:
        return self.n / max(self.found.taken, 1)

    @cached_property
    def counts(self) -> Array:
        """Entries down to each bin's lower edge, beginning with none."""
        return self._summed(self.found.counts)

    @cached_property
    def magnitudes(self) -> Array:
        """Their sum of magnitudes."""
        return self._summed(self.found.counts * (self.found.low + self.found.high) / 2.0)

    @cached_property
    def squares(self) -> Array:
        """Their sum of squares: as if the magnitudes of a bin were spread evenly."""
        low, high = self.found.low, self.found.high
        return self._summed(self.found.counts * (low * low + low * high + high * high) / 3.0)

    def _summed(self, parts: Array) -> Array:
        sums = np.zeros(len(parts) + 1)
        np.cumsum(parts, out=sums[1:])
        return sums * self._scale

    @property
    def empty(self) -> bool:
        """Whether all is zero."""
        return not len(self.found.counts) or not self.squares[-1] > 0.0

    def alpha(self, entries: Array) -> Array:
        """The share of the squared norm in so many of the largest entries."""
        return np.asarray(np.interp(entries, self.counts, self.squares) / self.squares[-1])

    def beta(self, entries: Array) -> Array:
        """The same if only their signs and one scale travel."""
        sums = np.interp(entries, self.counts, self.magnitudes)
        return np.asarray(sums * sums / (np.maximum(entries, 1e-9) * self.squares[-1]))

    def omega(self, entries: Array) -> Array:
        """The same for a random choice that is right on average: ||g||^2 over the expected ||sent||^2."""
        scales = self.scales(entries)
        above, at = self._above(scales, self.squares), self._above(scales, self.magnitudes)
        return np.asarray(self.squares[-1] / (above + scales * (self.magnitudes[-1] - at)))

    def scales(self, entries: Array) -> Array:
        """What smaller magnitudes are rounded to, or to zero, so that so many entries are expected to travel."""
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
        """A threshold that about so many magnitudes exceed, and how many that are equal to it must pass besides."""
        place = int(np.searchsorted(self.counts, entries, side="left"))
        if place == 0 or place >= len(self.counts):
            return 0.0, 0
        low, high = self.found.low[place - 1], self.found.high[place - 1]
        before, until = self.counts[place - 1], self.counts[place]
        if low == high:  # one value, or many that are equal: they pass by number
            return float(low), max(1, round(entries - before))
        share = (entries - before) / (until - before)
        threshold = high * (low / high) ** share
        # At the bin's end its smallest magnitude is to pass too.
        return float(np.nextafter(np.float32(low), np.float32(0.0)) if share >= 1.0 else threshold), 0


Rule = Literal["plain", "sign", "stochastic"]
Agree = Literal["min", "max", "mean"]

# Entries beyond the threshold that a sample should hold, and the most elements that one takes. Fewer than TopK has: the
# density follows slowly anyway.
_EXCEED = 500
_MOST = 1 << 20
# Numbers of entries that are weighed, evenly spaced by ratio: the best of all is hardly better than the best of these.
_CANDIDATES = 256


@dataclass(frozen=True)
class Adaptive(Selection):
    """The density that buys the most descent for its cost, between `floor` and `ceiling`.

    rule: "plain" (the entries as they are), "sign" (for the values `Sign`), or "stochastic": entries are chosen at
        random in proportion to their magnitude and scaled up, so that the mean is right; it needs `NoFeedback()`.
    start: the density until the cost is known. smooth: the share of the way to the best density that a step goes.
    agree: all ranks of a link take the smallest, largest or mean density (by ratio); None: each takes its own.
    bits, elements: of a value, and of the model whose step the cost is of; `attach` fills them in.
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
            raise ValueError(f"smooth lies in (0, 1], not {self.smooth}; 1 jumps to the best density at once")

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
        law = Law(group.histogram(wanted, step), group.n)
        if law.empty:
            return Cutoff(0.0)
        # 2. The best density of all, and one step towards it.
        density = self._approach(self.best(law) if self.cost.known else self.start, state)
        # 3. The threshold that gives it.
        entries = float(min(max(density * group.n, 1.0), group.n))
        if self.rule == "stochastic":
            scale = float(law.scales(np.array([entries]))[0])
            seed = _native.mix(_native.mix(self.seed & SEEDS ^ step) ^ key)
            group.vectors = [_rounded(v, scale, _native.mix(seed + i)) for i, v in enumerate(group.vectors)]
            return Cutoff(0.0)
        return Cutoff(*law.threshold(entries))

    def best(self, law: Law) -> float:
        """The density that buys the most for its cost."""
        entries = _candidates(max(self.floor * law.n, 1.0), max(self.ceiling * law.n, 1.0))
        gain = {"plain": law.alpha, "sign": law.beta, "stochastic": law.omega}[self.rule](entries)
        # The other tensors of the step are taken to be like this one: its bits stand for their share of the frame.
        step_bits = self.frame_bits(entries, law.n) * max((self.elements or law.n) / law.n, 1.0)
        return float(entries[np.argmax(gain / self.cost.of(step_bits))]) / law.n

    def frame_bits(self, entries: Array, n: int) -> Array:
        """About what so many entries of n take: their values, and positions at little more than the entropy."""
        value = 1.0 if self.rule == "sign" else 8.0 if self.bits is None else self.bits
        return np.asarray(entries * (value + 1.6 + np.log2(np.maximum(n / np.maximum(entries, 1.0), 1.0))))

    def _approach(self, best: float, state: dict[str, float]) -> float:
        """Go part of the way, by ratio; what the ranks agreed on goes before the own wish."""
        state["wish"] = best
        aim = state.get("agreed", best) if self.agree is not None else best
        if "density" not in state:
            state["density"] = aim
        before = math.log(state["density"])
        state["density"] = math.exp(before + self.smooth * (math.log(aim) - before))
        return min(max(state["density"], self.floor), self.ceiling)

    def agreed(self, wishes: list[float]) -> float:
        """What comes of all ranks' wishes."""
        if self.agree == "mean":
            return math.exp(sum(map(math.log, wishes)) / len(wishes))
        return min(wishes) if self.agree == "min" else max(wishes)

    def for_sums(self, factor: float) -> Selection:
        # What was rounded at random is right on average; a second selection without a memory would not be.
        return Threshold(0.0) if self.rule == "stochastic" else self.scaled(factor)

    def rescale(self, factor: float, state: dict[str, float]) -> None:
        """Densities have no unit."""

    def expected(self, n: int, step: int) -> int:
        # Where bits alone count the rule goes to its floor, and the first messages should not be ten times as large.
        return entry_count(self.floor if self.cost.bits_alone else self.start, n)


@lru_cache(maxsize=1024)
def _candidates(least: float, most: float) -> Array:
    """Numbers of entries to weigh, the same for every step."""
    return np.unique(np.round(np.geomspace(least, most, _CANDIDATES)))


def _rounded(vector: Vector, scale: float, seed: int) -> Vector:
    """Magnitudes below the scale become the scale, with the probability that keeps the mean, or zero."""
    if vector.kept is not None:
        raise ValueError('the rule "stochastic" is right on average without a residual: use NoFeedback()')
    x = vector.accumulated()
    generator = torch.Generator(x.device).manual_seed(seed & (1 << 63) - 1)
    drawn = torch.rand(x.shape, generator=generator, device=x.device)
    up = torch.where(drawn * scale < x.abs(), torch.full_like(x, scale).copysign(x), torch.zeros_like(x))
    return replace(vector, gradient=torch.where(x.abs() >= scale, x, up))
