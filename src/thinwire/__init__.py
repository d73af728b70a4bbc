"""thinwire: data-parallel PyTorch training over thin wires.

Public names load on first use, so that `import thinwire` imports the standard library alone.
"""

from importlib import metadata
from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names that load on first use
    from thinwire.codec.codec import Codec
    from thinwire.codec.feedback import ErrorFeedback, MomentumCorrection, NoFeedback
    from thinwire.codec.low_rank import LowRank
    from thinwire.codec.selection import Dynamic, Percentile, RandomK, Rotate, StdDev, Threshold, TopK, Warmup
    from thinwire.codec.values import BFloat16, Bits, Float16, Float32, Sign, Unary
    from thinwire.errors import FrameError, LinkError, ThinwireError
    from thinwire.hooks.attach import attach
    from thinwire.link.link import Link
    from thinwire.link.rounds import SGD, Nesterov
    from thinwire.link.state import merge_states
    from thinwire.server.server import Server
    from thinwire.server.worker import Worker
    from thinwire.tune.adaptive import Adaptive

__all__ = ["Adaptive", "BFloat16", "Bits", "Codec", "Dynamic", "ErrorFeedback", "Float16", "Float32", "FrameError"]
__all__ += [
    "SGD",
    "Link",
    "LinkError",
    "LowRank",
    "MomentumCorrection",
    "Nesterov",
    "NoFeedback",
    "Percentile",
    "RandomK",
    "Rotate",
    "Server",
]
__all__ += ["Sign", "StdDev", "ThinwireError", "Threshold", "TopK", "Unary", "Warmup", "Worker", "attach"]
__all__ += ["merge_states"]

try:
    __version__ = metadata.version("thinwire")
except metadata.PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

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
_PACKAGES = ("codec", "errors", "exchange", "integrations", "server", "tune")
_MODULES = {
    "thinwire.hooks.attach": ("attach",),
    "thinwire.link.link": ("Link",),
    "thinwire.link.rounds": ("SGD", "Nesterov"),
    "thinwire.link.state": ("merge_states",),
    "thinwire.codec.codec": ("Codec",),
    "thinwire.codec.selection": ("TopK", "Percentile", "Threshold", "StdDev", "Dynamic", "RandomK", "Rotate", "Warmup"),
    "thinwire.codec.low_rank": ("LowRank",),
    "thinwire.tune.adaptive": ("Adaptive",),
    "thinwire.codec.values": ("Float32", "Float16", "BFloat16", "Bits", "Sign", "Unary"),
    "thinwire.codec.feedback": ("NoFeedback", "ErrorFeedback", "MomentumCorrection"),
    "thinwire.server.server": ("Server",),
    "thinwire.server.worker": ("Worker",),
    "thinwire.errors": ("ThinwireError", "FrameError", "LinkError"),
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES, _RENAMED, _PACKAGES)
