"""Buckets: gradients on their way from DDP to an exchange and back.

DDP's buffer is worked on in place where it is float32 on the CPU; otherwise a copy is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.steady import Placed
from thinwire.codec.vectors import plain


@dataclass(frozen=True)
class Job:
    """One bucket on its way: its gradients are views of the buffer, which receives the mean."""

    buffer: Tensor
    gradients: dict[str, Tensor]
    last: bool
    begins_step: bool
    factors: dict[str, float] = field(default_factory=dict)  # by which memories are rescaled before the step
    ready: Callable[[], None] = lambda: None


class Opened:
    """A bucket's flat float32 views on the CPU, which receive the mean; its own memory where that is possible."""

    def __init__(self, job: Job) -> None:
        self._buffer = job.buffer
        self._direct = job.buffer.device.type == "cpu" and job.buffer.dtype == torch.float32
        self.outs = job.gradients
        if not self._direct:
            self._flat = torch.empty(job.buffer.numel())
            sizes = [g.numel() for g in job.gradients.values()]
            self.outs = dict(zip(job.gradients, torch.split(self._flat, sizes), strict=True))

    def close(self) -> bool:
        """Hand the mean to DDP; whether it outgrew the bucket's type, on which all ranks agree, bits being the same."""
        if self._direct:
            return False
        self._buffer.copy_(self._flat)
        if self._buffer.is_cuda:
            torch.cuda.current_stream(self._buffer.device).synchronize()
        return self._buffer.dtype == torch.float16 and not bool(self._buffer.isfinite().all())


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All of them together; one alone stays the object that it is."""
    return parts[0] if len(parts) == 1 else {name: t for part in parts for name, t in part.items()}


def without_gradient(gradients: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of those gradients that hold nothing at all."""
    arrays = gradients.plain if isinstance(gradients, Placed) else None
    if arrays is None and all(g.device.type == "cpu" and g.is_contiguous() for g in gradients.values()):
        arrays = [plain(g) for g in gradients.values()]
    if arrays is None:
        return frozenset(name for name, g in gradients.items() if not g.any())
    empty = _native.all_zero(arrays)
    return frozenset(list(gradients)[i] for i in empty) if empty else _NOBODY


_NOBODY: frozenset[str] = frozenset()
