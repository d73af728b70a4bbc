"""The parameter server: a server owns the model, and workers push gradients to it and pull parameters from it.

`Server` runs in one process, a `Worker` in each process that computes gradients. Both directions are compressed by a
codec. Workers may join and leave at any time.
"""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.errors import ServerError
    from thinwire.server.server import Server
    from thinwire.server.worker import Worker

__all__ = ["Server", "ServerError", "Worker"]

_MODULES = {
    "thinwire.server.server": ("Server",),
    "thinwire.server.worker": ("Worker",),
    "thinwire.errors": ("ServerError",),
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
