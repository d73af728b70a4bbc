"""Limits on the size of messages and packets. Needs no library, so that a command line can be checked without one."""

import logging
from collections.abc import Iterable, Sequence

from thinwire.transport.base import LARGEST, Buffer

# The largest number of parts of a message. It bounds what a hostile peer can make the receiver collect.
MOST_PARTS = 8
# The default and the largest size of a UDP packet in bytes, without IP and UDP headers.
MTU = 1400
LARGEST_PACKET = 9216
# The most messages that one poll returns, so that a peer that never stops sending cannot keep the server in it.
AT_ONCE = 256
# How many lines about one subject a log may have in so many seconds.
_LINES, _LINE_SECONDS = 10, 60.0


def views(parts: Sequence[Buffer]) -> list[memoryview]:
    """Return the parts of a message as byte views; raise ValueError if the message exceeds the limits."""
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"a message has 1 to {MOST_PARTS} parts, not {len(parts)}")
    found = [_as_bytes(memoryview(part)) for part in parts]
    size = sum(map(len, found))
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes is larger than {LARGEST}; cut it in pieces")
    return found


def _as_bytes(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # Python cannot cast an empty view


def acceptable(sizes: Iterable[int]) -> bool:
    """Return whether a received message, given the sizes of its parts, keeps the limits."""
    known = list(sizes)
    return 1 <= len(known) <= MOST_PARTS and sum(known) <= LARGEST


def check_mtu(mtu: int) -> int:
    """Return `mtu`; raise ValueError if frames would not fit into such packets, or networks would not carry them."""
    if not 256 <= mtu <= LARGEST_PACKET:
        raise ValueError(f"--mtu is from 256 to {LARGEST_PACKET} bytes, not {mtu}")
    return mtu


class LogLimit:
    """Logs about one subject with a limit, because a peer must not be able to fill the log.

    After 10 lines within a minute, the others are counted, and the first line of the next minute tells their number.
    """

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log, self._level = log, level
        self._began, self._lines, self.omitted = -_LINE_SECONDS, 0, 0

    def say(self, now: float, text: str, *arguments: object) -> None:
        """Log a line, or count it if there were too many."""
        if now - self._began >= _LINE_SECONDS:
            if self.omitted:
                self._log.log(self._level, "%d more lines like the next one were left out", self.omitted)
            self._began, self._lines, self.omitted = now, 0, 0
        self._lines += 1
        if self._lines > _LINES:
            self.omitted += 1
        else:
            self._log.log(self._level, text, *arguments)
