"""Line: what a worker says to the server and hears from it, counted and timed."""

import time
from collections.abc import Iterator, Sequence

from thinwire.server.messages import Message, parse
from thinwire.server.session import Session
from thinwire.transport.base import Buffer, Connection

# Beats to a server that does not answer: from the fifth on they are this far apart, for they all wait in a queue.
_UNANSWERED, _PATIENT = 4, 2.0


class Line:
    """A connection, and when it was used last."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sent = self.received = 0  # bytes
        self.heard = time.monotonic()
        self._spoken = 0.0
        self._beats = 0  # since anything was heard

    def send(self, message: Message, session: Session | None) -> None:
        """Send a message; in a session it is counted."""
        parts = message.parts(session.counter.next(message.kind) if session is not None else 0)
        self.sent += sum(map(len, parts))
        self._spoken = time.monotonic()
        self.connection.send(parts)

    def send_pieces(self, message: Message, session: Session, pieces: Sequence[Buffer]) -> int | None:
        """Send a body in pieces, any of which may be lost; returns the transport's ticket."""
        head = bytes(message.parts(session.counter.next(message.kind))[0])
        self.sent += len(head) + sum(map(len, pieces))
        self._spoken = time.monotonic()
        return self.connection.send_pieces(head, pieces)

    def poll(self, timeout: float) -> Iterator[Message]:
        """Messages that have arrived; waits up to `timeout` seconds for the first."""
        for parts in self.connection.poll(timeout):
            self.received += sum(map(len, parts))
            self.heard, self._beats = time.monotonic(), 0
            yield parse(parts)

    def beat_is_due(self, usual: float) -> bool:
        """Whether to give a sign of life now, every `usual` seconds of silence; if so it is counted."""
        every = usual if self._beats < _UNANSWERED else max(usual, _PATIENT)
        due = time.monotonic() - self._spoken > every
        self._beats += due
        return due
