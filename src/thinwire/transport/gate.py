"""Gate: lets the workers in whose keys are in the server's folder, and nobody else.

The folder is read at every handshake, so that keys can be added and taken away while the server runs.
"""

import logging
import os

import zmq
from zmq.auth.thread import ThreadAuthenticator

from thinwire.errors import TransportError
from thinwire.transport.keys import allowed, server_keys

log = logging.getLogger("thinwire.transport")

DOMAIN = "thinwire"


class Gate:
    """ZeroMQ's authenticator for one context; it answers in a thread of its own."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: str | os.PathLike[str]) -> None:
        self.keys = server_keys(folder)
        allowed(folder)  # a broken file is an error now rather than in the log later
        self._folder = folder
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Encrypt what goes through a socket, and ask this gate about everybody who wants in."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it ZeroMQ lets everybody in while nobody is asked

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key may come in; called by the authenticator."""
        try:
            name = allowed(self._folder).get(key)
        except TransportError as error:
            log.error("refused a worker: %s", error)
            return False
        if name is None:
            log.warning("refused a worker: its public key %s is not in %s", key.decode(), self._folder)
        else:
            log.info("let in worker %s", name)
        return name is not None

    def close(self) -> None:
        """Stop answering. After the sockets that it guards are closed."""
        self._authenticator.stop()
