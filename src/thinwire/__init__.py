"""thinwire: data-parallel PyTorch training over thin wires.

Public names load on first use, so that commands that need no torch start at once.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of the names that load on first use
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
    from thinwire.errors import FrameError as FrameError
    from thinwire.errors import LinkError as LinkError
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.errors import TransportError as TransportError
    from thinwire.exchange.base import Dense as Dense
    from thinwire.exchange.gather import Gather as Gather
    from thinwire.exchange.hierarchical import Hierarchical as Hierarchical
    from thinwire.exchange.scatter_reduce import ScatterReduce as ScatterReduce
    from thinwire.hooks.attach import attach as attach
    from thinwire.link.link import Link as Link
    from thinwire.link.state import merge_states as merge_states
    from thinwire.server.client import ServerError as ServerError
    from thinwire.server.server import Server as Server
    from thinwire.server.worker import Worker as Worker
    from thinwire.tune.adaptive import Adaptive as Adaptive
    from thinwire.tune.cost import Affine as Affine
    from thinwire.tune.cost import Measured as Measured
    from thinwire.tune.cost import Packets as Packets
    from thinwire.tune.cost import Payload as Payload

try:
    __version__ = metadata.version("thinwire")
except metadata.PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

# name: the module it lives in
_PUBLIC = {
    "Codec": "codec.codec",
    "Frame": "codec.frame",
    "FrameReader": "codec.frame",
    "Percentile": "codec.selection",
    "TopK": "codec.selection",
    "Threshold": "codec.selection",
    "StdDev": "codec.selection",
    "Dynamic": "codec.selection",
    "RandomK": "codec.selection",
    "Warmup": "codec.selection",
    "AccuracyCutoff": "codec.selection",
    "Float32": "codec.values",
    "Float16": "codec.values",
    "BFloat16": "codec.values",
    "Bits": "codec.values",
    "Sign": "codec.values",
    "NoFeedback": "codec.feedback",
    "ErrorFeedback": "codec.feedback",
    "MomentumCorrection": "codec.feedback",
    "Dense": "exchange.base",
    "Gather": "exchange.gather",
    "ScatterReduce": "exchange.scatter_reduce",
    "Hierarchical": "exchange.hierarchical",
    "Adaptive": "tune.adaptive",
    "Affine": "tune.cost",
    "Measured": "tune.cost",
    "Packets": "tune.cost",
    "Payload": "tune.cost",
    "attach": "hooks.attach",
    "Link": "link.link",
    "merge_states": "link.state",
    "Server": "server.server",
    "Worker": "server.worker",
    "FrameError": "errors",
    "LinkError": "errors",
    "ServerError": "server.client",
    "TransportError": "errors",
    "ThinwireError": "errors",
}


__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"thinwire.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
