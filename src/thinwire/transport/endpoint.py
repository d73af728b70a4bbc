"""Endpoint: one ZeroMQ socket with its context, its monitor and a way to wake it from another thread.

What listener and connection have in common; all of it but `wake` belongs to the thread that made it.
"""

import contextlib
import errno
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from thinwire.transport.base import LARGEST, Buffer
from thinwire.transport.gate import Gate
from thinwire.transport.limits import MOST_PARTS

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
