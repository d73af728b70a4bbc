"""Values: how a kept value is written, from 32 bits down to one.

A format is a frozen value; the kernels know it by its code, which is also what travels in a frame.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Values(ABC):
    """A value format."""

    seed: int | None = None  # of stochastic rounding; None rounds to nearest

    @property
    @abstractmethod
    def code(self) -> int:
        """What travels in a section's header."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of one value, scales not counted."""

    @property
    def scaled(self) -> bool:
        """Whether each block of 512 values carries two scales of 32 bits."""
        return self.code >= 3


@dataclass(frozen=True)
class Float32(Values):
    """The value as it is."""

    @property
    def code(self) -> int:
        return 0

    @property
    def bits(self) -> int:
        return 32


@dataclass(frozen=True)
class Float16(Values):
    """Half precision, to nearest; beyond 65,504 the largest value travels and the rest stays in the memory."""

    @property
    def code(self) -> int:
        return 1

    @property
    def bits(self) -> int:
        return 16


@dataclass(frozen=True)
class BFloat16(Values):
    """The upper half of a float32, to nearest: full range, eight bits of precision."""

    @property
    def code(self) -> int:
        return 2

    @property
    def bits(self) -> int:
        return 16


@dataclass(frozen=True)
class Bits(Values):
    """A sign and evenly spaced magnitudes between a block's smallest and largest: 8, 4 or 2 bits in all.

    Two bits choose between the means of the block's small and large magnitudes. With `seed` the rounding is
    stochastic, unbiased between the block's extremes, and the same for the same seed and step.
    """

    width: int = 8
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.width not in (8, 4, 2):
            raise ValueError(f"Bits takes 8, 4 or 2 bits, not {self.width}; for one bit use Sign()")

    @property
    def code(self) -> int:
        return {8: 3, 4: 4, 2: 5}[self.width]

    @property
    def bits(self) -> int:
        return self.width


@dataclass(frozen=True)
class Sign(Values):
    """One bit a value: a block's positive values travel as their mean, its negative ones as theirs."""

    @property
    def code(self) -> int:
        return 6

    @property
    def bits(self) -> int:
        return 1
