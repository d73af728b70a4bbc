"""Codec: memory + selection + values; gradients become a frame and frames become gradients.

The whole way out is `encode`: check, accumulate, choose, write. State is kept per parameter name.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.frame import Frame, FrameReader, section_bound
from thinwire.codec.memory import Memory, Residual
from thinwire.codec.selection import Selection, TopK
from thinwire.codec.values import Bits, Values
from thinwire.codec.vectors import DTYPES, Group, NativeGroup, TorchGroup, Vector
from thinwire.codec.writing import EVERYTHING, Chosen, Place, put_native, put_torch

State = dict[str, Any]


class Codec:
    """Compresses named tensors into frames and keeps what did not travel.

    selection: a Selection, or a density, which means TopK(density).
    values: how kept values are written. memory: what becomes of the rest.
    scope: "tensor" gives every tensor its own threshold, "global" one over all tensors of an encode.
    min_numel: smaller tensors (biases, norms) travel whole, in the codec's values or 8 bits if those are fewer.
    kernels: "native", "torch" (any device; the kernels' twin), or "auto": native for CPU tensors.
    """

    def __init__(
        self,
        selection: Selection | float = 0.01,
        values: Values | None = None,
        memory: Memory | None = None,
        *,
        scope: Literal["tensor", "global"] = "tensor",
        min_numel: int = 1024,
        kernels: Literal["auto", "native", "torch"] = "auto",
    ) -> None:
        if scope not in ("tensor", "global"):
            raise ValueError(f'scope is "tensor" or "global", not {scope!r}')
        if kernels not in ("auto", "native", "torch"):
            raise ValueError(f'kernels is "auto", "native" or "torch", not {kernels!r}')
        self.selection = selection if isinstance(selection, Selection) else TopK(selection)
        self.values = values if values is not None else Bits(8)
        self.memory = memory if memory is not None else Residual()
        self.scope = scope
        self.min_numel = min_numel
        self.kernels = kernels
        self.step = 0
        self._slots: dict[str, dict[str, Tensor]] = {}
        self._learned: dict[str, dict[str, float]] = {}

    def __repr__(self) -> str:
        return (
            f"Codec({self.selection}, {self.values}, {self.memory}, scope={self.scope!r}, min_numel={self.min_numel})"
        )

    # The way out

    def encode(self, tensors: Mapping[str, Tensor], *, step: int | None = None, budget: int | None = None) -> Frame:
        """Encode gradients; what does not travel stays in the memory.

        The frame never exceeds `budget` bytes; what does not fit is held back too. If an input is not finite the
        frame says so, holds nothing, and neither memory nor step changes. `step` defaults to a counter of calls.
        """
        names = list(tensors)
        gradients = [self._checked(name, tensor) for name, tensor in tensors.items()]
        for name, gradient in zip(names, gradients, strict=True):
            if not _finite(gradient):
                return _empty_frame(name)
        at = self.step if step is None else step
        self.step = at + 1
        vectors = [self.memory.open(g, self._open_slots(name, g)) for name, g in zip(names, gradients, strict=True)]
        vectors, chosen = self._choose(names, vectors, at)
        return self._write(names, vectors, chosen, at, budget)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: gradients must be float32, float16 or bfloat16, not {tensor.dtype}")
        if tensor.is_sparse:
            raise ValueError(f"{name}: sparse gradients are not supported; use sparse=False in the embedding")
        held = self._slots.get(name)
        if held and next(iter(held.values())).numel() != tensor.numel():
            raise ValueError(f"{name}: the memory holds another number of elements than the {tensor.numel()} given")
        return tensor.detach().contiguous()

    def _open_slots(self, name: str, gradient: Tensor) -> dict[str, Tensor]:
        held = self._slots.setdefault(name, {})
        for slot in self.memory.slots:
            tensor = held.get(slot)
            if tensor is None:
                held[slot] = torch.zeros(gradient.numel(), device=gradient.device)
            elif tensor.device != gradient.device:
                held[slot] = tensor.to(gradient.device)
        return held

    def _native_for(self, vectors: Sequence[Vector]) -> bool:
        on_cpu = all(v.gradient.device.type == "cpu" for v in vectors)
        if self.kernels == "native" and not on_cpu:
            raise ValueError('kernels="native" takes CPU tensors; use kernels="auto"')
        return on_cpu and self.kernels != "torch"

    def _choose(self, names: list[str], vectors: list[Vector], step: int) -> tuple[list[Vector], list[Chosen]]:
        """What travels of each vector; tensors of one group share their `Chosen`."""
        chosen = [Chosen(name, EVERYTHING, whole=True) for name in names]
        large = [i for i, v in enumerate(vectors) if v.n >= max(self.min_numel, 1)]
        make: type[Group] = NativeGroup if self._native_for(vectors) else TorchGroup
        together = self.scope == "global" and self.selection.shares_threshold
        for members in [large] if together and large else [[i] for i in large]:
            group = make([vectors[i] for i in members])
            label = names[members[0]]
            state = self._learned.setdefault(label, {})
            cut = self.selection.cut(group, step=step, key=zlib.crc32(label.encode()), state=state)
            shared = Chosen(label, cut)
            for i, vector in zip(members, group.vectors, strict=True):
                vectors[i], chosen[i] = vector, shared
        return vectors, chosen

    def _write(
        self, names: list[str], vectors: list[Vector], chosen: list[Chosen], step: int, budget: int | None
    ) -> Frame:
        capacity = self.frame_bound([v.n for v in vectors]) if budget is None else budget
        if capacity < _native.HEADER_BYTES:
            raise ValueError(f"a budget of {capacity} bytes cannot hold a frame's header of {_native.HEADER_BYTES}")
        buffer = torch.empty(capacity, dtype=torch.uint8)
        writer = _native.Writer(buffer.data_ptr(), capacity)
        put = put_native if self._native_for(vectors) else put_torch
        reserves = self._reserves(vectors, chosen)
        counts = []
        for i, (name, vector, choice) in enumerate(zip(names, vectors, chosen, strict=True)):
            values = self.small if choice.whole else self.values
            seed = 0 if values.seed is None else _seed(values.seed, step, name)
            counts.append(put(writer, Place(i, values, seed, reserves[i]), vector, choice))
        for choice in {id(c): c for c in chosen if not c.whole}.values():
            self.selection.learn(choice.selected, choice.magnitudes, self._learned[choice.label])
        length = writer.finish(0)
        return Frame(buffer[:length].clone(), counts=tuple(counts))

    def _reserves(self, vectors: list[Vector], chosen: list[Chosen]) -> list[int]:
        """Bytes to keep free at each section, so that later ones find room for headers and for whole tensors."""
        reserves, later = [], 0
        for vector, choice in zip(reversed(vectors), reversed(chosen), strict=True):
            reserves.append(later)
            later += section_bound(vector.n, vector.n if choice.whole else 0, self.small, whole=True)
        return reserves[::-1]

    @property
    def small(self) -> Values:
        """How tensors below `min_numel` are written: fewer than 8 bits would be too coarse for biases and norms."""
        return self.values if self.values.bits >= 8 else Bits(8)

    def frame_bound(self, sizes: Sequence[int], counts: Sequence[int] | None = None) -> int:
        """Bytes that a frame of tensors of these sizes takes at the most, with up to `counts` entries each."""
        total = _native.HEADER_BYTES
        for i, n in enumerate(sizes):
            whole = n < self.min_numel
            count = n if whole or counts is None else counts[i]
            total += section_bound(n, count, self.small if whole else self.values, whole=whole)
        return total

    def expected_counts(self, sizes: Sequence[int], step: int = 0) -> list[int]:
        """Entries that tensors of these sizes are expected to send."""
        return [n if n < self.min_numel else self.selection.expected(n, step) for n in sizes]

    # The way in

    @staticmethod
    def decode(frame: Frame | Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that were declared sent: float32, on the CPU, in the shapes of `like` (the sender's order).

        Raises FrameError for bytes that are not a valid frame of these tensors. A frame that reports a
        non-finite input gives tensors of NaN, as the gradient itself would.
        """
        reader = FrameReader(frame, [t.numel() for t in like.values()])
        outs = {name: torch.zeros(t.shape) for name, t in like.items()}
        if reader.non_finite:
            return {name: out.fill_(torch.nan) for name, out in outs.items()}
        reader.add_to(list(outs.values()))
        return outs

    # State

    def held(self, name: str) -> dict[str, Tensor]:
        """The memory's tensors of one parameter, flat; empty before its first encode."""
        return self._slots.get(name, {})

    def rescale(self, factor: float) -> None:
        """Multiply the memory, when the unit of the gradients changes.

        After a change of the loss scale call it with new / old. After a change of the learning rate call it with
        old / new, so that what is held back is applied at the rate it was computed for.
        """
        if not (0.0 < factor < float("inf")):
            raise ValueError(f"a memory is rescaled by a positive finite factor, not {factor}")
        for slots in self._slots.values():
            for tensor in slots.values():
                tensor.mul_(factor)
        for learned in self._learned.values():
            for key in learned:
                learned[key] *= factor

    def state_dict(self) -> State:
        """Plain tensors and numbers by parameter name, loadable with `torch.load(weights_only=True)`."""
        memory = {name: {slot: t.clone() for slot, t in slots.items()} for name, slots in self._slots.items()}
        learned = {label: dict(values) for label, values in self._learned.items() if values}
        return {"version": 1, "step": self.step, "memory": memory, "selection": learned}

    def load_state_dict(self, state: State) -> None:
        """Take over a saved state; raises ValueError and changes nothing if it is not one of this memory."""
        if state.get("version") != 1:
            raise ValueError(f"the codec's state has version {state.get('version')!r}, this thinwire reads 1")
        for name, slots in state["memory"].items():
            if set(slots) != set(self.memory.slots):
                raise ValueError(
                    f"{name}: the state holds {sorted(slots)}, {self.memory} needs {list(self.memory.slots)}"
                )
        self.step = int(state["step"])
        self._slots = {
            name: {slot: t.detach().clone().float().reshape(-1) for slot, t in slots.items()}
            for name, slots in state["memory"].items()
        }
        self._learned = {label: dict(values) for label, values in state["selection"].items()}


def _finite(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu":
        return bool(tensor.isfinite().all())
    return _native.all_finite(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel())


def _empty_frame(culprit: str) -> Frame:
    buffer = torch.empty(_native.HEADER_BYTES, dtype=torch.uint8)
    _native.Writer(buffer.data_ptr(), len(buffer)).finish(1)
    return Frame(buffer, non_finite=culprit)


def _seed(seed: int, step: int, name: str) -> int:
    return _native.mix(_native.mix(seed ^ step) ^ zlib.crc32(name.encode()))
