"""Costs: what a step that sends so many bits costs, as values that a selection can weigh against what they buy.

Only ratios matter, so that every cost has the unit that is natural to it. A cost without a fixed part asks for one
entry a step: computing and waiting are what make it pay to send more.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Cost(ABC):
    """What a step costs, by the bits of its frame."""

    @abstractmethod
    def of(self, bits: Array) -> Array:
        """The cost of a step whose frame has so many bits."""

    @property
    def known(self) -> bool:
        """Whether there is anything to go by yet."""
        return True

    @property
    def bits_alone(self) -> bool:
        """Whether a step costs nothing but its bits: then as few entries as possible are the best."""
        return False


@dataclass(frozen=True)
class Payload(Cost):
    """Bits alone: the fewest bytes until the target, however long it takes. Goes to the selection's floor."""

    def of(self, bits: Array) -> Array:
        return np.maximum(bits, 1.0)

    @property
    def bits_alone(self) -> bool:
        return True


@dataclass(frozen=True)
class Affine(Cost):
    """A fixed time a step, and a time per bit: `latency` in seconds, computing included, `bandwidth` in bits/s."""

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
    """Whole packets of `mtu` bytes with `header` bytes each, and `fixed` bytes' worth of a step's other cost."""

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
    """A fixed time and a time per bit, fitted to what exchanges took; older figures count less and less.

    A link feeds it, with figures that all ranks agree on. Where frames hardly vary in size the two cannot be told
    apart, and all of the exchange counts as time per bit.
    """

    decay: float = 0.95  # what an observation weighs after one more: closer to 1 is steadier and slower
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5, init=False, repr=False, compare=False)
    _beside: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"Measured needs a decay between 0 and 1, not {self.decay}")

    def observe(self, bits: float, seconds: float, *, beside: float | None = None) -> None:
        """A frame of so many bits took so long to exchange; `beside` is what the step took apart from that."""
        new = (1.0, bits, seconds, bits * bits, bits * seconds)
        self._sums = [self.decay * old + value for old, value in zip(self._sums, new, strict=True)]
        if beside is not None:
            rate = 1.0 if self._beside == 0.0 else 1.0 - self.decay
            self._beside += rate * (beside - self._beside)

    @property
    def known(self) -> bool:
        return self._sums[0] > 0.0 and self._beside > 0.0

    @property
    def per_bit(self) -> float:
        """Seconds that one more bit takes."""
        weight, x, y, xx, xy = self._sums
        if not weight or not x:
            return 0.0
        average, spread = y / x, xx / weight - (x / weight) ** 2
        if spread < (0.2 * x / weight) ** 2:
            return average
        slope = (xy / weight - x * y / weight**2) / spread
        # Noise may tilt the line any way; a bit costs something, and no more than if nothing else did.
        return min(max(slope, 0.02 * average), average)

    @property
    def fixed(self) -> float:
        """Seconds that a step takes whatever is sent."""
        weight, x, y, *_ = self._sums
        latency = (y - self.per_bit * x) / weight if weight else 0.0
        return self._beside + max(latency, 0.0)

    def of(self, bits: Array) -> Array:
        return self.fixed + np.maximum(bits, 1.0) * max(self.per_bit, 1e-15)
