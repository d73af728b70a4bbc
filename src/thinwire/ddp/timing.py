"""Timing: what compressing takes on this machine, tried out."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.frame import FrameReader


def codec_seconds(codec: Codec, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """What it takes to encode gradients, once the codec knows their size, and to read the frame."""
    fresh = codec.fresh()
    fresh.encode(gradients)
    began = time.perf_counter()
    frame = fresh.encode(gradients)
    encoded = time.perf_counter()
    outs = [torch.zeros(g.numel()) for g in gradients.values()]
    zeroed = time.perf_counter()
    FrameReader(frame, [out.numel() for out in outs]).add_to(outs)
    return encoded - began, time.perf_counter() - zeroed


def copy_seconds(elements: int) -> float:
    """What it takes to narrow so many elements to 16 bits and back."""
    part = min(elements, 1 << 20)
    x = torch.ones(part)
    began = time.perf_counter()
    x.copy_(x.to(torch.float16))
    return (time.perf_counter() - began) * elements / max(part, 1)
