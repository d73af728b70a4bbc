"""Codec: error feedback, selection and value format in one object that turns gradients into frames and back.

`encode` checks the gradients, adds them to the residuals, selects entries and writes them. The residuals and what the
selection has learned are the codec's state, by parameter name.
"""

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.encode import (
    EVERYTHING,
    Batch,
    Choice,
    FrameOutput,
    NonFinite,
    Observer,
    ValueCoding,
    empty_frame,
    write_batch,
)
from thinwire.codec.feedback import DTYPES, Accumulated, ErrorFeedback, Feedback, Vector, first_not_finite
from thinwire.codec.frame import Frame, FrameReader, section_bound, window_bytes
from thinwire.codec.selection import Group, NativeGroup, RandomK, Rotate, Rule, Selection, TopK, TorchGroup, Window
from thinwire.codec.values import SEEDS, Bits, Unary, Values

State = dict[str, Any]
Slots = dict[str, dict[str, Tensor]]
Learned = dict[str, dict[str, float]]
Scope = Literal["tensor", "global"]
Kernels = Literal["auto", "native", "torch"]

STATE_VERSION = 2


class Codec:
    """Compresses named tensors into frames and keeps what was not sent in residuals.

    selection: which entries are sent; a number is a density and means TopK(density).
    values: how the values of sent entries are written. None: `Unary` where the largest 2 % or fewer are sent and a
        residual keeps the rounding, else `Bits(8)`.
    feedback: what becomes of the rest.
    scope: "tensor" gives every tensor its own threshold, "global" one threshold to all tensors of an encode.
    min_numel: smaller tensors (biases, norms) are sent whole, in the codec's values; in 8 bits if those are `Bits(4)`,
        `Bits(2)` or `Sign`, or `Unary` without error feedback. Rotate takes them as all others; its codec has a
        min_numel of 0.
    kernels: "native", "torch" (any device), or "auto": native for CPU tensors. Both give the same frames.
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
        self.selection = selection if isinstance(selection, Selection) else TopK(selection)
        self.feedback = feedback if feedback is not None else ErrorFeedback()
        self.values = values if values is not None else self._default_values()
        self.scope = scope
        self._min_numel = min_numel
        self.kernels = kernels
        self.observer: Observer | None = None
        self.step = 0
        self.generation = 0  # counts how often tensors of the residuals were replaced
        self._slots: Slots = {}
        self._learned: Learned = {}
        self._reserves: dict[tuple[int, ...], list[int]] = {}  # results of `reserves`: sizes seldom change

    def __repr__(self) -> str:
        return (
            f"Codec({self.selection}, {self.values}, {self.feedback}, scope={self.scope!r}, min_numel={self.min_numel})"
        )

    @property
    def min_numel(self) -> int:
        """Tensors with fewer elements are sent whole; 0 if the selection takes small tensors as all others."""
        return self._min_numel if self.selection.spares_small else 0

    def _default_values(self) -> Values:
        """Return `Unary` for the tail of a distribution: it is short and accurate there, and needs error feedback."""
        tail = self.selection.by_threshold and self.selection.expected(1000, 0) <= 20
        return Unary() if tail and self.feedback.slots else Bits(8)

    def copy(self, **changes: Any) -> "Codec":
        """Return a codec with the same settings, except for those given, and without residuals.

        The settings are the arguments of the constructor: `codec.copy(feedback=NoFeedback())`.
        """
        names = ("selection", "values", "feedback", "scope", "kernels")
        same = {name: getattr(self, name) for name in names} | {"min_numel": self._min_numel}
        return Codec(**same | changes)

    # Encoding

    def encode(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int | None = None,
        budget: int | None = None,
        hold: Collection[str] = (),
    ) -> Frame:
        """Encode gradients; what is not sent stays in the residual.

        The frame never exceeds `budget` bytes; entries that do not fit stay in the residual, too. If an input is not
        finite, the frame reports it and is empty, and neither residuals nor step change. `step` defaults to the number
        of calls so far. Tensors named in `hold` send nothing and their residuals do not change.
        """
        if budget is not None and budget < _native.HEADER_BYTES:
            raise ValueError(f"a budget of {budget} bytes cannot hold a frame's header of {_native.HEADER_BYTES}")
        batch = self.prepare(tensors, step=step, hold=hold)
        if isinstance(batch, NonFinite):
            return empty_frame(batch.tensor)
        size = self.frame_bound([v.n for v in batch.vectors]) if budget is None else budget
        frame = self.write(batch, torch.empty(size, dtype=torch.uint8))
        # A frame uses little of a buffer of the bound's size: the copy releases that buffer.
        return replace(frame, data=frame.data.clone()) if budget is None else frame

    def prepare(
        self, tensors: Mapping[str, Tensor], *, step: int | None = None, hold: Collection[str] = ()
    ) -> Batch | NonFinite:
        """Apply the feedback and choose what is sent; `NonFinite` if a tensor holds an infinity or a NaN."""
        if step is not None and step < 0:
            raise ValueError(f"a step counts from 0, not {step}")
        active = {name: self.checked(name, t) for name, t in tensors.items() if name not in hold}
        unchecked = {name: t for name, t in active.items() if not self.is_accumulated(name, t)}
        if (bad := first_not_finite(list(unchecked.values()))) >= 0:
            return NonFinite(list(unchecked)[bad])
        at = self.step if step is None else step
        self.step = at + 1
        vectors = [self.feedback.prepare(g, self.ensure_residuals(name, g)) for name, g in active.items()]
        sections = [i for i, name in enumerate(tensors) if name not in hold]
        batch = self.choose(list(active), vectors, sections, len(tensors), at)
        if self.observer is not None:
            self.observer.opened(batch)
        return batch

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        """Return a gradient as a contiguous tensor; ValueError if it cannot be encoded under this name."""
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: gradients must be float32, float16 or bfloat16, not {tensor.dtype}")
        if tensor.is_sparse:
            raise ValueError(f"{name}: sparse gradients are not supported; use sparse=False in the embedding")
        slots = self._slots.get(name)
        if slots and (size := next(iter(slots.values())).numel()) != tensor.numel():
            raise ValueError(f"{name}: the residual has {size} elements, the gradient has {tensor.numel()}")
        return (tensor.detach() if tensor.requires_grad else tensor).contiguous()

    def is_accumulated(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is this parameter's residual, to which its change was added before.

        It is finite then, because only finite changes are added.
        """
        if not isinstance(self.feedback, Accumulated):
            return False
        residual = self._slots.get(name, {}).get("residual")
        return residual is tensor or (residual is not None and residual.data_ptr() == tensor.data_ptr())

    def uses_kernels(self, vectors: Sequence[Vector]) -> bool:
        """Return whether the kernels take these vectors; otherwise torch operations do."""
        on_cpu = all(v.gradient.device.type == "cpu" for v in vectors)
        if self.kernels == "native" and not on_cpu:
            raise ValueError('kernels="native" takes CPU tensors; use kernels="auto"')
        return on_cpu and self.kernels != "torch"

    def choose(
        self,
        names: list[str],
        vectors: list[Vector],
        sections: list[int],
        tensors: int,
        step: int,
        rules: Sequence[Rule] | None = None,
    ) -> Batch:
        """Choose what is sent of each vector, by these rules or by the selection."""
        native = self.uses_kernels(vectors)
        if rules is None:
            choices = self._select(names, vectors, step, NativeGroup if native else TorchGroup)
        else:
            choices = [Choice(name, rule) for name, rule in zip(names, rules, strict=True)]
        small = self.small_values
        codings = [
            _coding(small if choice.whole else self.values, step, name)
            for name, choice in zip(names, choices, strict=True)
        ]
        return Batch(names, vectors, choices, codings, sections, tensors, step, native)

    def _select(self, names: list[str], vectors: list[Vector], step: int, make: type[Group]) -> list[Choice]:
        """Ask the selection what is sent of each vector; vectors of one group share a `Choice`.

        A vector whose sum was computed on the way is replaced by one that reads it.
        """
        choices = [Choice(name, EVERYTHING, whole=True) for name in names]
        least = max(self.min_numel, 1) if self.selection.spares_small else 0
        large = [i for i, v in enumerate(vectors) if v.n >= least]
        together = self.scope == "global" and self.selection.by_threshold
        for members in [large] if together and large else [[i] for i in large]:
            group = make([vectors[i] for i in members])
            label = names[members[0]]
            state = self._learned.setdefault(label, {})
            rule = self.selection.select(group, step=step, key=zlib.crc32(label.encode()), state=state)
            shared = Choice(label, rule)
            for i, vector in zip(members, group.vectors, strict=True):
                vectors[i], choices[i] = vector, shared
        for i, choice in enumerate(choices):
            if choice.whole and vectors[i].mask is not None:
                # The mask stops the momentum of entries that are sent late. Small tensors are sent at every step.
                vectors[i] = replace(vectors[i], mask=None)
        return choices

    def write(self, batch: Batch, buffer: Tensor, *, pad: bool = False) -> Frame:
        """Write a batch into one frame in a buffer; `pad` fills the rest of the buffer with zeros."""
        output = FrameOutput(buffer, self.reserves([v.n for v in batch.vectors]))
        counts = write_batch(batch, output)
        self.learn(batch)
        return Frame(output.finish(pad=pad), counts=tuple(counts))

    def learn(self, batch: Batch) -> None:
        """Tell the selection what it selected, once all tensors of a batch are written."""
        for choice in {id(c): c for c in batch.choices if not c.whole}.values():
            self.selection.learn(choice.selected, choice.magnitudes, self._learned.get(choice.label, {}))
        if self.observer is not None:
            self.observer.written(batch)

    # Sizes

    @property
    def small_values(self) -> Values:
        """How tensors below `min_numel` are written: 4, 2 or 1 bits would be too coarse for biases and norms.

        Unary values have no largest level, and error feedback corrects their rounding; without it they are too coarse.
        """
        corrected = isinstance(self.values, Unary) and bool(self.feedback.slots)
        return self.values if self.values.bits >= 8 or corrected else Bits(8)

    def reserves(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes to keep free at each section for the headers and small tensors of later sections.

        With Rotate there are none: most later tensors send nothing at a step.
        """
        if isinstance(self.selection, Rotate):
            return [0] * len(sizes)
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
        """Return the most bytes that a tensor takes with up to `count` entries, or with all of them if it is small."""
        if isinstance(self.selection, Rotate):
            return window_bytes(n, count, self.values)
        if n < max(self.min_numel, 1):
            return section_bound(n, n, self.small_values, whole=True)
        return section_bound(n, count, self.values, strata=isinstance(self.selection, RandomK))

    def frame_bound(self, sizes: Sequence[int], counts: Sequence[int] | None = None) -> int:
        """Return the most bytes that a frame of tensors of these sizes takes, with up to `counts` entries each."""
        many = sizes if counts is None else counts
        return _native.HEADER_BYTES + sum(self._section_bound(n, count) for n, count in zip(sizes, many, strict=True))

    def expected_counts(self, sizes: Sequence[int], step: int = 0) -> list[int]:
        """Return how many entries tensors of these sizes are expected to send."""
        return [n if n < self.min_numel else self.selection.expected(n, step) for n in sizes]

    def windows(self, names: Sequence[str], sizes: Sequence[int], step: int) -> list[Window] | None:
        """Return the window of each of these tensors at a step; None if the selection depends on the values."""
        if not isinstance(self.selection, Rotate):
            return None
        if self.selection.period(step) == 1:  # without any dependence on the step
            return [Window(0, n) for n in sizes]
        keys = (zlib.crc32(name.encode()) for name in names)
        return [self.selection.window(n, step, key) for n, key in zip(sizes, keys, strict=True)]

    @property
    def writes_windows(self) -> bool:
        """Whether kernels can write windows of many CPU tensors in one call, without rounding that depends on names."""
        return isinstance(self.selection, Rotate) and self.kernels != "torch" and self.values.seed is None

    def windows_bytes(self, sizes: Sequence[int], windows: Sequence[Window]) -> int:
        """Return the bytes of a frame that sends these windows of tensors of these sizes."""
        return _native.HEADER_BYTES + sum(
            window_bytes(n, window.count, self.values, section=i)
            for i, (n, window) in enumerate(zip(sizes, windows, strict=True))
        )

    def known_bytes(self, names: Sequence[str], sizes: Sequence[int], step: int) -> int | None:
        """Return the bytes of the frame of these tensors at a step; None if they depend on the values."""
        windows = self.windows(names, sizes, step)
        return self.windows_bytes(sizes, windows) if windows is not None else None

    def expected_bytes(self, sizes: Sequence[int], step: int = 0) -> int:
        """Return how many bytes a frame of tensors of these sizes is expected to take, averaged over many steps."""
        if not isinstance(self.selection, Rotate):
            return self.frame_bound(sizes, self.expected_counts(sizes, step))
        total = 0
        for i, n in enumerate(sizes):
            size = max(self.selection.window_size(n, step), 1)
            total += n // size * window_bytes(n, size, self.values, section=i)
            total += window_bytes(n, n % size, self.values, section=i)
        return _native.HEADER_BYTES + -(-total // self.selection.period(step))

    # Decoding

    @staticmethod
    def decode(frame: Frame | Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode a frame into float32 tensors on the CPU, in the shapes and the order of `like` (the sender's order).

        Raises FrameError for bytes that are not a valid frame of these tensors. A frame that reports a non-finite
        input decodes to tensors of NaN.
        """
        reader = FrameReader(frame, [t.numel() for t in like.values()])
        outs = {name: torch.zeros(t.shape) for name, t in like.items()}
        if reader.non_finite:
            return {name: out.fill_(torch.nan) for name, out in outs.items()}
        reader.add_to(list(outs.values()))
        return outs

    # State

    def residuals(self, name: str) -> dict[str, Tensor]:
        """Return the feedback's flat tensors of one parameter, by slot; empty before its first encode."""
        return self._slots.get(name, {})

    def ensure_residuals(self, name: str, gradient: Tensor) -> dict[str, Tensor]:
        """Return the feedback's tensors of a parameter on its gradient's device; missing ones are created as zeros."""
        slots = self._slots.setdefault(name, {})
        for slot in self.feedback.slots:
            tensor = slots.get(slot)
            if tensor is None:
                slots[slot] = torch.zeros(gradient.numel(), device=gradient.device)
            elif tensor.device != gradient.device:
                slots[slot] = tensor.to(gradient.device)
                self.generation += 1
        return slots

    def place_residuals(self, slots: Slots) -> None:
        """Keep the residuals of these parameters in the given tensors from now on."""
        self._slots.update(slots)
        self.generation += 1

    @property
    def learned(self) -> Learned:
        """What the selection has learned, by the first parameter of each group."""
        return self._learned

    def give_back(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Add entries to the residual again that were sent and did not take effect."""
        residual = self._slots.get(name, {}).get("residual")
        if residual is not None:
            residual.index_add_(0, positions.to(residual.device), values.to(residual.device))

    def rescale(self, factor: float, names: Collection[str] | None = None) -> None:
        """Multiply the residuals of some parameters, or of all, when the unit of the gradients changes.

        After a change of the loss scale call it with new / old. After a change of the learning rate call it with
        old / new, so that learning rate x residual stays constant.
        """
        if not (0.0 < factor < float("inf")):
            raise ValueError(f"a residual is rescaled by a positive finite factor, not {factor}")
        for name in self._slots if names is None else names:
            for tensor in self._slots.get(name, {}).values():
                tensor.mul_(factor)
            self.selection.rescale(factor, self._learned.get(name, {}))

    def state_dict(self) -> State:
        """Return the state: tensors and numbers by parameter name, loadable with `torch.load(weights_only=True)`."""
        residuals = {name: {slot: t.clone() for slot, t in slots.items()} for name, slots in self._slots.items()}
        learned = {label: dict(values) for label, values in self._learned.items() if values}
        return {"version": STATE_VERSION, "step": self.step, "residuals": residuals, "selection": learned}

    def load_state_dict(self, state: State) -> None:
        """Load a saved state. Raises ValueError and changes nothing if it is not one of a codec with this feedback."""
        _check_fields(state)
        residuals = {name: self._checked_slots(name, slots) for name, slots in state["residuals"].items()}
        learned = {label: _checked_figures(label, figures) for label, figures in state["selection"].items()}
        self.step = state["step"]
        self.generation += 1
        self._slots, self._learned = residuals, learned

    def _checked_slots(self, name: str, slots: Any) -> dict[str, Tensor]:
        """Return copies of a parameter's saved tensors; ValueError if the feedback cannot use them."""
        if not isinstance(slots, Mapping) or set(slots) != set(self.feedback.slots):
            found = sorted(map(str, slots)) if isinstance(slots, Mapping) else type(slots).__name__
            raise ValueError(f"{name}: the state has {found}, {self.feedback} needs {list(self.feedback.slots)}")
        copies = {}
        for slot, tensor in slots.items():
            dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
            if not dense or not tensor.is_floating_point():
                raise ValueError(f"{name}: the state's {slot} is not a dense tensor of floating-point numbers")
            copies[slot] = tensor.detach().to(torch.float32, copy=True).reshape(-1)
            if not copies[slot].isfinite().all():
                raise ValueError(f"{name}: the state's {slot} has a value that is not finite")
        if len({tensor.numel() for tensor in copies.values()}) > 1:
            raise ValueError(f"{name}: the tensors {sorted(slots)} of the state differ in size")
        return copies


def _coding(values: Values, step: int, name: str) -> ValueCoding:
    """Return how values are written at a step: stochastic rounding has another seed for every step and tensor."""
    if values.seed is None:
        return ValueCoding(values.code)
    seed = _native.mix(_native.mix(values.seed & SEEDS ^ step) ^ zlib.crc32(name.encode()))
    return ValueCoding(values.code, True, seed)


def _check_fields(state: Any) -> None:
    """Raise ValueError unless this is a codec's state of this version with all its fields."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a codec's state is a dict as state_dict() returns it, not {type(state).__name__}")
    version = state.get("version")
    if type(version) is int and version == 1:
        raise ValueError(
            "the codec's state was saved by thinwire 0.1: train on without it, or load it with thinwire 0.1 and finish"
            " training there"
        )
    if type(version) is not int or version != STATE_VERSION:
        raise ValueError(f"the codec's state has version {version!r}, this thinwire reads version {STATE_VERSION}")
    missing = {"step", "residuals", "selection"} - set(state)
    if missing:
        raise ValueError(f"the codec's state lacks {', '.join(sorted(missing))}")
    if type(state["step"]) is not int or state["step"] < 0:
        raise ValueError(f"the step of the codec's state must be a number from 0 on, not {state['step']!r}")
    for field in ("residuals", "selection"):
        entries = state[field]
        if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
            raise ValueError(f"the {field} of the codec's state must be a dict by parameter name")


def _checked_figures(label: str, figures: Any) -> dict[str, float]:
    """Return a copy of what a selection has learned; ValueError unless these are finite numbers by name."""
    fit = isinstance(figures, Mapping) and all(
        isinstance(key, str) and type(value) in (int, float) and abs(value) < math.inf for key, value in figures.items()
    )
    if not fit:
        raise ValueError(f"{label}: what the state's selection learned must be finite numbers by name")
    return dict(figures)
