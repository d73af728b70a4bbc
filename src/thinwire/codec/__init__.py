"""The codec: compresses named tensors into frames with error feedback, and decodes frames.

A `Codec` combines a selection (which entries are sent), a value format and a feedback (what becomes of the rest).
"""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.codec.codec import Codec as Codec
    from thinwire.codec.feedback import ErrorFeedback as ErrorFeedback
    from thinwire.codec.feedback import MomentumCorrection as MomentumCorrection
    from thinwire.codec.feedback import NoFeedback as NoFeedback
    from thinwire.codec.frame import Frame as Frame
    from thinwire.codec.frame import FrameReader as FrameReader
    from thinwire.codec.selection import AccuracyCutoff as AccuracyCutoff
    from thinwire.codec.selection import Dynamic as Dynamic
    from thinwire.codec.selection import Percentile as Percentile
    from thinwire.codec.selection import RandomK as RandomK
    from thinwire.codec.selection import StdDev as StdDev
    from thinwire.codec.selection import Threshold as Threshold
    from thinwire.codec.selection import TopK as TopK
    from thinwire.codec.selection import Warmup as Warmup
    from thinwire.codec.values import BFloat16 as BFloat16
    from thinwire.codec.values import Bits as Bits
    from thinwire.codec.values import Float16 as Float16
    from thinwire.codec.values import Float32 as Float32
    from thinwire.codec.values import Sign as Sign

_NAMES = {
    "Codec": "thinwire.codec.codec",
    "Frame": "thinwire.codec.frame",
    "FrameReader": "thinwire.codec.frame",
    "TopK": "thinwire.codec.selection",
    "Percentile": "thinwire.codec.selection",
    "Threshold": "thinwire.codec.selection",
    "StdDev": "thinwire.codec.selection",
    "Dynamic": "thinwire.codec.selection",
    "RandomK": "thinwire.codec.selection",
    "Warmup": "thinwire.codec.selection",
    "AccuracyCutoff": "thinwire.codec.selection",
    "Float32": "thinwire.codec.values",
    "Float16": "thinwire.codec.values",
    "BFloat16": "thinwire.codec.values",
    "Bits": "thinwire.codec.values",
    "Sign": "thinwire.codec.values",
    "NoFeedback": "thinwire.codec.feedback",
    "ErrorFeedback": "thinwire.codec.feedback",
    "MomentumCorrection": "thinwire.codec.feedback",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
