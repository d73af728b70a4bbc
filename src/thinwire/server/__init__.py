"""The parameter server: a server that owns the model, and workers that push gradients and pull layers."""

from typing import TYPE_CHECKING

from thinwire._lazy import lazy_names

if TYPE_CHECKING:
    from thinwire.server.client import ServerError as ServerError
    from thinwire.server.server import Server as Server
    from thinwire.server.worker import Worker as Worker

_NAMES = {
    "Server": "thinwire.server.server",
    "Worker": "thinwire.server.worker",
    "ServerError": "thinwire.server.client",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
