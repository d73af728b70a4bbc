"""Path: one session's way between two sides: keys, numbered messages, and datagrams that leave and come.

A message in datagrams has a number in the session's order like all others; its last word stands for it on the
reliable way. Not safe by itself: the transport holds a lock.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinwire.transport.base import Buffer
from thinwire.transport.udp.congestion import Shares
from thinwire.transport.udp.packet import (
    CONTROL_BYTES,
    EXPRESS,
    KEY_BYTES,
    OVERHEAD,
    Envelope,
    Kind,
    Opener,
    Report,
    Sealer,
    pack_control,
    read_end,
    read_records,
    read_reports,
)
from thinwire.transport.udp.recovery import Dispatch, Gathering, Group, Message, Outcome, pack

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


# Smoothed loss from which on short envelopes are sent as datagrams too, and as two, and as three.
_COPIES = (0.002, 0.02, 0.1)
# Seconds until a short envelope is sent again: two round trips, and what timers and threads take.
_TRIPS, _GRAIN = 2.0, 0.006
# Seconds after which it goes the reliable way too.
_PATIENCE = 0.1
# Seconds for which a clean path's last words wait: the report that makes them needless is mostly sooner.
_WORDS = 0.03
# A reader sleeps until the rest of a message should be there, but not for longer; not at all after so long without a
# datagram, or after four times what was between two, for which the first stands as long as there is only one.
_NAP, _SILENCE, _APART = 0.002, 5e-4, 1e-4


Address = tuple[str, int] | tuple[str, int, int, int]  # as Python's sockets take it


class Path:
    """One session."""

    def __init__(self, session: int, keys: bytes, *, server: bool, mtu: int, shares: Shares | None = None) -> None:
        mine, theirs = keys[:KEY_BYTES], keys[KEY_BYTES:]
        if not server:
            mine, theirs = theirs, mine
        self.session, self.mtu = session, mtu
        self.sealer, self.opener = Sealer(session, mine), Opener(theirs)
        self.dispatch = Dispatch(mtu)
        self.pacer, self.counts, self.queue = self.dispatch.pacer, self.dispatch.counts, self.dispatch.queue
        self.gathering = Gathering()
        self._shares = shares  # server: among all that send to it
        self.address: Address | None = None  # where datagrams go; None: nowhere yet
        self.batches = True  # whether several datagrams may be handed to the kernel by one call
        self.origin = b""  # server: the same as the kernel writes it, where the newest came from
        self._out, self._in = Outgoing(session, mtu - OVERHEAD - CONTROL_BYTES), Incoming()
        self.express_at = 0.0  # when short envelopes must be looked after
        self._level = 0  # copies of a short envelope, by the loss that was seen
        self._opened = False  # whether the other side must be told that its datagrams arrive
        self._reports: list[bytes] = []
        self._news = 0.0  # when a datagram of envelopes last brought any
        self._repeated = False  # the other side sent what is here already: it must hear so
        self.welcome = b""  # server: what the worker was told of this session

    # Out

    def open_to_peer(self) -> None:
        """Tell the other side that its datagrams arrive."""
        self._opened = True

    def has_words(self, now: float) -> bool:
        """Whether anything but datagrams of messages may have to leave now."""
        if self._reports or self._opened or self._repeated or self._out.pressing:
            return True
        return self._out.waiting and (self._level > 0 or now >= self._out.since + self._patience(now)[1])

    @property
    def gaps(self) -> int:
        """How often what the other side sent was lost for good."""
        return self._in.gaps

    @property
    def has_news(self) -> bool:
        """Whether anything came that `ready` has not handed over."""
        return bool(self.gathering.open) or self._in.waiting

    def put(self, kind: Kind, parts: Sequence[Buffer]) -> None:
        """Queue a message for the reliable way."""
        reports, self._reports = b"".join(self._reports), []
        self._out.put(kind, parts, reports)

    def drain(self, *, all_of_it: bool = False) -> list[list[Buffer]]:
        """What the reliable way takes now; reports that found no message to go with go alone."""
        if self._reports:
            self.put(Kind.REPORT, [])
        now = time.monotonic()
        patience, words = (0.0, 0.0) if all_of_it else self._patience(now)
        found = self._out.drain(self._in.due, now - patience, now - words)
        if self._opened:
            self._opened = False
            found.insert(0, Envelope(Kind.OPEN, self.session, 0, []).as_parts())
        return found

    def _patience(self, now: float) -> tuple[float, float]:
        """Seconds for which envelopes wait before they go the reliable way, and words with nothing behind them."""
        if self._copies(now):
            return _PATIENCE, _PATIENCE
        return 0.0, 0.0 if self._level or not self.can_send(now) else _WORDS

    def _copies(self, now: float) -> int:
        """How often a short envelope is sent as a datagram."""
        return self._level if self._level and self.can_send(now) else 0

    def express(self, now: float) -> tuple[list[bytes], float]:
        """Datagrams of short envelopes to send now, if the path loses packets, and the seconds until more are due."""
        copies = self._copies(now)
        if not copies:
            self._repeated = False
            self._out.forget_short()
            return [], 3600.0
        groups, pause = self._out.express(now, _TRIPS * self.pacer.trip + _GRAIN, fresh=copies)
        if not groups and self._repeated:
            groups = [[]]
        self._repeated = False
        return [self.sealer.seal(pack_control(self._in.due, group)) for group in groups], pause

    def can_send(self, now: float) -> bool:
        """Whether datagrams are worth trying."""
        return self.address is not None and now >= self.dispatch.rests_until

    def submit(self, head: bytes, pieces: Sequence[Buffer]) -> int:
        """Queue a message in pieces for the pacer; returns its ticket."""
        number = self._out.hold()
        self.dispatch.submit(number, head, pieces)
        return number

    def pump(self, send: Callable[[Iterable[bytes]], None]) -> float:
        """Let leave what may; returns the seconds until more may."""
        while self.queue:
            sending, count, delay = self.dispatch.next(time.monotonic())
            if not count:
                return delay
            datagrams = self.sealer.seal_all(sending.packed(count))
            send(datagrams)
            if self.dispatch.left(sending, count, sum(map(len, datagrams)), time.monotonic()):
                self._out.release(sending.number, sending.word())
        return 3600.0

    # In

    def take(self, envelope: Envelope, *, reliable: bool) -> bool:
        """An envelope of this session, by either way; whether it is news."""
        if envelope.kind is Kind.BATCH:
            self._out.acknowledge(envelope.number)
            records = read_records(self.session, envelope.parts[0] if envelope.parts else b"")
            return any([self.take(each, reliable=reliable) for each in records])
        if not self._in.arrive(envelope, reliable=reliable):
            return False
        if envelope.kind is Kind.WORD:  # the deadline runs from now, even if it is not its turn yet
            self.gathering.end(*read_end(envelope.parts[0]), time.monotonic())
        return True

    def take_control(self, due: int, envelopes: list[Envelope]) -> bool:
        """A datagram of short envelopes; whether any is news."""
        self._out.acknowledge(due)
        news = any([self.take(each, reliable=False) for each in envelopes])
        now = time.monotonic()
        if news:
            self._news = now
        # Copies come together; what comes again later was not answered.
        self._repeated |= bool(envelopes) and now - self._news > _GRAIN
        return news

    def take_pieces(self, group: Group) -> bool:
        """Datagrams of a message; whether the message is complete and in turn."""
        message = group[0]
        if not self._in.due <= message <= self._in.due + AHEAD and not self.gathering.knows(message):
            return False
        if self._shares is not None:
            self._shares.note(self.session, self.mtu * len(group[3]), group[-1])
        return self.gathering.add(group) and message == self._in.due

    def ready(self, now: float) -> tuple[list[list[Buffer]], list[Outcome]]:
        """Messages, and what became of ours, that are in turn now."""
        found: list[list[Buffer]] = []
        outcomes: list[Outcome] = []
        gathered = self.gathering.open
        while gathered or self._in.waiting:
            message = gathered.get(self._in.due)
            if message is not None and message.whole:  # it needs no last word
                found.append(self.close(message, now))
            elif (envelope := self._in.current()) is None:
                break
            elif envelope.kind is Kind.WORD:
                message = self.gathering.end(*read_end(envelope.parts[0]), now)
                if message is not None:
                    if not message.whole and now < self._gives_up(message):
                        break
                    found.append(self.close(message, now))
            else:
                if envelope.kind is not Kind.REPORT:
                    found.append(list(envelope.parts))
                if len(envelope.reports):
                    learned = (self.dispatch.learn(report, now) for report in self._in.reports())
                    outcomes += [outcome for outcome in learned if outcome is not None]
                    self._level = sum(self.pacer.loss > bar for bar in _COPIES)
            self._in.advance()
        return found, outcomes

    def close(self, message: Message, now: float) -> list[Buffer]:
        """A message as far as it has come; the sender will be told."""
        self.gathering.close(message.number)
        lost = frozenset() if message.whole else frozenset(range(message.count)) - message.pieces.keys()
        hold = now - message.last if message.pieces else 0.0
        span, grant = message.stamps[1] - message.stamps[0], 0
        if self._shares is not None and message.pieces:
            self._shares.learn(message.queue, len(lost) / message.count)
            grant = self._shares.grant(message.stamps[1])
        self._reports.append(Report(message.number, message.count, lost, hold, message.queue, span, grant).pack())
        total = sum(map(len, message.pieces.values())) if message.whole else message.total
        return [message.head, pack(message.count, total, sorted(message.pieces.items()), reported=True)]

    def _gives_up(self, message: Message) -> float:
        return (message.ended or 0.0) + self.gathering.lateness.wait

    def deadline(self, now: float) -> float:
        """When a message that holds up the others is given up on, or an envelope must go the reliable way."""
        message = self.gathering.open.get(self._in.due)
        gives_up = math.inf if message is None or message.ended is None else self._gives_up(message)
        since = self._out.since
        return gives_up if since == math.inf else min(gives_up, since + self._patience(now)[1])

    def arriving(self, now: float) -> float:
        """Seconds until the rest of the message in turn should be there; 0 if nothing of it comes now.

        Coming for each datagram costs more than to read all of them at once.
        """
        message = self.gathering.open.get(self._in.due)
        if message is None or not message.pieces or message.whole or message.ended is not None:
            return 0.0
        there = len(message.pieces)
        apart = (message.stamps[1] - message.stamps[0]) / (there - 1) if there > 1 else _APART
        if now - message.last > max(_SILENCE, 4 * apart):
            return 0.0
        return min(max(apart * (message.count - there), _APART), _NAP)

    def clear(self) -> None:
        """Forget what is under way to a peer that is gone."""
        self.dispatch.clear()
        self._out.clear()
