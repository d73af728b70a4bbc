"""Writing: puts one vector's chosen entries into a frame and what was not sent back into the memory.

`put_native` streams through the kernels; `put_torch` is their twin in torch operations for any device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.selection import Cut, Strata
from thinwire.codec.values import Values
from thinwire.codec.vectors import Vector

# Lets every entry pass, zeros too: how small tensors travel whole.
EVERYTHING = Cut(-1.0)


@dataclass
class Chosen:
    """A cut, the tensors' group it belongs to, and what came of it so far."""

    label: str
    cut: Cut | Strata
    whole: bool = False
    selected: int = 0
    magnitudes: float = 0.0

    def note(self, selected: int, ties: int, magnitudes: float) -> None:
        """Count what one tensor took; ties that it used are not there for the next."""
        self.selected += selected
        self.magnitudes += magnitudes
        if isinstance(self.cut, Cut):
            self.cut = Cut(self.cut.threshold, ties)


@dataclass(frozen=True)
class Place:
    """Where and how a section is written."""

    section: int
    values: Values
    seed: int  # of stochastic rounding
    reserve: int  # bytes that sections still to come need


def put_native(writer: _native.Writer, place: Place, vector: Vector, chosen: Chosen) -> int:
    """One pass of the kernels over a CPU vector; returns the entries sent."""
    held = vector.held.data_ptr() if vector.held is not None else 0
    mask = vector.mask.data_ptr() if vector.mask is not None else 0
    how = (place.values.code, place.values.seed is not None, place.seed, place.reserve)
    cut = chosen.cut
    if isinstance(cut, Strata):
        written = writer.add_strata(place.section, vector.described, held, mask, cut.count, cut.seed, *how)
    else:
        written = writer.add_selected(place.section, vector.described, held, mask, cut.threshold, cut.ties, *how)
    sent, selected, ties, magnitudes = written
    chosen.note(selected, ties, magnitudes)
    return sent


def put_torch(writer: _native.Writer, place: Place, vector: Vector, chosen: Chosen) -> int:
    """The same by torch operations: only the chosen entries leave the device."""
    vector = vector.settled()
    x = vector.gradient.reshape(-1).float()
    cut = chosen.cut
    if isinstance(cut, Strata):
        positions, ties = strata_positions(cut, x.numel()).to(x.device), 0
    else:
        positions, ties = positions_above(x, cut)
    values = x[positions]
    there, kept = positions.cpu(), values.cpu()
    sent = torch.empty_like(kept)
    count = writer.add_entries(
        place.section,
        there.data_ptr(),
        kept.data_ptr(),
        len(kept),
        x.numel(),
        sent.data_ptr(),
        isinstance(cut, Strata),
        cut.seed if isinstance(cut, Strata) else 0,
        place.values.code,
        place.values.seed is not None,
        place.seed,
        place.reserve,
    )[0]
    gone = positions[:count]
    if vector.held is not None:
        vector.held[gone] = values[:count] - sent[:count].to(x.device)
    if vector.mask is not None:
        vector.mask[gone] = 0.0
    chosen.note(len(kept), ties, float(values.abs().double().sum()))
    return count


def positions_above(x: Tensor, cut: Cut) -> tuple[Tensor, int]:
    """Positions of the entries that pass a cut, ascending, and the ties left over."""
    magnitudes = x.abs()
    passing = magnitudes > cut.threshold
    if not cut.ties:
        return passing.nonzero().flatten(), 0
    equal = (magnitudes == cut.threshold).nonzero().flatten()[: cut.ties]
    passing[equal] = True
    return passing.nonzero().flatten(), cut.ties - len(equal)


def strata_positions(strata: Strata, n: int) -> Tensor:
    """The places that a seed stands for, in ascending order."""
    places = [_native.stratum_position(strata.seed, j, strata.count, n) for j in range(strata.count)]
    return torch.tensor(places, dtype=torch.int64)
