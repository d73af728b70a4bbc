"""Tcp: messages by ZeroMQ over TCP, which reconnects by itself, keeps messages whole and can encrypt them.

The server's socket is a ROUTER, which knows its peers by the names that they chose; a worker's is a DEALER.
"""

import contextlib
import errno
import logging
import math
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from thinwire.errors import TransportError
from thinwire.transport.base import LARGEST, Buffer, Connection, Listener, Parts, Peer
from thinwire.transport.keys import Keys, allowed, server_keys
from thinwire.transport.limits import MOST_PARTS, acceptable, views

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


# Smaller parts are copied, which is cheaper than to keep track of them.
COPIED = 1 << 14
# Messages that ZeroMQ holds for one peer: those to send, and those to read (beyond them TCP makes the sender wait).
TO_SEND, TO_READ = 1000, 8
LINGER_MS = 1000
HANDSHAKES = zmq.Event.HANDSHAKE_SUCCEEDED | (
    zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


# A small part as it is, or a large one that ZeroMQ reads where it lies.
Sendable = Buffer | zmq.Frame


def sendable(part: Buffer) -> Sendable:
    """A part in the form that is cheapest to send."""
    return part if len(part) < COPIED else zmq.Frame(part, track=True, copy=False, copy_threshold=COPIED)


class Outbox:
    """Bytes on their way to one peer, counted until ZeroMQ lets go of them."""

    def __init__(self) -> None:
        self._parts: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether a message may be queued: always behind an empty queue, else while the peer is not far behind."""
        while self._parts and self._parts[0][0].done:
            self._bytes -= self._parts.popleft()[1]
        return not self._parts or self._bytes + size <= LARGEST

    def add(self, frames: Sequence[Sendable]) -> None:
        """Count parts that are on their way now; small ones were copied and ZeroMQ's own limit holds for them."""
        for frame in frames:
            if isinstance(frame, zmq.Frame) and not frame.tracker.done:
                self._parts.append((frame.tracker, len(frame)))
                self._bytes += len(frame)


_MORE = zmq.DONTWAIT | zmq.SNDMORE


class Endpoint:
    """A socket for messages in several parts, neither of which is copied on the way in or out."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.RCVHWM, 0)  # of the monitor: ZeroMQ stands still while one is full
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, TO_SEND)
        self.socket.setsockopt(zmq.RCVHWM, TO_READ)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        # A dead host is found by TCP. ZMTP's own heartbeat would take a large message on a thin wire for silence.
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 4),
            (zmq.TCP_MAXRT, 60_000),
            (zmq.CONNECT_TIMEOUT, 5_000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2_000),
        ):
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(int(HANDSHAKES))
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._lock = threading.Lock()  # between `wake` and `close`
        self._gate: Gate | None = None
        self._watched: set[int] = set()
        # What the last `wait` found: messages, ends of handshakes, something to read from what is watched.
        self.has_messages = self.has_handshakes = self.has_watched = False
        self._poller = zmq.Poller()
        for source in (self.socket, self._monitor, self._woken):
            self._poller.register(source, zmq.POLLIN)

    def guard(self, folder: str | os.PathLike[str]) -> None:
        """Encrypt, and let in only workers whose keys are in a folder. Before the socket is bound."""
        self._gate = Gate(self._context, folder)
        self._gate.guard(self.socket)

    def watch(self, descriptor: int) -> None:
        """End a `wait`, from now on, also when there is something to read from this file descriptor."""
        self._watched.add(descriptor)
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Before it is closed."""
        if descriptor in self._watched:
            self._watched.remove(descriptor)
            self._poller.unregister(descriptor)

    def send(self, frames: Sequence[Sendable]) -> bool:
        """Queue one message; False if its peer is unknown or its queue is full."""
        try:
            # Only the first part can fail: ZeroMQ takes the rest of a message whose beginning it took.
            for frame in frames[:-1]:
                self.socket.send(frame, _MORE, copy=not isinstance(frame, zmq.Frame))
            self.socket.send(frames[-1], zmq.DONTWAIT, copy=not isinstance(frames[-1], zmq.Frame))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self) -> list[zmq.Frame]:
        """The next message's parts, with its sender's name if there is one; none if no message is here."""
        try:
            frame = self.socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return []
        frames = [frame]
        while frame.more:
            frame = self.socket.recv(zmq.DONTWAIT, copy=False)  # all parts of a message arrive at once
            if len(frames) < MOST_PARTS + 2:  # enough to see that there are too many
                frames.append(frame)
        return frames

    def wait(self, seconds: float) -> bool:
        """Wait for something to happen; False if it is over, at a `wake`, or if what is watched is ready."""
        milliseconds = min(max(0, math.ceil(min(seconds, 1e6) * 1000)), 1_000_000)
        happened = [source for source, _ in self._poller.poll(milliseconds)]
        self.has_messages, self.has_handshakes = self.socket in happened, self._monitor in happened
        self.has_watched = not self._watched.isdisjoint(happened)
        woken = self._woken.fileno() in happened
        if woken:
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
        return bool(happened) and not woken and not self.has_watched

    def handshakes(self) -> Iterator[tuple[int, int]]:
        """Handshakes that ended since the last call: (event, its value)."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            yield int(message["event"]), int(message["value"])

    def wake(self) -> None:
        """End a `wait` under way, or the next one. For any thread, at any time."""
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._waker.fileno() >= 0:
                self._waker.send(b"\0")

    def close(self) -> None:
        """Give what is queued a second to leave, and free everything."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
        if self._gate:
            self._gate.close()
        with self._lock:
            self._woken.close()
            self._waker.close()
        self._context.term()


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
