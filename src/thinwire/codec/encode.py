"""Steady: gradients that stay in their places from step to step, encoded by a single call of the kernels.

DDP's buckets are such. Frames and memories are those of `Codec.open` and `write`, to the bit; only the interpreter's
part is missing, which takes longer than the kernels where other work has pushed it out of the caches.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.feedback import ErrorFeedback, NoFeedback
from thinwire.codec.frame import Frame
from thinwire.codec.selection import Cut, Strata, TopK, density_at
from thinwire.codec.values import Float32, Values
from thinwire.codec.vectors import DTYPES, Vector, plain

if TYPE_CHECKING:
    from thinwire.codec.codec import Codec

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
    held = vector.kept.data_ptr() if vector.kept is not None else 0
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
    if vector.kept is not None:
        vector.kept[places.to(vector.kept.device)] = rest.to(vector.kept.device)
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
    codec: "Codec",
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
            dealt = _deal_native if native and not isinstance(chosen.cut, Strata) else _deal_torch
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


def _deal_native(
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
        vector.kept.data_ptr() if vector.kept is not None else 0,
        vector.mask.data_ptr() if vector.mask is not None else 0,
        chosen.cut.threshold,
        chosen.cut.ties,
        place.values.code,
        place.values.seed is not None,
        place.seed,
    )
    chosen.note(selected, ties, magnitudes)
    return sent


def _deal_torch(
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
    codec: "Codec", sums: Mapping[int, Tensor], names: Sequence[str], room: Tensor, *, step: int
) -> Frame:
    """Select from sums, by their section, which are changed in place to what does not travel; no memory takes part.

    The frame is in the room given, followed by zeros.
    """
    vectors = [Vector(t, None, 1.0, t, None) for t in sums.values()]
    batch: Batch = codec.choose([names[i] for i in sums], vectors, list(sums), step)
    return codec.write(batch, len(names), room, pad=True)


Bytes = bytes | bytearray | memoryview


def _shard_native(writer: _native.ShardWriter, place: Place, vector: Vector, chosen: Chosen) -> int:
    """One pass of the kernels over a CPU vector that is cut at a threshold; returns the entries sent."""
    assert not isinstance(chosen.cut, Strata)
    held = vector.kept.data_ptr() if vector.kept is not None else 0
    mask = vector.mask.data_ptr() if vector.mask is not None else 0
    how = (chosen.cut.threshold, chosen.cut.ties, place.values.code, place.values.seed is not None, place.seed)
    sent, selected, ties, magnitudes = writer.add_selected(place.section, vector.described, held, mask, *how)
    chosen.note(selected, ties, magnitudes)
    return sent


def _shard_torch(writer: _native.ShardWriter, place: Place, vector: Vector, chosen: Chosen) -> int:
    """The same by torch operations, or for places that a seed stands for: shards list them like any others."""
    entries = take_entries(vector.settled(), chosen)
    sent = torch.empty_like(entries.values)
    there = (entries.positions.data_ptr(), entries.values.data_ptr(), len(sent), vector.n, sent.data_ptr())
    writer.add_entries(place.section, *there, place.values.code, place.values.seed is not None, place.seed)
    leave(vector, entries.places, entries.values - sent)
    return len(sent)


def encode_shards(
    codec: "Codec", tensors: Mapping[str, Tensor], budget: int, *, step: int, hold: Collection[str] = ()
) -> tuple[list[bytes], int] | str:
    """Shards of at most `budget` bytes and how many entries are in them; a string names a tensor that is not finite."""
    batch = codec.open(tensors, step=step, hold=hold)
    if isinstance(batch, str):
        return batch
    writer, total, native = _native.ShardWriter(budget, False), 0, codec.native_for(batch.vectors)
    for i, (vector, chosen) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
        put = _shard_native if native and not isinstance(chosen.cut, Strata) else _shard_torch
        total += put(writer, codec.place(batch, i, 0), vector, chosen)
    codec.learn(batch)
    return writer.finish(), total


def encode_exact(values: Sequence[Tensor], positions: Mapping[int, Tensor], budget: int) -> list[bytes]:
    """Shards with the values as they are at some positions, ascending, of some of these tensors."""
    writer = _native.ShardWriter(budget, True)
    for tensor in sorted(positions):
        there = positions[tensor].contiguous()
        exact = values[tensor][there]
        sent, n = torch.empty_like(exact), values[tensor].numel()
        pointers = (there.data_ptr(), exact.data_ptr(), len(there), n, sent.data_ptr())
        writer.add_entries(tensor, *pointers, Float32().code, False, 0)
    return writer.finish()


class ShardReader:
    """Validated shards of tensors with these sizes. Raises FrameError and changes nothing if any byte is wrong.

    exact: whether shards of exact values are expected as well.
    """

    def __init__(self, shards: Sequence[Bytes], numels: Sequence[int], *, exact: bool = False) -> None:
        self._numels = list(numels)
        self._reader = _native.ShardReader(shards, self._numels, exact)

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """outs[i] += weight * values, for the tensors of the whole batch; outs[i] = values where they are exact."""
        for i, (out, n) in enumerate(zip(outs, self._numels, strict=True)):
            if out.dtype != torch.float32 or not out.is_contiguous() or out.device.type != "cpu" or out.numel() != n:
                raise ValueError(f"tensor {i} must be {n} contiguous float32 on the CPU to add shards to it")
        self._reader.add([out.data_ptr() for out in outs], weight)

    def entries(self) -> list[tuple[int, Tensor, Tensor]]:
        """(tensor, positions, values) of everything in them."""
        found = []
        for i, (tensor, count) in enumerate(self._reader.pieces):
            positions, values = torch.empty(count, dtype=torch.int64), torch.empty(count)
            self._reader.entries(i, positions.data_ptr(), values.data_ptr())
            found.append((tensor, positions, values))
        return found


class Placed(dict[str, Tensor]):
    """Named flat tensors of which the maker promises that they stay where they are while this object lives."""

    @cached_property
    def plain(self) -> list[tuple[int, int, int]] | None:
        """The tensors as the kernels take them; None if they cannot take all of them."""
        fit = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in DTYPES for t in self.values())
        return [plain(t) for t in self.values()] if fit and self else None


class SteadyEncoder:
    """Encodes one bucket's placed tensors after the other; the codec's memory and step are those of `encode`."""

    def __init__(self, codec: "Codec", reserves: list[int]) -> None:
        self._codec, self._reserves = codec, reserves
        self._placed: weakref.ref[Placed] | None = None  # whose places the kernels know
        self._generation = -1
        self._encoder: _native.Encoder | None = None

    def encode(self, tensors: Placed, room: Tensor, *, step: int) -> tuple[Frame, list[int]] | None:
        """A frame in the room given, zeros after it, and the entries per tensor; None where it takes `open`."""
        codec, selection = self._codec, self._codec.selection
        if type(selection) is not TopK or selection.exact or codec.observer is not None:
            return None
        known = self._placed() if self._placed is not None else None
        if known is not tensors or self._generation != codec.generation:
            self._placed, self._encoder = weakref.ref(tensors), self._made(tensors)
            self._generation = codec.generation
        if self._encoder is None:
            return None
        density = density_at(selection.density, step)
        not_finite, length, sent = self._encoder.encode(density, step, room.data_ptr(), room.numel())
        if not_finite >= 0:
            return fill(room, empty_frame(list(tensors)[not_finite])), [0] * len(tensors)
        codec.step = step + 1
        return Frame(room[:length]), sent

    def _made(self, tensors: Placed) -> _native.Encoder | None:
        """What the kernels must know; None if this codec or these tensors need more than they do in one call."""
        codec = self._codec
        simple = codec.scope == "tensor" and codec.kernels != "torch" and codec.values.seed is None
        if not simple or type(codec.feedback) not in (ErrorFeedback, NoFeedback) or tensors.plain is None:
            return None
        described = []
        for (name, tensor), reserve in zip(tensors.items(), self._reserves, strict=True):
            vector = codec.feedback.open(codec.checked(name, tensor), codec.open_slots(name, tensor))
            held = vector.kept.data_ptr() if vector.kept is not None else 0
            whole = vector.n < max(codec.min_numel, 1)
            values = codec.small if whole else codec.values
            described.append((vector.described, held, whole, values.code, reserve))
        return _native.Encoder(described)
