"""Codec: memory + selection + values; gradients become a frame and frames become gradients.

The whole way out is `encode`: check, accumulate, choose, write.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.encode import EVERYTHING, Batch, Chosen, Observer, Place, empty_frame, put_native, put_torch
from thinwire.codec.feedback import ErrorFeedback, Feedback
from thinwire.codec.frame import Frame, FrameReader, section_bound
from thinwire.codec.selection import RandomK, Selection, TopK
from thinwire.codec.values import SEEDS, Bits, Values
from thinwire.codec.vectors import DTYPES, Group, NativeGroup, TorchGroup, Vector, first_not_finite

State = dict[str, Any]


class Keeper:
    """The part of a codec that has a state."""

    def __init__(self, selection: Selection, feedback: Feedback) -> None:
        self.selection = selection
        self.feedback = feedback
        self.step = 0
        self.generation = 0  # changes when the memory's tensors are others than before
        self._slots: dict[str, dict[str, Tensor]] = {}
        self._learned: dict[str, dict[str, float]] = {}

    def open_slots(self, name: str, gradient: Tensor) -> dict[str, Tensor]:
        """The memory's tensors of a parameter, made if they are not there yet."""
        held = self._slots.setdefault(name, {})
        for slot in self.feedback.slots:
            tensor = held.get(slot)
            if tensor is None:
                held[slot] = torch.zeros(gradient.numel(), device=gradient.device)
            elif tensor.device != gradient.device:
                held[slot] = tensor.to(gradient.device)
                self.generation += 1
        return held

    def residuals(self, name: str) -> dict[str, Tensor]:
        """The memory's tensors of one parameter, flat; empty before its first encode."""
        return self._slots.get(name, {})

    @property
    def learned(self) -> dict[str, dict[str, float]]:
        """What the selection remembers, by the first parameter of each group."""
        return self._learned

    def give_back(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Put entries back into the memory that were sent and did not count, or that another rank's memory lost."""
        residual = self._slots.get(name, {}).get("residual")
        if residual is not None:
            residual.index_add_(0, positions.to(residual.device), values.to(residual.device))

    def rescale(self, factor: float, names: Collection[str] | None = None) -> None:
        """Multiply the memory (of some parameters, or of all), when the unit of the gradients changes.

        After a change of the loss scale call it with new / old. After a change of the learning rate call it with
        old / new, so that what is held back is applied at the rate it was computed for.
        """
        if not (0.0 < factor < float("inf")):
            raise ValueError(f"a memory is rescaled by a positive finite factor, not {factor}")
        for name in self._slots if names is None else names:
            for tensor in self._slots.get(name, {}).values():
                tensor.mul_(factor)
            self.selection.rescale(factor, self._learned.get(name, {}))

    def state_dict(self) -> State:
        """Plain tensors and numbers by parameter name, loadable with `torch.load(weights_only=True)`."""
        memory = {name: {slot: t.clone() for slot, t in slots.items()} for name, slots in self._slots.items()}
        learned = {label: dict(values) for label, values in self._learned.items() if values}
        return {"version": 1, "step": self.step, "residuals": memory, "selection": learned}

    def load_state_dict(self, state: State) -> None:
        """Take over a saved state; raises ValueError and changes nothing if it is not one of this memory."""
        if state.get("version") != 1:
            raise ValueError(f"the codec's state has version {state.get('version')!r}, this thinwire reads 1")
        missing = {"step", "residuals", "selection"} - set(state)
        if missing:
            raise ValueError(f"the codec's state lacks {', '.join(sorted(missing))}")
        for name, slots in state["residuals"].items():
            self._check_slots(name, slots)
        self.step = int(state["step"])
        self.generation += 1
        self._slots = {
            name: {slot: t.detach().clone().float().reshape(-1) for slot, t in slots.items()}
            for name, slots in state["residuals"].items()
        }
        self._learned = {label: dict(values) for label, values in state["selection"].items()}

    def _check_slots(self, name: str, slots: Mapping[str, Tensor]) -> None:
        if set(slots) != set(self.feedback.slots):
            raise ValueError(
                f"{name}: the state holds {sorted(slots)}, {self.feedback} needs {list(self.feedback.slots)}"
            )
        if len({tensor.numel() for tensor in slots.values()}) > 1:
            raise ValueError(f"{name}: the tensors {sorted(slots)} of the state differ in size")
        for slot, tensor in slots.items():
            if not tensor.isfinite().all():
                raise ValueError(f"{name}: the state's {slot} holds a value that is not finite")


Scope = Literal["tensor", "global"]
Kernels = Literal["auto", "native", "torch"]


class Codec(Keeper):
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
        feedback: Feedback | None = None,
        *,
        scope: Scope = "tensor",
        min_numel: int = 1024,
        kernels: Kernels = "auto",
    ) -> None:
        if scope not in ("tensor", "global"):
            raise ValueError(f'scope is "tensor" or "global", not {scope!r}')
        if kernels not in ("auto", "native", "torch"):
            raise ValueError(f'kernels is "auto", "native" or "torch", not {kernels!r}')
        super().__init__(
            selection if isinstance(selection, Selection) else TopK(selection),
            feedback if feedback is not None else ErrorFeedback(),
        )
        self.values = values if values is not None else Bits(8)
        self.scope = scope
        self.min_numel = min_numel
        self.kernels = kernels
        self.observer: Observer | None = None
        self._reserves: dict[tuple[int, ...], list[int]] = {}  # answers given: sizes seldom change

    def __repr__(self) -> str:
        return (
            f"Codec({self.selection}, {self.values}, {self.feedback}, scope={self.scope!r}, min_numel={self.min_numel})"
        )

    # The way out

    def encode(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int | None = None,
        budget: int | None = None,
        hold: Collection[str] = (),
    ) -> Frame:
        """Encode gradients; what does not travel stays in the memory.

        The frame never exceeds `budget` bytes; what does not fit is held back too. If an input is not finite the
        frame says so, holds nothing, and neither memory nor step changes. `step` defaults to a counter of calls.
        Tensors named in `hold` are left alone: they send nothing and their memory does not change.
        """
        if budget is not None and budget < _native.HEADER_BYTES:
            raise ValueError(f"a budget of {budget} bytes cannot hold a frame's header of {_native.HEADER_BYTES}")
        batch = self.open(tensors, step=step, hold=hold)
        if isinstance(batch, str):
            return empty_frame(batch)
        size = self.frame_bound([v.n for v in batch.vectors]) if budget is None else budget
        room = torch.empty(size, dtype=torch.uint8)
        frame = self.write(batch, len(tensors), room)
        # A bound leaves most of its room unused, a budget little: only that may live as long as the frame.
        return replace(frame, data=frame.data.clone()) if budget is None else frame

    def open(
        self, tensors: Mapping[str, Tensor], *, step: int | None = None, hold: Collection[str] = ()
    ) -> Batch | str:
        """Take gradients into the memory and choose what travels; a string names a tensor that is not finite."""
        if step is not None and step < 0:
            raise ValueError(f"a step counts from 0, not {step}")
        active = {name: self.checked(name, t) for name, t in tensors.items() if name not in hold}
        if (bad := first_not_finite(list(active.values()))) >= 0:
            return list(active)[bad]
        at = self.step if step is None else step
        self.step = at + 1
        vectors = [self.feedback.open(g, self.open_slots(name, g)) for name, g in active.items()]
        sections = [i for i, name in enumerate(tensors) if name not in hold]
        batch = self.choose(list(active), vectors, sections, at)
        if self.observer is not None:
            self.observer.opened(batch)
        return batch

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        """A gradient that can be encoded under this name, contiguous; ValueError if it cannot be."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: gradients must be float32, float16 or bfloat16, not {tensor.dtype}")
        if tensor.is_sparse:
            raise ValueError(f"{name}: sparse gradients are not supported; use sparse=False in the embedding")
        held = self._slots.get(name)
        if held and next(iter(held.values())).numel() != tensor.numel():
            raise ValueError(f"{name}: the memory holds another number of elements than the {tensor.numel()} given")
        return (tensor.detach() if tensor.requires_grad else tensor).contiguous()

    def native_for(self, vectors: Sequence[Vector]) -> bool:
        """Whether the kernels take these vectors, or torch operations do."""
        on_cpu = all(v.gradient.device.type == "cpu" for v in vectors)
        if self.kernels == "native" and not on_cpu:
            raise ValueError('kernels="native" takes CPU tensors; use kernels="auto"')
        return on_cpu and self.kernels != "torch"

    def choose(self, names: list[str], vectors: list[Vector], sections: list[int], step: int) -> Batch:
        """What travels of each vector; tensors of one group share their `Chosen`."""
        chosen = [Chosen(name, EVERYTHING, whole=True) for name in names]
        large = [i for i, v in enumerate(vectors) if v.n >= max(self.min_numel, 1)]
        make: type[Group] = NativeGroup if self.native_for(vectors) else TorchGroup
        together = self.scope == "global" and self.selection.shares_threshold
        for members in [large] if together and large else [[i] for i in large]:
            group = make([vectors[i] for i in members])
            label = names[members[0]]
            state = self._learned.setdefault(label, {})
            cut = self.selection.cut(group, step=step, key=zlib.crc32(label.encode()), state=state)
            shared = Chosen(label, cut)
            for i, vector in zip(members, group.vectors, strict=True):
                vectors[i], chosen[i] = vector, shared
        for i, choice in enumerate(chosen):
            if choice.whole and vectors[i].mask is not None:
                # Momentum is masked where an entry travels late. What travels whole is never late: plain momentum.
                vectors[i] = replace(vectors[i], mask=None)
        return Batch(names, vectors, chosen, sections, step)

    def place(self, batch: Batch, i: int, reserve: int) -> Place:
        """How the i-th vector of a batch is written."""
        values = self.small if batch.chosen[i].whole else self.values
        seed = 0 if values.seed is None else _seed(values.seed, batch.step, batch.names[i])
        return Place(batch.sections[i], values, seed, reserve)

    def learn(self, batch: Batch) -> None:
        """Tell the selection what became of its cuts, once all tensors of a batch are written."""
        for choice in {id(c): c for c in batch.chosen if not c.whole}.values():
            self.selection.learn(choice.selected, choice.magnitudes, self._learned[choice.label])
        if self.observer is not None:
            self.observer.written(batch)

    def write(self, batch: Batch, sections: int, room: Tensor, *, pad: bool = False) -> Frame:
        """Put a batch into one frame, in the room given; `pad` fills the rest of that with zeros."""
        writer = _native.Writer(room.data_ptr(), room.numel())
        put = put_native if self.native_for(batch.vectors) else put_torch
        reserves = self.reserves([v.n for v in batch.vectors])
        counts = [0] * sections
        for i, (vector, choice) in enumerate(zip(batch.vectors, batch.chosen, strict=True)):
            counts[batch.sections[i]] = put(writer, self.place(batch, i, reserves[i]), vector, choice)
        self.learn(batch)
        return Frame(room[: writer.finish(0, pad)], counts=tuple(counts))

    def reserves(self, sizes: Sequence[int]) -> list[int]:
        """Bytes to keep free at each section, so that later ones find room for headers and for whole tensors."""
        key = (isinstance(self.selection, RandomK), *sizes)
        if key not in self._reserves:
            if len(self._reserves) > 100:
                self._reserves.clear()
            reserves, later = [], 0
            for n in reversed(sizes):
                reserves.append(later)
                later += self._section_bound(n, 0)
            self._reserves[key] = reserves[::-1]
        return self._reserves[key]

    def _section_bound(self, n: int, count: int) -> int:
        """Bytes that a tensor takes with up to `count` entries, or all if it is small."""
        if n < max(self.min_numel, 1):
            return section_bound(n, n, self.small, whole=True)
        return section_bound(n, count, self.values, strata=isinstance(self.selection, RandomK))

    @property
    def small(self) -> Values:
        """How tensors below `min_numel` are written: fewer than 8 bits would be too coarse for biases and norms."""
        return self.values if self.values.bits >= 8 else Bits(8)

    def frame_bound(self, sizes: Sequence[int], counts: Sequence[int] | None = None) -> int:
        """Bytes that a frame of tensors of these sizes takes at the most, with up to `counts` entries each."""
        many = sizes if counts is None else counts
        return _native.HEADER_BYTES + sum(self._section_bound(n, count) for n, count in zip(sizes, many, strict=True))

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

    def fresh(self) -> "Codec":
        """A codec of the same configuration that remembers nothing."""
        return Codec(
            self.selection,
            self.values,
            self.feedback,
            scope=self.scope,
            min_numel=self.min_numel,
            kernels=self.kernels,
        )


def _seed(seed: int, step: int, name: str) -> int:
    return _native.mix(_native.mix(seed & SEEDS ^ step) ^ zlib.crc32(name.encode()))
