"""Values: how the value of a sent entry is written, in 32 bits down to one.

A value format is a frozen dataclass. Its code identifies it in frames and in the kernels.
"""

from dataclasses import dataclass

SEEDS = (1 << 64) - 1  # mask: a seed may be any integer, of which the low 64 bits are used


class Values:
    """Base class of the value formats."""

    code: int  # in a section's header
    bits: float  # per value, without the scales; where it depends on the values, about that many
    seed: int | None = None  # of stochastic rounding; None: values are rounded to nearest


@dataclass(frozen=True)
class Float32(Values):
    """Single precision: the values do not change."""

    code = 0
    bits = 32


@dataclass(frozen=True)
class Float16(Values):
    """Half precision, rounded to nearest. Magnitudes beyond 65,504 are sent as that; the rest stays in the residual."""

    code = 1
    bits = 16


@dataclass(frozen=True)
class BFloat16(Values):
    """The upper half of a float32, rounded to nearest: the full range with eight bits of precision."""

    code = 2
    bits = 16


@dataclass(frozen=True)
class Bits(Values):
    """A sign and evenly spaced magnitudes between a block's smallest and largest, in 8, 4 or 2 bits altogether.

    With two bits the magnitudes are the means of the block's small and of its large magnitudes. With `seed` the
    rounding is stochastic: unbiased, and the same for the same seed and step.
    """

    width: int = 8
    seed: int | None = None

    def __post_init__(self) -> None:
        codes = {8: 3, 4: 4, 2: 5}
        if self.width not in codes:
            raise ValueError(f"Bits takes 8, 4 or 2 bits, not {self.width}; for one bit use Sign()")
        object.__setattr__(self, "code", codes[self.width])
        object.__setattr__(self, "bits", self.width)


@dataclass(frozen=True)
class Sign(Values):
    """One bit per value: a block's positive values are sent as their mean, its negative values as theirs."""

    code = 6
    bits = 1


@dataclass(frozen=True)
class Unary(Values):
    """A sign and a level in unary code: about 2.6 bits per value, at most 3.

    A level is the excess of a magnitude over the block's smallest, in whole multiples of the block's mean excess. The
    magnitudes of selected entries are the tail of a distribution, in which small levels are frequent: unary code, the
    Golomb code with divisor 1, is then near the entropy. The receiver reads the points with the least squared error:
    the mean of the magnitudes of level 0, and a step per level.
    """

    code = 7
    bits = 2.6
