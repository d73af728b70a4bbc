"""Shards: one batch of gradients as frames of at most so many bytes, each of which reads on its own.

What travels in datagrams: any of them may be lost, and the others still mean what they say.
"""

import struct
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader, section_bound
from thinwire.codec.selection import Strata
from thinwire.codec.values import Float32, Values
from thinwire.codec.vectors import Vector
from thinwire.codec.writing import Chosen, Entries, Place, SentEntries, open_writer, put_native, take_entries
from thinwire.errors import FrameError

# The first tensor's place in the batch, and the element from which its positions count.
_PLACE = struct.Struct("<II")
SHARD_BYTES = _PLACE.size
# Added to that place where values are exact and take the place of what is there.
_EXACT = 1 << 31
Bytes = bytes | bytearray | memoryview


class _Packing:
    """Entries of one tensor after the other become shards."""

    def __init__(self, budget: int, flags: int = 0) -> None:
        self.shards: list[bytes] = []
        self._budget, self._flags = budget, flags
        self._open: tuple[Tensor, _native.Writer] | None = None
        self._tensor = self._begin = self._sections = 0

    def put(self, tensor: int, n: int, entries: Entries, values: Values, seed: int = 0) -> SentEntries:
        """All entries of a tensor of n elements."""
        sent, low, high = SentEntries(entries), 0, len(entries.values)
        # No more than that can fit, at a bit for each position; and about as many as did before. The writer need not
        # look further ahead.
        most = 8 * self._budget // (values.bits + 1)
        while low < high:
            if self._open is None:
                self._open = open_writer(self._budget - SHARD_BYTES)
                self._tensor, self._begin, self._sections = tensor, int(entries.positions[low]), 0
            base = self._begin if tensor == self._tensor else 0
            place = Place(tensor - self._tensor, values, seed, 0)
            count = sent.put(self._open[1], place, n - base, low, min(high, low + most), base=base)
            low += count
            most = min(most, max(64, count + count // 8)) if count and low < high else most
            self._sections += 1
            if low < high:
                if self._sections == 1 and not count:
                    raise ValueError(f"shards of {self._budget} bytes cannot hold a single entry")
                self.close()
        return sent

    def close(self) -> None:
        """End the shard that is being filled."""
        if self._open is not None:
            buffer, writer = self._open
            length = writer.finish(0)
            self.shards.append(_PLACE.pack(self._tensor | self._flags, self._begin) + buffer[:length].numpy().tobytes())
            self._open = None


def _lift_entries(vector: Vector, chosen: Chosen) -> Entries:
    """The chosen entries as they are, out of the memory: one pass of the kernels, through a frame of exact values.

    By torch operations it takes seven times as long.
    """
    bound = section_bound(vector.n, vector.n, Float32(), whole=chosen.whole, strata=isinstance(chosen.cut, Strata))
    buffer, writer = open_writer(_native.HEADER_BYTES + bound)
    put_native(writer, Place(0, Float32(), 0, 0), vector, chosen)
    reader = FrameReader(buffer[: writer.finish(0)], [vector.n])
    positions, values = (
        reader.entries(reader.sections[0]) if reader.sections else (torch.empty(0, dtype=torch.int64), torch.empty(0))
    )
    return Entries(positions, values, positions)


def encode_shards(
    codec: Codec, tensors: Mapping[str, Tensor], budget: int, *, step: int, hold: Collection[str] = ()
) -> tuple[list[bytes], int] | str:
    """Shards of at most `budget` bytes and how many entries are in them; a string names a tensor that is not finite."""
    batch = codec.open(tensors, step=step, hold=hold)
    if isinstance(batch, str):
        return batch
    packing, total, native = _Packing(budget), 0, codec.native_for(batch.vectors)
    for i, (vector, chosen) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
        place = codec.place(batch, i, 0)
        entries = _lift_entries(vector, chosen) if native else take_entries(vector.settled(), chosen)
        packing.put(place.section, vector.n, entries, place.values, place.seed).leave(vector)
        total += len(entries.values)
    codec.learn(batch)
    packing.close()
    return packing.shards, total


def encode_exact(values: Sequence[Tensor], positions: Mapping[int, Tensor], budget: int) -> list[bytes]:
    """Shards with the values as they are at some positions, ascending, of some of these tensors."""
    packing = _Packing(budget, _EXACT)
    for tensor in sorted(positions):
        there = positions[tensor]
        packing.put(tensor, values[tensor].numel(), Entries(there, values[tensor][there], there), Float32())
    packing.close()
    return packing.shards


class ShardReader:
    """A validated shard of tensors with these sizes. Raises FrameError and changes nothing if any byte is wrong.

    exact: whether one of exact values is expected as well.
    """

    def __init__(self, data: Bytes, numels: Sequence[int], *, exact: bool = False) -> None:
        if len(data) < SHARD_BYTES:
            raise FrameError(f"a shard has {SHARD_BYTES} bytes at least, not {len(data)}")
        self.tensor, self.begin = _PLACE.unpack_from(data)
        self.exact = exact and bool(self.tensor & _EXACT)
        self.tensor -= _EXACT if self.exact else 0
        if self.tensor >= len(numels) or self.begin >= max(numels[self.tensor], 1):
            raise FrameError(f"a shard begins at element {self.begin} of tensor {self.tensor}, which is not there")
        sizes = list(numels[self.tensor :])
        sizes[0] -= self.begin
        self._reader = FrameReader(Frame.from_bytes(memoryview(data)[SHARD_BYTES:]), sizes)
        if self._reader.non_finite:
            raise FrameError("a shard holds finite values only")

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """outs[i] += weight * values, for the tensors of the whole batch; outs[i] = values if they are exact."""
        if self.exact:
            for tensor, positions, values in self.entries():
                outs[tensor][positions] = values
            return
        rows = list(outs[self.tensor :])
        rows[0] = rows[0][self.begin :]
        self._reader.add_to(rows, weight)

    def entries(self) -> list[tuple[int, Tensor, Tensor]]:
        """(tensor, positions, values) of everything in it."""
        found = []
        for section in self._reader.sections:
            positions, values = self._reader.entries(section)
            if section.id == 0 and self.begin:
                positions = positions + self.begin
            found.append((self.tensor + section.id, positions, values))
        return found
