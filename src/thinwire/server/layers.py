"""Layers: a model's parameters as the units that are pushed, pulled, scheduled and applied.

A layer is what one module owns itself, with small modules behind it: a message costs the same for few entries. Large
layers are cut in parts, so that urgent requests can overtake them. Server and workers derive the same layout from the
same model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor, nn

from thinwire.transport.base import LARGEST

# A layout that a peer announces may not be larger than this.
MOST_PARTS = 1 << 16
# Elements of a part: in full it must fit in a message.
MOST_ELEMENTS = (LARGEST - 1024) // 4

# A module of less than this share of the model, and of fewer elements, joins the layer before it, up to that much.
_SMALL, _FEW = 1 / 64, 1 << 16

Shapes = list[tuple[str, tuple[int, ...]]]
Members = list[tuple[str, Tensor]]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take part; tied ones once, by their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


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
    """The parameters of one module, or of one and small ones behind it, and the parts in which they travel."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    parts: tuple[tuple[Piece, ...], ...]

    @property
    def name(self) -> str:
        """Of its first module."""
        return self.modules[0]

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
        if cut < 0:
            raise ValueError(f"a part has at least one element, not {cut}")
        owned: dict[str, Members] = {}
        for name, parameter in trained(model).items():
            owned.setdefault(name.rpartition(".")[0], []).append((name, parameter))
        if not owned:
            raise ValueError("the model has no parameter that is trained")
        sizes = [p.numel() for members in owned.values() for _, p in members]
        if cut and sum(-(-n // cut) for n in sizes) > MOST_PARTS:  # before they are made
            raise ValueError(f"parts of {cut} elements cut this model in too many: make them larger")
        layers = tuple(
            Layer(modules, tuple(name for name, _ in members), tuple(_parts(members, cut)))
            for modules, members in _joined(owned)
        )
        largest = max((layer for layer in layers), key=lambda layer: max(map(_elements, layer.parts)))
        if max(map(_elements, largest.parts)) > MOST_ELEMENTS:
            raise ValueError(f"the layer {largest.name} is too large for a message: cut it in smaller parts")
        shapes = tuple((n, tuple(p.shape)) for members in owned.values() for n, p in members)
        return cls(layers, shapes, cut)

    def places(self) -> Iterator[tuple[int, int]]:
        """(layer, part) of everything that travels."""
        return ((i, j) for i, layer in enumerate(self.layers) for j in range(len(layer.parts)))

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """The numbers of all parts through all layers, by (layer, part)."""
        return {place: number for number, place in enumerate(self.places())}

    def numels(self, layer: int, part: int) -> list[int]:
        return [len(piece) for piece in self.layers[layer].parts[part]]


def difference(ours: Shapes, theirs: Shapes, what: str) -> str | None:
    """The first tensor in which a worker's model differs from the server's, in words."""
    mine, others = dict(ours), dict(theirs)
    for name, shape in mine.items():
        if name not in others:
            return f"the server's model has a {what} {name} that the worker's lacks"
        if others[name] != shape:
            return f"{name} has the shape {list(shape)} on the server and {list(others[name])} on the worker"
    extra = next((name for name in others if name not in mine), None)
    if extra is not None:
        return f"the worker's model has a {what} {extra} that the server's lacks"
    return None if list(mine) == list(others) else f"server and worker order their {what}s differently"


def _elements(part: tuple[Piece, ...]) -> int:
    return sum(map(len, part))


def _joined(owned: dict[str, Members]) -> list[tuple[tuple[str, ...], Members]]:
    """Modules with the small ones behind them. In the backward pass those are ready before."""
    sizes = {module: sum(p.numel() for _, p in members) for module, members in owned.items()}
    small = min(_FEW, int(_SMALL * sum(sizes.values())))
    groups: list[list[str]] = []
    joined = 0  # elements of small modules in the last group
    for module, size in sizes.items():
        if groups and joined + size <= small:
            groups[-1].append(module)
            joined += size
        else:
            groups.append([module])
            joined = 0
    return [(tuple(group), [member for module in group for member in owned[module]]) for group in groups]


def _parts(members: Members, cut: int) -> Iterator[tuple[Piece, ...]]:
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
