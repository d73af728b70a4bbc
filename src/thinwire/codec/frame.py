"""Frame: self-describing bytes that carry entries of many tensors, and the readers of frames and shards.

docs/wire-format.md specifies the layout. A reader validates every byte before it writes anything.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.values import Values
from thinwire.errors import FrameError

BLOCK = _native.BLOCK


@dataclass(frozen=True)
class Frame:
    """One encoded message. `data` is a one-dimensional uint8 tensor on the CPU."""

    data: Tensor
    non_finite: str | None = None  # set by the encoder: the name of the tensor that was not finite
    counts: tuple[int, ...] = field(default=())  # set by the encoder: entries sent per tensor

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "Frame":
        """Return the frame in these bytes. They are validated when the frame is read."""
        buffer = bytearray(data)
        return cls(torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8))

    def tobytes(self) -> bytes:
        """Return a copy of the frame's bytes."""
        return self.data.numpy().tobytes()

    def __len__(self) -> int:
        return self.data.numel()


class FrameReader:
    """Validates a frame and reads it. `numels` are the sizes of the tensors, in the sender's order.

    With `trailing=True` bytes after the frame are ignored (padding of collectives of a fixed size). Raises FrameError
    if any byte is wrong.
    """

    def __init__(self, frame: Frame | Tensor, numels: Sequence[int], *, trailing: bool = False) -> None:
        data = frame.data if isinstance(frame, Frame) else frame
        if data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu":
            raise FrameError("a frame is a one-dimensional uint8 tensor on the CPU")
        self.data = data.contiguous()  # the reader points into these bytes
        self._reader = _native.Reader(self.data.data_ptr(), data.numel(), list(numels), trailing)

    @property
    def non_finite(self) -> bool:
        """Whether the sender's input was not finite. Such a frame is empty."""
        return self._reader.non_finite

    @property
    def length(self) -> int:
        """The frame's length in bytes, without trailing bytes."""
        return self._reader.length

    @property
    def sections(self) -> list[_native.Section]:
        """The sections, one per tensor present: id, numel, count, format, coding (of positions)."""
        return self._reader.sections

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """Add weight * values to outs[id] for every tensor in the frame; outs are contiguous float32 CPU tensors."""
        sections = self._reader.sections
        _check_outs([(section.id, outs[section.id]) for section in sections], {s.id: s.numel for s in sections})
        for section in sections:
            self._reader.add(section, outs[section.id].data_ptr(), weight)

    def entries(self, section: _native.Section) -> tuple[Tensor, Tensor]:
        """Return the positions (int64) and values (float32) of one section's entries."""
        positions = torch.empty(section.count, dtype=torch.int64)
        values = torch.empty(section.count)
        self._reader.entries(section, positions.data_ptr(), values.data_ptr())
        return positions, values


class Frames:
    """Reads frames that were received together and adds them up, each in one call.

    Use one object for many steps: it reuses the memory that it has allocated.
    """

    def __init__(self) -> None:
        self._frames = _native.Frames()
        self._messages: list[Tensor] = []
        self.lengths: list[int] = []
        self.non_finite: list[int] = []  # indices of the frames whose input was not finite

    def read(self, messages: Sequence[Tensor], numels: Sequence[Sequence[int]], *, trailing: bool = False) -> None:
        """Validate these frames. Their bytes must not change until the frames are added up.

        `numels` are the sizes of each frame's tensors, or a single list for all. Raises FrameError for any wrong byte.
        """
        for message in messages:
            if message.dtype is not torch.uint8 or not message.is_cpu:
                raise FrameError("frames are uint8 tensors on the CPU")
        self.lengths, self.non_finite = [], []  # an error must not leave the results of an earlier read
        self._messages = [message.contiguous() for message in messages]  # the readers point into these bytes
        described = [(message.data_ptr(), message.numel()) for message in self._messages]
        self._frames.read(described, numels, trailing)
        self.lengths, self.non_finite = self._frames.lengths, self._frames.non_finite

    def sum_to(
        self, outs: Sequence[Tensor], weight: float = 1.0, partitions: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Set outs to the weighted sum of all frames, added in their order; zero where no frame has an entry.

        With `partitions`, (world, first) for each out, the i-th frame holds the i-th owner's share of it (see
        encode.Partition).
        """
        self._frames.sum(_sum_args(outs, partitions), weight)


def read_frames(frames: Sequence[Frame], numels: Sequence[Sequence[int]]) -> Frames:
    """Return `Frames` that have read these frames."""
    found = Frames()
    found.read([frame.data for frame in frames], numels)
    return found


def sum_frames(readers: Sequence[FrameReader], outs: Sequence[Tensor]) -> None:
    """Set outs to the sum of frames that were received one by one, as `Frames.sum_to` does."""
    _native.sum_frames([reader._reader for reader in readers], _sum_args(outs, None), 1.0)


class Outs(list[Tensor]):
    """Tensors for sums that stay at their addresses while this object lives; they are checked once."""

    @cached_property
    def args(self) -> "list[_native.SumArgs]":
        """The tensors as the kernels take them."""
        return _sum_args(list(self), None)


def _sum_args(outs: Sequence[Tensor], partitions: Sequence[tuple[int, int]] | None) -> "list[_native.SumArgs]":
    """Return the outs as the kernels take them."""
    if partitions is None and isinstance(outs, Outs):
        return outs.args
    _check_outs(enumerate(outs))
    split = partitions if partitions is not None else [(1, 0)] * len(outs)
    return [(out.data_ptr(), out.numel(), *partition) for out, partition in zip(outs, split, strict=True)]


def _check_outs(outs: Iterable[tuple[int, Tensor]], numels: Mapping[int, int] | None = None) -> None:
    """Raise ValueError unless the kernels can add to these tensors, which have `numels` elements if those are given."""
    for i, out in outs:
        if out.dtype != torch.float32 or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"tensor {i} must be contiguous float32 on the CPU to add frames to it")
        if numels is not None and out.numel() != numels[i]:
            raise ValueError(f"tensor {i} has {out.numel()} elements, the frame has {numels[i]}")


class ShardReader:
    """Validates shards of tensors with these sizes and reads them. Raises FrameError if any byte is wrong.

    exact: whether shards of exact values, which overwrite, are expected as well.
    """

    def __init__(
        self, shards: Sequence[bytes | bytearray | memoryview], numels: Sequence[int], *, exact: bool = False
    ) -> None:
        self._numels = list(numels)
        self._reader = _native.ShardReader(shards, self._numels, exact)

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """Add weight * values to the tensors of the whole batch; exact values overwrite what is there."""
        if len(outs) != len(self._numels):
            raise ValueError(f"the shards are of {len(self._numels)} tensors, not of {len(outs)}")
        _check_outs(enumerate(outs), dict(enumerate(self._numels)))
        self._reader.add([out.data_ptr() for out in outs], weight)

    def entries(self) -> list[tuple[int, Tensor, Tensor]]:
        """Return (tensor, positions, values) of all sections."""
        found = []
        for i, (tensor, count) in enumerate(self._reader.pieces):
            positions, values = torch.empty(count, dtype=torch.int64), torch.empty(count)
            self._reader.entries(i, positions.data_ptr(), values.data_ptr())
            found.append((tensor, positions, values))
        return found


# Section ids up to this one take at most two bytes.
_MAX_ID = (1 << 14) - 1


def section_bound(n: int, count: int, values: Values, *, whole: bool = False, strata: bool = False) -> int:
    """Return the most bytes that a section of up to `count` of n entries takes. A `whole` tensor needs no positions.

    A gap takes at most 4 + log2(n / count) bits on average; native/positions.cpp explains the bound.
    """
    header = _native.section_bytes(_MAX_ID, n, _native.STRATA if strata else _native.GAPS)
    if count == 0:
        return header
    blocks = -(-count // BLOCK)
    gaps = 0.0 if whole else count * (4.0 + math.log2(n / count)) / 8.0
    return header + math.ceil(gaps) + 2 * blocks + stored_bytes(count, values)


def stored_bytes(count: int, values: Values) -> int:
    """Return the bytes of the values of `count` entries, in blocks."""
    rest = count % BLOCK
    stored = count // BLOCK * _native.block_bytes(values.code, BLOCK)
    return stored + (_native.block_bytes(values.code, rest) if rest else 0)


def window_bytes(n: int, count: int, values: Values, *, section: int = _MAX_ID) -> int:
    """Return the bytes of a section that sends a window of `count` of n entries. Without entries there is none."""
    return _native.section_bytes(section, n, _native.WINDOW) + stored_bytes(count, values) if count else 0
