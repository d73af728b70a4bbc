"""thinwire: data-parallel PyTorch training over thin wires.

Public names load on first use, so that `import thinwire` imports the standard library alone.
"""

from importlib import metadata
from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names that load on first use
    from thinwire.codec.codec import Codec as Codec
    from thinwire.codec.feedback import ErrorFeedback as ErrorFeedback
    from thinwire.codec.feedback import MomentumCorrection as MomentumCorrection
    from thinwire.codec.feedback import NoFeedback as NoFeedback
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
    from thinwire.errors import FrameError as FrameError
    from thinwire.errors import LinkError as LinkError
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.hooks.attach import attach as attach
    from thinwire.link.link import Link as Link
    from thinwire.link.state import merge_states as merge_states
    from thinwire.server.server import Server as Server
    from thinwire.server.worker import Worker as Worker
    from thinwire.tune.adaptive import Adaptive as Adaptive

try:
    __version__ = metadata.version("thinwire")
except metadata.PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

_NAMES = {
    "attach": "thinwire.hooks.attach",
    "Link": "thinwire.link.link",
    "merge_states": "thinwire.link.state",
    "Codec": "thinwire.codec.codec",
    "TopK": "thinwire.codec.selection",
    "Percentile": "thinwire.codec.selection",
    "Threshold": "thinwire.codec.selection",
    "StdDev": "thinwire.codec.selection",
    "Dynamic": "thinwire.codec.selection",
    "RandomK": "thinwire.codec.selection",
    "Warmup": "thinwire.codec.selection",
    "Adaptive": "thinwire.tune.adaptive",
    "Float32": "thinwire.codec.values",
    "Float16": "thinwire.codec.values",
    "BFloat16": "thinwire.codec.values",
    "Bits": "thinwire.codec.values",
    "Sign": "thinwire.codec.values",
    "NoFeedback": "thinwire.codec.feedback",
    "ErrorFeedback": "thinwire.codec.feedback",
    "MomentumCorrection": "thinwire.codec.feedback",
    "Server": "thinwire.server.server",
    "Worker": "thinwire.server.worker",
    "ThinwireError": "thinwire.errors",
    "FrameError": "thinwire.errors",
    "LinkError": "thinwire.errors",
}
# Public names of 0.1, and where they are now.
_RENAMED = {
    "Drop": "thinwire.NoFeedback",
    "Residual": "thinwire.ErrorFeedback",
    "MomentumResidual": "thinwire.MomentumCorrection",
    "Frame": "thinwire.codec.Frame",
    "FrameReader": "thinwire.codec.FrameReader",
    "AccuracyCutoff": "thinwire.codec.AccuracyCutoff",
    "Dense": "thinwire.exchange.Dense",
    "Gather": "thinwire.exchange.Gather",
    "ScatterReduce": "thinwire.exchange.ScatterReduce",
    "Hierarchical": "thinwire.exchange.Hierarchical",
    "Affine": "thinwire.tune.Affine",
    "Measured": "thinwire.tune.Measured",
    "Packets": "thinwire.tune.Packets",
    "Payload": "thinwire.tune.Payload",
    "ServerError": "thinwire.server.ServerError",
    "TransportError": "thinwire.errors.TransportError",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(
    __name__, _NAMES, _RENAMED, packages=("codec", "errors", "exchange", "server", "tune")
)
