"""Batch: the gradients of one encode between choosing and writing, and who may look at them there."""

from dataclasses import dataclass
from typing import Protocol

from thinwire.codec.vectors import Vector
from thinwire.codec.writing import Chosen


@dataclass(frozen=True)
class Batch:
    """Gradients that are in the memory, and what of them is to travel; sections are their places in the frame."""

    names: list[str]
    vectors: list[Vector]
    chosen: list[Chosen]
    sections: list[int]
    step: int


class Observer(Protocol):
    """Somebody who watches a codec's batches."""

    def opened(self, batch: Batch) -> None:
        """Gradients are in the memory and what is to travel is chosen."""

    def written(self, batch: Batch) -> None:
        """What travels is in a frame, the rest in the memory."""
