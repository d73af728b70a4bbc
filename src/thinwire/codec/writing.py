"""Writing: puts one vector's chosen entries into a frame and what was not sent back into the memory.

`put_native` streams through the kernels; `put_torch` is their twin in torch operations for any device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.frame import Frame
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
    entries = take_entries(vector.settled(), chosen)
    sent = SentEntries(entries)
    count = sent.put(writer, place, vector.n, 0, len(entries.values), chosen.cut)
    sent.leave(vector)
    return count


@dataclass(frozen=True)
class Entries:
    """Chosen entries of one vector, on the CPU: their positions in the frame, values, and places in the memory."""

    positions: Tensor
    values: Tensor
    places: Tensor


def take_entries(vector: Vector, chosen: Chosen) -> Entries:
    """The entries of a settled vector that pass the cut; the memory still holds them."""
    cut = chosen.cut
    x = vector.gradient.reshape(-1).float()
    if isinstance(cut, Strata):
        there, ties = strata_positions(cut, x.numel()).to(x.device), 0
    else:
        there, ties = positions_above(x, cut)
    places, values = there.cpu(), x[there].cpu()
    chosen.note(len(values), ties, float(values.abs().double().sum()))
    return Entries(places, values, places)


class SentEntries:
    """Entries on their way into one or several frames; those that found room leave the memory in the end."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._sent = torch.empty_like(entries.values)
        self._gone: list[tuple[int, int]] = []

    def put(
        self,
        writer: _native.Writer,
        place: Place,
        n: int,
        low: int,
        high: int,
        cut: Cut | Strata | None = None,
    ) -> int:
        """Write the entries [low, high) as a section of n elements; returns how many found room."""
        count = writer.add_entries(
            place.section,
            self._entries.positions.data_ptr() + 8 * low,
            self._entries.values.data_ptr() + 4 * low,
            high - low,
            n,
            self._sent.data_ptr() + 4 * low,
            isinstance(cut, Strata),
            cut.seed if isinstance(cut, Strata) else 0,
            place.values.code,
            place.values.seed is not None,
            place.seed,
            place.reserve,
        )[0]
        self._gone.append((low, low + count))
        return count

    def leave(self, vector: Vector) -> None:
        """Take what was sent out of the memory; the rounding error stays in it."""
        gone = [range(low, high) for low, high in self._gone]
        places, values, sent = self._entries.places, self._entries.values, self._sent
        if sum(map(len, gone)) < len(values):
            kept = torch.cat([torch.arange(r.start, r.stop) for r in gone])
            places, values, sent = places[kept], values[kept], sent[kept]
        leave(vector, places, values - sent)


def leave(vector: Vector, places: Tensor, rest: Tensor) -> None:
    """Entries at these places were sent: only what rounding left of them stays in the memory."""
    if vector.held is not None:
        vector.held[places.to(vector.held.device)] = rest.to(vector.held.device)
    if vector.mask is not None:
        vector.mask[places.to(vector.mask.device)] = 0.0


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
    _native.strata_positions(strata.seed, strata.count, n, places.data_ptr())
    return places


def empty_frame(culprit: str) -> Frame:
    """The frame that tells everybody of a non-finite input."""
    buffer = torch.empty(_native.HEADER_BYTES, dtype=torch.uint8)
    _native.Writer(buffer.data_ptr(), len(buffer)).finish(1, False)
    return Frame(buffer, non_finite=culprit)
