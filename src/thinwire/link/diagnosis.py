"""Diagnosis: the figures of one comparison of a link with a dense exchange, for logs and reports."""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How far a step's compressed mean was from what training would do without compression."""

    event: ClassVar[str] = "diagnosis"
    step: int
    delta: float  # ||sent||^2 / ||accumulated||^2
    xi: float  # ||selection of the mean - what was applied|| / ||dense mean||
    residual_ratio: float  # ||residual|| / ||gradient||
    cosine: float  # of what was applied and the dense mean
    age: float = math.nan  # steps that the residual's entries have waited, on average
    age_oldest: int = 0
    waited: float = math.nan  # steps that entries sent since the last diagnosis had waited, on average

    def text(self) -> str:
        """All figures in one line."""
        ages = f"age {self.age:.1f} steps (oldest {self.age_oldest}), waited {self.waited:.1f}"
        return (
            f"delta {self.delta:.3g}, xi {self.xi:.3g}, residual/gradient {self.residual_ratio:.3g}, "
            f"cosine {self.cosine:.3g}" + (f", {ages}" if math.isfinite(self.age) else "")
        )
