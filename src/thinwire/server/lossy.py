"""Lossy: pushes and deltas as shards, any of which may not arrive, and what both sides do about it.

A worker puts lost shards of a gradient back into its memory (restore) or does without (ignore). Of deltas the server
always keeps account: what a worker did not get goes again with the next one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.shards import ShardReader, encode_shards
from thinwire.errors import TransportError
from thinwire.server.messages import MessageError
from thinwire.transport.base import Buffer
from thinwire.transport.pieces import unpack

OnLoss = Literal["restore", "ignore"]
# The body of a push whose gradient was not finite: one shard that is none. It travels reliably.
NON_FINITE = b"\xff" * 4


def check_on_loss(word: str) -> OnLoss:
    """The policy of that name; ValueError if there is none."""
    if word == "restore":
        return "restore"
    if word == "ignore":
        return "ignore"
    raise ValueError(f'on-loss is "restore" or "ignore", not {word!r}')


class Arrived:
    """A message in pieces, checked: what has come of it is read like a frame."""

    def __init__(self, body: Buffer, numels: Sequence[int], *, exact: bool = False) -> None:
        try:
            pieces = unpack(body)
        except TransportError as error:
            raise MessageError(str(error)) from None
        self.size, self.lost, self.reported = pieces.total, pieces.count - len(pieces.arrived), pieces.reported
        self.non_finite = any(piece == NON_FINITE for piece in pieces.arrived.values())
        found = [] if self.non_finite else sorted(pieces.arrived.items())
        self._shards = ShardReader([piece for _, piece in found], numels, exact=exact)

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """Add all that has come."""
        self._shards.add_to(outs, weight)


@dataclass
class Pushed:
    """A gradient on its way in shards; what is known to be lost is not there any more."""

    shards: dict[int, bytes]
    numels: list[int]
    names: list[str]

    @classmethod
    def encode(
        cls, codec: Codec, views: Mapping[str, Tensor], budget: int, *, step: int, hold: Collection[str]
    ) -> "tuple[Pushed, int]":
        """A gradient as shards, and how many entries are in them."""
        made = encode_shards(codec, views, budget, step=step, hold=hold)
        shards, entries = ([NON_FINITE], 0) if isinstance(made, str) else made
        return cls(dict(enumerate(shards)), [view.numel() for view in views.values()], list(views)), entries

    @property
    def finite(self) -> bool:
        return self.shards.get(0) != NON_FINITE

    @property
    def size(self) -> int:
        return sum(map(len, self.shards.values()))

    def give_back(self, codec: Codec, lost: Collection[int] | None = None, *, restore: bool = True) -> float:
        """Shards that did not arrive (None: all) return to the memory, or are gone; returns the sum of magnitudes."""
        gone = [self.shards.pop(index, NON_FINITE) for index in sorted(self.shards if lost is None else lost)]
        mass = 0.0
        if restore:
            back = ShardReader([shard for shard in gone if shard != NON_FINITE], self.numels)
            for tensor, positions, values in back.entries():
                codec.give_back(self.names[tensor], positions, values)
                mass += float(values.abs().sum())
        return mass
