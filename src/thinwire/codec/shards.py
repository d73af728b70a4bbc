"""Shards: one batch of gradients as frames of at most so many bytes, each of which reads on its own.

What travels in datagrams: any of them may be lost, and the others still mean what they say.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec, open_writer
from thinwire.codec.frame import Frame, FrameReader, section_bound
from thinwire.codec.selection import Strata
from thinwire.codec.values import Float32
from thinwire.codec.vectors import Vector
from thinwire.codec.writing import Chosen, Entries, Place, SentEntries, put_native, take_entries
from thinwire.errors import FrameError

# The first tensor's place in the batch, and the element from which its positions count.
_PLACE = struct.Struct("<II")
SHARD_BYTES = _PLACE.size
Bytes = bytes | bytearray | memoryview


@dataclass
class _Open:
    """A shard that is being filled."""

    tensor: int
    begin: int
    budget: int

    def __post_init__(self) -> None:
        self.buffer, self.writer = open_writer(self.budget - SHARD_BYTES)
        self.sections = 0

    def finish(self) -> bytes:
        length = self.writer.finish(0)
        return _PLACE.pack(self.tensor, self.begin) + self.buffer[:length].numpy().tobytes()


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
    shards: list[bytes] = []
    shard: _Open | None = None
    total, native = 0, codec.native_for(batch.vectors)
    for i, (vector, chosen) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
        section, place = batch.sections[i], codec.place(batch, i, 0)
        entries = _lift_entries(vector, chosen) if native else take_entries(vector.settled(), chosen)
        sent, low, high = SentEntries(entries), 0, len(entries.values)
        total += high
        while low < high:
            if shard is None:
                shard = _Open(section, int(entries.positions[low]), budget)
            base = shard.begin if section == shard.tensor else 0
            here = replace(place, section=section - shard.tensor)
            count = sent.put(shard.writer, here, vector.n - base, low, high, base=base)
            low += count
            shard.sections += 1
            if low < high:
                if shard.sections == 1 and not count:
                    raise ValueError(f"shards of {budget} bytes cannot hold a single entry")
                shards.append(shard.finish())
                shard = None
        sent.leave(vector)
    codec.learn(batch)
    if shard is not None:
        shards.append(shard.finish())
    return shards, total


class ShardReader:
    """A validated shard of tensors with these sizes. Raises FrameError and changes nothing if any byte is wrong."""

    def __init__(self, data: Bytes, numels: Sequence[int]) -> None:
        if len(data) < SHARD_BYTES:
            raise FrameError(f"a shard has {SHARD_BYTES} bytes at least, not {len(data)}")
        self.tensor, self.begin = _PLACE.unpack_from(data)
        if self.tensor >= len(numels) or self.begin >= max(numels[self.tensor], 1):
            raise FrameError(f"a shard begins at element {self.begin} of tensor {self.tensor}, which is not there")
        sizes = list(numels[self.tensor :])
        sizes[0] -= self.begin
        self._reader = FrameReader(Frame.from_bytes(memoryview(data)[SHARD_BYTES:]), sizes)
        if self._reader.non_finite:
            raise FrameError("a shard holds finite values only")

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """outs[i] += weight * values, for the tensors of the whole batch."""
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


def mass(shards: Sequence[ShardReader]) -> float:
    """The sum of all magnitudes in some shards."""
    return float(sum(values.abs().sum() for shard in shards for _, _, values in shard.entries()) or torch.zeros(()))
