"""Lossy views: views of workers that may not get all that they are sent.

A delta is made once for all workers that have the same, as ever. What a worker is known to have lost it is owed: with
its next delta come the exact values of those entries, which it takes in place of its own. So it has the same bits as
the others again, however often that is lost too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codec.shards import ShardReader, encode_exact, encode_shards
from thinwire.server.lossy import NON_FINITE
from thinwire.server.messages import MessageError
from thinwire.server.views import Answer, Views, all_bytes
from thinwire.transport.base import Buffer, Peer

Place = tuple[int, int]
Owed = dict[int, Tensor]  # by tensor of a part: positions, ascending


@dataclass
class _Under:
    """A delta on its way to one worker."""

    worker: int
    place: Place
    shards: list[Buffer]


class LossyViews(Views):
    """Views whose deltas travel as shards of at most `budget` bytes."""

    @classmethod
    def of(cls, views: Views, budget: int) -> "LossyViews":
        """In place of views that nobody has used yet."""
        made = cls.__new__(cls)
        made.__dict__.update(views.__dict__)
        made._budget = budget
        made._under, made._tickets, made._owed = {}, {}, {}
        return made

    _budget: int
    _under: dict[tuple[int, Place], _Under]
    _tickets: dict[tuple[Peer, int], _Under]
    _owed: dict[tuple[int, Place], Owed]

    def answer(self, worker: int, layer: int, part: int, *, whole: bool) -> Answer:
        """As a view's; a delta comes as shards, and `under_way` must follow."""
        place = layer, part
        if (worker, place) in self._under and not whole:
            raise MessageError(f"part {part} of layer {layer} was asked for before its last delta was reported")
        made = super().answer(worker, layer, part, whole=whole)
        if made.whole:  # its ticket is kept: what was sent before must still be accounted for
            self._owed.pop((worker, place), None)
            self._under.pop((worker, place), None)
            return made
        if NON_FINITE in made.shards:  # said in full: the worker will see it
            return Answer(made.edition, True, all_bytes(self._values[layer][part]))
        owed, shards = self._owed.pop((worker, place), {}), list(made.shards)
        if owed:
            shards += encode_exact(self._at[place][worker].values, owed, self._budget)
        self._under[worker, place] = _Under(worker, place, shards)
        return Answer(made.edition, False, b"", shards)

    def under_way(self, worker: int, layer: int, part: int, peer: Peer, ticket: int | None) -> None:
        """The last answer was sent under this ticket; None: all of it will arrive."""
        if ticket is None:
            del self._under[worker, (layer, part)]
        else:
            self._tickets[peer, ticket] = self._under[worker, (layer, part)]

    def settle(self, peer: Peer, ticket: int, lost: frozenset[int]) -> tuple[int, int] | None:
        """It is known what a worker did not get of a delta: it is owed that. Returns the worker, and bytes sent."""
        under = self._tickets.pop((peer, ticket), None)
        if under is None:
            return None
        key = under.worker, under.place
        if self._under.get(key) is under:
            del self._under[key]
            if lost:
                self._owed[key] = self._positions(under, lost)
        return under.worker, sum(map(len, under.shards))

    def owed(self, worker: int, layer: int, part: int) -> Owed:
        """Entries of a part in which a worker is known to differ from its view, until its next delta."""
        return self._owed.get((worker, (layer, part)), {})

    def forget(self, worker: int) -> None:
        for place in self._at:
            self._owed.pop((worker, place), None)
            self._under.pop((worker, place), None)
        for ticket in [ticket for ticket, under in self._tickets.items() if under.worker == worker]:
            del self._tickets[ticket]
        super().forget(worker)

    def _positions(self, under: _Under, lost: frozenset[int]) -> Owed:
        numels = self._layout.numels(*under.place)
        found: dict[int, list[Tensor]] = {}
        shards = [under.shards[index] for index in lost if index < len(under.shards)]
        for tensor, positions, _ in ShardReader(shards, numels, exact=True).entries():
            found.setdefault(tensor, []).append(positions)
        return {tensor: torch.cat(found[tensor]).unique() for tensor in sorted(found)}

    def _encode(self, missing: dict[str, Tensor], values: list[Tensor], edition: int) -> Buffer | list[bytes]:
        assert self._codec is not None
        made = encode_shards(self._codec, missing, self._budget, step=edition)
        if isinstance(made, str):
            return [NON_FINITE]
        shards, _ = made
        ShardReader(shards, [value.numel() for value in values]).add_to(values)
        return shards
