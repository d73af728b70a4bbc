"""Shards: one batch of gradients as frames of at most so many bytes, each of which reads on its own.

What travels in datagrams: any of them may be lost, and the others still mean what they say.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.selection import Strata
from thinwire.codec.values import Float32
from thinwire.codec.vectors import Vector
from thinwire.codec.writing import Chosen, Place, leave, take_entries

Bytes = bytes | bytearray | memoryview


def _put_native(writer: _native.ShardWriter, place: Place, vector: Vector, chosen: Chosen) -> int:
    """One pass of the kernels over a CPU vector that is cut at a threshold; returns the entries sent."""
    assert not isinstance(chosen.cut, Strata)
    held = vector.held.data_ptr() if vector.held is not None else 0
    mask = vector.mask.data_ptr() if vector.mask is not None else 0
    how = (chosen.cut.threshold, chosen.cut.ties, place.values.code, place.values.seed is not None, place.seed)
    sent, selected, ties, magnitudes = writer.add_selected(place.section, vector.described, held, mask, *how)
    chosen.note(selected, ties, magnitudes)
    return sent


def _put_torch(writer: _native.ShardWriter, place: Place, vector: Vector, chosen: Chosen) -> int:
    """The same by torch operations, or for places that a seed stands for: shards list them like any others."""
    entries = take_entries(vector.settled(), chosen)
    sent = torch.empty_like(entries.values)
    there = (entries.positions.data_ptr(), entries.values.data_ptr(), len(sent), vector.n, sent.data_ptr())
    writer.add_entries(place.section, *there, place.values.code, place.values.seed is not None, place.seed)
    leave(vector, entries.places, entries.values - sent)
    return len(sent)


def encode_shards(
    codec: Codec, tensors: Mapping[str, Tensor], budget: int, *, step: int, hold: Collection[str] = ()
) -> tuple[list[bytes], int] | str:
    """Shards of at most `budget` bytes and how many entries are in them; a string names a tensor that is not finite."""
    batch = codec.open(tensors, step=step, hold=hold)
    if isinstance(batch, str):
        return batch
    writer, total, native = _native.ShardWriter(budget, False), 0, codec.native_for(batch.vectors)
    for i, (vector, chosen) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
        put = _put_native if native and not isinstance(chosen.cut, Strata) else _put_torch
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
