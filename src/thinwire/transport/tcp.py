"""Tcp: messages by ZeroMQ over TCP, which reconnects by itself, keeps messages whole and can encrypt them.

The server's socket is a ROUTER, which knows its peers by the names that they chose; a worker's is a DEALER.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Sequence

import zmq

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer, Connection, Listener, Parts, Peer
from thinwire.transport.endpoint import Endpoint, Outbox, Sendable, sendable
from thinwire.transport.keys import Keys
from thinwire.transport.limits import acceptable, views

log = logging.getLogger("thinwire.transport")

NAME_BYTES = 16
# Messages that one poll returns at most, so that a peer that never stops cannot hold the server in it.
AT_ONCE = 256
# A server with another key, or without one if it is quicker than this side, only hangs up, as one does that is just
# restarting: it is believed the fifth time.
PERSISTENT = 5

Folder = str | os.PathLike[str]


def _frames(parts: Sequence[Buffer]) -> list[Sendable]:
    return [sendable(view) for view in views(parts)]


class TcpListener(Listener):
    """The server's side over TCP."""

    def __init__(self, endpoint: str, *, keys: Folder | None = None, shown_host: str | None = None) -> None:
        self._endpoint = Endpoint(zmq.ROUTER)
        self._outboxes: defaultdict[Peer, Outbox] = defaultdict(Outbox)
        self.discarded = 0  # messages beyond the limits, or of strangers
        self.refused = 0  # handshakes that failed
        socket = self._endpoint.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to nobody is an error instead of silence
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that comes back is known before its old connection is dead
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            if keys is not None:
                self._endpoint.guard(keys)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._endpoint.close()
            raise TransportError(f"cannot listen on {endpoint}: {error.strerror.lower()}") from None
        except TransportError:
            self._endpoint.close()
            raise
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if shown_host:
            self._address = f"tcp://{shown_host}:{self._address.rpartition(':')[2]}"

    @property
    def address(self) -> str:
        return self._address

    def poll(self, timeout: float) -> list[tuple[Peer, Parts]]:
        deadline = time.monotonic() + timeout
        while True:
            goes_on = self._endpoint.wait(deadline - time.monotonic())
            if self._endpoint.has_handshakes:
                self._count_handshakes()
            found = self._arrived() if self._endpoint.has_messages else []
            if found or not goes_on:
                return found

    def _arrived(self) -> list[tuple[Peer, Parts]]:
        found: list[tuple[Peer, Parts]] = []
        for _ in range(AT_ONCE):
            frames = self._endpoint.receive()
            if not frames:
                break
            name, parts = frames[0], frames[1:]
            if len(name) == NAME_BYTES and acceptable(map(len, parts)):
                found.append((name.bytes, [part.buffer for part in parts]))
            else:
                self._discard(len(parts), sum(map(len, parts)))
        return found

    def _discard(self, parts: int, size: int) -> None:
        self.discarded += 1
        if self.discarded & (self.discarded - 1) == 0:  # a flood must not fill the log
            log.warning("discarded a message of %d bytes in %d parts (%d so far)", size, parts, self.discarded)

    def _count_handshakes(self) -> None:
        for event, _ in self._endpoint.handshakes():
            self.refused += event != zmq.Event.HANDSHAKE_SUCCEEDED
            # The gate names unknown keys itself; the others are strangers, whose flood must not fill the log.
            strange = event in (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
            if strange and self.refused & (self.refused - 1) == 0:
                log.warning("refused a connection: no handshake, or without the right keys (%d so far)", self.refused)

    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        frames = _frames(parts)
        outbox = self._outboxes[peer]
        if not outbox.has_room(sum(map(len, frames))):
            return False
        if not self._endpoint.send([peer, *frames]):
            return False
        outbox.add(frames)
        return True

    def watch(self, descriptor: int, *, on: bool = True) -> None:
        """Let `poll` return when there is something to read from this file descriptor."""
        (self._endpoint.watch if on else self._endpoint.unwatch)(descriptor)

    @property
    def watched(self) -> bool:
        """Whether the last `poll` found something to read from there."""
        return self._endpoint.has_watched

    def forget(self, peer: Peer) -> None:
        self._outboxes.pop(peer, None)

    def wake(self) -> None:
        self._endpoint.wake()

    def close(self) -> None:
        self._outboxes.clear()
        self._endpoint.close()


class TcpConnection(Connection):
    """A worker's side over TCP."""

    def __init__(self, endpoint: str, *, keys: Keys | None = None) -> None:
        self._where = endpoint
        self._endpoint = Endpoint(zmq.DEALER)
        self._outbox = Outbox()
        self._keys = keys
        self._failures: int | None = 0  # handshakes that failed before the first success
        self._error: TransportError | None = None
        self.discarded = 0
        socket = self._endpoint.socket
        # ZeroMQ keeps names that begin with a zero for itself. Nobody can guess this one and take the worker's place.
        socket.setsockopt(zmq.ROUTING_ID, b"\1" + os.urandom(NAME_BYTES - 1))
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._endpoint.close()
            raise TransportError(f"cannot connect to {endpoint}: {error.strerror.lower()}") from None

    def poll(self, timeout: float) -> list[Parts]:
        deadline = time.monotonic() + timeout
        while True:
            goes_on = self._endpoint.wait(deadline - time.monotonic())
            self._check_handshakes()
            found = self._arrived() if self._endpoint.has_messages else []
            if found or not goes_on:
                return found

    def _check_handshakes(self) -> None:
        """Raise for a server that will never take this worker; one that is away may come back."""
        for event, value in self._endpoint.handshakes() if self._endpoint.has_handshakes else ():
            self._error = self._error or self._verdict(event, value)
        if self._error:
            raise self._error

    def _verdict(self, event: int, value: int) -> TransportError | None:
        """What a handshake's end says. ZeroMQ itself gives up after the first two kinds of failure."""
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return TransportError(f"the server at {self._where} does not know this worker's key")
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return TransportError(f"what listens at {self._where} is no server of thinwire")
            other = "without keys, and this worker has some" if self._keys else "with keys, and this worker has none"
            return TransportError(f"the server at {self._where} runs {other}; --keys must be given to both or neither")
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._failures = None
        elif self._keys and self._failures is not None:
            self._failures += 1
            if self._failures == PERSISTENT:
                return TransportError(
                    f"the server at {self._where} hangs up: its key is not the one in this worker's file of keys, "
                    "or it runs without keys"
                )
        return None

    def _arrived(self) -> list[Parts]:
        found: list[Parts] = []
        for _ in range(AT_ONCE):
            parts = self._endpoint.receive()
            if not parts:
                break
            if acceptable(map(len, parts)):
                found.append([part.buffer for part in parts])
            else:
                self.discarded += 1
        return found

    def send(self, parts: Sequence[Buffer]) -> None:
        frames = _frames(parts)
        if not self._outbox.has_room(sum(map(len, frames))) or not self._endpoint.send(frames):
            raise TransportError(f"too much is queued for the server at {self._where}, which does not read it")
        self._outbox.add(frames)

    def watch(self, descriptor: int, *, on: bool = True) -> None:
        """As a listener's."""
        (self._endpoint.watch if on else self._endpoint.unwatch)(descriptor)

    @property
    def watched(self) -> bool:
        """As a listener's."""
        return self._endpoint.has_watched

    def wake(self) -> None:
        self._endpoint.wake()

    def close(self) -> None:
        self._endpoint.close()
