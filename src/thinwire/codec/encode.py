"""Encoding: the selected entries of a batch of vectors become one frame, one frame per owner, or shards.

`write_batch` is the loop over the vectors. CPU vectors go through the kernels in one pass that accumulates, selects
and writes; `section_args` is the only place that hands their addresses over. Other devices select with torch
operations, and only the selected entries leave the device. `BucketEncoder` does everything in one call of the kernels
for tensors that stay in place.
"""

import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.feedback import DTYPES, ErrorFeedback, NoFeedback, Vector, array_args
from thinwire.codec.frame import Frame, Outs
from thinwire.codec.selection import Cutoff, Rule, StratifiedSample, TopK, Window, density_at
from thinwire.codec.values import Float32

if TYPE_CHECKING:
    from thinwire.codec.codec import Codec

# Lets every entry pass, zeros too: small tensors are sent whole.
EVERYTHING = Cutoff(-1.0)


class ValueCoding(NamedTuple):
    """How the values of one section are written."""

    code: int
    stochastic: bool = False
    seed: int = 0  # of stochastic rounding


@dataclass
class Choice:
    """What a group of tensors sends, and the entries that were selected so far."""

    label: str  # the name of the group's first tensor
    rule: Rule
    whole: bool = False  # a small tensor, of which everything is sent
    selected: int = 0
    magnitudes: float = 0.0  # the sum over the selected entries

    def count(self, selected: int, ties: int, magnitudes: float) -> None:
        """Count what one tensor selected. `ties` are left for the group's next tensor."""
        self.selected += selected
        self.magnitudes += magnitudes
        if isinstance(self.rule, Cutoff):
            self.rule = Cutoff(self.rule.threshold, ties)


@dataclass(frozen=True)
class NonFinite:
    """The result of an encode that found an infinity or a NaN: nothing is sent, and no residual changes."""

    tensor: str


@dataclass(frozen=True)
class Batch:
    """The vectors of one encode, and what each of them sends."""

    names: list[str]
    vectors: list[Vector]
    choices: list[Choice]  # tensors of one group share one object
    codings: list[ValueCoding]
    sections: list[int]  # each vector's index in the frame
    tensors: int  # in the frame, those that send nothing included
    step: int
    native: bool  # whether the kernels take these vectors


class Observer(Protocol):
    """Receives a codec's batches, for diagnostics."""

    def opened(self, batch: Batch) -> None:
        """Called when the entries to send are chosen and nothing is written yet."""

    def written(self, batch: Batch) -> None:
        """Called when the chosen entries are in a frame and the rest is in the residual."""


# Arguments of the kernels


def section_args(section: int, vector: Vector, coding: ValueCoding) -> "_native.SectionArgs":
    """Return a section as the kernels take it: addresses of the vector, its residual and mask, and the value format."""
    kept = vector.kept.data_ptr() if vector.kept is not None else 0
    mask = vector.mask.data_ptr() if vector.mask is not None else 0
    return section, vector.args, kept, mask, *coding


class Entries:
    """Selected entries of one vector, on the CPU, in ascending order."""

    def __init__(self, positions: Tensor, values: Tensor) -> None:
        self.positions = positions  # in the frame, which may be of an owner's share
        self.places = positions  # in the vector
        self.values = values
        self.sent = torch.empty_like(values)  # the values as the receiver reads them

    def args(self, section: int, n: int, coding: ValueCoding, low: int, high: int) -> "_native.EntriesArgs":
        """Return the entries [low, high) as the kernels take them, for a section of n elements."""
        positions, values = self.positions.data_ptr() + 8 * low, self.values.data_ptr() + 4 * low
        return section, positions, values, high - low, n, self.sent.data_ptr() + 4 * low, *coding


# Selection with torch operations


def select_entries(vector: Vector, choice: Choice) -> Entries:
    """Return the entries of an accumulated vector that its choice selects."""
    x = vector.gradient.reshape(-1).float()
    if isinstance(choice.rule, StratifiedSample):
        there, ties = sample_positions(choice.rule, x.numel()).to(x.device), 0
    elif isinstance(choice.rule, Window):
        there, ties = torch.arange(choice.rule.start, choice.rule.start + choice.rule.count, device=x.device), 0
    else:
        there, ties = positions_above(x, choice.rule)
    values = x[there].cpu()
    choice.count(len(values), ties, float(values.abs().double().sum()))
    return Entries(there.cpu(), values)


def positions_above(x: Tensor, cutoff: Cutoff) -> tuple[Tensor, int]:
    """Return the positions of the entries that pass a cutoff, ascending, and the ties that are left."""
    magnitudes = x.abs()
    passing = magnitudes > cutoff.threshold
    if not cutoff.ties:
        return passing.nonzero().flatten(), 0
    equal = (magnitudes == cutoff.threshold).nonzero().flatten()[: cutoff.ties]
    passing[equal] = True
    return passing.nonzero().flatten(), cutoff.ties - len(equal)


def sample_positions(sample: StratifiedSample, n: int) -> Tensor:
    """Return the positions that a sample's seed determines, in ascending order."""
    positions = torch.empty(sample.count, dtype=torch.int64)
    _native.strata_positions(sample.seed, sample.count, n, positions.data_ptr())
    return positions


def remove_sent(vector: Vector, entries: Entries, written: list[tuple[int, int]]) -> None:
    """Take the ranges of entries that were written out of the residual; their rounding error stays in it."""
    places, rest = entries.places, entries.values - entries.sent
    if sum(high - low for low, high in written) < len(places):
        there = torch.cat([torch.arange(low, high) for low, high in written])
        places, rest = places[there], rest[there]
    if vector.kept is not None:
        vector.kept[places.to(vector.kept.device)] = rest.to(vector.kept.device)
    if vector.mask is not None:
        vector.mask[places.to(vector.mask.device)] = 0.0


# Outputs: where sections are written to


class Output(ABC):
    """What a batch is written to."""

    def takes(self, i: int, rule: Rule) -> bool:
        """Whether the kernels can write the i-th vector of the batch by this rule."""
        return isinstance(rule, Cutoff)

    @abstractmethod
    def add(self, i: int, section: "_native.SectionArgs", rule: Rule) -> "_native.Written":
        """Write the i-th vector with the kernels."""

    @abstractmethod
    def add_entries(self, i: int, batch: Batch, entries: Entries) -> list[tuple[int, int]]:
        """Write selected entries of the i-th vector; returns the ranges of them that found room.

        It may reorder the entries.
        """


class FrameOutput(Output):
    """One frame in a caller's buffer. `reserves[i]` bytes are kept free for the sections after the i-th."""

    def __init__(self, buffer: Tensor, reserves: Sequence[int]) -> None:
        self.buffer, self.reserves = buffer, reserves
        self.writer = _native.Writer(buffer.data_ptr(), buffer.numel())

    def takes(self, i: int, rule: Rule) -> bool:
        return True

    def add(self, i: int, section: "_native.SectionArgs", rule: Rule) -> "_native.Written":
        if isinstance(rule, StratifiedSample):
            return self.writer.add_strata(section, rule.count, rule.seed, self.reserves[i])
        if isinstance(rule, Window):
            return self.writer.add_window(section, rule.start, rule.count, self.reserves[i])
        return self.writer.add_selected(section, rule.threshold, rule.ties, self.reserves[i])

    def add_entries(self, i: int, batch: Batch, entries: Entries) -> list[tuple[int, int]]:
        rule, count = batch.choices[i].rule, len(entries.values)
        args = entries.args(batch.sections[i], batch.vectors[i].n, batch.codings[i], 0, count)
        if isinstance(rule, Window):
            return [(0, self.writer.add_window_entries(args, self.reserves[i]))]
        seed = rule.seed if isinstance(rule, StratifiedSample) else None
        return [(0, self.writer.add_entries(args, seed, self.reserves[i]))]

    def finish(self, *, pad: bool = False) -> Tensor:
        """Return the bytes of the frame. `pad` fills the rest of the buffer with zeros."""
        return self.buffer[: self.writer.finish(0, pad)]


@dataclass(frozen=True)
class Partition:
    """Which ranks own the elements of a tensor.

    With a world of several ranks each owns blocks of the tensor, dealt round-robin from another rank each round;
    `first` shifts the rounds. With a world of one the rank `first` owns the whole tensor.
    """

    world: int
    first: int

    def share(self, n: int, owner: int) -> int:
        """Return how many of n elements an owner has."""
        if self.world == 1:
            return n if owner == self.first else 0
        return _native.share_of(n, self.world, self.first, owner)

    def window(self, window: Window, owner: int) -> Window:
        """Return an owner's elements of a window. They are consecutive in its share."""
        start = self.share(window.start, owner)
        return Window(start, self.share(window.start + window.count, owner) - start)

    def places(self, n: int, owner: int) -> Tensor:
        """Return the positions of an owner's share in the whole tensor."""
        if self.world == 1:
            return torch.arange(n if owner == self.first else 0)
        owners, _ = self._owners(torch.arange(n))
        return (owners == owner).nonzero().flatten()

    def _owners(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return who owns these positions, and the positions in the owners' shares (as native/partition.hpp does)."""
        blocks = positions // _native.PARTITION_BLOCK
        rounds = blocks // self.world
        shifts = ((rounds + self.first) * 2654435761 & 0xFFFFFFFF) * self.world >> 32
        shares = rounds * _native.PARTITION_BLOCK + positions % _native.PARTITION_BLOCK
        return (blocks + shifts) % self.world, shares

    def sort(self, entries: Entries) -> list[int]:
        """Sort entries by owner, their positions as in the owners' shares; returns where each owner's entries begin."""
        owners, positions = self._owners(entries.places)
        order = torch.argsort(owners, stable=True)
        entries.positions, entries.places = positions[order], entries.places[order]
        entries.values = entries.values[order]
        edges: list[int] = torch.searchsorted(owners[order], torch.arange(self.world + 1)).tolist()
        return edges


@dataclass(frozen=True)
class Part:
    """The buffer for one owner's frame, a uint8 tensor; zeros follow the frame."""

    buffer: Tensor
    shares: list[int]  # how many elements of every tensor the owner has
    reserves: list[int]  # bytes to keep free at each tensor, see Codec.reserves

    def reserves_for(self, sections: list[int]) -> list[int]:
        """Return the reserves without those for tensors that send nothing."""
        if len(sections) == len(self.shares):
            return self.reserves
        found, later = [], 0
        for at in reversed(sections):
            found.append(later)
            later += self.reserves[at - 1] - self.reserves[at] if at else 0
        return found[::-1]


class PartsOutput(Output):
    """One frame per owner, each with the owner's share of every tensor."""

    def __init__(self, partitions: Sequence[Partition], parts: Sequence[Part], sections: list[int]) -> None:
        self._partitions = [partitions[at] for at in sections]
        self.frames = [FrameOutput(part.buffer, part.reserves_for(sections)) for part in parts]

    def takes(self, i: int, rule: Rule) -> bool:
        return self._partitions[i].world == 1 or not isinstance(rule, StratifiedSample)

    def add(self, i: int, section: "_native.SectionArgs", rule: Rule) -> "_native.Written":
        partition = self._partitions[i]
        if partition.world == 1:
            return self.frames[partition.first].add(i, section, rule)
        writers, reserves = [frame.writer for frame in self.frames], [frame.reserves[i] for frame in self.frames]
        if isinstance(rule, Window):
            return _native.Writer.add_window_parts(writers, reserves, partition.first, section, rule.start, rule.count)
        assert isinstance(rule, Cutoff)
        return _native.Writer.add_parts(writers, reserves, partition.first, section, rule.threshold, rule.ties)

    def add_entries(self, i: int, batch: Batch, entries: Entries) -> list[tuple[int, int]]:
        partition = self._partitions[i]
        if partition.world == 1:
            return self.frames[partition.first].add_entries(i, batch, entries)
        edges = partition.sort(entries)
        windowed, written = isinstance(batch.choices[i].rule, Window), []
        for owner, frame in enumerate(self.frames):
            share, low, high = partition.share(batch.vectors[i].n, owner), edges[owner], edges[owner + 1]
            if share:
                args, reserve = entries.args(batch.sections[i], share, batch.codings[i], low, high), frame.reserves[i]
                fit = (
                    frame.writer.add_window_entries(args, reserve)
                    if windowed
                    else frame.writer.add_entries(args, None, reserve)
                )
                written.append((low, low + fit))
        return written


class ShardOutput(Output):
    """Shards: frames of at most `budget` bytes, any of which may be lost. Shards list all positions."""

    def __init__(self, budget: int, *, exact: bool = False) -> None:
        self.writer = _native.ShardWriter(budget, exact)

    def add(self, i: int, section: "_native.SectionArgs", rule: Rule) -> "_native.Written":
        assert isinstance(rule, Cutoff)
        return self.writer.add_selected(section, rule.threshold, rule.ties)

    def add_entries(self, i: int, batch: Batch, entries: Entries) -> list[tuple[int, int]]:
        count = len(entries.values)
        self.writer.add_entries(entries.args(batch.sections[i], batch.vectors[i].n, batch.codings[i], 0, count))
        return [(0, count)]


def write_batch(batch: Batch, output: Output) -> list[int]:
    """Write all vectors of a batch; returns how many entries of each tensor were sent."""
    counts = [0] * batch.tensors
    for i, (vector, choice) in enumerate(zip(batch.vectors, batch.choices, strict=True)):
        section = batch.sections[i]
        if batch.native and output.takes(i, choice.rule):
            args = section_args(section, vector, batch.codings[i])
            counts[section], selected, ties, magnitudes = output.add(i, args, choice.rule)
            choice.count(selected, ties, magnitudes)
        else:
            entries = select_entries(vector.accumulate(), choice)
            written = output.add_entries(i, batch, entries)
            remove_sent(vector, entries, written)
            counts[section] = sum(high - low for low, high in written)
    return counts


# What exchanges and the parameter server encode


def encode_parts(
    codec: "Codec",
    tensors: Mapping[str, Tensor],
    partitions: Sequence[Partition],
    parts: Sequence[Part],
    *,
    step: int,
    hold: Collection[str] = (),
) -> tuple[list[Frame], list[int]]:
    """Encode gradients into one frame per owner; returns the frames and how many entries of each tensor were sent."""
    if isinstance(tensors, BucketViews) and not hold:
        found = _encode_windows(codec, tensors, partitions, parts, step)
        if found is not None:
            return found
    batch = codec.prepare(tensors, step=step, hold=hold)
    if isinstance(batch, NonFinite):
        return [fill(part.buffer, empty_frame(batch.tensor)) for part in parts], [0] * len(tensors)
    output = PartsOutput(partitions, parts, batch.sections)
    counts = write_batch(batch, output)
    codec.learn(batch)
    return [Frame(frame.finish(pad=True)) for frame in output.frames], counts


def _encode_windows(
    codec: "Codec", tensors: "BucketViews", partitions: Sequence[Partition], parts: Sequence[Part], step: int
) -> tuple[list[Frame], list[int]] | None:
    """Encode windows, which need no look at the tensors, with a single call of the kernels.

    Returns None where `encode_parts` must take its own way: for other selections and settings, and for tensors that are
    not finite. Frames and residuals are the same to the bit.
    """
    feedback = codec.feedback
    if codec.observer is not None or not codec.writes_windows or not isinstance(feedback, ErrorFeedback):
        return None
    windows = codec.windows(tensors.names, tensors.numels, step)
    if windows is None or tensors.args is None or _native.first_not_finite(tensors.args) >= 0:
        return None
    coding = ValueCoding(codec.values.code)
    sections: list[_native.SectionArgs] = []
    for (name, tensor), (address, dtype, n) in zip(tensors.items(), tensors.args, strict=True):
        residual = codec.ensure_residuals(name, tensor)["residual"]
        if residual.numel() != n:
            return None
        there = residual.data_ptr()
        sections.append((len(sections), (address, dtype, there, feedback.decay, n), there, 0, *coding))
    outputs = [FrameOutput(part.buffer, part.reserves) for part in parts]
    sent = _native.Writer.add_windows([o.writer for o in outputs], _placed(sections, windows, partitions))
    codec.step = step + 1
    return [Frame(output.finish(pad=True)) for output in outputs], sent


def _placed(
    sections: Sequence["_native.SectionArgs"], windows: Sequence[Window], partitions: Sequence[Partition]
) -> list[tuple["_native.SectionArgs", int, int, int, int]]:
    """Return sections with their windows and owners, as the kernels take them."""
    return [
        (section, window.start, window.count, partition.world, partition.first)
        for section, window, partition in zip(sections, windows, partitions, strict=True)
    ]


def encode_sums(
    codec: "Codec",
    sums: Mapping[int, Tensor],
    names: Sequence[str],
    buffer: Tensor,
    *,
    step: int,
    windows: Sequence[Window] | None = None,
) -> Frame:
    """Encode sums, given by section, without a residual; what is not sent stays in the sums themselves.

    With `windows`, by section, these entries are sent; otherwise the codec selects. Zeros follow the frame in the
    buffer.
    """
    if windows is not None and codec.observer is None and codec.writes_windows:
        coding, output = ValueCoding(codec.values.code), FrameOutput(buffer, [])
        sections = [(i, Vector(t, None, 1.0, t, None).args, t.data_ptr(), 0, *coding) for i, t in sums.items()]
        everything = [Partition(1, 0)] * len(sections)
        sent = _native.Writer.add_windows([output.writer], _placed(sections, [windows[i] for i in sums], everything))
        counts = [0] * len(names)
        for i, count in zip(sums, sent, strict=True):
            counts[i] = count
        return Frame(output.finish(pad=True), counts=tuple(counts))
    vectors = [Vector(t, None, 1.0, t, None) for t in sums.values()]
    rules = [windows[i] for i in sums] if windows is not None else None
    batch = codec.choose([names[i] for i in sums], vectors, list(sums), len(names), step, rules)
    return codec.write(batch, buffer, pad=True)


def encode_shards(
    codec: "Codec", tensors: Mapping[str, Tensor], budget: int, *, step: int, hold: Collection[str] = ()
) -> tuple[list[bytes], int] | NonFinite:
    """Encode gradients into shards of at most `budget` bytes.

    Returns the shards and the number of entries in them, or `NonFinite`.
    """
    batch = codec.prepare(tensors, step=step, hold=hold)
    if isinstance(batch, NonFinite):
        return batch
    output = ShardOutput(budget)
    counts = write_batch(batch, output)
    codec.learn(batch)
    return output.writer.finish(), sum(counts)


def encode_exact(values: Sequence[Tensor], positions: Mapping[int, Tensor], budget: int) -> list[bytes]:
    """Encode the exact values at ascending positions of some of these tensors into shards, which overwrite."""
    output, coding = ShardOutput(budget, exact=True), ValueCoding(Float32().code)
    for tensor in sorted(positions):
        there = positions[tensor].contiguous()
        entries = Entries(there, values[tensor][there])
        output.writer.add_entries(entries.args(tensor, values[tensor].numel(), coding, 0, len(there)))
    return output.writer.finish()


def empty_frame(culprit: str) -> Frame:
    """Return the frame that reports a non-finite input."""
    buffer = torch.empty(_native.HEADER_BYTES, dtype=torch.uint8)
    _native.Writer(buffer.data_ptr(), len(buffer)).finish(1, False)
    return Frame(buffer, non_finite=culprit)


def fill(buffer: Tensor, frame: Frame) -> Frame:
    """Copy a frame into a buffer, with zeros after it."""
    buffer[: len(frame)] = frame.data
    buffer[len(frame) :].zero_()
    return Frame(buffer[: len(frame)], frame.non_finite)


# Tensors that stay in place


class BucketViews(dict[str, Tensor]):
    """Named flat tensors that stay at their addresses while this object lives, as the gradients of a DDP bucket do.

    What depends on names, sizes and addresses alone is computed once. The tensors must not change after its first use.
    """

    @cached_property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self)

    @cached_property
    def outs(self) -> Outs:
        """The tensors, for sums that are written to them."""
        return Outs(self.values())

    @cached_property
    def numels(self) -> list[int]:
        """The sizes of the tensors."""
        return [tensor.numel() for tensor in self.values()]

    @cached_property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(self.numels)

    @cached_property
    def key(self) -> str:
        """Identifies the tensors by their names and order."""
        return key_of(self)

    @cached_property
    def args(self) -> "list[_native.ArrayArgs] | None":
        """The tensors as the kernels take them; None if the kernels cannot take all of them."""
        fit = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in DTYPES for t in self.values())
        return [array_args(t) for t in self.values()] if fit and self else None


def elements_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of elements of all tensors."""
    if isinstance(tensors, BucketViews):
        return tensors.elements
    return sum(tensor.numel() for tensor in tensors.values())


def key_of(names: Collection[str]) -> str:
    """Return what identifies tensors by their names and order."""
    return f"{next(iter(names), '')}+{len(names)}+{zlib.crc32(chr(10).join(names).encode()):08x}"


class BucketEncoder:
    """Encodes the gradients of one bucket in a single call of the kernels.

    Frames, residuals and the codec's step are the same to the bit as with `encode_parts`. Where other work has
    evicted the interpreter from the caches, its part of `encode_parts` takes longer than the kernels.
    """

    def __init__(self, codec: "Codec", reserves: list[int]) -> None:
        self._codec, self._reserves = codec, reserves
        self._views: weakref.ref[BucketViews] | None = None  # whose addresses the kernels have
        self._generation = -1
        self._encoder: _native.Encoder | None = None

    def encode(self, tensors: BucketViews, buffer: Tensor, *, step: int) -> tuple[Frame, list[int]] | None:
        """Encode into a buffer, with zeros after the frame.

        Returns the frame and how many entries of each tensor were sent, or None where `encode_parts` must be used.
        """
        codec, selection = self._codec, self._codec.selection
        if type(selection) is not TopK or selection.exact or codec.observer is not None:
            return None
        known = self._views() if self._views is not None else None
        if known is not tensors or self._generation != codec.generation:
            self._views, self._encoder = weakref.ref(tensors), self._native_encoder(tensors)
            self._generation = codec.generation
        if self._encoder is None:
            return None
        density = density_at(selection.density, step)
        not_finite, length, sent = self._encoder.encode(density, step, buffer.data_ptr(), buffer.numel())
        if not_finite >= 0:
            return fill(buffer, empty_frame(list(tensors)[not_finite])), [0] * len(tensors)
        codec.step = step + 1
        return Frame(buffer[:length]), sent

    def _native_encoder(self, tensors: BucketViews) -> _native.Encoder | None:
        """Return an encoder for these addresses, or None if one call cannot do what this codec does."""
        codec = self._codec
        simple = codec.scope == "tensor" and codec.kernels != "torch" and codec.values.seed is None
        if not simple or type(codec.feedback) not in (ErrorFeedback, NoFeedback) or tensors.args is None:
            return None
        sections = []
        for i, ((name, tensor), reserve) in enumerate(zip(tensors.items(), self._reserves, strict=True)):
            vector = codec.feedback.prepare(codec.checked(name, tensor), codec.ensure_residuals(name, tensor))
            whole = vector.n < max(codec.min_numel, 1)
            coding = ValueCoding((codec.small_values if whole else codec.values).code)
            sections.append((section_args(i, vector, coding), whole, reserve))
        return _native.Encoder(sections)
