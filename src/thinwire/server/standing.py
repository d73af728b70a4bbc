"""Standing: how a worker stands with the server: in which session, fresh to which step, stopped or failed.

The courier's thread changes it, the worker's thread waits for it.
"""

import threading
import time
from collections.abc import Sequence

from thinwire.errors import ThinwireError
from thinwire.server.line import Line
from thinwire.server.messages import Message
from thinwire.server.pace import Pace
from thinwire.server.session import Session


class ServerError(ThinwireError, RuntimeError):
    """The server refused this worker, is gone, or sent something that makes no sense."""


class Standing:
    """What the two threads of a worker share."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._changed = threading.Condition()
        self.session: Session | None = None
        self.lost = False  # a new session has begun: what this step computes will not count
        self.stopped: str | None = None
        self.error: Exception | None = None

    # For the worker's thread

    def wait(self, layers: Sequence[int], clock: int, patience: float) -> bool:
        """Until these layers are fresh enough for this step; False if a new session began or training has ended."""
        with self._changed:
            while True:
                self._raise()
                if self.lost or self.stopped is not None or self.session is None:
                    return False
                if all(min(self.session.arrived[layer]) >= clock for layer in layers):
                    return True
                self._sleep(patience)

    def wait_for_session(self, patience: float) -> Session | None:
        """Until the server has let us in; None if training has ended."""
        with self._changed:
            while self.session is None and self.stopped is None:
                self._raise()
                self._sleep(patience)
            self._raise()
            self.lost = False
            return self.session

    def _sleep(self, patience: float) -> None:
        # While anything is heard of the server it lives, and others are slow.
        self._changed.wait(1.0)
        if time.monotonic() - self._line.heard > patience:
            raise ServerError(f"nothing was heard of the server for {patience:g} s: is it still running?")

    def _raise(self) -> None:
        if self.error is not None and self.stopped is None:  # a server that has ended training may be gone
            raise self.error

    # For the courier's

    def enter(self, session: Session | None) -> None:
        """A session begins, or the one that was is over."""
        with self._changed:
            self.session, self.lost = session, True
            self._changed.notify_all()

    def arrive(self, session: Session, message: Message, pace: Pace) -> None:
        """A part is there as its message tells; with a layer's last one it is noted how stale that is."""
        layer, part = message.layer, message.part
        before, session.editions[layer][part] = session.editions[layer][part], message.number
        with self._changed:
            session.arrived[layer][part] = message.clock
            session.known.here[layer] = min(session.arrived[layer])
            if session.known.here[layer] == message.clock:
                pace.arrived(layer, message.clock, session.stale(message, before))
                self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Training has ended."""
        with self._changed:
            self.stopped = reason
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The thread that waits must hear of it, whatever it is."""
        self.error = error if isinstance(error, ThinwireError) else ServerError(f"the worker failed: {error}")
        self.error.__cause__ = error.__cause__ if self.error is error else error

    def close(self) -> None:
        """The courier's thread is done: nobody needs to wait any more."""
        with self._changed:
            self._changed.notify_all()
