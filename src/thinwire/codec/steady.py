"""Steady: gradients that stay in their places from step to step, encoded by a single call of the kernels.

DDP's buckets are such. Frames and memories are those of `Codec.open` and `write`, to the bit; only the interpreter's
part is missing, which takes longer than the kernels where other work has pushed it out of the caches.
"""

import weakref
from functools import cached_property

from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.density import density_at
from thinwire.codec.frame import Frame
from thinwire.codec.memory import Drop, Residual
from thinwire.codec.parts import fill
from thinwire.codec.selection import TopK
from thinwire.codec.vectors import DTYPES, plain
from thinwire.codec.writing import empty_frame


class Placed(dict[str, Tensor]):
    """Named flat tensors of which the maker promises that they stay where they are while this object lives."""

    @cached_property
    def plain(self) -> list[tuple[int, int, int]] | None:
        """The tensors as the kernels take them; None if they cannot take all of them."""
        fit = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in DTYPES for t in self.values())
        return [plain(t) for t in self.values()] if fit and self else None


class SteadyEncoder:
    """Encodes one bucket's placed tensors after the other; the codec's memory and step are those of `encode`."""

    def __init__(self, codec: Codec, reserves: list[int]) -> None:
        self._codec, self._reserves = codec, reserves
        self._placed: weakref.ref[Placed] | None = None  # whose places the kernels know
        self._generation = -1
        self._encoder: _native.Encoder | None = None

    def encode(self, tensors: Placed, room: Tensor, *, step: int) -> tuple[Frame, list[int]] | None:
        """A frame in the room given, zeros after it, and the entries per tensor; None where it takes `open`."""
        codec, selection = self._codec, self._codec.selection
        if type(selection) is not TopK or selection.exact or codec.observer is not None:
            return None
        known = self._placed() if self._placed is not None else None
        if known is not tensors or self._generation != codec.generation:
            self._placed, self._encoder = weakref.ref(tensors), self._made(tensors)
            self._generation = codec.generation
        if self._encoder is None:
            return None
        density = density_at(selection.density, step)
        not_finite, length, sent = self._encoder.encode(density, step, room.data_ptr(), room.numel())
        if not_finite >= 0:
            return fill(room, empty_frame(list(tensors)[not_finite])), [0] * len(tensors)
        codec.step = step + 1
        return Frame(room[:length]), sent

    def _made(self, tensors: Placed) -> _native.Encoder | None:
        """What the kernels must know; None if this codec or these tensors need more than they do in one call."""
        codec = self._codec
        simple = codec.scope == "tensor" and codec.kernels != "torch" and codec.values.seed is None
        if not simple or type(codec.memory) not in (Residual, Drop) or tensors.plain is None:
            return None
        described = []
        for (name, tensor), reserve in zip(tensors.items(), self._reserves, strict=True):
            vector = codec.memory.open(codec.checked(name, tensor), codec.open_slots(name, tensor))
            held = vector.held.data_ptr() if vector.held is not None else 0
            whole = vector.n < max(codec.min_numel, 1)
            values = codec.small if whole else codec.values
            described.append((vector.described, held, whole, values.code, reserve))
        return _native.Encoder(described)
