"""Adaptive: as many entries as pay, by CAT's rule, at every step.

Of all numbers of entries it takes the one that buys the most descent per cost, on gradient + memory, from one
histogram of a sample. The number moves slowly, so that frames keep their size, and stays between two densities.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from thinwire import _native
from thinwire.codec.selection import Cut, Selection, Threshold, count_of
from thinwire.codec.values import SEEDS
from thinwire.codec.vectors import Group, Vector
from thinwire.tune.cost import Array, Cost, Measured
from thinwire.tune.law import Law

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
        random in proportion to their magnitude and scaled up, so that the mean is right; it takes the memory Drop.
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

    def cut(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cut:
        # 1. One histogram of a sample, fine enough for the density of late.
        wanted = min(int(_EXCEED / state.get("density", self.start)), _MOST)
        law = Law(group.histogram(wanted, step), group.n)
        if law.empty:
            return Cut(0.0)
        # 2. The best density of all, and one step towards it.
        density = self._approach(self.best(law) if self.cost.known else self.start, state)
        # 3. The threshold that gives it.
        entries = float(min(max(density * group.n, 1.0), group.n))
        if self.rule == "stochastic":
            scale = float(law.scales(np.array([entries]))[0])
            seed = _native.mix(_native.mix(self.seed & SEEDS ^ step) ^ key)
            group.vectors = [_rounded(v, scale, _native.mix(seed + i)) for i, v in enumerate(group.vectors)]
            return Cut(0.0)
        return Cut(*law.threshold(entries))

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

    def again(self, factor: float) -> Selection:
        # What was rounded at random is right on average; a second selection without a memory would not be.
        return Threshold(0.0) if self.rule == "stochastic" else self.scaled(factor)

    def rescale(self, factor: float, state: dict[str, float]) -> None:
        """Densities have no unit."""

    def expected(self, n: int, step: int) -> int:
        # Where bits alone count the rule goes to its floor, and the first messages should not be ten times as large.
        return count_of(self.floor if self.cost.bits_alone else self.start, n)


@lru_cache(maxsize=1024)
def _candidates(least: float, most: float) -> Array:
    """Numbers of entries to weigh, the same for every step."""
    return np.unique(np.round(np.geomspace(least, most, _CANDIDATES)))


def _rounded(vector: Vector, scale: float, seed: int) -> Vector:
    """Magnitudes below the scale become the scale, with the probability that keeps the mean, or zero."""
    if vector.held is not None:
        raise ValueError('the rule "stochastic" is right on average without a memory: use the memory Drop()')
    x = vector.accumulated()
    generator = torch.Generator(x.device).manual_seed(seed & (1 << 63) - 1)
    drawn = torch.rand(x.shape, generator=generator, device=x.device)
    up = torch.where(drawn * scale < x.abs(), torch.full_like(x, scale).copysign(x), torch.zeros_like(x))
    return replace(vector, gradient=torch.where(x.abs() >= scale, x, up))
