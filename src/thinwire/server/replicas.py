"""Replicas: the workers' parameters, as the server knows them and as a worker holds them.

The server knows what each worker has received, bit for bit, and sends it the compressed difference to its own
parameters. A delta is made once for all workers with the same replica. Over a transport that loses data, the server
learns which entries of a delta a worker has lost. With the next delta it sends the exact values of those entries, which
the worker writes over its own, so that both agree again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.encode import NonFinite, encode_exact, encode_shards
from thinwire.codec.feedback import NoFeedback, first_not_finite
from thinwire.codec.frame import Frame, FrameReader, ShardReader
from thinwire.errors import FrameError, MessageError, TransportError
from thinwire.server.layout import Layout, flat, trained
from thinwire.transport.base import Buffer, Peer
from thinwire.transport.udp.packet import missing_ranges
from thinwire.transport.udp.recovery import unpack

# The only shard of a message whose tensors are not finite. It is not a valid shard, and it is sent reliably.
NON_FINITE = b"\xff" * 4

Place = tuple[int, int]  # layer and part
PartValues = Sequence[Sequence[Sequence[Tensor]]]  # by layer, part and piece
LostEntries = dict[int, Tensor]  # by tensor of a part: positions, ascending


class ReceivedShards:
    """A message in shards, some of which may be lost; the rest has been checked and is read like a frame."""

    def __init__(self, body: Buffer, numels: Sequence[int], *, exact: bool = False) -> None:
        try:
            pieces = unpack(body)
        except TransportError as error:
            raise MessageError(str(error)) from None
        self.size, self.reported, self._body = pieces.total, pieces.reported, body
        self.non_finite = any(piece == NON_FINITE for piece in pieces.arrived.values())
        found = [] if self.non_finite else sorted(pieces.arrived.items())
        self.lost = [(lost.start, lost.stop) for lost in missing_ranges(pieces.count, pieces.arrived)]
        self._shards = ShardReader([piece for _, piece in found], numels, exact=exact)

    @property
    def data(self) -> Tensor:
        """The message's bytes."""
        return torch.frombuffer(bytearray(self._body), dtype=torch.uint8)

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """Add all entries that have arrived."""
        self._shards.add_to(outs, weight)


@dataclass
class SentShards:
    """A gradient that was sent in shards; a shard that is known to be lost is removed from it."""

    shards: dict[int, bytes]
    numels: list[int]
    names: list[str]

    @classmethod
    def encode(
        cls, codec: Codec, tensors: Mapping[str, Tensor], budget: int, *, step: int, hold: Collection[str]
    ) -> "tuple[SentShards, int]":
        """Encode a gradient in shards of at most `budget` bytes; also return the number of entries in them."""
        made = encode_shards(codec, tensors, budget, step=step, hold=hold)
        shards, entries = ([NON_FINITE], 0) if isinstance(made, NonFinite) else made
        return cls(dict(enumerate(shards)), [tensor.numel() for tensor in tensors.values()], list(tensors)), entries

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(map(len, self.shards.values()))

    def within(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return the shards within some ranges, without those that were known to be lost."""
        return [index for index in self.shards if any(first <= index < end for first, end in ranges)]

    def give_back(self, codec: Codec, lost: Collection[int] | None = None, *, restore: bool = True) -> float:
        """Add the entries of lost shards (None: of all) to the residual and return the sum of their magnitudes.

        Without `restore` the entries are dropped.
        """
        gone = [self.shards.pop(index, NON_FINITE) for index in sorted(self.shards if lost is None else lost)]
        back = ShardReader([shard for shard in gone if restore and shard != NON_FINITE], self.numels)
        mass = 0.0
        for tensor, positions, values in back.entries():
            codec.give_back(self.names[tensor], positions, values)
            mass += float(values.abs().sum())
        return mass


@dataclass
class ReplicaVersion:
    """A part's values at one version, as some workers have them."""

    version: int
    values: list[Tensor]
    followers: int = 0
    # The change to the newest version that a worker pulled, as a frame or as shards, and that version.
    delta: "tuple[Buffer | list[bytes], ReplicaVersion] | None" = None
    gone: bool = False  # its tensors now belong to a later version, or are free for any


@dataclass(frozen=True)
class PullReply:
    """What the server sends for a pull: a delta, or a part's parameters in full."""

    version: int
    full: bool
    body: Buffer
    shards: Sequence[Buffer] = ()  # in place of the body, over a transport that may lose some of them

    @property
    def size(self) -> int:
        """Bytes of the body or the shards."""
        return len(self.body) + sum(map(len, self.shards))


class Replicas:
    """The replicas of all parts at all workers. Without a codec every reply is the parameters in full."""

    def __init__(self, layout: Layout, values: PartValues, codec: Codec | None, start: int = 0) -> None:
        self.layout, self._values = layout, values
        # The difference between the model and a replica already contains what was not sent: a residual of the codec's
        # own would count it twice.
        self._codec = codec and codec.copy(feedback=NoFeedback())
        self.deltas = codec is not None  # whether changes are sent, or the parameters in full
        self._versions = dict.fromkeys(layout.places(), start)
        self._at: dict[Place, dict[int, ReplicaVersion]] = {place: {} for place in layout.places()}  # by session
        self._bodies: dict[Place, Buffer] = {}  # parameters in full, without a codec
        # Buffers are reused: the page faults of new ones for each delta take as long as the delta itself.
        self._difference = torch.empty(0)
        self._spare: dict[Place, list[Tensor]] = {}

    def changed(self, layer: int, part: int) -> None:
        """Note that the server has updated its parameters of a part."""
        self._versions[layer, part] += 1
        self._bodies.pop((layer, part), None)

    def reply(self, session: int, layer: int, part: int, *, full: bool) -> PullReply:
        """Return what brings a worker's part up to date, as far as the codec sends it."""
        version = self._versions[layer, part]
        if self._codec is None:
            if (layer, part) not in self._bodies:
                self._bodies[layer, part] = all_bytes(self._values[layer][part])
            return PullReply(version, True, self._bodies[layer, part])
        replica = self._at[layer, part].get(session)
        if replica is None or full:
            replica = self._shared(layer, part)
            self._move((layer, part), session, replica)
            return PullReply(replica.version, True, all_bytes(replica.values))
        delta, after = self._advanced(replica, layer, part, alone=replica.followers == 1)
        self._move((layer, part), session, after)
        body, shards = (b"", delta) if isinstance(delta, list) else (delta, ())
        return PullReply(version, False, body, shards)

    def forget(self, session: int) -> None:
        """Drop the replica of a worker that has left."""
        for place in self._at:
            self._unfollow(place, session)

    def _shared(self, layer: int, part: int) -> ReplicaVersion:
        """Return the replica that most workers have, brought up to date, so that a new worker shares their deltas."""
        replicas = {id(replica): replica for replica in self._at[layer, part].values()}.values()
        popular = max(replicas, key=lambda replica: (replica.version, replica.followers), default=None)
        version = self._versions[layer, part]
        if popular is None:
            return ReplicaVersion(version, [value.clone() for value in self._values[layer][part]])
        return self._advanced(popular, layer, part)[1] if popular.version < version else popular

    def _advanced(
        self, replica: ReplicaVersion, layer: int, part: int, *, alone: bool = False
    ) -> tuple[Buffer | list[bytes], ReplicaVersion]:
        """Return the delta from a replica to the present version, made once, and the replica that it leads to.

        alone: no other worker has this replica, so that its values are changed in place.
        """
        version = self._versions[layer, part]
        if replica.delta is None or replica.delta[1].version != version or replica.delta[1].gone:
            names = [piece.name for piece in self.layout.layers[layer].parts[part]]
            missing = self._differences(names, self._values[layer][part], replica.values)
            values = replica.values if alone else self._copied((layer, part), replica.values)
            replica.gone = alone
            replica.delta = self._encode(missing, values, version), ReplicaVersion(version, values)
        return replica.delta

    def _encode(self, missing: dict[str, Tensor], values: list[Tensor], version: int) -> Buffer | list[bytes]:
        """Encode what is missing, and add what the codec sends to the values, as the worker will do."""
        assert self._codec is not None
        frame = self._codec.encode(missing, step=version)
        FrameReader(frame, [value.numel() for value in values]).add_to(values)
        body: Buffer = frame.data.numpy().data
        return body

    def _differences(self, names: list[str], ours: Sequence[Tensor], theirs: list[Tensor]) -> dict[str, Tensor]:
        """Return what a replica lacks of a part's pieces; the tensors are valid until the next call."""
        sizes = [value.numel() for value in ours]
        if self._difference.numel() < sum(sizes):
            self._difference = torch.empty(sum(sizes))
        rows = self._difference[: sum(sizes)].split(sizes)
        return {
            name: torch.sub(our, their, out=row)
            for name, our, their, row in zip(names, ours, theirs, rows, strict=True)
        }

    def _copied(self, place: Place, values: list[Tensor]) -> list[Tensor]:
        copies = self._spare.pop(place, None)
        if copies is None:
            return [value.clone() for value in values]
        for copy, value in zip(copies, values, strict=True):
            copy.copy_(value)
        return copies

    def _move(self, place: Place, session: int, replica: ReplicaVersion) -> None:
        replica.followers += 1
        self._unfollow(place, session)
        self._at[place][session] = replica

    def _unfollow(self, place: Place, session: int) -> None:
        """Count one follower less. Without any, free the delta, which refers to later versions, and the values."""
        replica = self._at[place].pop(session, None)
        if replica is None:
            return
        replica.followers -= 1
        if not replica.followers:
            replica.delta = None
            if not replica.gone:
                replica.gone, self._spare[place] = True, replica.values


class LossyReplicas(Replicas):
    """Replicas whose deltas are sent as shards of at most `budget` bytes, any of which may be lost."""

    def __init__(self, layout: Layout, values: PartValues, codec: Codec | None, start: int = 0, *, budget: int) -> None:
        super().__init__(layout, values, codec, start)
        self._budget = budget
        # By session and place: the shards of a delta that is not reported yet, and the entries that were lost.
        self._in_flight: dict[tuple[int, Place], list[Buffer]] = {}
        self._lost: dict[tuple[int, Place], LostEntries] = {}
        self._tickets: dict[tuple[Peer, int], tuple[int, Place, list[Buffer]]] = {}

    def reply(self, session: int, layer: int, part: int, *, full: bool) -> PullReply:
        """As of `Replicas`, with a delta as shards; the caller must call `sent` for a delta."""
        place = layer, part
        if (session, place) in self._in_flight and not full:
            raise MessageError(f"part {part} of layer {layer} was pulled before its last delta was reported")
        made = super().reply(session, layer, part, full=full)
        if made.full:  # the ticket of an earlier delta stays: its bytes must still be reported
            self._lost.pop((session, place), None)
            self._in_flight.pop((session, place), None)
            return made
        if NON_FINITE in made.shards:  # sent in full, so that the worker sees what happened
            return PullReply(made.version, True, all_bytes(self._values[layer][part]))
        lost, shards = self._lost.pop((session, place), {}), list(made.shards)
        if lost:
            shards += encode_exact(self._at[place][session].values, lost, self._budget)
        self._in_flight[session, place] = shards
        return PullReply(made.version, False, b"", shards)

    def sent(self, session: int, place: Place, peer: Peer, ticket: int | None) -> None:
        """Note the transport's ticket of the last delta; None if all of it will arrive."""
        if ticket is None:
            del self._in_flight[session, place]
        else:
            self._tickets[peer, ticket] = session, place, self._in_flight[session, place]

    def settle(self, peer: Peer, ticket: int, lost: frozenset[int]) -> tuple[int, int] | None:
        """Note which shards of a delta were lost: the next delta repeats them. Return its session and bytes."""
        if (peer, ticket) not in self._tickets:
            return None
        session, place, shards = self._tickets.pop((peer, ticket))
        if self._in_flight.get((session, place)) is shards:
            del self._in_flight[session, place]
            if lost:
                gone = [shards[index] for index in lost if index < len(shards)]
                found: dict[int, list[Tensor]] = {}
                for tensor, positions, _ in ShardReader(gone, self.layout.numels[place], exact=True).entries():
                    found.setdefault(tensor, []).append(positions)
                self._lost[session, place] = {n: torch.cat(found[n]).unique() for n in sorted(found)}
        return session, sum(map(len, shards))

    def forget(self, session: int) -> None:
        """Drop the replica of a worker that has left."""
        for place in self._at:
            self._lost.pop((session, place), None)
            self._in_flight.pop((session, place), None)
        self._tickets = {key: delta for key, delta in self._tickets.items() if delta[0] != session}
        super().forget(session)

    def _encode(self, missing: dict[str, Tensor], values: list[Tensor], version: int) -> Buffer | list[bytes]:
        assert self._codec is not None
        made = encode_shards(self._codec, missing, self._budget, step=version)
        if isinstance(made, NonFinite):
            return [NON_FINITE]
        shards, _ = made
        ShardReader(shards, [value.numel() for value in values]).add_to(values)
        return shards


def all_bytes(values: Sequence[Tensor]) -> Buffer:
    """Return a part's parameters in full, as they are sent."""
    return torch.cat(list(values)).numpy().tobytes()


def write_full(body: Buffer, outs: Sequence[Tensor]) -> None:
    """Write a part's parameters that were sent in full."""
    count = sum(out.numel() for out in outs)
    if len(body) != 4 * count:
        raise FrameError(f"{count} parameters take {4 * count} bytes, not {len(body)}")
    values = torch.frombuffer(bytearray(body), dtype=torch.float32)
    if first_not_finite([values]) >= 0:
        raise FrameError(_DIVERGED)
    for out, part in zip(outs, values.split([out.numel() for out in outs]), strict=True):
        out.copy_(part)


def add_delta(body: Buffer, outs: Sequence[Tensor]) -> None:
    """Add a delta to a part's parameters."""
    reader = FrameReader(Frame.from_bytes(memoryview(body)), [out.numel() for out in outs])
    if reader.non_finite:
        raise FrameError(_DIVERGED)
    reader.add_to(outs)


_DIVERGED = "the server's parameters are not finite any more: has training diverged?"


class LocalParameters:
    """A worker's parameters, kept in float32 as the server sends them.

    Parameters of another type, device or memory layout are written from a float32 copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = trained(model)
        self.rows: dict[str, Tensor] = {}  # exact values, flat
        for name, parameter in self._parameters.items():
            plain = parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()
            self.rows[name] = flat(parameter) if plain else parameter.detach().float().cpu().reshape(-1).clone()
        self.last_layout: Layout | None = None

    def update(self, layout: Layout, layer: int, part: int, body: Buffer, *, full: bool, lossy: bool = False) -> int:
        """Bring a part up to date with a reply of the server, some shards of which may be lost.

        Return the bytes that the worker has to acknowledge: none where the transport has reported them.
        """
        self.last_layout = layout
        pieces = layout.layers[layer].parts[part]
        rows = [self.rows[piece.parameter][piece.begin : piece.end] for piece in pieces]
        size = len(body)
        if lossy and not full:
            received = ReceivedShards(body, [row.numel() for row in rows], exact=True)
            received.add_to(rows)
            size = 0 if received.reported else received.size
        else:
            (write_full if full else add_delta)(body, rows)
        for piece, row in zip(pieces, rows, strict=True):
            parameter = self._parameters[piece.parameter].detach()
            if self.rows[piece.parameter].data_ptr() == parameter.data_ptr():
                continue
            if parameter.is_contiguous():
                parameter.view(-1)[piece.begin : piece.end].copy_(row)
            else:  # a piece of it cannot be addressed, so all of it is written
                parameter.copy_(self.rows[piece.parameter].view(parameter.shape))
        return size
