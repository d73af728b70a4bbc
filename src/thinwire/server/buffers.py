"""Buffers: what a model has besides trained parameters: running statistics, and parameters that are frozen.

Buffers travel: a worker that joins takes the server's, and now and then the server takes those of one worker, so that
the server's model can be evaluated. Frozen parameters do not: both sides must have loaded the same ones.
"""

import hashlib

import torch
from torch import Tensor, nn

from thinwire.server.layers import Shapes
from thinwire.server.messages import MessageError
from thinwire.transport.base import LARGEST, Buffer


class Buffers:
    """The buffers of a model that a checkpoint of it would hold."""

    def __init__(self, model: nn.Module) -> None:
        kept = set(model.state_dict(keep_vars=True))
        self._tensors = {name: b for name, b in model.named_buffers() if name in kept and b.numel()}
        if self.size > LARGEST - 1024:
            raise ValueError(f"the model's buffers take {self.size} bytes, more than fits in a message")

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @property
    def shapes(self) -> Shapes:
        return [(name, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    @property
    def size(self) -> int:
        """Bytes that they take in a message."""
        return sum(tensor.numel() * _travels_as(tensor).itemsize for tensor in self._tensors.values())

    def body(self) -> bytes:
        """All of them, one after the other: float32 or int64."""
        rows = (t.detach().to("cpu", _travels_as(t)).contiguous() for t in self._tensors.values())
        return b"".join(row.numpy().tobytes() for row in rows)

    def take(self, body: Buffer) -> None:
        """Write what came; MessageError if it is not of this model or not finite, and then nothing is written."""
        if len(body) != self.size:
            raise MessageError(f"the model's buffers take {self.size} bytes, not {len(body)}")
        found, data, at = [], bytearray(body), 0
        for tensor in self._tensors.values():
            kind = _travels_as(tensor)
            row = torch.frombuffer(data, dtype=kind, count=tensor.numel(), offset=at)
            at += tensor.numel() * kind.itemsize
            if not row.isfinite().all():
                raise MessageError("the model's buffers are not finite")
            found.append(row)
        for tensor, row in zip(self._tensors.values(), found, strict=True):
            tensor.detach().copy_(row.view(tensor.shape))


def _travels_as(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else torch.int64


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Of every frozen parameter: its type and a digest of its values."""
    return {name: _digest(p) for name, p in model.named_parameters() if not p.requires_grad}


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {hashlib.sha256(raw).hexdigest()[:32]}"


def frozen_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first frozen parameter whose values differ, in words; values of different types are not compared."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in ours or name not in theirs:
            return f"{name} is frozen on one side only"
        mine, other = ours[name].split(" "), theirs[name].split(" ")
        if mine[0] == other[0] and mine != other:
            return f"the frozen parameter {name} has other values: load the same weights on both sides"
    return None
