"""Network: how long collectives of a size take, between so many ranks, from a few probes or from a rate.

A line for each kind of collective: what it takes with next to nothing in it, and what a byte of a rank's own message
adds. Everything else is put together from these two.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Seconds by bytes."""

    fixed: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.fixed + self.per_byte * size

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> "Line":
        """The line through two probes (bytes, seconds); noise must not give it a negative slope."""
        slope = max((large[1] - small[1]) / max(large[0] - small[0], 1.0), 1e-13)
        return cls(max(small[1] - slope * small[0], 1e-7), slope)


@dataclass(frozen=True)
class Tiers:
    """Machines of several ranks: what it takes within one, and between the first ranks of all."""

    per_machine: int
    inside: Line  # to one rank and back to all, by the bytes of the vector that is summed
    between: Line  # all-gather, by the bytes of each machine's message


@dataclass(frozen=True)
class Network:
    """All-gathers and all-reduces between `world` ranks."""

    world: int
    gather: Line  # by the bytes of each rank's message
    reduce: Line  # by the bytes of the vector that is summed
    tiers: Tiers | None = None  # where machines have several ranks each

    @classmethod
    def ideal(cls, world: int, bandwidth: float, latency: float) -> "Network":
        """Links of so many bits a second for each rank, and so many seconds for each of a ring's rounds."""
        byte, others = 8.0 / bandwidth, world - 1
        return cls(
            world,
            Line(others * latency, others * byte),
            Line(2 * others * latency, 2 * others / max(world, 1) * byte),
        )

    def scatter(self, size: float) -> float:
        """Parts of a message to their owners and everybody's result back: two rounds of 1/world of the message."""
        return 2.0 * self.gather(size / max(self.world, 1))

    @property
    def bandwidth(self) -> float:
        """Bits a second that a rank can send, as all-gathers see it."""
        return 8.0 * max(self.world - 1, 1) / self.gather.per_byte

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e6:,.0f} Mbit/s and {1e3 * self.gather.fixed:.1f} ms for {self.world} ranks"
