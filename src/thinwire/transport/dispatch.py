"""Dispatch: messages in pieces on their way out: in the pacer's queue, then until the receiver has reported on them."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire import _native
from thinwire.transport.base import Buffer
from thinwire.transport.envelope import Report, pack_end
from thinwire.transport.pacing import Pacer, Seen

# Messages one after the other of which nothing arrived, and for how long datagrams are not tried after them.
_DEAF, _REST = 8, 10.0
# Datagrams that are sealed before the first of them leaves.
_AT_ONCE = 64
# Of IP and UDP, in front of every datagram.
_HEADERS = 28
# Bytes by which a piece may be padded to be as long as the longest next to it: datagrams of one length leave together.
_PADDING = 32


@dataclass
class Sending:
    """A message whose datagrams are under way."""

    number: int
    head: bytes
    pieces: Sequence[Buffer]
    total: int
    next: int = 0
    waited: bool = False
    began: float = 0.0  # when the first datagram went
    left: float = 0.0  # when the last one did

    def packed(self, count: int) -> list[bytes]:
        """The contents of the next so many datagrams."""
        first, pieces = self.next, self.pieces
        now = [bytes(piece) for piece in pieces[first : first + count]]
        return _native.pack_data(self.number, first, len(pieces), self.head, now, time.time(), _PADDING)

    def word(self) -> bytes:
        """What is said after its datagrams."""
        return pack_end(self.number, len(self.pieces), self.total, self.head)


class Outcome(NamedTuple):
    """What became of a message that was sent in pieces."""

    ticket: int
    lost: frozenset[int]


class Dispatch:
    """One path's messages in pieces."""

    def __init__(self, mtu: int) -> None:
        self._mtu, self.pacer = mtu, Pacer(mtu, time.monotonic())
        self.queue: deque[Sending] = deque()  # waits for the pacer
        self.counts: Counter[str] = Counter()
        self.rests_until = 0.0  # datagrams are not worth trying before
        self._unreported: dict[int, Sending] = {}
        self._deaf = 0

    def submit(self, number: int, head: bytes, pieces: Sequence[Buffer]) -> None:
        """A message of that number waits for the pacer."""
        self._unreported[number] = sending = Sending(number, head, pieces, sum(map(len, pieces)))
        self.queue.append(sending)

    def next(self, now: float) -> tuple[Sending, int, float]:
        """The message in turn, how many of its datagrams may leave now, and if none, the seconds until one may."""
        sending = self.queue[0]
        count, delay = self.pacer.allowed(now)
        if count < len(sending.pieces) - sending.next:
            sending.waited = True
        if count:
            sending.began = sending.began or now
        return sending, min(count, len(sending.pieces) - sending.next, _AT_ONCE), delay

    def left(self, sending: Sending, count: int, size: int, now: float) -> bool:
        """So many of its datagrams, of so many bytes, have left; whether these were the last."""
        sending.next += count
        self.counts["sent"] += count
        self.pacer.spend(size + count * _HEADERS)
        if sending.next < len(sending.pieces):
            return False
        self.queue.popleft()
        sending.left = now
        return True

    def learn(self, report: Report, now: float) -> Outcome | None:
        """Take in a report; None if nothing waits for it."""
        sending = self._unreported.get(report.message)
        if sending is None or report.count != len(sending.pieces) or not sending.left:
            return None
        del self._unreported[report.message]
        lost = len(report.lost)
        self.counts["lost"] += lost
        self.pacer.learn(
            Seen(
                sent=report.count,
                size=sending.total,
                lost=lost,
                queue=report.queue,
                span=report.span,
                took=sending.left - sending.began,
                trip=now - sending.left - report.hold,
                tried=sending.waited,
                grant=report.grant,
            ),
            now,
        )
        self._deaf = self._deaf + 1 if report.count and lost == report.count else 0
        if self._deaf >= _DEAF:
            self._deaf, self.rests_until = 0, now + _REST
        return Outcome(report.message, report.lost)

    def clear(self) -> None:
        """Forget what is under way."""
        self.queue.clear()
        self._unreported.clear()
