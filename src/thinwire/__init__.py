"""thinwire: data-parallel PyTorch training over thin wires.

Public names load on first use, so that commands that need no torch start at once.
"""

from importlib import import_module, metadata
from typing import Any

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
    "Warmup": "codec.density",
    "AccuracyCutoff": "codec.density",
    "Float32": "codec.values",
    "Float16": "codec.values",
    "BFloat16": "codec.values",
    "Bits": "codec.values",
    "Sign": "codec.values",
    "Drop": "codec.memory",
    "Residual": "codec.memory",
    "MomentumResidual": "codec.memory",
    "FrameError": "errors",
    "ThinwireError": "errors",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"thinwire.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
