"""Shards: states of links whose parameters are sharded, cut from full parameters and joined to them.

FSDP2 cuts each parameter along one dimension into equal parts, one for each rank of the shard group; the last parts may
be shorter or empty. A link between replicas then holds the residuals of one part of every parameter. A full state has
the shapes of the parameters themselves: it fits any sharding, and models that are not sharded.
"""

import base64
import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.exchange.channel import Channel, OwnGroups, gather_json

Path = tuple[str | int, ...]
# The fields of a link's state that hold a tensor, or several, for each parameter.
_PER_PARAMETER = ("codec", "updates")


class LocalShards(Mapping[str, Tensor]):
    """This rank's parts of sharded parameters, by name, as they are now: FSDP may move them to other memory."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.whole = {name: p for name, p in parameters.items() if local_part(p).numel()}

    def __getitem__(self, name: str) -> Tensor:
        return local_part(self.whole[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor is returned as it is."""
    if type(tensor) in (Tensor, nn.Parameter):  # a lookup that fails takes longer, and most tensors are no DTensors
        return tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shared_like(part: Tensor, whole: Tensor) -> Tensor:
    """A part as a DTensor with the mesh and the placements of another one; for any other tensor, the part itself."""
    if not hasattr(whole, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    like: Any = whole
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut into parts: its full shape, and the dimension along which it is cut."""

    shape: tuple[int, ...]
    dim: int

    def extent(self, index: int, count: int) -> tuple[int, int]:
        """Where a part begins along the dimension, and its length; 0 if it is empty."""
        whole = self.shape[self.dim]
        length = -(-whole // count)
        begin = min(index * length, whole)
        return begin, min(length, whole - begin)

    def part_shape(self, index: int, count: int) -> tuple[int, ...]:
        """The shape of a part."""
        return (*self.shape[: self.dim], self.extent(index, count)[1], *self.shape[self.dim + 1 :])

    def part(self, full: Tensor, index: int, count: int) -> Tensor:
        """A part of a full tensor; flat if the tensor is flat."""
        found = full.reshape(self.shape).narrow(self.dim, *self.extent(index, count)).clone()
        return found if tuple(full.shape) == self.shape else found.reshape(-1)

    def joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        """The full tensor of all parts in order; None stands for zeros. It is flat if they are."""
        count = len(parts)
        like = next(part for part in parts if part is not None)
        flat = all(p is None or tuple(p.shape) != self.part_shape(i, count) for i, p in enumerate(parts))
        shaped = [
            torch.zeros(self.part_shape(i, count), dtype=like.dtype)
            if part is None
            else part.cpu().reshape(self.part_shape(i, count))
            for i, part in enumerate(parts)
        ]
        full = torch.cat(shaped, self.dim)
        return full.reshape(-1) if flat else full


@dataclass
class Shards:
    """The part of every parameter that this rank holds.

    index: which part. count: the number of ranks that share a replica. cuts: of all parameters in training, by name.
    groups: connects the ranks that share a replica. parameters: the DTensors, by name.
    """

    index: int
    count: int
    cuts: Mapping[str, Cut]
    groups: OwnGroups
    parameters: Mapping[str, nn.Parameter] = field(repr=False)

    @property
    def channel(self) -> Channel:
        """The channel between the ranks that share a replica."""
        return self.groups.all

    def describe(self) -> dict[str, Any]:
        """What a state says about its parts."""
        cuts = {name: [list(cut.shape), cut.dim] for name, cut in self.cuts.items()}
        return {"index": self.index, "count": self.count, "parameters": cuts}

    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of this rank's parts, by name."""
        return {name: torch.Size(cut.part_shape(self.index, self.count)) for name, cut in self.cuts.items()}

    def any(self, mine: bool) -> bool:
        """Whether something is true on any rank that shares this replica. Call it on all of them."""
        flag = torch.tensor([float(mine)]).to(self.channel.device)
        self.channel.all_reduce(flag)
        return float(flag) > 0.0

    def part_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a full state."""
        sizes = {name: math.prod(cut.shape) for name, cut in self.cuts.items()}
        rest, pieces = take_apart(state, sizes)
        for path, (name, full) in pieces.items():
            put(rest, path, self.cuts[name].part(full, self.index, self.count))
        empty = {name for name, cut in self.cuts.items() if not cut.extent(self.index, self.count)[1]}
        kept = {key: without(value, empty) if key in _PER_PARAMETER else value for key, value in rest.items()}
        return {**kept, "shard": self.describe()}

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The full state of which this one is a part. Call it on all ranks that share a replica."""
        with self.groups.reopened():
            return self._gathered(state)

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        rest, mine = take_apart(state, _part_sizes(self.cuts, self.index, self.count))
        rest = decode_rest(gather_json(self.channel, encode_rest(rest))[0])  # the first rank has a part of everything
        rows = gather_json(self.channel, [[list(path), name, _type(t), t.dim()] for path, (name, t) in mine.items()])
        paths: dict[Path, tuple[str, str, bool]] = {}
        for path, name, kind, dims in (entry for row in rows for entry in row):
            paths.setdefault(tuple(path), (name, kind, dims == 1 and len(self.cuts[name].shape) != 1))
        for path, (name, kind, flat) in paths.items():
            cut = self.cuts[name]
            own = mine[path][1] if path in mine else None
            full = cut.joined(self._all_parts(cut, own, getattr(torch, kind)))
            put(rest, path, full.reshape(-1) if flat else full)
        return {**rest, "shard": None}

    def _all_parts(self, cut: Cut, own: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        room = torch.zeros(math.prod(cut.part_shape(0, self.count)), dtype=dtype)  # the first part is the largest
        if own is not None:
            room[: own.numel()] = own.cpu().reshape(-1)
        messages = self.channel.all_gather(room.view(torch.uint8))
        shapes = [cut.part_shape(index, self.count) for index in range(self.count)]
        return [m.clone().view(dtype)[: math.prod(s)].view(s) for m, s in zip(messages, shapes, strict=True)]


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _part_sizes(cuts: Mapping[str, Cut], index: int, count: int) -> dict[str, int]:
    return {name: math.prod(cut.part_shape(index, count)) for name, cut in cuts.items()}


# States as trees


def take_apart(
    state: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[Path, tuple[str, Tensor]]]:
    """Return a state without its tensors of parameters' sizes, and those tensors by path, with the parameter's name."""
    pieces: dict[Path, tuple[str, Tensor]] = {}

    def walk(tree: Any, path: Path, name: str | None) -> Any:
        if isinstance(tree, Tensor):
            if name is None or tree.dim() == 0 or tree.numel() != sizes[name]:
                return tree
            pieces[path] = name, tree
            return None
        if isinstance(tree, Mapping):
            return {k: walk(v, (*path, k), k if k in sizes else name) for k, v in tree.items()}
        if isinstance(tree, list | tuple):
            return [walk(v, (*path, i), name) for i, v in enumerate(tree)]
        return tree

    rest = {key: walk(v, (key,), None) if key in _PER_PARAMETER else v for key, v in state.items()}
    return rest, pieces


def put(tree: Any, path: Path, value: Any) -> None:
    """Set a value in a tree of dicts and lists; dicts that are missing are made."""
    *before, last = path
    for key in before:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key]
    tree[last] = value


def without(tree: Any, names: Container[str]) -> Any:
    """A tree without the parameters of these names."""
    if isinstance(tree, Mapping):
        return {key: without(value, names) for key, value in tree.items() if key not in names}
    return [without(value, names) for value in tree] if isinstance(tree, list) else tree


def encode_rest(rest: Any) -> str:
    """JSON of what `take_apart` leaves; tensors in it become base64."""

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"a link's state holds a {type(value).__name__}")
        data = value.detach().cpu().contiguous()
        text = base64.b64encode(data.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": text, "type": _type(data), "shape": list(data.shape)}

    return json.dumps(rest, default=plain)


def decode_rest(text: str) -> Any:
    """What `encode_rest` was given. ValueError if this is not such a text."""

    def tensors(value: dict[str, Any]) -> Any:
        if value.keys() != {"tensor", "type", "shape"}:
            return value
        kind = getattr(torch, str(value["type"]), None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"a tensor in the link's state has the type {value['type']!r}, which does not exist")
        data = torch.frombuffer(bytearray(base64.b64decode(value["tensor"])), dtype=torch.uint8)
        return data.view(kind).reshape(value["shape"])

    return json.loads(text, object_hook=tensors)


def join_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The full state of all shards' states, which are given in order. ValueError if some are missing."""
    described = [state["shard"] for state in states]
    count = described[0]["count"]
    if [d["index"] for d in described] != list(range(count)) or any(d["count"] != count for d in described):
        raise ValueError(f"these are the states of shards {[d['index'] for d in described]}, of {count}: give all")
    cuts = cuts_of(described[0])
    taken = [take_apart(state, _part_sizes(cuts, i, count)) for i, state in enumerate(states)]
    rest = taken[0][0]
    names = {path: name for _, pieces in taken for path, (name, _) in pieces.items()}
    for path, name in names.items():
        put(rest, path, cuts[name].joined([pieces[path][1] if path in pieces else None for _, pieces in taken]))
    return {**rest, "shard": None}


def cuts_of(described: Mapping[str, Any]) -> dict[str, Cut]:
    """The cuts that a state names. ValueError if they are not shapes and dimensions."""
    try:
        return {name: Cut(tuple(map(int, shape)), int(dim)) for name, (shape, dim) in described["parameters"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError("the link's state does not say how its parameters are sharded") from None


def is_shard(value: object) -> bool:
    """Whether a state's field says how its parameters are sharded."""
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(value.get(key), int) for key in ("index", "count"))
        and isinstance(value.get("parameters"), dict)
    )


# torch.distributed.checkpoint

_KEY = re.compile(r"(?:.*\.)?(?P<key>thinwire (?P<replica>\d+) (?:rest (?P<shard>\d+)|(?P<path>\[.*\])))", re.DOTALL)


class ShardedLink:
    """A link for torch.distributed.checkpoint, which stores every replica's residuals as sharded tensors.

    saved: the checkpoint to load from, a path or a storage reader. It may have another number of replicas or shards.
    Without it, the next load takes the tensors that the link has by then, from a checkpoint of the same mesh.
    """

    def __init__(self, link: Any, shards: Shards | None, shapes: Mapping[str, torch.Size], saved: Any = None) -> None:
        self._link, self._shards, self._shapes, self._saved = link, shards, shapes, saved
        self._index, self._count = (0, 1) if shards is None else (shards.index, shards.count)
        self._merges = False  # whether the checkpoint to load has another number of replicas

    def load_from(self, saved: Any) -> None:
        """Name the checkpoint that the next load reads, a path or a storage reader. After it this object saves again.

        Frameworks that save and load with the same object call it before `torch.distributed.checkpoint.load`.
        """
        self._saved = saved

    def state_dict(self) -> dict[str, Any]:
        """What this rank saves; where there is a checkpoint to load from, the tensors to load into."""
        if self._saved is not None:
            return self._targets()
        self._merges = False
        state = self._link.state_dict()
        self._add_residuals(state["codec"]["residuals"])
        rest, pieces = take_apart(state, {name: shape.numel() for name, shape in self._shapes.items()})
        rest["pieces"] = [list(path) for path in pieces]
        found: dict[str, Any] = {_rest_key(state["rank"], self._index): encode_rest(rest)}
        for path, (name, tensor) in pieces.items():
            found[f"thinwire {state['rank']} {json.dumps(path)}"] = self._whole(name, tensor)
        return found

    def _add_residuals(self, residuals: dict[str, dict[str, Tensor]]) -> None:
        """Add zeros for residuals that are not made yet, so that a new link too asks a checkpoint for all of them."""
        for name in (name for name, shape in self._shapes.items() if shape.numel()):
            for slot in self._link.codec.feedback.slots:
                if slot not in (slots := residuals.setdefault(name, {})):
                    slots[slot] = torch.zeros(self._shapes[name].numel())

    def _whole(self, name: str, part: Tensor) -> Tensor:
        shaped = part.detach().reshape(self._shapes[name])
        return shaped if self._shards is None else shared_like(shaped, self._shards.parameters[name])

    def _targets(self) -> dict[str, Any]:
        found = self._keys()
        replicas = {int(key["replica"]) for key in found}
        shards = {int(key["shard"]) for key in found if key["shard"] is not None}
        if not replicas:
            raise ValueError("the checkpoint holds no state of a link: save it with link.sharded()")
        own = self._link.rank, self._link.world
        self._merges = len(replicas) != own[1]
        wanted = replicas if self._merges else {own[0]}
        shard = 0 if self._merges or len(shards) != self._count else self._index
        targets: dict[str, Any] = {_rest_key(replica, shard): "" for replica in sorted(wanted)}
        for key, size, dtype in (
            (k, *self._sizes[k["key"]]) for k in found if k["path"] and int(k["replica"]) in wanted
        ):
            name = self._name_in(json.loads(key["path"]), size)
            if self._shapes[name].numel():
                targets[key["key"]] = self._whole(name, torch.zeros(self._shapes[name], dtype=dtype))
        return targets

    def _keys(self) -> list[dict[str, Any]]:
        """The parts of the keys of all links' tensors in the checkpoint; `_sizes` gets their sizes and types."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        reader = self._saved if hasattr(self._saved, "read_metadata") else FileSystemReader(self._saved)
        found, self._sizes = [], dict[str, tuple[torch.Size, torch.dtype]]()
        for text, stored in reader.read_metadata().state_dict_metadata.items():
            if (match := _KEY.fullmatch(text)) is not None:
                found.append(match.groupdict())
                if isinstance(stored, TensorStorageMetadata):
                    self._sizes[match["key"]] = stored.size, stored.properties.dtype
        return found

    def _name_in(self, path: Sequence[str | int], size: torch.Size) -> str:
        """The parameter that a path belongs to; ValueError if the model has no such parameter of this shape."""
        name = next((key for key in reversed(path) if key in self._shapes or self._cut(key) is not None), None)
        if not isinstance(name, str):
            raise ValueError(f"the checkpoint holds {path}, which belongs to no parameter in training here")
        cut = self._cut(name)
        shape = self._shapes[name] if cut is None else torch.Size(cut.shape)
        if shape != size:
            raise ValueError(f"{name} has the shape {list(shape)}, and {list(size)} in the checkpoint")
        return name

    def _cut(self, name: str | int) -> Cut | None:
        return self._shards.cuts.get(str(name)) if self._shards is not None else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what was read from the checkpoint; from another number of replicas, every rank loads their mean."""
        states: dict[str, dict[str, Any]] = {}
        unread: set[Path] = set()
        for key in sorted(state, key=lambda key: " rest " not in key):  # the numbers first, then tensors into them
            match = _KEY.fullmatch(key)
            assert match is not None
            if match["shard"] is not None:
                rest = decode_rest(state[key])
                held = set(map(tuple, rest.pop("pieces", ())))
                unread |= held if self._saved is None else set()
                states[match["replica"]] = self._fitting(rest)
            else:
                path = tuple(json.loads(match["path"]))
                local = state[key].to_local() if self._shards is not None else state[key]
                put(states[match["replica"]], path, local.clone())
                unread.discard(path)
        if unread:
            raise ValueError(
                f"the checkpoint holds {min(map(str, unread))}, which this link has not made yet: name the checkpoint, "
                "link.sharded(path), or load_from(path) of an object that saves too"
            )
        found = list(states.values())
        self._link.load_state_dict(found if self._merges else found[0])
        self._saved = None

    def _fitting(self, rest: Any) -> dict[str, Any]:
        """A saved state, of which the tensors follow, as this rank would have saved it."""
        empty = {name for name, shape in self._shapes.items() if not shape.numel()}
        found = {**without(rest, empty), "shard": None if self._shards is None else self._shards.describe()}
        count = rest["shard"]["count"] if rest.get("shard") else 1
        # Sizes of messages and learned thresholds do not fit another mesh. They are found again within a few steps.
        if self._merges or count != self._count:
            found |= {"exchange": {}, "buckets": [], "codec": {**found["codec"], "selection": {}}}
        return found


def _rest_key(replica: int, shard: int) -> str:
    return f"thinwire {replica} rest {shard}"
