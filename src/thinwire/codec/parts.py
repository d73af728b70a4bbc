"""Parts: one batch of gradients as several frames, each with the entries of one range of every tensor.

What the exchanges need that give every rank a share of the index space: splitting what is sent, and encoding sums
that leave in place what the second selection rejects.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codec.codec import Batch, Codec, empty_frame, open_writer
from thinwire.codec.frame import Frame
from thinwire.codec.vectors import Vector
from thinwire.codec.writing import SentEntries, take_entries


@dataclass(frozen=True)
class Piece:
    """The range [begin, end) of a tensor, named by its place in the batch, that one rank owns."""

    tensor: int
    begin: int
    end: int


def encode_parts(
    codec: Codec,
    tensors: Mapping[str, Tensor],
    owned: Sequence[Sequence[Piece]],
    budgets: Sequence[int],
    *,
    step: int,
    hold: Collection[str] = (),
) -> list[Frame]:
    """One frame per owner with the chosen entries of its pieces; positions count from the whole tensor's start."""
    batch = codec.open(tensors, step=step, hold=hold)
    if isinstance(batch, str):
        return [empty_frame(batch) for _ in owned]
    opened = [open_writer(budget) for budget in budgets]
    reserves = _reserves(codec, batch, owned)
    native = codec.native_for(batch.vectors)
    counts = [[0] * len(tensors) for _ in owned]
    for i, (vector, chosen) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
        entries = take_entries(vector, chosen, native=native)
        ranges = [(owner, p) for owner, pieces in enumerate(owned) for p in pieces if p.tensor == batch.sections[i]]
        bounds = torch.tensor([edge for _, piece in ranges for edge in (piece.begin, piece.end)])
        edges = torch.searchsorted(entries.positions, bounds).tolist()
        sent = SentEntries(entries)
        for (owner, piece), low, high in zip(ranges, edges[::2], edges[1::2], strict=True):
            place = codec.place(batch, i, reserves[owner, piece.tensor])
            counts[owner][piece.tensor] = sent.put(opened[owner][1], place, low, high)
        sent.leave(vector)
    codec.learn(batch)
    return [
        Frame(buffer[: writer.finish(0)].clone(), counts=tuple(sent))
        for (buffer, writer), sent in zip(opened, counts, strict=True)
    ]


def _reserves(codec: Codec, batch: Batch, owned: Sequence[Sequence[Piece]]) -> dict[tuple[int, int], int]:
    """Bytes that each owner's later pieces need, by owner and tensor."""
    whole = {section: c.whole for section, c in zip(batch.sections, batch.chosen, strict=True)}
    reserves = {}
    for owner, pieces in enumerate(owned):
        active = [p for p in pieces if p.tensor in whole]
        needs = codec.reserves([p.end - p.begin if whole[p.tensor] else 0 for p in active])
        reserves.update({(owner, p.tensor): need for p, need in zip(active, needs, strict=True)})
    return reserves


def encode_leftover(codec: Codec, sums: Mapping[str, Tensor], *, step: int, budget: int) -> Frame:
    """Select from sums, which are changed in place to what does not travel; no memory takes part."""
    vectors = [Vector(t, None, 1.0, t, None) for t in sums.values()]
    batch = codec.choose(list(sums), vectors, list(range(len(sums))), step)
    return codec.write(batch, len(sums), budget)
