"""Views: what each worker has of the model; what it lacks is what the server holds back for it.

A view of a part is a node: values and their edition. Workers whose values are the same bits share a node, so that in
bulk-synchronous training one delta is made for all of them. A delta moves a worker to the node's successor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.codec.memory import Drop
from thinwire.errors import FrameError
from thinwire.server.layers import Layout
from thinwire.transport.base import Buffer, Peer


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
        self._codec = codec and Codec(
            codec.selection, codec.values, Drop(), scope=codec.scope, min_numel=codec.min_numel, kernels=codec.kernels
        )
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
