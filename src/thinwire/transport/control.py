"""Control: the numbered envelopes of a session, out by two ways and in again by whichever is first.

All of them travel reliably, several together. Where the path loses packets short ones are sent as datagrams first, and
again until the other side has them: TCP's own way to find out that a packet is missing takes 200 ms and more. What
is not acknowledged soon goes the reliable way as well.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.transport.base import Buffer
from thinwire.transport.envelope import EXPRESS, Envelope, Kind, Report, read_end, read_reports

# Numbers that a datagram may be ahead of its turn; what is further ahead waits for its reliable copy.
AHEAD = 4096
# Times that an envelope is sent again as a datagram; then its reliable copy is on its way for long enough.
_AGAIN = 5
# Records of one reliable batch.
_BATCH_BYTES = 1 << 14


@dataclass
class _Short:
    """An envelope that may go as a datagram, until the other side says that it has come."""

    envelope: Envelope
    record: bytes = b""  # made when it is needed: a clean path needs none
    sent: float = 0.0
    times: int = 0


@dataclass(slots=True)
class _Queued:
    """An envelope that waits for the reliable way, and since when."""

    envelope: Envelope
    since: float
    short: bool = True


class Outgoing:
    """Envelopes that leave, numbered from 1."""

    def __init__(self, session: int, room: int) -> None:
        self._session, self._room = session, room  # bytes of records in one datagram
        self._number = self._acknowledged = 0
        self._reliable: deque[_Queued] = deque()
        self._held: dict[int, _Queued] = {}  # stand for messages whose datagrams have not all left yet
        self._short: deque[_Short] = deque()
        self._plain = 0  # of those that wait for the reliable way, how many are more than words

    def put(self, kind: Kind, parts: Sequence[Buffer], reports: bytes = b"") -> int:
        """Queue an envelope; returns its number."""
        self._number += 1
        envelope = Envelope(kind, self._session, self._number, parts, reports)
        short = envelope.size <= EXPRESS
        self._reliable.append(_Queued(envelope, time.monotonic(), short))
        self._plain += 1
        if short:
            self._short.append(_Short(envelope))
        return self._number

    def hold(self) -> int:
        """A number for a message in datagrams: reliable envelopes behind it wait for `release`."""
        self._number += 1
        queued = _Queued(Envelope(Kind.WORD, self._session, self._number, []), time.monotonic())
        self._held[self._number] = queued
        self._reliable.append(queued)
        return self._number

    def release(self, number: int, word: bytes) -> None:
        """All datagrams of a message have left: its last word may go."""
        held = self._held.pop(number, None)
        if held is not None:
            held.envelope = Envelope(Kind.WORD, self._session, number, [word])
            self._short.append(_Short(held.envelope))

    def acknowledge(self, due: int) -> None:
        """The other side waits for this number: it has all before it."""
        if self._acknowledged < due <= self._number + 1:
            self._acknowledged = due
            self._short = deque(each for each in self._short if each.envelope.number >= due)
            while self._reliable and self._reliable[0].envelope.number < due:
                self._next()

    def drain(self, due: int, before: float, words: float) -> list[list[Buffer]]:
        """What goes the reliable way now, of what is there since `before`: short envelopes in batches, others alone.

        `due` is the number that this side waits for. Words alone, with nothing behind them, go if they are there since
        `words`: a message that arrives complete needs none.
        """
        found: list[list[Buffer]] = []
        records: list[bytes] = []

        def close() -> None:
            if records:
                found.append(Envelope(Kind.BATCH, self._session, due, [b"".join(records)]).as_parts())
                records.clear()

        if not self._reliable:
            return []
        if not self._plain:
            before = min(before, words)
        elif not all(each.short for each in self._reliable):
            before = math.inf  # it has no other way, and what is before it must not come after it
        while self._reliable and self._reliable[0].since <= before and not self._is_held(self._reliable[0]):
            queued = self._next()
            envelope = queued.envelope
            if queued.short:
                records.append(envelope.as_record())
                if sum(map(len, records)) > _BATCH_BYTES:
                    close()
            else:
                close()
                found.append(envelope.as_parts())
        close()
        return found

    @property
    def since(self) -> float:
        """When the oldest envelope was queued that has not gone the reliable way."""
        return self._reliable[0].since if self._reliable and not self._is_held(self._reliable[0]) else math.inf

    @property
    def waiting(self) -> bool:
        """Whether any waits for either way."""
        return bool(self._reliable) or bool(self._short)

    @property
    def pressing(self) -> bool:
        """Whether any but words waits for the reliable way."""
        return self._plain > 0

    def _next(self) -> _Queued:
        queued = self._reliable.popleft()
        self._plain -= queued.envelope.kind is not Kind.WORD
        return queued

    def _is_held(self, queued: _Queued) -> bool:
        return queued.envelope.number in self._held

    def express(self, now: float, again: float, *, fresh: int) -> tuple[list[list[bytes]], float]:
        """Records of datagrams to send now, and the seconds until more are due.

        New ones go `fresh` times, those without an answer once more after `again` seconds, and later each time.
        """
        once: list[bytes] = []
        often: list[bytes] = []
        pause = 3600.0
        for each in self._short:
            if not each.times:
                each.record = each.envelope.as_record()
                if len(each.record) > self._room:
                    each.times = _AGAIN + 1
                    continue
                often.append(each.record)
            elif each.times > _AGAIN:
                continue
            elif now - each.sent >= again * each.times:
                once.append(each.record)
            else:
                pause = min(pause, each.sent + again * each.times - now)
                continue
            each.times, each.sent = each.times + 1, now
            pause = min(pause, again * each.times)
        # What is sent again goes along with every copy of what is new.
        return self._grouped(once + often) * (fresh if often else 1), pause

    def _grouped(self, records: Sequence[bytes]) -> list[list[bytes]]:
        groups: list[list[bytes]] = []
        room = 0
        for record in records:
            if not groups or len(record) > room:
                groups.append([])
                room = self._room
            groups[-1].append(record)
            room -= len(record)
        return groups

    def forget_short(self) -> None:
        """The path is clean: the reliable way is enough. What has not gone that way yet may still need another."""
        first = self._reliable[0].envelope.number if self._reliable else self._number + 1
        while self._short and self._short[0].envelope.number < first:
            self._short.popleft()

    def clear(self) -> None:
        """Let go of messages whose datagrams will not leave any more; what waits behind them may go."""
        self._reliable = deque(each for each in self._reliable if not self._is_held(each))  # all held ones are words
        self._held.clear()


class Incoming:
    """Envelopes that come, in the order of their numbers; `due` is the one that is waited for."""

    def __init__(self) -> None:
        self.due = 1
        self._early: dict[int, Envelope] = {}
        self._reports: dict[int, list[Report]] = {}  # of those, read
        self._sure = 0  # the highest number that came reliably: what is missing before it never will
        self.gaps = 0  # how often something was passed over

    def arrive(self, envelope: Envelope, *, reliable: bool) -> bool:
        """Take an envelope in, by either way; False if it is here already or too far ahead."""
        number = envelope.number
        if number < self.due or number in self._early or (not reliable and number > self.due + AHEAD):
            return False
        if len(envelope.reports):
            # Broken ones are found here, before they are in anybody's way.
            self._reports[number] = read_reports(envelope.reports)
        if envelope.kind is Kind.WORD:
            read_end(envelope.parts[0] if envelope.parts else b"")
        self._early[number] = envelope
        if reliable:
            self._sure = max(self._sure, number)
        return True

    @property
    def waiting(self) -> bool:
        """Whether any is here that was not advanced over."""
        return bool(self._early)

    def current(self) -> Envelope | None:
        """The envelope in turn, if it is here; what was lost with a connection is passed over."""
        if self.due < self._sure and self.due not in self._early:
            self.due, self.gaps = min(self._early), self.gaps + 1
        return self._early.get(self.due)

    def reports(self) -> list[Report]:
        """Of the envelope in turn."""
        return self._reports.get(self.due, [])

    def advance(self) -> None:
        """The one in turn is done with."""
        self._early.pop(self.due, None)
        self._reports.pop(self.due, None)
        self.due += 1
