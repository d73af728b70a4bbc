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
    entries = take_entries(vector.settled(), chosen, native=False)
    return put_entries(writer, place, vector, entries, chosen.cut)


@dataclass(frozen=True)
class Entries:
    """Chosen entries of one vector of n elements: ascending positions and their values, on the CPU."""

    positions: Tensor
    values: Tensor
    n: int

    def between(self, begin: int, end: int) -> "Entries":
        """Those whose positions lie in [begin, end)."""
        low, high = torch.searchsorted(self.positions, torch.tensor([begin, end])).tolist()
        return Entries(self.positions[low:high], self.values[low:high], self.n)


def take_entries(vector: Vector, chosen: Chosen, *, native: bool) -> Entries:
    """The entries that pass the cut; the memory takes in the gradient and still holds them."""
    cut = chosen.cut
    if native and isinstance(cut, Cut):
        positions = torch.empty(vector.n, dtype=torch.int64)
        values = torch.empty(vector.n)
        count, ties = _native.collect_entries(
            vector.described, cut.threshold, cut.ties, positions.data_ptr(), values.data_ptr()
        )
        positions, values = positions[:count].clone(), values[:count].clone()
    else:
        x = vector.settled().gradient.reshape(-1).float()
        if isinstance(cut, Strata):
            there, ties = strata_positions(cut, x.numel()).to(x.device), 0
        else:
            there, ties = positions_above(x, cut)
        positions, values = there.cpu(), x[there].cpu()
    chosen.note(len(values), ties, float(values.abs().double().sum()))
    return Entries(positions, values, vector.n)


def put_entries(
    writer: _native.Writer, place: Place, vector: Vector, entries: Entries, cut: Cut | Strata | None = None
) -> int:
    """Write entries and take what was sent out of the memory; returns how many were sent."""
    sent = torch.empty_like(entries.values)
    count = writer.add_entries(
        place.section,
        entries.positions.data_ptr(),
        entries.values.data_ptr(),
        len(entries.values),
        entries.n,
        sent.data_ptr(),
        isinstance(cut, Strata),
        cut.seed if isinstance(cut, Strata) else 0,
        place.values.code,
        place.values.seed is not None,
        place.seed,
        place.reserve,
    )[0]
    if vector.held is not None:
        gone = entries.positions[:count].to(vector.held.device)
        vector.held[gone] = (entries.values[:count] - sent[:count]).to(vector.held.device)
    if vector.mask is not None:
        vector.mask[entries.positions[:count].to(vector.mask.device)] = 0.0
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
    places = torch.empty(strata.count, dtype=torch.int64)
    _native.strata(strata.seed, strata.count, n, places.data_ptr())
    return places
