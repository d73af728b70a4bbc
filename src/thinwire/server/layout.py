"""Layout: how a model is divided in layers and parts for pushes and pulls; its buffers and frozen parameters.

Buffers (running statistics) are sent in full: a worker that joins takes the server's, and from time to time the server
takes those of one worker, so that its own model can be evaluated. Frozen parameters are not sent: the server and the
workers must load the same ones, which is checked by a digest.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.errors import MessageError
from thinwire.transport.base import LARGEST, Buffer

# The largest number of parts, because a peer chooses how the model is cut.
MOST_PARTS = 1 << 16
# The largest number of elements in a part: in full it must fit in a message.
MOST_ELEMENTS = (LARGEST - 1024) // 4

# Modules behind a layer are joined to it up to this share of the model, and up to this number of elements.
_SMALL_SHARE, _SMALL_NUMEL = 1 / 64, 1 << 16

Shapes = list[list[Any]]  # names and shapes, as JSON has them
NamedTensors = list[tuple[str, Tensor]]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained; tied ones appear once, by their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


@dataclass(frozen=True)
class Piece:
    """A range of one parameter's elements."""

    parameter: str
    begin: int
    end: int

    @cached_property
    def name(self) -> str:
        """A name that is unique among all pieces."""
        return f"{self.parameter}[{self.begin}:{self.end}]"

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layer:
    """The parameters of one module and of small modules behind it, and the parts in which they are sent."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    parts: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class Layout:
    """All layers of a model, in the order of its modules, which is assumed to be the order of use."""

    layers: tuple[Layer, ...]
    cut: int

    @classmethod
    def of(cls, model: nn.Module, cut: int) -> "Layout":
        """Return the layout with parts of at most `cut` elements; 0 does not divide layers."""
        if cut < 0:
            raise ValueError(f"a part has at least one element, not {cut}")
        owned: dict[str, NamedTensors] = {}
        for name, parameter in trained(model).items():
            owned.setdefault(name.rpartition(".")[0], []).append((name, parameter))
        if not owned:
            raise ValueError("the model has no parameter that is trained")
        sizes = [p.numel() for tensors in owned.values() for _, p in tensors]
        if cut and sum(-(-n // cut) for n in sizes) > MOST_PARTS:  # checked before they are made
            raise ValueError(f"parts of {cut} elements are too many for this model: make them larger")
        layers = tuple(
            Layer(modules, tuple(name for name, _ in tensors), tuple(_parts(tensors, cut)))
            for modules, tensors in _joined(owned)
        )
        for layer in layers:
            if max(sum(map(len, part)) for part in layer.parts) > MOST_ELEMENTS:
                raise ValueError(f"the layer {layer.modules[0]} is too large for a message: cut it in smaller parts")
        return cls(layers, cut)

    def places(self) -> Iterator[tuple[int, int]]:
        """Return (layer, part) of all parts, in order."""
        return ((i, j) for i, layer in enumerate(self.layers) for j in range(len(layer.parts)))

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """The parts' numbers through all layers, by (layer, part)."""
        return {place: number for number, place in enumerate(self.places())}

    @cached_property
    def numels(self) -> dict[tuple[int, int], list[int]]:
        """The number of elements of each piece of a part, by (layer, part)."""
        return {(i, j): [len(piece) for piece in self.layers[i].parts[j]] for i, j in self.places()}


def difference(ours: Shapes, theirs: Shapes, what: str) -> str | None:
    """Return in words how a worker's model differs from the server's, or None if it does not."""
    mine, others = {name: shape for name, shape in ours}, {name: shape for name, shape in theirs}
    for name, shape in mine.items():
        if name not in others:
            return f"the server's model has a {what} {name} that the worker's lacks"
        if others[name] != shape:
            return f"{name} has the shape {shape} on the server and {others[name]} on the worker"
    extra = next((name for name in others if name not in mine), None)
    if extra is not None:
        return f"the worker's model has a {what} {extra} that the server's lacks"
    return None if list(mine) == list(others) else f"server and worker order their {what}s differently"


def _joined(owned: dict[str, NamedTensors]) -> list[tuple[tuple[str, ...], NamedTensors]]:
    """Group each module with the small ones behind it, whose gradients the backward pass computes before its own."""
    sizes = {module: sum(p.numel() for _, p in tensors) for module, tensors in owned.items()}
    small = min(_SMALL_NUMEL, int(_SMALL_SHARE * sum(sizes.values())))
    groups: list[list[str]] = []
    joined = 0  # elements of small modules in the last group
    for module, size in sizes.items():
        if groups and joined + size <= small:
            groups[-1].append(module)
            joined += size
        else:
            groups.append([module])
            joined = 0
    return [(tuple(group), [tensor for module in group for tensor in owned[module]]) for group in groups]


def _parts(tensors: NamedTensors, cut: int) -> Iterator[tuple[Piece, ...]]:
    """Divide a layer in parts of at most `cut` elements; small parameters share one, a large one is divided evenly."""
    waiting: list[Piece] = []
    for name, parameter in tensors:
        n = parameter.numel()
        if cut and sum(map(len, waiting)) + n > cut and waiting:
            yield tuple(waiting)
            waiting = []
        if cut and n > cut:
            pieces = -(-n // cut)
            for begin, end in pairwise(n * i // pieces for i in range(pieces + 1)):
                yield (Piece(name, begin, end),)
        else:
            waiting.append(Piece(name, 0, n))
    if waiting:
        yield tuple(waiting)


def flat(parameter: Tensor) -> Tensor:
    """Return a flat view of a parameter's elements."""
    data = parameter.detach()
    if not data.is_contiguous():
        raise ValueError("the parameters of a server's model must be contiguous in memory")
    return data.view(-1)


# The largest number of bytes that a part should take on the wire.
PART_BYTES = 1 << 18
# Optimizers that update each element by itself, so that a parameter may be updated in parts.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")


def cut_for(optimizer: torch.optim.Optimizer, codec: Codec | None, wanted: int | None = None) -> int:
    """Return the elements of a part: as wanted, or so that a part takes about PART_BYTES on the wire.

    0 means that the optimizer needs whole parameters.
    """
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _ELEMENTWISE
    if not known or optimizer.state:  # existing state belongs to whole parameters
        return 0
    if wanted is not None:
        return wanted
    if codec is None:
        return PART_BYTES // 4
    n = 1 << 20
    bytes_each = codec.frame_bound([n], codec.expected_counts([n])) / n
    return min(MOST_ELEMENTS // 4, max(1 << 15, int(PART_BYTES / bytes_each)))


class Buffers:
    """The persistent buffers of a model, as they are sent."""

    def __init__(self, model: nn.Module) -> None:
        kept = set(model.state_dict(keep_vars=True))
        self._tensors = {name: b for name, b in model.named_buffers() if name in kept and b.numel()}
        if self.size > LARGEST - 1024:
            raise ValueError(f"the model's buffers take {self.size} bytes, more than fits in a message")

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @property
    def shapes(self) -> Shapes:
        """Names and shapes."""
        return [[name, list(tensor.shape)] for name, tensor in self._tensors.items()]

    @property
    def size(self) -> int:
        """Bytes that all buffers take in a message."""
        return sum(tensor.numel() * _wire_type(tensor).itemsize for tensor in self._tensors.values())

    def body(self) -> bytes:
        """Return all buffers, one after the other, as float32 or int64."""
        rows = (t.detach().to("cpu", _wire_type(t)).contiguous() for t in self._tensors.values())
        return b"".join(row.numpy().tobytes() for row in rows)

    def update(self, body: Buffer) -> None:
        """Write received buffers; MessageError, and nothing is written, if they do not fit or are not finite."""
        if len(body) != self.size:
            raise MessageError(f"the model's buffers take {self.size} bytes, not {len(body)}")
        found, data, at = [], bytearray(body), 0
        for tensor in self._tensors.values():
            kind = _wire_type(tensor)
            row = torch.frombuffer(data, dtype=kind, count=tensor.numel(), offset=at)
            at += tensor.numel() * kind.itemsize
            if not row.isfinite().all():
                raise MessageError("the model's buffers are not finite")
            found.append(row)
        for tensor, row in zip(self._tensors.values(), found, strict=True):
            tensor.detach().copy_(row.view(tensor.shape))


def _wire_type(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else torch.int64


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return the type and a digest of the values of every frozen parameter."""
    digests = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            raw = p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digests[name] = f"{p.dtype} {hashlib.sha256(raw).hexdigest()[:32]}"
    return digests


def frozen_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return in words how the frozen parameters differ, or None if they do not.

    Values of different types are not compared.
    """
    for name in ours | theirs:
        if name not in ours or name not in theirs:
            return f"{name} is frozen on one side only"
        mine, other = ours[name].split(" "), theirs[name].split(" ")
        if mine[0] == other[0] and mine != other:
            return f"the frozen parameter {name} has other values: load the same weights on both sides"
    return None
