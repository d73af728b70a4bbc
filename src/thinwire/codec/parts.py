"""Parts: one batch of gradients as frames in rooms of their own, each with the entries that one rank owns.

Large tensors are dealt out in blocks, so that every rank's share is like the others; a share's positions count within
the share. What exchanges need: everything in one room, or every rank's share of the index space in its own, and
encoding sums that leave in place what the second selection rejects.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.batch import Batch
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame
from thinwire.codec.selection import Strata
from thinwire.codec.vectors import Vector
from thinwire.codec.writing import Chosen, Entries, Place, SentEntries, empty_frame, put_native, put_torch, take_entries


@dataclass(frozen=True)
class Deal:
    """Who owns a tensor: all ranks block by block, the `first` of them first; or with a world of one the `first`."""

    world: int
    first: int

    def share(self, n: int, owner: int) -> int:
        """How many of n elements an owner has."""
        if self.world == 1:
            return n if owner == self.first else 0
        return _native.share_of(n, self.world, self.first, owner)

    def places(self, n: int, owner: int) -> Tensor:
        """The positions in the whole tensor of an owner's share."""
        if self.world == 1:
            return torch.arange(n if owner == self.first else 0)
        owners, _ = self._owners(torch.arange(n))
        return (owners == owner).nonzero().flatten()

    def _owners(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Who owns these positions, and what they are in the owner's share."""
        blocks = positions // _native.DEAL
        rounds = blocks // self.world
        turns = ((rounds + self.first) * 2654435761 & 0xFFFFFFFF) * self.world >> 32  # as in deal.hpp
        return (blocks + turns) % self.world, rounds * _native.DEAL + positions % _native.DEAL

    def split(self, entries: Entries) -> tuple[Entries, list[int]]:
        """Entries in the order of their owners, positions those of the shares, and where each owner's begin and end."""
        owners, positions = self._owners(entries.places)
        order = torch.argsort(owners, stable=True)
        edges = torch.searchsorted(owners[order], torch.arange(self.world + 1)).tolist()
        return Entries(positions[order], entries.values[order], entries.places[order]), edges


@dataclass(frozen=True)
class Part:
    """Room for one owner's frame: a uint8 tensor that ends in zeros once the frame is in it."""

    room: Tensor
    shares: list[int]  # elements of every tensor that the owner has
    reserves: list[int]  # bytes to keep free at each tensor, see Codec.reserves


def encode_parts(
    codec: Codec,
    tensors: Mapping[str, Tensor],
    deals: Sequence[Deal],
    parts: Sequence[Part],
    *,
    step: int,
    hold: Collection[str] = (),
) -> tuple[list[Frame], list[int]]:
    """One frame per owner, in the room given, with its share of the chosen entries; and the entries per tensor."""
    batch = codec.open(tensors, step=step, hold=hold)
    counts = [0] * len(tensors)
    if isinstance(batch, str):
        return [fill(part.room, empty_frame(batch)) for part in parts], counts
    writers = [_native.Writer(part.room.data_ptr(), part.room.numel()) for part in parts]
    native = codec.native_for(batch.vectors)
    reserves = [_reserves(part, batch.sections) for part in parts]
    for i, (vector, chosen) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
        at = batch.sections[i]
        deal = deals[at]
        if deal.world == 1:
            put = put_native if native else put_torch
            place = codec.place(batch, i, reserves[deal.first][i])
            counts[at] = put(writers[deal.first], place, vector, chosen)
        else:
            place = codec.place(batch, i, 0)
            dealt = _put_native if native and not isinstance(chosen.cut, Strata) else _put_torch
            counts[at] = dealt(writers, [each[i] for each in reserves], place, vector, chosen, deal)
    codec.learn(batch)
    return [_finished(part.room, writer) for part, writer in zip(parts, writers, strict=True)], counts


def _reserves(part: Part, sections: list[int]) -> list[int]:
    """Those of the part; less what it has for tensors that send nothing, whose room would stay empty."""
    if len(sections) == len(part.shares):
        return part.reserves
    found, later = [], 0
    for at in reversed(sections):
        found.append(later)
        later += part.reserves[at - 1] - part.reserves[at] if at else 0
    return found[::-1]


def _put_native(
    writers: list[_native.Writer], reserves: list[int], place: Place, vector: Vector, chosen: Chosen, deal: Deal
) -> int:
    """One pass of the kernels that fills all owners' frames."""
    assert not isinstance(chosen.cut, Strata)
    sent, selected, ties, magnitudes = _native.Writer.add_dealt(
        writers,
        reserves,
        deal.first,
        place.section,
        vector.described,
        vector.held.data_ptr() if vector.held is not None else 0,
        vector.mask.data_ptr() if vector.mask is not None else 0,
        chosen.cut.threshold,
        chosen.cut.ties,
        place.values.code,
        place.values.seed is not None,
        place.seed,
    )
    chosen.note(selected, ties, magnitudes)
    return sent


def _put_torch(
    writers: list[_native.Writer], reserves: list[int], place: Place, vector: Vector, chosen: Chosen, deal: Deal
) -> int:
    entries, edges = deal.split(take_entries(vector.settled(), chosen))
    sent = SentEntries(entries)
    count = 0
    for owner, writer in enumerate(writers):
        here = Place(place.section, place.values, place.seed, reserves[owner])
        share = deal.share(vector.n, owner)
        count += sent.put(writer, here, share, edges[owner], edges[owner + 1]) if share else 0
    sent.leave(vector)
    return count


def _finished(room: Tensor, writer: _native.Writer) -> Frame:
    return Frame(room[: writer.finish(0, True)])


def fill(room: Tensor, frame: Frame) -> Frame:
    """Copy a frame into a room, and zeros after it."""
    room[: len(frame)] = frame.data
    room[len(frame) :].zero_()
    return Frame(room[: len(frame)], frame.non_finite)


def encode_leftover(
    codec: Codec, sums: Mapping[int, Tensor], names: Sequence[str], room: Tensor, *, step: int
) -> Frame:
    """Select from sums, by their section, which are changed in place to what does not travel; no memory takes part.

    The frame is in the room given, followed by zeros.
    """
    vectors = [Vector(t, None, 1.0, t, None) for t in sums.values()]
    batch: Batch = codec.choose([names[i] for i in sums], vectors, list(sums), step)
    return codec.write(batch, len(names), room, pad=True)
