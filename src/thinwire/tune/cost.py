"""Costs: the cost of a training step as a function of the bits it sends, for the selection `Adaptive`.

Only ratios matter, so that each cost has its natural unit. Without a fixed part, sending a single entry would always be
the best choice: the fixed cost of computing and latency is what makes it worthwhile to send more.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Cost(ABC):
    """The cost of a step as a function of the bits of its frame."""

    @abstractmethod
    def of(self, bits: Array) -> Array:
        """The cost of a step whose frame has so many bits."""

    @property
    def known(self) -> bool:
        """Whether the cost has been measured yet."""
        return True

    @property
    def bits_alone(self) -> bool:
        """Whether the cost has no fixed part, so that the fewest entries are always best."""
        return False


@dataclass(frozen=True)
class Payload(Cost):
    """Counts bits alone: the fewest bytes in all, however long training takes. The density goes to its floor."""

    def of(self, bits: Array) -> Array:
        return np.maximum(bits, 1.0)

    @property
    def bits_alone(self) -> bool:
        return True


@dataclass(frozen=True)
class Affine(Cost):
    """A fixed time per step (`latency` in seconds, computing included) and a time per bit (`bandwidth` in bit/s)."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0.0 and math.isfinite(self.latency)):
            raise ValueError(f"a latency is a number of seconds, not {self.latency}")
        if not self.bandwidth > 0.0:
            raise ValueError(f"a bandwidth is a positive number of bits a second, not {self.bandwidth}")

    def of(self, bits: Array) -> Array:
        return self.latency + np.maximum(bits, 1.0) / self.bandwidth

    @property
    def bits_alone(self) -> bool:
        return self.latency == 0.0


@dataclass(frozen=True)
class Packets(Cost):
    """Whole packets of `mtu` bytes with `header` bytes each, and a fixed cost per step worth `fixed` bytes."""

    mtu: int = 1448
    header: int = 66
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if self.mtu < 1 or self.header < 0 or self.fixed < 0.0:
            raise ValueError(f"Packets needs an mtu above 0, header and fixed of at least 0, not {self}")

    def of(self, bits: Array) -> Array:
        packets = np.maximum(np.ceil(bits / (8.0 * self.mtu)), 1.0)
        return self.fixed + packets * (self.mtu + self.header)


@dataclass
class Measured(Cost):
    """A fixed time and a time per bit, fitted to measured exchanges with exponentially decaying weights.

    A link feeds it, with figures that all ranks agree on. Where frames hardly vary in size the two cannot be told
    apart, and all of the exchange beyond the latency that was measured counts as time per bit.
    """

    decay: float = 0.95  # weight of an observation after the next one: closer to 1 is steadier and adapts more slowly
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5, init=False, repr=False, compare=False)
    _beside: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"Measured needs a decay between 0 and 1, not {self.decay}")

    def observe(self, bits: float, seconds: float, *, latency: float = 0.0, beside: float | None = None) -> None:
        """Record that exchanging `bits` took `seconds`, of which messages were on their way for `latency` at least.

        beside: the rest of the step's time.
        """
        rest = max(seconds - latency, 0.0)
        new = (1.0, bits, rest, bits * bits, bits * rest)
        self._sums = [self.decay * old + value for old, value in zip(self._sums, new, strict=True)]
        if beside is not None:
            rate = 1.0 if self._beside == 0.0 else 1.0 - self.decay
            self._beside += rate * (beside + min(latency, seconds) - self._beside)

    @property
    def known(self) -> bool:
        return self._sums[0] > 0.0 and self._beside > 0.0

    @property
    def per_bit(self) -> float:
        """Seconds per additional bit."""
        weight, x, y, xx, xy = self._sums
        if not weight or not x:
            return 0.0
        average, spread = y / x, xx / weight - (x / weight) ** 2
        if spread < (0.2 * x / weight) ** 2:
            return average
        slope = (xy / weight - x * y / weight**2) / spread
        # Keep the slope within sensible bounds, whatever the noise.
        return min(max(slope, 0.02 * average), average)

    @property
    def fixed(self) -> float:
        """Seconds of a step that do not depend on the bits sent."""
        weight, x, y, *_ = self._sums
        latency = (y - self.per_bit * x) / weight if weight else 0.0
        return self._beside + max(latency, 0.0)

    def of(self, bits: Array) -> Array:
        return self.fixed + np.maximum(bits, 1.0) * max(self.per_bit, 1e-15)
