"""Lossy views: views of workers that may not get all that they are sent.

A delta is made once for all workers that have the same, as ever. What a worker is known to have lost it is owed: with
its next delta come the exact values of those entries, which it takes in place of its own. So it has the same bits as
the others again, however often that is lost too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.encode import encode_exact, encode_shards
from thinwire.codec.feedback import NoFeedback
from thinwire.codec.frame import Frame, FrameReader, ShardReader
from thinwire.errors import FrameError, MessageError, TransportError
from thinwire.server.layout import Layout, Piece, flat, trained
from thinwire.transport.base import Buffer, Peer
from thinwire.transport.udp.recovery import unpack


@dataclass
class Node:
    """A part's values as some workers have them."""

    edition: int
    values: list[Tensor]
    followers: int = 0
    # What leads to the newest edition that was asked for, as a frame or as shards, and that edition's node.
    delta: "tuple[Buffer | list[bytes], Node] | None" = None
    gone: bool = False  # its values have become those of a later node, or may become those of any


@dataclass(frozen=True)
class Answer:
    """What a worker is sent: a delta, or a part's parameters in full."""

    edition: int
    whole: bool
    body: Buffer
    shards: Sequence[Buffer] = ()  # in place of the body, where it may arrive in part

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + sum(map(len, self.shards))


class Views:
    """All workers' views of all parts. Without a codec every answer is the parameters in full, as in the paper."""

    def __init__(
        self, layout: Layout, values: Sequence[Sequence[Sequence[Tensor]]], codec: Codec | None, start: int = 0
    ) -> None:
        self._layout, self._values = layout, values
        # What does not travel is still the difference between model and view: no other memory is needed.
        self._codec = codec and codec.copy(feedback=NoFeedback())
        self._editions = dict.fromkeys(layout.places(), start)
        self._at: dict[tuple[int, int], dict[int, Node]] = {place: {} for place in layout.places()}
        self._bodies: dict[tuple[int, int], tuple[int, Buffer]] = {}
        # Memory that is used again: new memory for each delta costs as much time as the delta, in page faults.
        self._missing = torch.empty(0)
        self._spare: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def deltas(self) -> bool:
        """Whether changes are sent, or the parameters in full."""
        return self._codec is not None

    def changed(self, layer: int, part: int) -> None:
        """The server's parameters of a part are not what they were."""
        self._editions[layer, part] += 1

    def answer(self, worker: int, layer: int, part: int, *, whole: bool) -> Answer:
        """What brings a worker's part up to date, as far as the codec sends it."""
        edition = self._editions[layer, part]
        if self._codec is None:
            return Answer(edition, True, self._body(layer, part))
        at = self._at[layer, part]
        node = at.get(worker)
        if node is None or whole:
            node = self._joined(layer, part)
            self._move((layer, part), worker, node)
            return Answer(node.edition, True, all_bytes(node.values))
        delta, after = self._advanced(node, layer, part, alone=node.followers == 1)
        self._move((layer, part), worker, after)
        if isinstance(delta, list):
            return Answer(edition, False, b"", delta)
        return Answer(edition, False, delta)

    def settle(self, peer: Peer, ticket: int, lost: frozenset[int]) -> tuple[int, int] | None:
        """What became of an answer in pieces; returns its worker and bytes. There are none here."""
        return None

    def forget(self, worker: int) -> None:
        """A worker has left: its view is not needed any more."""
        for place, at in self._at.items():
            node = at.pop(worker, None)
            if node is not None:
                self._left(place, node)

    def held_back(self, worker: int, layer: int, part: int) -> list[Tensor]:
        """What the server still holds back for a worker: its own parameters minus the worker's."""
        node = self._at[layer, part].get(worker)
        seen = self._values[layer][part] if node is None else node.values
        return [mine - theirs for mine, theirs in zip(self._values[layer][part], seen, strict=True)]

    def _joined(self, layer: int, part: int) -> Node:
        """The view that most workers have, brought up to date: a newcomer shares their deltas from now on."""
        nodes = {id(node): node for node in self._at[layer, part].values()}.values()
        popular = max(nodes, key=lambda node: (node.edition, node.followers), default=None)
        if popular is None:
            return Node(self._editions[layer, part], [value.clone() for value in self._values[layer][part]])
        return self._advanced(popular, layer, part)[1] if popular.edition < self._editions[layer, part] else popular

    def _advanced(self, node: Node, layer: int, part: int, *, alone: bool = False) -> tuple[Buffer | list[bytes], Node]:
        """The delta from a node to the present edition, made once, and the node that it leads to.

        When nobody else is at the node its values are changed in place.
        """
        edition = self._editions[layer, part]
        if node.delta is None or node.delta[1].edition != edition or node.delta[1].gone:
            pieces = self._layout.layers[layer].parts[part]
            names = [piece.name for piece in pieces]
            missing = self._differences(names, self._values[layer][part], node.values)
            after = Node(edition, node.values if alone else self._copied((layer, part), node.values))
            node.gone = alone
            node.delta = self._encode(missing, after.values, edition), after
        return node.delta

    def _encode(self, missing: dict[str, Tensor], values: list[Tensor], edition: int) -> Buffer | list[bytes]:
        """What is missing, as far as the codec sends it; it is added to the values, as the worker will do."""
        assert self._codec is not None
        frame = self._codec.encode(missing, step=edition)
        FrameReader(frame, [value.numel() for value in values]).add_to(values)
        body: Buffer = frame.data.numpy().data
        return body

    def _body(self, layer: int, part: int) -> Buffer:
        edition, body = self._bodies.get((layer, part), (-1, b""))
        if edition != self._editions[layer, part]:
            body = all_bytes(self._values[layer][part])
            self._bodies[layer, part] = self._editions[layer, part], body
        return body

    def _differences(self, names: list[str], mine: Sequence[Tensor], theirs: list[Tensor]) -> dict[str, Tensor]:
        """What a view lacks of a part's pieces; until the next call."""
        sizes = [value.numel() for value in mine]
        if self._missing.numel() < sum(sizes):
            self._missing = torch.empty(sum(sizes))
        rows = self._missing[: sum(sizes)].split(sizes)
        return {
            name: torch.sub(ours, their, out=row)
            for name, ours, their, row in zip(names, mine, theirs, rows, strict=True)
        }

    def _copied(self, place: tuple[int, int], values: list[Tensor]) -> list[Tensor]:
        copies = self._spare.pop(place, None)
        if copies is None:
            return [value.clone() for value in values]
        for copy, value in zip(copies, values, strict=True):
            copy.copy_(value)
        return copies

    def _move(self, place: tuple[int, int], worker: int, node: Node) -> None:
        node.followers += 1
        before = self._at[place].get(worker)
        if before is not None:
            self._left(place, before)
        self._at[place][worker] = node

    def _left(self, place: tuple[int, int], node: Node) -> None:
        """One follower less; without any a node's delta is not asked for again, and must not keep what comes after it.

        Nor are its values: another node may have their memory.
        """
        node.followers -= 1
        if not node.followers:
            node.delta = None
            if not node.gone:
                node.gone, self._spare[place] = True, node.values


def all_bytes(values: Sequence[Tensor]) -> Buffer:
    """A part's parameters in full."""
    return torch.cat(list(values)).numpy().tobytes()


def take_whole(body: Buffer, outs: Sequence[Tensor]) -> None:
    """Write a part's parameters, as they came in full."""
    count = sum(out.numel() for out in outs)
    if len(body) != 4 * count:
        raise FrameError(f"{count} parameters take {4 * count} bytes, not {len(body)}")
    values = torch.frombuffer(bytearray(body), dtype=torch.float32)
    if not values.isfinite().all():
        raise FrameError("the server's parameters are not finite any more: has training diverged?")
    for out, part in zip(outs, values.split([out.numel() for out in outs]), strict=True):
        out.copy_(part)


def take_delta(body: Buffer, outs: Sequence[Tensor]) -> None:
    """Add a delta to a part's parameters."""
    reader = FrameReader(Frame.from_bytes(memoryview(body)), [out.numel() for out in outs])
    if reader.non_finite:
        raise FrameError("the server's parameters are not finite any more: has training diverged?")
    reader.add_to(outs)


class Copies:
    """Rows by parameter name."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = trained(model)
        self._rows: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            plain = parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()
            self._rows[name] = flat(parameter) if plain else parameter.detach().float().cpu().reshape(-1).clone()
        self.last_layout: Layout | None = None

    def row(self, name: str) -> Tensor:
        """The exact values of a parameter."""
        return self._rows[name]

    def gradients(self, pieces: Sequence[Piece], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of the gradients of a part; a parameter without one is represented by its values, to be held."""
        views = {}
        for piece in pieces:
            whole = gradients.get(piece.parameter)
            row = self._rows[piece.parameter] if whole is None else whole.reshape(-1)
            if row.dtype == torch.float64:
                row = row.float()
            views[piece.name] = row[piece.begin : piece.end]
        return views

    def take(self, layout: Layout, layer: int, part: int, body: Buffer, *, whole: bool, lossy: bool = False) -> int:
        """Bring a part up to date with what the server sent, of which pieces may be missing.

        Returns the bytes for which a receipt is due: none where the transport has reported.
        """
        self.last_layout = layout
        pieces = layout.layers[layer].parts[part]
        rows = [self._rows[piece.parameter][piece.begin : piece.end] for piece in pieces]
        size = len(body)
        if lossy and not whole:
            arrived = Arrived(body, [row.numel() for row in rows], exact=True)
            arrived.add_to(rows)
            size = 0 if arrived.reported else arrived.size
        else:
            (take_whole if whole else take_delta)(body, rows)
        for piece, row in zip(pieces, rows, strict=True):
            parameter = self._parameters[piece.parameter].detach()
            if self._rows[piece.parameter].data_ptr() == parameter.data_ptr():
                continue
            if parameter.is_contiguous():
                parameter.view(-1)[piece.begin : piece.end].copy_(row)
            else:  # no row of elements to write a part of
                parameter.copy_(self._rows[piece.parameter].view(parameter.shape))
        return size


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
