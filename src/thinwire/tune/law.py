"""Law: what every number of entries of a gradient buys, from one histogram of its magnitudes.

CAT's shares of the guaranteed descent: alpha for the largest entries as they are, beta for their signs and one scale,
omega for entries chosen at random in proportion to their magnitude.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thinwire.codec.vectors import Histogram
from thinwire.tune.cost import Array


@dataclass(frozen=True)
class Law:
    """The law of a vector of n elements; counts are of the vector, not of the sample."""

    found: Histogram
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
