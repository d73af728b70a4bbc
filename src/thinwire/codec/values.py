"""Values: how the value of a sent entry is written, in 32 bits down to one.

A value format is a frozen dataclass. Its code identifies it in frames and in the kernels.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

SEEDS = (1 << 64) - 1  # mask: a seed may be any integer, of which the low 64 bits are used


class Values(ABC):
    """Base class of the value formats."""

    seed: int | None = None  # of stochastic rounding; None: values are rounded to nearest

    @property
    @abstractmethod
    def code(self) -> int:
        """The format's code in a section's header."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """The number of bits per value, without the scales."""

    @property
    def scaled(self) -> bool:
        """Whether each block of 512 values has two scales of 32 bits."""
        return self.code >= 3


@dataclass(frozen=True)
class Float32(Values):
    """Single precision: the values do not change."""

    @property
    def code(self) -> int:
        return 0

    @property
    def bits(self) -> int:
        return 32


@dataclass(frozen=True)
class Float16(Values):
    """Half precision, rounded to nearest. Magnitudes beyond 65,504 are sent as that; the rest stays in the residual."""

    @property
    def code(self) -> int:
        return 1

    @property
    def bits(self) -> int:
        return 16


@dataclass(frozen=True)
class BFloat16(Values):
    """The upper half of a float32, rounded to nearest: the full range with eight bits of precision."""

    @property
    def code(self) -> int:
        return 2

    @property
    def bits(self) -> int:
        return 16


@dataclass(frozen=True)
class Bits(Values):
    """A sign and evenly spaced magnitudes between a block's smallest and largest, in 8, 4 or 2 bits altogether.

    With two bits the magnitudes are the means of the block's small and of its large magnitudes. With `seed` the
    rounding is stochastic: unbiased, and the same for the same seed and step.
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
    """One bit per value: a block's positive values are sent as their mean, its negative values as theirs."""

    @property
    def code(self) -> int:
        return 6

    @property
    def bits(self) -> int:
        return 1
