"""Shares: a receiver that many send to at once gives each of them a share of its link.

Senders cannot know of one another, and by the time that each has found out by losses the queue before the receiver
is long full. The receiver sees what its link carries and who uses it, and says so with every report.
"""

from thinwire.transport.largest import Largest

# Seconds over which arrivals are counted, and how many such spans are remembered.
SPAN, _SPANS = 0.020, 500
# Who sent within so many seconds counts as a sender.
_ACTIVE = 0.2
# All shares together, of what the link was seen to carry: more while it shows no sign of being full.
_MORE, _LESS = 1.5, 0.95
# Delay above the least, and share of datagrams lost, from which on the link is taken for full.
_QUEUE, _LOSS = 0.020, 0.02
_SMOOTH = 1 / 16


class Shares:
    """What one receiver's link carries."""

    def __init__(self) -> None:
        self._span, self._bytes = 0, 0
        self._rates = Largest(_SPANS)
        self._heard: dict[int, float] = {}
        self._queue = self._loss = 0.0

    def note(self, session: int, size: int, stamp: float) -> None:
        """A datagram of a session came at this time, by the kernel's clock."""
        span = int(stamp / SPAN)
        if span != self._span:
            if self._bytes:
                self._rates.add(self._bytes / SPAN)
            self._span, self._bytes = span, 0
        self._bytes += size
        self._heard[session] = stamp

    def learn(self, queue: float, loss: float) -> None:
        """A message came with this least queueing delay and this share lost."""
        self._queue += (queue - self._queue) * _SMOOTH
        self._loss += (loss - self._loss) * _SMOOTH

    def grant(self, stamp: float) -> int:
        """Bytes a second for each sender; 0 where there is only one, or nothing is known yet."""
        self._heard = {session: when for session, when in self._heard.items() if when > stamp - _ACTIVE}
        if len(self._heard) < 2 or not self._rates.largest:
            return 0
        full = self._queue > _QUEUE or self._loss > _LOSS
        return int(self._rates.largest * (_LESS if full else _MORE) / len(self._heard))
