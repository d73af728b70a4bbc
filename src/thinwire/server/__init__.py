"""The parameter server: a server owns the model, and workers push gradients to it and pull parameters from it.

`Server` runs in one process, a `Worker` in each process that computes gradients. Both directions are compressed by a
codec. Workers may join and leave at any time.
"""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.errors import ServerError as ServerError
    from thinwire.server.server import Server as Server
    from thinwire.server.worker import Worker as Worker

_NAMES = {
    "Server": "thinwire.server.server",
    "Worker": "thinwire.server.worker",
    "ServerError": "thinwire.errors",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
