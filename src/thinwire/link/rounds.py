"""Rounds: how long optimizers step between two exchanges of updates, and how the mean is applied.

A round takes a number of steps, or a time. In a round by time a slower rank takes fewer steps. All ranks learn in each
exchange how many samples the others have seen, and when all of them had arrived: from then on the next round counts.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from thinwire.exchange.channel import Channel
from thinwire.link.outer import SGD, Outer


@dataclass(frozen=True)
class Rounds:
    """The setting of local steps. The default exchanges the change of every step and applies its mean at once."""

    every: int | str = 1  # steps between exchanges, or a time such as "30s"
    outer: Outer = field(default_factory=SGD)
    overlap: bool = False  # whether the exchange runs while the next round computes, and is applied at its end

    def __post_init__(self) -> None:
        steps = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if not steps and not (isinstance(self.every, str) and self.seconds > 0.0):
            raise ValueError(f'every is a number of steps from 1, or a time such as "30s", not {self.every!r}')
        if not isinstance(self.outer, Outer):
            raise ValueError(f"outer is an outer optimizer, thinwire.SGD or thinwire.Nesterov, not {self.outer!r}")

    @property
    def seconds(self) -> float:
        """The time of a round; 0 if it is a number of steps."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*s", self.every) if isinstance(self.every, str) else None
        return float(found.group(1)) if found is not None else 0.0

    def __str__(self) -> str:
        often = f"every {self.every} steps" if isinstance(self.every, int) else f"every {self.seconds:g} s"
        late = ", while the next ones compute" if self.overlap else ""
        return f"exchanged {often}{late}, the mean applied by {self.outer!r}"

    @property
    def single(self) -> bool:
        """Whether every step is exchanged before the next begins."""
        return self.every == 1 and not self.overlap

    @property
    def corrects(self) -> bool:
        """Whether Adam's second moments are corrected for the number of ranks.

        In longer rounds a rank follows the noise of its own batches for several steps, which longer steps make worse.
        """
        return self.every == 1

    def ends(self, taken: int) -> bool:
        """Return whether a round ends after so many steps. One by time does not: its `Pace` tells."""
        return isinstance(self.every, int) and taken >= self.every


class Pace:
    """Ends rounds by time, and weights this rank by its share of the samples."""

    def __init__(self, seconds: float, channel: Channel) -> None:
        self.weight = 1.0  # this rank's samples in the round before, divided by the mean of all ranks
        self._seconds, self._channel = seconds, channel
        self._samples = 0
        self._met: float | None = time.monotonic()  # when all ranks were at the last exchange; None before they are

    def count(self, samples: int) -> None:
        """Count the samples of a step."""
        self._samples += samples

    def over(self) -> bool:
        """Return whether the time of the round is over."""
        return self._met is not None and time.monotonic() >= self._met + self._seconds

    def begin(self) -> Callable[[], None]:
        """End this rank's round; returns the function that exchanges the numbers of samples with the other ranks.

        Weights hold from the next round on, because a rank must not wait for the others to go on.
        """
        mine, self._samples, self._met = self._samples, 0, None

        def exchange() -> None:
            message = torch.tensor([mine], dtype=torch.int64).view(torch.uint8).to(self._channel.device)
            counts = [int(t.cpu().view(torch.int64)) for t in self._channel.all_gather(message)]
            self.weight = mine * len(counts) / sum(counts) if sum(counts) else 1.0
            self._met = time.monotonic()

        return exchange
