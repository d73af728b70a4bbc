"""Dispatch: messages in pieces on their way out: in the pacer's queue, then until the receiver has reported on them."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.transport.base import Buffer
from thinwire.transport.envelope import Report, pack_data, pack_end
from thinwire.transport.pacing import Pacer, Seen

# Messages one after the other of which nothing arrived, and for how long datagrams are not tried after them.
_DEAF, _REST = 8, 10.0
# Of IP and UDP, in front of every datagram.
_HEADERS = 28


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

    def word(self) -> bytes:
        """What is said after its datagrams."""
        return pack_end(self.number, len(self.pieces), self.total, self.head)


@dataclass(frozen=True)
class Outcome:
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
        self._finished: list[Sending] = []
        self._deaf = 0

    def submit(self, number: int, head: bytes, pieces: Sequence[Buffer]) -> None:
        """A message of that number waits for the pacer."""
        self._unreported[number] = sending = Sending(number, head, pieces, sum(map(len, pieces)))
        self.queue.append(sending)

    def next(self, now: float) -> tuple[bytes | None, float]:
        """The next datagram's content if it may leave now, or None and the seconds until one may."""
        sending = self.queue[0]
        delay = self.pacer.delay(self._mtu, now)
        if delay > 0.0:
            sending.waited = True
            return None, delay
        sending.began = sending.began or now
        piece = sending.pieces[sending.next]
        plain = pack_data(sending.number, sending.next, len(sending.pieces), sending.head, piece, time.time())
        sending.next += 1
        self.counts["sent"] += 1
        self.pacer.spend(len(plain) + _HEADERS)
        if sending.next == len(sending.pieces):
            self.queue.popleft()
            sending.left = now
            self._finished.append(sending)
        return plain, 0.0

    def finished(self) -> list[Sending]:
        """Messages whose last datagram has left since the last call."""
        found, self._finished = self._finished, []
        return found

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
