"""Cutting: how large the parts are in which a model travels, so that urgent ones need not wait for long."""

import torch

from thinwire.codec.codec import Codec
from thinwire.server.layers import MOST_ELEMENTS

# Bytes that a part should take at the most on the wire.
PART_BYTES = 1 << 18
# Each element's update depends on that element alone: a parameter may be updated in parts.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")


def cut_for(optimizer: torch.optim.Optimizer, codec: Codec | None, wanted: int | None = None) -> int:
    """Elements of a part: as wanted, or so that it takes about PART_BYTES; 0: this optimizer must not be cut."""
    if not _cuts(optimizer):
        return 0
    if wanted is not None:
        return wanted
    if codec is None:
        return PART_BYTES // 4
    n = 1 << 20
    bytes_each = codec.frame_bound([n], codec.expected_counts([n])) / n
    return min(MOST_ELEMENTS // 4, max(1 << 15, int(PART_BYTES / bytes_each)))


def _cuts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters may be cut for this optimizer, or must be updated whole."""
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _ELEMENTWISE
    return known and not optimizer.state  # a state is of whole parameters
