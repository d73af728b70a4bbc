"""Frame: self-describing bytes for many tensors, validated from first to last before anything is believed.

The layout is documented in docs/wire-format.md; bytes are made by the native writer and read by the native reader.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    non_finite: str | None = None  # encoder only: the name of the tensor that was not finite
    counts: tuple[int, ...] = field(default=())  # encoder only: entries sent per tensor

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "Frame":
        """A frame as it came from a file or a socket; it is checked when it is read."""
        buffer = bytearray(data)
        return cls(torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8))

    def tobytes(self) -> bytes:
        return self.data.numpy().tobytes()

    def __len__(self) -> int:
        return self.data.numel()


class FrameReader:
    """A validated frame. `numels` are the sizes of the tensors that the receiver expects, in the sender's order.

    With `trailing=True` bytes after the frame are ignored (padding of collectives of a fixed size).
    Raises FrameError and changes nothing if any byte is wrong.
    """

    def __init__(self, frame: Frame | Tensor, numels: Sequence[int], *, trailing: bool = False) -> None:
        data = frame.data if isinstance(frame, Frame) else frame
        if data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu":
            raise FrameError("a frame is a one-dimensional uint8 tensor on the CPU")
        self._data = data.contiguous()  # the reader points into these bytes
        self._reader = _native.Reader(self._data.data_ptr(), data.numel(), list(numels), trailing)

    @property
    def non_finite(self) -> bool:
        """Whether the sender's input was not finite; then the frame is empty."""
        return self._reader.non_finite

    @property
    def length(self) -> int:
        return self._reader.length

    @property
    def sections(self) -> list[_native.Section]:
        """What is inside, per tensor present: id, numel, count, format, strata."""
        return self._reader.sections

    def add_to(self, outs: Sequence[Tensor], weight: float = 1.0) -> None:
        """outs[id] += weight * values, for every tensor in the frame; outs are contiguous float32 CPU tensors."""
        sections = self._reader.sections
        for section in sections:
            out = outs[section.id]
            if out.dtype != torch.float32 or not out.is_contiguous() or out.device.type != "cpu":
                raise ValueError(f"tensor {section.id} must be contiguous float32 on the CPU to add a frame to it")
            if out.numel() != section.numel:
                raise ValueError(f"tensor {section.id} has {out.numel()} elements, the frame {section.numel}")
        for section in sections:
            self._reader.add(section, outs[section.id].data_ptr(), weight)

    def entries(self, section: _native.Section) -> tuple[Tensor, Tensor]:
        """Positions (int64) and values (float32) of one tensor's entries."""
        positions = torch.empty(section.count, dtype=torch.int64)
        values = torch.empty(section.count)
        self._reader.entries(section, positions.data_ptr(), values.data_ptr())
        return positions, values


class Frames:
    """Validated frames that were received together, to be added up: one call for all of them.

    One object may read again and again; it keeps its memory, which is quicker than to ask for new.
    """

    def __init__(self) -> None:
        self._frames = _native.Frames()
        self._messages: list[Tensor] = []
        self.lengths: list[int] = []
        self.non_finite: list[int] = []  # which frames say that their input was not finite

    def read(self, messages: Sequence[Tensor], numels: Sequence[Sequence[int]], *, trailing: bool = False) -> None:
        """Read these frames, whose bytes must stay as they are until they are added up.

        `numels` are the sizes of every frame's tensors, or a single list for all. FrameError if any byte is wrong.
        """
        if any(message.dtype != torch.uint8 or message.device.type != "cpu" for message in messages):
            raise FrameError("frames are uint8 tensors on the CPU")
        self.lengths, self.non_finite = [], []  # nothing of what was read before survives a fault
        self._messages = [message.contiguous() for message in messages]  # the readers point into these bytes
        described = [(message.data_ptr(), message.numel()) for message in self._messages]
        self._frames.read(described, numels, trailing)
        self.lengths, self.non_finite = self._frames.lengths, self._frames.non_finite

    def sum_to(
        self, outs: Sequence[Tensor], weight: float = 1.0, deals: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """outs = the weighted sum of all frames, added in their order, in one pass over the outs; zero elsewhere.

        With `deals`, (world, first) for each out, the i-th frame holds the i-th owner's share of it (see parts.py).
        """
        self._frames.sum(_results(outs, deals), weight)


def frames_of(frames: Sequence[Frame], numels: Sequence[Sequence[int]]) -> Frames:
    """Frames of one's own, read."""
    found = Frames()
    found.read([frame.data for frame in frames], numels)
    return found


def sum_frames(readers: Sequence[FrameReader], outs: Sequence[Tensor]) -> None:
    """The same for frames that were received one by one."""
    _native.sum_frames([reader._reader for reader in readers], _results(outs, None), 1.0)


def _results(outs: Sequence[Tensor], deals: Sequence[tuple[int, int]] | None) -> list[tuple[int, int, int, int]]:
    for i, out in enumerate(outs):
        if out.dtype != torch.float32 or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"tensor {i} must be contiguous float32 on the CPU to add frames to it")
    dealt = deals if deals is not None else [(1, 0)] * len(outs)
    return [(out.data_ptr(), out.numel(), *deal) for out, deal in zip(outs, dealt, strict=True)]


# Ids of sections take two bytes up to this one.
_MOST_ID = (1 << 14) - 1


def section_bound(n: int, count: int, values: Values, *, whole: bool = False, strata: bool = False) -> int:
    """Bytes that up to `count` entries of n elements take at the most; `whole`: all n, so no positions.

    A gap costs at most 4 + log2(n / count) bits on average: see positions.cpp for why the quotients are bounded.
    """
    header = _native.section_bytes(_MOST_ID, n, strata)
    if count == 0:
        return header
    blocks = -(-count // BLOCK)
    gaps = 0.0 if whole else count * (4.0 + math.log2(n / count)) / 8.0
    stored = count // BLOCK * _native.block_bytes(values.code, BLOCK)
    rest = count % BLOCK
    stored += _native.block_bytes(values.code, rest) if rest else 0
    return header + math.ceil(gaps) + 2 * blocks + stored
