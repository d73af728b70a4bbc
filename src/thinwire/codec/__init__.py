"""The codec: named tensors become a frame of bytes, and frames become tensors again."""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names that load on first use
    from thinwire.codec.codec import Codec
    from thinwire.codec.feedback import ErrorFeedback, MomentumCorrection, NoFeedback
    from thinwire.codec.frame import Frame, FrameReader
    from thinwire.codec.low_rank import LowRank
    from thinwire.codec.selection import (
        AccuracyCutoff,
        Dynamic,
        Percentile,
        RandomK,
        Rotate,
        StdDev,
        Threshold,
        TopK,
        Warmup,
    )
    from thinwire.codec.values import BFloat16, Bits, Float16, Float32, Sign, Unary

__all__ = ["AccuracyCutoff", "BFloat16", "Bits", "Codec", "Dynamic", "ErrorFeedback", "Float16", "Float32", "Frame"]
__all__ += [
    "FrameReader",
    "LowRank",
    "MomentumCorrection",
    "NoFeedback",
    "Percentile",
    "RandomK",
    "Rotate",
    "Sign",
    "StdDev",
]
__all__ += ["Threshold", "TopK", "Unary", "Warmup"]

_MODULES = {
    "thinwire.codec.codec": ("Codec",),
    "thinwire.codec.frame": ("Frame", "FrameReader"),
    "thinwire.codec.selection": (
        "TopK",
        "Percentile",
        "Threshold",
        "StdDev",
        "Dynamic",
        "RandomK",
        "Rotate",
        "Warmup",
        "AccuracyCutoff",
    ),
    "thinwire.codec.low_rank": ("LowRank",),
    "thinwire.codec.values": ("Float32", "Float16", "BFloat16", "Bits", "Sign", "Unary"),
    "thinwire.codec.feedback": ("NoFeedback", "ErrorFeedback", "MomentumCorrection"),
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
