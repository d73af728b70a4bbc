"""Path: one session's way between two sides: keys, order, datagrams to send and messages that come in.

Every message of a session has a number. It travels reliably, and a short one also as a datagram where packets are
lost: the first to come counts, in the order of the numbers. Not safe by itself: the transport holds a lock.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.transport.base import Buffer
from thinwire.transport.envelope import (
    EXPRESS,
    Envelope,
    Kind,
    Report,
    pack_data,
    pack_end,
    read_end,
    read_reports,
)
from thinwire.transport.gathering import Gathering, Message
from thinwire.transport.pacing import Pacer, Seen
from thinwire.transport.pieces import pack
from thinwire.transport.sealing import KEY_BYTES, Opener, Sealer

# Messages one after the other of which nothing arrived, and for how long datagrams are not tried after them.
_DEAF, _REST = 8, 10.0
# Numbers that a datagram may be ahead of its turn; what is further ahead waits for its reliable copy.
_AHEAD = 4096
# Smoothed loss from which on short messages are sent as datagrams too, and as two, and as three.
_COPIES = (0.002, 0.02, 0.1)


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
        """What is said before and after its datagrams."""
        return pack_end(self.number, len(self.pieces), self.total, self.head)


@dataclass(frozen=True)
class Outcome:
    """What became of a message that was sent in pieces."""

    ticket: int
    lost: frozenset[int]


class Path:
    """One session."""

    def __init__(self, session: int, keys: bytes, *, server: bool, mtu: int) -> None:
        mine, theirs = keys[:KEY_BYTES], keys[KEY_BYTES:]
        if not server:
            mine, theirs = theirs, mine
        self.session, self.mtu = session, mtu
        self.sealer, self.opener = Sealer(session, mine), Opener(theirs)
        self.pacer = Pacer(mtu)
        self.gathering = Gathering()
        self.address: tuple[str, int] | None = None  # where datagrams go; None: nowhere yet
        self.outbox: deque[Envelope] = deque()  # for the reliable way, in order
        self.queue: deque[Sending] = deque()  # waits for the pacer
        self._reports: list[bytes] = []
        self._number = self._tickets = 0
        self._unreported: dict[int, Sending] = {}
        self._next = 1  # the number that is due
        self._early: dict[int, Envelope] = {}
        self._line: deque[Envelope] = deque()  # in order, held up by a message that is not closed yet
        self._deaf, self._rests = 0, 0.0
        self.counts: Counter[str] = Counter()
        self.welcome = b""  # server: what the worker was told of this session

    # Out

    def open_to_peer(self) -> None:
        """Tell the other side that its datagrams arrive."""
        self.outbox.append(Envelope(Kind.OPEN, self.session, 0, []))

    def put(self, kind: Kind, parts: Sequence[Buffer]) -> list[bytes]:
        """Queue a message for the reliable way; returns copies of it to send as datagrams."""
        self._number += 1
        reports, self._reports = b"".join(self._reports), []
        envelope = Envelope(kind, self.session, self._number, parts, reports)
        self.outbox.append(envelope)
        copies = self._copies if envelope.size <= EXPRESS else 0
        return [self.sealer.seal(envelope.as_control()) for _ in range(copies)]

    @property
    def _copies(self) -> int:
        """How often a short message is sent as a datagram too."""
        return sum(self.pacer.loss > bar for bar in _COPIES) if self.address else 0

    def put_reports(self) -> list[bytes]:
        """Reports that found no message to go with go alone."""
        return self.put(Kind.REPORT, []) if self._reports else []

    def can_send(self, now: float) -> bool:
        """Whether datagrams are worth trying."""
        return self.address is not None and now >= self._rests

    def submit(self, head: bytes, pieces: Sequence[Buffer]) -> tuple[int, list[bytes]]:
        """Queue a message in pieces for the pacer, and announce it; returns its ticket, and datagrams to send now."""
        self._tickets += 1
        sending = Sending(self._tickets, head, pieces, sum(map(len, pieces)))
        self._unreported[sending.number] = sending
        self.queue.append(sending)
        return sending.number, self.put(Kind.BEGIN, [sending.word()])

    def next_datagram(self, now: float) -> tuple[bytes | None, float]:
        """The next datagram that may leave now, or None and the seconds until one may."""
        if not self.queue:
            return None, 3600.0
        sending = self.queue[0]
        delay = self.pacer.delay(self.mtu, now)
        if delay > 0.0:
            sending.waited = True
            return None, delay
        sending.began = sending.began or now
        piece = sending.pieces[sending.next]
        plain = pack_data(sending.number, sending.next, len(sending.pieces), sending.head, piece, time.time())
        sending.next += 1
        self.counts["sent"] += 1
        self.pacer.spend(len(plain) + 28)
        return self.sealer.seal(plain), 0.0

    def end_sent(self, now: float) -> list[bytes]:
        """Say the last word on the first message of the queue if all its datagrams have left."""
        if not self.queue or self.queue[0].next < len(self.queue[0].pieces):
            return []
        sending = self.queue.popleft()
        sending.left = now
        envelope = Envelope(Kind.END, self.session, 0, [sending.word()])
        self.outbox.append(envelope)
        return [self.sealer.seal(envelope.as_control()) for _ in range(self._copies)]

    def learn(self, report: Report, now: float) -> Outcome | None:
        """Take in a report on what was sent; None if nothing waits for it."""
        sending = self._unreported.get(report.message)
        if sending is None or report.count != len(sending.pieces):
            return None
        del self._unreported[report.message]
        lost = len(report.lost)
        self.counts["lost"] += lost
        trip = now - sending.left - report.hold if sending.left else self.pacer.trip
        took = max(sending.left - sending.began, 1e-6)
        pushed = sending.waited and sending.total / took > self.pacer.rate / 2
        self.pacer.learn(Seen(report.count, lost, report.queue, trip, pushed), now)
        self._deaf = self._deaf + 1 if report.count and lost == report.count else 0
        if self._deaf >= _DEAF:
            self._deaf, self._rests = 0, now + _REST
        return Outcome(report.message, report.lost)

    # In

    def take(self, envelope: Envelope, now: float, *, reliable: bool) -> None:
        """An envelope of this session, by either way."""
        if envelope.kind is Kind.END:
            self.end(envelope, now)
        elif envelope.number:
            self.arrive(envelope, reliable=reliable)

    def arrive(self, envelope: Envelope, *, reliable: bool) -> None:
        """An envelope of the session's order, by either way."""
        number = envelope.number
        if number < self._next or number in self._early or (not reliable and number > self._next + _AHEAD):
            return
        read_reports(envelope.reports)  # broken ones are found here, before they are in anybody's way
        if envelope.kind is Kind.BEGIN:
            read_end(envelope.parts[0] if envelope.parts else b"")
        self._early[number] = envelope
        if reliable:  # what has not come before it was lost with a connection, and never will
            for old in sorted(n for n in self._early if n < number):
                self._line.append(self._early.pop(old))
            self._next = number
        while self._next in self._early:
            self._line.append(self._early.pop(self._next))
            self._next += 1

    def end(self, envelope: Envelope, now: float) -> None:
        """The sender's last word on a message, by either way."""
        self.gathering.end(*read_end(envelope.parts[0] if envelope.parts else b""), now)

    def ready(self, now: float) -> tuple[list[list[Buffer]], list[Outcome]]:
        """Messages, and what became of ours, that are in turn now."""
        found: list[list[Buffer]] = []
        outcomes: list[Outcome] = []
        while self._line:
            envelope = self._line[0]
            if envelope.kind is Kind.BEGIN:
                message = self.gathering.begin(*read_end(envelope.parts[0]), now)
                if message is not None:
                    if not message.whole and now < message.deadline(self.gathering.lateness.wait):
                        break
                    found.append(self.close(message, now))
            elif envelope.kind is not Kind.REPORT:
                found.append(list(envelope.parts))
            self._line.popleft()
            for report in read_reports(envelope.reports):
                outcome = self.learn(report, now)
                if outcome is not None:
                    outcomes.append(outcome)
        return found, outcomes

    def close(self, message: Message, now: float) -> list[Buffer]:
        """A message as far as it has come; the sender will be told."""
        self.gathering.close(message.number)
        lost = frozenset(range(message.count)) - message.pieces.keys()
        hold = now - message.last if message.pieces else 0.0
        self._reports.append(Report(message.number, message.count, hold, message.queue, lost).pack())
        total = sum(map(len, message.pieces.values())) if message.whole else message.total
        return [message.head, pack(message.count, total, sorted(message.pieces.items()))]

    def deadline(self) -> float | None:
        """When the message that holds up the others is given up on."""
        if not self._line or self._line[0].kind is not Kind.BEGIN:
            return None
        message = self.gathering.open.get(read_end(self._line[0].parts[0])[0])
        return None if message is None else message.deadline(self.gathering.lateness.wait)

    def clear(self) -> None:
        """Forget what is under way to a peer that is gone."""
        self.queue.clear()
        self._unreported.clear()
