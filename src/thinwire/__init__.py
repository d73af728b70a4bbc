"""thinwire: data-parallel PyTorch training over thin wires.

Public names load on first use, so that commands that need no torch start at once.
"""

from importlib import import_module, metadata
from typing import Any

try:
    __version__ = metadata.version("thinwire")
except metadata.PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

_PUBLIC = {
    "Bits": "codec.values",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"thinwire.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
