"""Lossy views: views of workers that may not get all that they are sent; they move when it is known what arrived.

Workers that got everything still share a node and its next delta; one that lost a shard has a node of its own, from
then on, and what it lacks is part of what its next delta is chosen from.
"""

from dataclasses import dataclass, field

from thinwire.codec.shards import ShardReader, encode_shards
from thinwire.server.messages import MessageError
from thinwire.server.views import Answer, Node, Views, all_bytes
from thinwire.transport.base import Peer


@dataclass
class _Shards:
    """What leads from a node to an edition; `after` is where those are who got all of it."""

    edition: int
    shards: list[bytes]
    after: "_Node | None" = None


@dataclass
class _Node(Node):
    shards: _Shards | None = None


@dataclass
class _Under:
    """A delta on its way to one worker."""

    worker: int
    place: tuple[int, int]
    node: _Node
    shards: _Shards
    ticket: tuple[Peer, int] | None = field(default=None)


class LossyViews(Views):
    """Views whose deltas travel as shards of at most `budget` bytes."""

    @classmethod
    def of(cls, views: Views, budget: int) -> "LossyViews":
        """In place of views that nobody has used yet."""
        made = cls.__new__(cls)
        made.__dict__.update(views.__dict__)
        made._budget = budget
        made._under = {}
        made._tickets = {}
        return made

    _budget: int
    _under: dict[tuple[int, tuple[int, int]], _Under]
    _tickets: dict[tuple[Peer, int], _Under]

    def answer(self, worker: int, layer: int, part: int, *, whole: bool) -> Answer:
        """As a view's; a delta comes as shards, and `under_way` must follow."""
        place = layer, part
        if self._codec is None:
            return super().answer(worker, layer, part, whole=whole)
        at = self._at[place]
        node = at.get(worker)
        if node is None or whole:
            self._forget_delta(worker, place)
            node = self._joined(layer, part)
            self._move(at, worker, node)
            return Answer(node.edition, True, all_bytes(node.values))
        if (worker, place) in self._under:
            raise MessageError(f"part {part} of layer {layer} was asked for before its last delta was reported")
        assert isinstance(node, _Node)
        shards = self._shards(node, layer, part)
        if shards is None:  # the model is not finite: said in full, the worker will see it
            return Answer(self._editions[place], True, all_bytes(self._values[layer][part]))
        self._under[worker, place] = _Under(worker, place, node, shards)
        return Answer(shards.edition, False, b"", shards.shards)

    def under_way(self, worker: int, layer: int, part: int, peer: Peer, ticket: int | None) -> None:
        """The last answer was sent under this ticket; None: all of it will arrive."""
        under = self._under[worker, (layer, part)]
        if ticket is None:
            self._settle(under, frozenset())
        else:
            under.ticket = peer, ticket
            self._tickets[peer, ticket] = under

    def settle(self, peer: Peer, ticket: int, lost: frozenset[int]) -> None:
        """It is known what a worker got of a delta: that is its view now."""
        under = self._tickets.get((peer, ticket))
        if under is not None:
            self._settle(under, lost)

    def forget(self, worker: int) -> None:
        for place in self._at:
            self._forget_delta(worker, place)
        super().forget(worker)

    def _forget_delta(self, worker: int, place: tuple[int, int]) -> None:
        under = self._under.pop((worker, place), None)
        if under is not None and under.ticket is not None:
            self._tickets.pop(under.ticket, None)

    def _settle(self, under: _Under, lost: frozenset[int]) -> None:
        self._forget_delta(under.worker, under.place)
        node, shards, at = under.node, under.shards, self._at[under.place]
        if not lost and (shards.after is not None or node.followers > 1):
            if shards.after is None:
                shards.after = self._applied(_Node(0, [value.clone() for value in node.values]), under, lost)
            self._move(at, under.worker, shards.after)
        elif node.followers > 1:
            self._move(at, under.worker, self._applied(_Node(0, [v.clone() for v in node.values]), under, lost))
        else:  # nobody else is there: the node itself moves
            self._applied(node, under, lost)

    def _applied(self, node: _Node, under: _Under, lost: frozenset[int]) -> _Node:
        numels = self._layout.numels(*under.place)
        for index, shard in enumerate(under.shards.shards):
            if index not in lost:
                ShardReader(shard, numels).add_to(node.values)
        node.edition, node.shards = under.shards.edition, None
        return node

    def _shards(self, node: _Node, layer: int, part: int) -> _Shards | None:
        """The delta from a node to the present edition, made once."""
        edition = self._editions[layer, part]
        if node.shards is None or node.shards.edition != edition:
            assert self._codec is not None
            pieces = self._layout.layers[layer].parts[part]
            missing = {
                piece.name: mine - theirs
                for piece, mine, theirs in zip(pieces, self._values[layer][part], node.values, strict=True)
            }
            made = encode_shards(self._codec, missing, self._budget, step=edition)
            node.shards = None if isinstance(made, str) else _Shards(edition, made[0])
        return node.shards

    def _joined(self, layer: int, part: int) -> Node:
        """The view that most workers have if it is up to date, or else the parameters as they are."""
        edition = self._editions[layer, part]
        nodes = {id(n): n for n in self._at[layer, part].values() if n.edition == edition}.values()
        popular = max(nodes, key=lambda node: node.followers, default=None)
        return popular or _Node(edition, [value.clone() for value in self._values[layer][part]])
