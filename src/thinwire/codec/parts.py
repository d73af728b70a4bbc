"""Parts: one batch of gradients as several frames, each with the entries of one range of every tensor.

What the exchanges need that give every rank a share of the index space: splitting what is sent, and encoding sums
that leave in place what the second selection rejects.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.codec.codec import Codec, empty_frame, open_writer
from thinwire.codec.frame import Frame
from thinwire.codec.vectors import Vector
from thinwire.codec.writing import put_entries, take_entries


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
    native = codec.native_for(batch.vectors)
    entries = [take_entries(v, c, native=native) for v, c in zip(batch.vectors, batch.chosen, strict=True)]
    at = {section: i for i, section in enumerate(batch.sections)}
    frames = []
    for pieces, budget in zip(owned, budgets, strict=True):
        active = [piece for piece in pieces if piece.tensor in at]
        whole = [p.end - p.begin if batch.chosen[at[p.tensor]].whole else 0 for p in active]
        buffer, writer = open_writer(budget)
        for piece, reserve in zip(active, codec.reserves(whole), strict=True):
            i = at[piece.tensor]
            part = entries[i].between(piece.begin, piece.end)
            put_entries(writer, codec.place(batch, i, reserve), batch.vectors[i], part)
        length = writer.finish(0)
        frames.append(Frame(buffer[:length].clone()))
    codec.learn(batch)
    return frames


def encode_leftover(codec: Codec, sums: Mapping[str, Tensor], *, step: int, budget: int) -> Frame:
    """Select from sums, which are changed in place to what does not travel; no memory takes part."""
    vectors = [Vector(t, None, 1.0, t, None) for t in sums.values()]
    batch = codec.choose(list(sums), vectors, list(range(len(sums))), step)
    return codec.write(batch, len(sums), budget)
