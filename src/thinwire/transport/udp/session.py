"""Session: the state of the udp transport between a worker and the server.

All envelopes of a session are numbered and delivered in that order. A message in pieces has a number too; its end
marker stands for it on the reliable channel, which is the TCP connection. Short envelopes also travel in control
packets where the network loses packets, because TCP would delay them. A session does no I/O and reads no clock: `now`
(time.monotonic) and bytes come in, bytes go out. It is not thread-safe: the socket thread's lock guards it.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from thinwire.errors import TransportError
from thinwire.transport.base import LARGEST, Buffer
from thinwire.transport.udp import packet
from thinwire.transport.udp.congestion import FairShares
from thinwire.transport.udp.packet import KEY_BYTES, Envelope, EnvelopeKind, MessageAck
from thinwire.transport.udp.recovery import PacketGroup, PartialMessage, PieceSender, Reassembly, pack

# How far the number of a packet may be ahead of the next expected one; an envelope further ahead comes over TCP.
AHEAD = 4096
# How often an envelope is retransmitted in a control packet; by then its copy over TCP is on its way.
_RETRANSMITS = 5
# Bytes of records in one batch over TCP.
_BATCH_BYTES = 1 << 14
# The pause in seconds that means "nothing is due".
_NEVER = 3600.0

Outstanding = Callable[[int], int | None]  # as `packet.read_acks` takes it


@dataclass(slots=True)
class _Queued:
    """An envelope that waits to be sent over TCP, and if it is short, until the other side has acknowledged it."""

    envelope: Envelope
    since: float
    short: bool = True
    # Of its control packets:
    record: bytes = b""  # made when it is needed: without loss it never is
    sent: float = 0.0
    times: int = 0


def _grouped(records: Sequence[bytes], room: int) -> list[list[bytes]]:
    """Divide records, in their order, in groups of at most `room` bytes."""
    groups: list[list[bytes]] = []
    for record in records:
        if not groups or sum(map(len, groups[-1])) + len(record) > room:
            groups.append([])
        groups[-1].append(record)
    return groups


class EnvelopeQueue:
    """Numbers outgoing envelopes from 1, queues them for TCP, and short ones also for control packets."""

    def __init__(self, session: int, room: int) -> None:
        self._session, self._room = session, room  # room: bytes of records in one control packet
        self._number = self._acknowledged = 0
        self._reliable: deque[_Queued] = deque()
        self._reserved: dict[int, _Queued] = {}  # end markers of messages whose packets have not all left yet
        self._short: deque[_Queued] = deque()
        self.payloads = 0  # how many of those that wait for TCP are not end markers

    def put(self, kind: EnvelopeKind, parts: Sequence[Buffer], now: float, acks: bytes = b"") -> None:
        """Queue an envelope."""
        self._number += 1
        envelope = Envelope(kind, self._session, self._number, parts, acks)
        queued = _Queued(envelope, now, envelope.size <= packet.SHORT_BYTES)
        self._reliable.append(queued)
        self.payloads += 1
        if queued.short:
            self._short.append(queued)

    def reserve(self, now: float) -> int:
        """Return a number for a message in pieces; later envelopes wait on TCP until `release` is called for it."""
        self._number += 1
        queued = _Queued(Envelope(EnvelopeKind.END, self._session, self._number, []), now)
        self._reserved[self._number] = queued
        self._reliable.append(queued)
        return self._number

    def release(self, number: int, end_marker: bytes) -> None:
        """Let the end marker of a message be sent, because all its packets have left."""
        queued = self._reserved.pop(number, None)
        if queued is not None:
            queued.envelope = Envelope(EnvelopeKind.END, self._session, number, [end_marker])
            self._short.append(queued)

    def on_ack(self, expected: int) -> None:
        """Drop the envelopes that the other side has: all before the number that it expects next."""
        if self._acknowledged < expected <= self._number + 1:
            self._acknowledged = expected
            self._short = deque(each for each in self._short if each.envelope.number >= expected)
            while self._reliable and self._reliable[0].envelope.number < expected:
                self._next()

    def drain(self, expected: int, now: float, before: float, ends_before: float) -> list[list[Buffer]]:
        """Return the TCP messages to send now, of envelopes queued up to `before`: short ones in batches.

        `expected` is the number that this side expects next. If only end markers wait, those queued up to `ends_before`
        are sent: a message that arrives completely needs no end marker, and is mostly acknowledged before that time.
        """
        if not self.payloads:
            before = min(before, ends_before)
        elif not all(each.short for each in self._reliable):
            before = now  # a long envelope travels over TCP only, after all those before it
        due: list[_Queued] = []
        while self.oldest <= before:
            due.append(self._next())
        found: list[list[Buffer]] = []
        for short, run in groupby(due, key=lambda each: each.short):
            if short:
                batches = _grouped([each.envelope.as_record() for each in run], _BATCH_BYTES)
                batched = (Envelope(EnvelopeKind.BATCH, self._session, expected, [b"".join(each)]) for each in batches)
                found += [each.as_parts() for each in batched]
            else:
                found += [each.envelope.as_parts() for each in run]
        return found

    @property
    def oldest(self) -> float:
        """When the envelope was queued that is the next to send over TCP; infinity if none may be sent."""
        first = self._reliable[0] if self._reliable else None
        return math.inf if first is None or first.envelope.number in self._reserved else first.since

    @property
    def waiting(self) -> bool:
        """Whether any envelope waits for TCP or for an ack."""
        return bool(self._reliable) or bool(self._short)

    def _next(self) -> _Queued:
        queued = self._reliable.popleft()
        self.payloads -= queued.envelope.kind is not EnvelopeKind.END
        return queued

    def control_records(self, now: float, retransmit: float, *, copies: int) -> tuple[list[list[bytes]], float]:
        """Return the records of each control packet to send now, and the seconds until more are due.

        A new envelope is sent in `copies` packets. An unacknowledged one is retransmitted after `retransmit` seconds,
        and then at growing intervals.
        """
        again, new, pause = [], [], _NEVER
        for each in self._short:
            if not each.times:
                each.record = each.envelope.as_record()
                if len(each.record) > self._room:
                    each.times = _RETRANSMITS + 1
                    continue
                new.append(each.record)
            elif each.times > _RETRANSMITS:
                continue
            elif now - each.sent >= retransmit * each.times:
                again.append(each.record)
            else:
                pause = min(pause, each.sent + retransmit * each.times - now)
                continue
            each.times, each.sent = each.times + 1, now
            pause = min(pause, retransmit * each.times)
        # Retransmitted records travel with every copy of the new ones.
        return _grouped(again + new, self._room) * (copies if new else 1), pause

    def forget_short(self) -> None:
        """Send no control packets for envelopes that have gone over TCP. Others may still need them."""
        first = self._reliable[0].envelope.number if self._reliable else self._number + 1
        while self._short and self._short[0].envelope.number < first:
            self._short.popleft()

    def clear(self) -> None:
        """Drop the end markers of messages whose packets will not leave any more, so that later envelopes can."""
        self._reliable = deque(each for each in self._reliable if each.envelope.number not in self._reserved)
        self._reserved.clear()


class ReorderBuffer:
    """Puts incoming envelopes in the order of their numbers; `expected` is the number of the next one."""

    def __init__(self) -> None:
        self.expected = 1
        self.early: dict[int, Envelope] = {}  # those that were not delivered yet
        self._bytes = 0  # of these
        self._highest = 0  # the highest number that came over TCP: an envelope missing before it never comes
        self.gaps = 0  # how often envelopes were skipped because they were lost with a connection

    def add(self, envelope: Envelope, outstanding: Outstanding, *, reliable: bool) -> bool:
        """Add an envelope from either channel; return False if it is a duplicate or too far ahead.

        TransportError if it is malformed: everything is checked before anything is kept, so that a malformed envelope
        neither takes memory nor blocks the envelopes behind it.
        """
        number = envelope.number
        if number in self.early and reliable:  # a control packet was faster, and what TCP lost before it is still lost
            self._highest = max(self._highest, number)
        if number < self.expected or number in self.early or (not reliable and number > self.expected + AHEAD):
            return False
        packet.read_acks(envelope.acks, outstanding)
        if envelope.kind is EnvelopeKind.END:
            packet.read_end(envelope)
        self.early[number] = envelope
        self._bytes += envelope.size
        if reliable:
            self._highest = max(self._highest, number)
        return True

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing may wait for lost packets any more."""
        return len(self.early) > AHEAD or self._bytes > LARGEST

    def current(self) -> Envelope | None:
        """Return the next envelope if it is here; skip those that were lost with a connection."""
        if self.expected < self._highest and self.expected not in self.early:
            self.expected, self.gaps = min(self.early), self.gaps + 1
        return self.early.get(self.expected)

    def advance(self) -> None:
        """Go on to the next number."""
        done = self.early.pop(self.expected, None)
        self._bytes -= 0 if done is None else done.size
        self.expected += 1


# Smoothed loss above which a short envelope is also sent in one, two and three control packets.
_COPIES = (0.002, 0.02, 0.1)
# A control packet is retransmitted after so many RTTs, plus the seconds that timers and threads take.
_RETRANSMIT_RTTS, _GRANULARITY = 2.0, 0.006
# Seconds after which an unacknowledged short envelope is also sent over TCP.
_TCP_DELAY = 0.1
# Seconds for which an end marker waits if there is no loss: the ack that makes it unnecessary mostly comes earlier.
_END_DELAY = 0.03
# A reader sleeps until the rest of a message should have arrived, at most this long. It does not sleep after so long
# without a packet or after four times the interval of packets. The last is the interval assumed for a single packet.
_SLEEP, _SILENCE, _INTERVAL = 0.002, 5e-4, 1e-4


Address = tuple[str, int] | tuple[str, int, int, int]  # as Python's sockets take it
Lost = tuple[int, frozenset[int]]  # an acknowledged message's ticket, and the pieces of it that were lost


class UdpSession:
    """One session, on either side."""

    def __init__(
        self, number: int, keys: bytes, now: float, *, server: bool, mtu: int, shares: FairShares | None = None
    ) -> None:
        first, second = keys[:KEY_BYTES], keys[KEY_BYTES:]
        mine, theirs = (first, second) if server else (second, first)
        self.number, self.mtu = number, mtu
        self.encryptor, self.decryptor = packet.PacketEncryptor(number, mine), packet.PacketDecryptor(theirs)
        self.sender = PieceSender(mtu, now)
        self.reassembly = Reassembly()
        self._shares = shares  # server: of all senders
        self.address: Address | None = None  # where packets go; None until it is known
        self.segments = True  # whether the kernel may be given several packets by one call
        self.origin = b""  # server: the address from which the newest packet came, as the kernel writes it
        self._out, self._in = EnvelopeQueue(number, mtu - packet.OVERHEAD - packet.CONTROL_BYTES), ReorderBuffer()
        self.control_due = 0.0  # when control packets must be looked after
        self._loss_level = 0  # copies of a short envelope, by the measured loss
        self.announce_open = False  # whether the other side must be told that its packets arrive
        self._acks: list[bytes] = []
        self._news = 0.0  # when a control packet last brought new envelopes
        self._repeated = False  # whether the other side retransmits what is here already: it needs an ack
        self.token = self.welcome = b""  # server: the worker's request for this session, and the answer to it
        self.admitted = True  # whether messages in pieces are accepted; a server admits its workers first

    # Out

    def has_control(self, now: float) -> bool:
        """Return whether anything but packets of messages may have to be sent now."""
        if self._acks or self.announce_open or self._repeated or self._out.payloads:
            return True
        return self._out.waiting and (self._loss_level > 0 or now >= self._out.oldest + self._tcp_delays(now)[1])

    @property
    def gaps(self) -> int:
        """How often something that the other side sent was lost for good."""
        return self._in.gaps

    @property
    def has_news(self) -> bool:
        """Whether anything has arrived that `deliver` has not returned."""
        return bool(self.reassembly.open) or bool(self._in.early)

    def put(self, kind: EnvelopeKind, parts: Sequence[Buffer], now: float) -> None:
        """Queue a message that must arrive; waiting acks travel with it."""
        acks, self._acks = b"".join(self._acks), []
        self._out.put(kind, parts, now, acks)

    def drain(self, now: float, *, everything: bool = False) -> list[list[Buffer]]:
        """Return the messages to send over TCP now; acks that no message took along are sent alone."""
        if self._acks:
            self.put(EnvelopeKind.ACK, [], now)
        delay, end_delay = (0.0, 0.0) if everything else self._tcp_delays(now)
        found = self._out.drain(self._in.expected, now, now - delay, now - end_delay)
        if self.announce_open:
            self.announce_open = False
            found.insert(0, Envelope(EnvelopeKind.OPEN, self.number, 0, []).as_parts())
        return found

    def _tcp_delays(self, now: float) -> tuple[float, float]:
        """Return the seconds for which envelopes wait before they go over TCP, and those for end markers alone."""
        if not self.can_send(now):
            return 0.0, 0.0
        return (_TCP_DELAY, _TCP_DELAY) if self._loss_level else (0.0, _END_DELAY)

    def control_packets(self, now: float) -> tuple[list[bytes], float]:
        """Return the control packets to send now, if the network loses packets, and the seconds until more are due."""
        if not self._loss_level or not self.can_send(now):
            self._repeated = False
            self._out.forget_short()
            return [], _NEVER
        retransmit = _RETRANSMIT_RTTS * self.sender.pacer.rtt + _GRANULARITY
        groups, pause = self._out.control_records(now, retransmit, copies=self._loss_level)
        groups = groups or [[]] * self._repeated  # an empty packet carries the ack alone
        self._repeated = False
        return self.encryptor.encrypt([packet.pack_control(self._in.expected, group) for group in groups]), pause

    def can_send(self, now: float) -> bool:
        """Return whether packets may be tried."""
        return self.address is not None and now >= self.sender.blocked_until

    def submit(self, head: bytes, pieces: Sequence[Buffer], now: float) -> int:
        """Queue a message in pieces for the pacer; return its ticket."""
        number = self._out.reserve(now)
        self.sender.submit(number, head, pieces)
        return number

    def next_packets(self, now: float, wall: float) -> tuple[list[bytes], float]:
        """Return packets of messages to send now; if there are none, also the seconds until the pacer allows some.

        The caller sends them, calls `on_sent`, and asks again. wall: the time of day (time.time).
        """
        if not self.sender.queue:
            return [], _NEVER
        message, count, delay = self.sender.next(now)
        return self.encryptor.encrypt(message.packet_contents(count, wall)) if count else [], delay

    def on_sent(self, packets: Sequence[bytes], now: float) -> None:
        """Account for the packets that `next_packets` returned, which have left."""
        message = self.sender.queue[0]
        if self.sender.on_sent(message, len(packets), sum(map(len, packets)), now):
            number, pieces = message.number, len(message.pieces)
            self._out.release(number, packet.pack_end(number, pieces, message.total, message.head))

    # In

    def receive_envelope(self, envelope: Envelope, now: float, *, reliable: bool) -> bool:
        """Add an envelope of this session from either channel; return whether it is new."""
        if envelope.kind is EnvelopeKind.BATCH:
            self._out.on_ack(envelope.number)
            records = packet.read_records(self.number, envelope.parts[0] if envelope.parts else b"")
            return any([self.receive_envelope(each, now, reliable=reliable) for each in records])
        if not self._in.add(envelope, self.sender.outstanding, reliable=reliable):
            return False
        if envelope.kind is EnvelopeKind.END:  # start the loss timer now, even if earlier envelopes are missing
            self.reassembly.end(*packet.read_end(envelope), now)
        return True

    def receive_control(self, expected: int, envelopes: list[Envelope], now: float) -> bool:
        """Add the envelopes of a control packet; return whether any is new."""
        self._out.on_ack(expected)
        news = any([self.receive_envelope(each, now, reliable=False) for each in envelopes])
        if news:
            self._news = now
        # Copies arrive together. An envelope that comes again later is a retransmission, so its ack was lost.
        self._repeated |= bool(envelopes) and now - self._news > _GRANULARITY
        return news

    def receive_pieces(self, group: PacketGroup, now: float) -> bool:
        """Add packets of a message; return whether the message is complete and can be delivered."""
        message = group[0]
        if not self.admitted:
            return False
        if not self._in.expected <= message <= self._in.expected + AHEAD and message not in self.reassembly.closed:
            return False
        if self._shares is not None:
            self._shares.on_packets(self.number, self.mtu * len(group[3]), group[-1])
        return self.reassembly.add(group, now) and message == self._in.expected

    def deliver(self, now: float) -> tuple[list[list[Buffer]], list[Lost]]:
        """Return the messages that can be delivered in order, and what acks tell of messages that were sent."""
        found: list[list[Buffer]] = []
        lost: list[Lost] = []
        partial, gaps = self.reassembly.open, self._in.gaps
        while self.has_news:
            message = partial.get(self._in.expected)
            if message is not None and message.complete:  # it needs no end marker
                found.append(self._finish(message, now))
            elif (envelope := self._in.current()) is None:
                break
            elif envelope.kind is EnvelopeKind.END:
                message = self.reassembly.end(*packet.read_end(envelope), now)
                if message is not None:
                    if not message.complete and now < self._gives_up(message) and not self._in.full:
                        break
                    found.append(self._finish(message, now))
            else:
                if envelope.kind is not EnvelopeKind.ACK:
                    found.append(list(envelope.parts))
                if len(envelope.acks):
                    lost += self._take_acks(envelope.acks, now)
            self._in.advance()
        if self._in.gaps > gaps:  # messages that were skipped will not be delivered
            for number in [number for number in partial if number < self._in.expected]:
                self.reassembly.close(number)
        return found, lost

    def _take_acks(self, acks: Buffer, now: float) -> list[Lost]:
        """Take acks into account; return the messages that they are of, with the pieces that were lost."""
        found: list[Lost] = []
        with contextlib.suppress(TransportError):  # only of a message that was not outstanding when the ack came
            for ack in packet.read_acks(acks, self.sender.outstanding):
                self.sender.on_ack(ack, now)
                found.append((ack.message, frozenset(chain(*ack.lost))))
        self._loss_level = sum(self.sender.pacer.loss > bar for bar in _COPIES)
        return found

    def _finish(self, message: PartialMessage, now: float) -> list[Buffer]:
        """Close a message, queue its ack and return what has arrived of it."""
        self.reassembly.close(message.number)
        lost = () if message.complete else packet.missing_ranges(message.count, message.pieces)
        share_lost = 1 - len(message.pieces) / message.count
        delay = now - message.last if message.pieces else 0.0
        span, share = message.stamps[1] - message.stamps[0], 0
        if self._shares is not None and message.pieces:
            self._shares.on_message(message.queue, share_lost)
            share = self._shares.share(message.stamps[1])
        self._acks.append(MessageAck(message.number, message.count, lost, delay, message.queue, span, share).pack())
        total = sum(map(len, message.pieces.values())) if message.complete else message.total
        return [message.head, pack(message.count, total, sorted(message.pieces.items()), reported=True)]

    def _gives_up(self, message: PartialMessage | None) -> float:
        """Return when a message's missing packets count as lost."""
        ended = math.inf if message is None or message.ended is None else message.ended
        return ended + self.reassembly.loss_timer.timeout

    def deadline(self, now: float) -> float:
        """Return when the next message's missing packets count as lost, or an envelope must go over TCP."""
        gives_up = self._gives_up(self.reassembly.open.get(self._in.expected))
        return min(gives_up, self._out.oldest + self._tcp_delays(now)[1])

    def time_to_complete(self, now: float) -> float:
        """Return the seconds until the rest of the next message should be here; 0 if none of it is arriving.

        To wake up for each packet costs more than to read them together.
        """
        message = self.reassembly.open.get(self._in.expected)
        if message is None or not message.pieces or message.complete or message.ended is not None:
            return 0.0
        there = len(message.pieces)
        interval = (message.stamps[1] - message.stamps[0]) / (there - 1) if there > 1 else _INTERVAL
        if now - message.last > max(_SILENCE, 4 * interval):
            return 0.0
        return min(max(interval * (message.count - there), _INTERVAL), _SLEEP)

    def clear(self) -> None:
        """Drop what is in flight to a peer that is gone."""
        self.sender.clear()
        self._out.clear()
