"""Layers: a model's parameters as the units that are pushed, pulled, scheduled and applied.

A layer is what one module owns itself; large layers are cut in parts, so that urgent requests can overtake them.
Server and workers derive the same layout from the same model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

# A layout that a peer announces may not be larger than this.
MOST_PARTS = 1 << 16


@dataclass(frozen=True)
class Piece:
    """A range of one parameter's elements; `name` is unique among all pieces."""

    parameter: str
    begin: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.parameter}[{self.begin}:{self.end}]"

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layer:
    """The parameters of one module, and the parts in which they travel."""

    name: str
    parameters: tuple[str, ...]
    parts: tuple[tuple[Piece, ...], ...]

    @property
    def numel(self) -> int:
        return sum(len(piece) for part in self.parts for piece in part)


@dataclass(frozen=True)
class Layout:
    """All layers of a model in the order of its modules, which is taken for the order of use."""

    layers: tuple[Layer, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    cut: int

    @classmethod
    def of(cls, model: nn.Module, cut: int) -> "Layout":
        """The layout with parts of at most `cut` elements; 0 leaves layers whole."""
        owned: dict[str, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                owned.setdefault(name.rpartition(".")[0], []).append((name, parameter))
        layers = tuple(
            Layer(module, tuple(name for name, _ in members), tuple(_parts(members, cut)))
            for module, members in owned.items()
        )
        if not layers:
            raise ValueError("the model has no parameter that is trained")
        if sum(len(layer.parts) for layer in layers) > MOST_PARTS:
            raise ValueError(f"parts of {cut} elements cut this model in too many: make them larger")
        shapes = tuple((n, tuple(p.shape)) for members in owned.values() for n, p in members)
        return cls(layers, shapes, cut)

    def places(self) -> Iterator[tuple[int, int]]:
        """(layer, part) of everything that travels."""
        return ((i, j) for i, layer in enumerate(self.layers) for j in range(len(layer.parts)))

    def number(self, layer: int, part: int) -> int:
        """A part's number through all layers; ValueError if there is no such part."""
        if not (0 <= layer < len(self.layers) and 0 <= part < len(self.layers[layer].parts)):
            raise ValueError(f"there is no part {part} of a layer {layer}")
        return sum(len(each.parts) for each in self.layers[:layer]) + part

    def numels(self, layer: int, part: int) -> list[int]:
        return [len(piece) for piece in self.layers[layer].parts[part]]

    def difference(self, shapes: list[tuple[str, tuple[int, ...]]]) -> str | None:
        """The first parameter in which another model differs from this one, in words."""
        ours, theirs = dict(self.shapes), dict(shapes)
        for name, shape in ours.items():
            if name not in theirs:
                return f"the server's model has a parameter {name} that the worker's lacks"
            if theirs[name] != shape:
                return f"{name} has the shape {list(shape)} on the server and {list(theirs[name])} on the worker"
        extra = next((name for name in theirs if name not in ours), None)
        if extra is not None:
            return f"the worker's model has a parameter {extra} that the server's lacks"
        return None if list(ours) == list(theirs) else "server and worker order their parameters differently"


def _parts(members: list[tuple[str, Tensor]], cut: int) -> Iterator[tuple[Piece, ...]]:
    """Parts of at most `cut` elements; small parameters share one, a large one is divided evenly."""
    waiting: list[Piece] = []
    for name, parameter in members:
        n = parameter.numel()
        if cut and sum(map(len, waiting)) + n > cut and waiting:
            yield tuple(waiting)
            waiting = []
        if cut and n > cut:
            pieces = -(-n // cut)
            bounds = [n * i // pieces for i in range(pieces + 1)]
            for begin, end in pairwise(bounds):
                yield (Piece(name, begin, end),)
        else:
            waiting.append(Piece(name, 0, n))
    if waiting:
        yield tuple(waiting)


def flat(parameter: Tensor) -> Tensor:
    """A parameter's elements as one row that writes through."""
    data = parameter.detach()
    if not data.is_contiguous():
        raise ValueError("parameters must be contiguous in memory to be kept in step with a server")
    return data.view(-1)
