"""The tcp transport: messages by ZeroMQ over TCP, which reconnects by itself and can encrypt.

The server's socket is a ROUTER, which addresses each peer by the name that the peer chose; a worker's is a DEALER.
"""

import contextlib
import errno
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from thinwire.errors import TransportError
from thinwire.limits import LogLimit
from thinwire.transport.base import (
    AT_ONCE,
    LARGEST,
    MOST_PARTS,
    Buffer,
    Connection,
    Listener,
    Parts,
    Peer,
    Side,
    T,
    acceptable,
    views,
)
from thinwire.transport.keys import Keys, allowed_keys, server_keys

log = logging.getLogger("thinwire.transport")

Folder = str | os.PathLike[str]
# The large parts that are queued for one peer until ZeroMQ has sent them, and their bytes. ZeroMQ copies small parts,
# which its own limit bounds.
Pending = deque[tuple[zmq.MessageTracker, int]]

DOMAIN = "thinwire"
# Smaller parts are copied, which is cheaper than to track when ZeroMQ has sent them.
COPIED = 1 << 14
# Messages that ZeroMQ queues for one peer: to send, and to read (beyond these TCP makes the sender wait).
TO_SEND, TO_READ = 1000, 8
LINGER_MS = 1000
HANDSHAKES = zmq.Event.HANDSHAKE_SUCCEEDED | (
    zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
NAME_BYTES = 16
# A server with another key closes the connection without a reason, as does one that is just restarting. After so many
# failed handshakes the worker takes the key for wrong. A server without keys may also close before it says so.
PERSISTENT = 5


class KeyAuthenticator:
    """Encrypts the traffic of a socket and accepts workers whose public keys are in a folder.

    ZeroMQ asks it from a thread of its own. Close the socket before its authenticator.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", folder: Folder) -> None:
        keys = server_keys(folder)
        allowed_keys(folder)  # raise for a broken file now; later it would only be logged
        self._folder = folder
        self._refusals = LogLimit(log, logging.WARNING)
        self._accepts = LogLimit(log, logging.INFO)
        thread = ThreadAuthenticator(context)
        thread.start()
        thread.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self.close = thread.stop
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # otherwise ZeroMQ accepts all peers if no authenticator answers

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the worker with this public key may connect; called by ZeroMQ's authenticator."""
        now = time.monotonic()
        try:
            name = allowed_keys(self._folder).get(key)
        except TransportError as error:
            self._refusals.say(now, "Refused a worker, because its key could not be checked: %s", error)
            return False
        if name is None:
            text = "Refused a worker: its public key %s is not in %s"
            self._refusals.say(now, text, key.decode(errors="replace"), self._folder)
        else:
            self._accepts.say(now, "Accepted worker %s", name)
        return name is not None


class _ZmqSide(Side[T]):
    """What the two sides share: a ZeroMQ socket, a monitor of its handshakes, and how it is polled for messages."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.RCVHWM, 0)  # for the monitor: ZeroMQ blocks while the monitor's queue is full
        self._socket = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, TO_SEND),
            (zmq.RCVHWM, TO_READ),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.LINGER, LINGER_MS),
            # TCP's keepalive finds a dead host. ZMTP's heartbeat would time out behind a large message on a slow link.
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 4),
            (zmq.TCP_MAXRT, 60_000),
            (zmq.CONNECT_TIMEOUT, 5_000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2_000),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(int(HANDSHAKES))
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._lock = threading.Lock()  # between `wake` and `close`
        self._authenticator: KeyAuthenticator | None = None
        self._watched: set[int] = set()
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._woken):
            self._poller.register(source, zmq.POLLIN)
        self.watched = False  # whether the last `poll` found something to read from a watched descriptor
        self._warnings = LogLimit(log, logging.WARNING)
        self.discarded = 0  # messages beyond the limits, or from peers with malformed names

    def watch(self, descriptor: int, *, on: bool = True) -> None:
        """Let `poll` also return when this file descriptor can be read; call with `on=False` before closing it."""
        if on:
            self._watched.add(descriptor)
            self._poller.register(descriptor, zmq.POLLIN)
        elif descriptor in self._watched:
            self._watched.remove(descriptor)
            self._poller.unregister(descriptor)

    def poll(self, timeout: float) -> list[T]:
        deadline = time.monotonic() + timeout
        while True:
            seconds = min(max(0.0, deadline - time.monotonic()), 1e3)
            happened = [source for source, _ in self._poller.poll(math.ceil(seconds * 1000))]
            self.watched = not self._watched.isdisjoint(happened)
            woken = self._woken.fileno() in happened
            if woken:
                with contextlib.suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
            self._check_handshakes(self._handshakes() if self._monitor in happened else ())
            found = self._receive() if self._socket in happened else []
            if found or woken or self.watched or not happened:
                return found

    def _handshakes(self) -> Iterator[tuple[int, int]]:
        """Yield the handshakes that finished since the last call: (event, value of the event)."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            yield int(message["event"]), int(message["value"])

    def _check_handshakes(self, handshakes: Iterable[tuple[int, int]]) -> None:
        raise NotImplementedError

    def _receive(self) -> list[T]:
        """Return the messages that have arrived; discard and count those that are not acceptable."""
        found: list[T] = []
        for _ in range(AT_ONCE):
            frames = self._receive_frames()
            if not frames:
                break
            message = self._accept(frames)
            if message is not None:
                found.append(message)
                continue
            self.discarded += 1
            self._warnings.say(time.monotonic(), "Discarded a message of %d bytes", sum(map(len, frames)))
        return found

    def _receive_frames(self) -> list[zmq.Frame]:
        """Return the parts of the next message, on a ROUTER after the peer's name; an empty list if there is none."""
        try:
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return []
        frames = [frame]
        while frame.more:
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)  # all parts of a message arrive together
            if len(frames) < MOST_PARTS + 2:  # enough to see that there are too many
                frames.append(frame)
        return frames

    def _accept(self, frames: list[zmq.Frame]) -> T | None:
        """Return the message in these frames, or None to discard it."""
        raise NotImplementedError

    def _queue(self, pending: Pending, parts: Sequence[Buffer], *peer: Peer) -> bool:
        """Queue one message; return False if its peer is unknown or the peer's queue is full.

        An empty queue takes any message, otherwise it takes up to LARGEST bytes.
        """
        parts = views(parts)
        while pending and pending[0][0].done:
            pending.popleft()
        if pending and sum(size for _, size in pending) + sum(map(len, parts)) > LARGEST:
            return False
        frames = [
            part if len(part) < COPIED else zmq.Frame(part, track=True, copy=False, copy_threshold=COPIED)
            for part in parts
        ]
        try:
            # Only the first part can fail: ZeroMQ accepts the rest of a message whose first part it accepted.
            self._socket.send_multipart([*peer, *frames], zmq.DONTWAIT, copy=False)  # which copies small parts
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        large = [frame for frame in frames if isinstance(frame, zmq.Frame) and not frame.tracker.done]
        pending += [(frame.tracker, len(frame)) for frame in large]
        return True

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader as well
            if self._waker.fileno() >= 0:
                self._waker.send(b"\0")

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        with self._lock:
            self._woken.close()
            self._waker.close()
        self._context.term()


class TcpListener(_ZmqSide[tuple[Peer, Parts]], Listener):
    """The server's side over TCP."""

    def __init__(self, endpoint: str, *, keys: Folder | None = None, shown_host: str | None = None) -> None:
        super().__init__(zmq.ROUTER)
        self._pending: dict[Peer, Pending] = {}  # of peers for which large parts are queued
        self.refused = 0  # handshakes that failed
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # report a message to an unknown peer instead of dropping it
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # accept a worker that reconnects before its old connection is dead
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            if keys is not None:
                self._authenticator = KeyAuthenticator(self._context, socket, keys)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot listen on {endpoint}: {error.strerror.lower()}") from None
        except TransportError:
            self.close()
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if shown_host:
            self.address = f"tcp://{shown_host}:{self.address.rpartition(':')[2]}"

    def _accept(self, frames: list[zmq.Frame]) -> tuple[Peer, Parts] | None:
        name, parts = frames[0], frames[1:]
        if len(name) != NAME_BYTES or not acceptable(map(len, parts)):
            return None
        return name.bytes, [part.buffer for part in parts]

    def _check_handshakes(self, handshakes: Iterable[tuple[int, int]]) -> None:
        """Count failed handshakes. The authenticator logs unknown keys itself, the others are logged here."""
        for event, _ in handshakes:
            self.refused += event != zmq.Event.HANDSHAKE_SUCCEEDED
            if event in (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL):
                text = "Refused a connection without a valid handshake or without the right keys"
                self._warnings.say(time.monotonic(), text)

    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        pending = self._pending.get(peer, deque())
        queued = self._queue(pending, parts, peer)
        if pending:
            self._pending[peer] = pending
        else:
            self._pending.pop(peer, None)
        return queued

    def forget(self, peer: Peer) -> None:
        self._pending.pop(peer, None)


class TcpConnection(_ZmqSide[Parts], Connection):
    """A worker's side over TCP."""

    def __init__(self, endpoint: str, *, keys: Keys | None = None) -> None:
        super().__init__(zmq.DEALER)
        self._where = endpoint
        self._pending: Pending = deque()
        self._keys = keys
        self._failures: int | None = 0  # handshakes that failed before the first success, then None
        self._error: TransportError | None = None
        socket = self._socket
        # ZeroMQ reserves names that begin with a zero byte. The name is random, so that no other peer can guess it.
        socket.setsockopt(zmq.ROUTING_ID, b"\1" + os.urandom(NAME_BYTES - 1))
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot connect to {endpoint}: {error.strerror.lower()}") from None

    def _accept(self, frames: list[zmq.Frame]) -> Parts | None:
        return [part.buffer for part in frames] if acceptable(map(len, frames)) else None

    def _check_handshakes(self, handshakes: Iterable[tuple[int, int]]) -> None:
        """Raise TransportError if the server will never accept this worker; an absent server may come back."""
        for event, value in handshakes:
            self._error = self._error or self._handshake_error(event, value)
        if self._error:
            raise self._error

    def _handshake_error(self, event: int, value: int) -> TransportError | None:
        """Return the error that a handshake shows, if any. ZeroMQ stops trying after the first two kinds of failure."""
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return TransportError(f"the server at {self._where} does not know this worker's key")
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return TransportError(f"the program that listens at {self._where} is not a thinwire server")
            other = "without keys, and this worker has some" if self._keys else "with keys, and this worker has none"
            return TransportError(f"the server at {self._where} runs {other}; --keys must be given to both or neither")
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._failures = None
        elif self._keys and self._failures is not None:
            self._failures += 1
            if self._failures == PERSISTENT:
                return TransportError(
                    f"the server at {self._where} closes every connection: its key is not the one in this worker's "
                    "file of keys, or it runs without keys"
                )
        return None

    def send(self, parts: Sequence[Buffer]) -> None:
        if not self._queue(self._pending, parts):
            raise TransportError(f"too much is queued for the server at {self._where}, which does not read it")
