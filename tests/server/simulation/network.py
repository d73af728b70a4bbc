"""The network between one worker and the server: TCP connections that break, and packets that are lost or late."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.server.simulation.events import Events
from thinwire.transport.base import Buffer
from thinwire.transport.udp.congestion import FairShares
from thinwire.transport.udp.endpoints import piece_bytes
from thinwire.transport.udp.packet import KEY_BYTES, Envelope, EnvelopeKind, read_envelope, split_packet
from thinwire.transport.udp.recovery import pack_all
from thinwire.transport.udp.session import UdpSession
from thinwire.transport.udp.socket import PacketReceiver

Parts = list[memoryview]
Handle = Callable[..., None]  # calls its first argument with the others, when the process runs
# Packets of a few pieces each, so that messages of a few dozen bytes have several.
_MTU = 150
# Seconds after which a worker asks for a udp session again.
_JOIN_SECONDS = 2.0


@dataclass
class Trouble:
    """How bad the network is: seconds of delay one way, and chances for each message (over udp, each packet)."""

    delay: float = 0.01
    jitter: float = 0.0
    loss: float = 0.0
    twice: float = 0.0
    reordered: float = 0.0


class Direction:
    """One direction of a connection, which delivers messages in order unless something goes wrong.

    packets: a partition loses what is sent meanwhile; otherwise TCP holds it back and repeats it.
    """

    def __init__(self, events: Events, trouble: Trouble, *, reliable: bool = False, packets: bool = False) -> None:
        self._events, self.trouble, self._reliable, self._packets = events, trouble, reliable, packets
        self.deliver: Callable[[Parts], None] = lambda parts: None
        self._last = 0.0  # when the newest message arrives
        self._broken = 0  # how often the connection has broken; messages of before are lost
        self.healed = 0.0  # when a partition ends

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send a message, which arrives later, twice, out of order or never."""
        message = [bytes(part) for part in parts]
        chance, trouble, now, bad = self._events.chance, self.trouble, self._events.now, not self._reliable
        if (self._packets and now < self.healed) or (bad and trouble.loss and chance.random() < trouble.loss):
            return
        delay = trouble.delay + trouble.jitter * chance.random()
        arrival = max(now + delay, self.healed + trouble.delay)
        if not (bad and trouble.reordered and chance.random() < trouble.reordered):
            self._last = arrival = max(arrival, self._last)
        for _ in range(1 + bool(bad and trouble.twice and chance.random() < trouble.twice)):
            self._events.after(arrival - now, self._arrive, message, self._broken)

    def _arrive(self, message: list[bytes], broken: int) -> None:
        if broken == self._broken:
            self._events.note(message[0])
            self.deliver([memoryview(part) for part in message])

    def partition(self, seconds: float) -> None:
        """Let nothing pass for so many seconds."""
        self.healed = max(self.healed, self._events.now + seconds)
        if self._packets:
            self.lose_all()

    def lose_all(self) -> None:
        """Lose what is on its way, as when a connection breaks."""
        self._broken += 1
        self._last = 0.0


@dataclass
class End:
    """What a process does with what the network delivers. `handle` calls something when the process runs.

    now: its clock. shares: how a server divides its link among its workers.
    """

    now: Callable[[], float] = lambda: 0.0
    shares: FairShares | None = None
    handle: Handle = lambda what, *arguments: None
    receive: Callable[[Parts], None] = lambda parts: None
    report: Callable[[int, frozenset[int]], None] = lambda ticket, lost: None
    gap: Callable[[], None] = lambda: None


class TcpLink:
    """A connection over TCP: it reconnects by itself, as ZeroMQ's do, and what was on its way is lost.

    While it is broken, the server cannot send; the worker's messages wait.
    """

    piece_bytes: int | None = None

    def __init__(self, events: Events, trouble: Trouble, *, reliable: bool = False) -> None:
        self.events = events
        self.worker, self.server = End(), End()
        self.up, self.down = (Direction(events, trouble, reliable=reliable) for _ in range(2))
        self.up.deliver = lambda parts: self.server.handle(self.server_receives, parts)
        self.down.deliver = lambda parts: self.worker.handle(self.worker_receives, parts)
        self._waiting: list[Sequence[Buffer]] = []
        self._closed_until = 0.0
        self.closed = False

    @property
    def connected(self) -> bool:
        return not self.closed and self.events.now >= self._closed_until

    def server_receives(self, parts: Parts) -> None:
        self.server.receive(parts)

    def worker_receives(self, parts: Parts) -> None:
        self.worker.receive(parts)

    def worker_sends(self, parts: Sequence[Buffer]) -> None:
        if self.connected and not self._waiting:
            self.up.send(parts)
        elif not self.closed:
            self._waiting.append([bytes(part) for part in parts])

    def server_sends(self, parts: Sequence[Buffer]) -> bool:
        if self.connected:
            self.down.send(parts)
        return self.connected

    def worker_sends_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        raise NotImplementedError

    def server_sends_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        raise NotImplementedError

    def keep(self) -> None:
        """The server has admitted the worker."""

    def forget(self) -> None:
        """The server's session with the worker is over."""

    def worker_flushes(self) -> None:
        """The worker has done what it wanted for now."""

    def server_flushes(self) -> None:
        """The server has done what it wanted for now."""

    def kept_messages(self) -> int:
        """Return how many messages in pieces the server keeps for this worker, in both directions."""
        return 0

    def break_for(self, seconds: float) -> None:
        """Break the connection; it is made again after so many seconds."""
        self.up.lose_all()
        self.down.lose_all()
        self._closed_until = max(self._closed_until, self.events.now + seconds)
        self.events.after(self._closed_until - self.events.now, self._reconnect)

    def _reconnect(self) -> None:
        if self.connected:
            waiting, self._waiting = self._waiting, []
            for parts in waiting:
                self.up.send(parts)

    def partition(self, seconds: float, *, up: bool = True, down: bool = True) -> None:
        """Let nothing pass to the server (up), to the worker (down) or both for so many seconds."""
        for way in [self.up] * up + [self.down] * down:
            way.partition(seconds)

    def server_restarts(self) -> None:
        """The server's process has ended, and another one listens at its address."""
        self.break_for(0.1)

    def close(self) -> None:
        """The worker's process has ended."""
        self.closed = True
        self.up.lose_all()
        self.down.lose_all()


class UdpSide:
    """One side of a udp session: a real session, whose packets and envelopes the link carries."""

    def __init__(self, link: "UdpLink", number: int, keys: bytes, *, server: bool) -> None:
        self._link, self._server, self._end = link, server, link.server if server else link.worker
        now, shares = self._end.now(), self._end.shares
        self.session = session = UdpSession(number, keys, now, server=server, mtu=_MTU, shares=shares)
        session.address, session.origin, session.admitted = ("simulated", 1), b"simulated", not server
        self._receiver = PacketReceiver({number: session}, Counter(), server=server)
        self._timer = 0.0  # when `flush` is called anyway, in the events' time

    def on_packet(self, parts: Parts) -> None:
        found = split_packet(bytes(parts[0]))
        if found is not None and self._current:
            now = self._end.now()
            self._receiver.receive([(found, b"simulated", now)], now)
            self.deliver()

    @property
    def _current(self) -> bool:
        """Whether this is still the session of its process."""
        return (self._link.server_side if self._server else self._link.worker_side) is self

    def on_envelope(self, envelope: Envelope) -> None:
        self.session.receive_envelope(envelope, self._end.now(), reliable=True)
        self.deliver()

    def deliver(self) -> None:
        """Hand over what can be delivered, after the reports that came before it, as the endpoints do."""
        end, gaps = self._end, self.session.gaps
        messages, acked = self.session.deliver(end.now())
        for ticket, lost in acked:
            end.report(ticket, lost)
        if self.session.gaps > gaps:
            end.gap()
        for parts in messages:
            if self._current:
                end.receive([memoryview(part) for part in parts])
        self.flush()

    def send_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        now, session = self._end.now(), self.session
        if not pieces or not session.can_send(now):
            session.put(EnvelopeKind.WHOLE, [head, pack_all(pieces)], now)
            return None
        return session.submit(head, pieces, now)

    def flush(self) -> None:
        """Send what may leave now, and set a timer for the rest."""
        if not self._current:
            return
        now, session, link = self._end.now(), self.session, self._link
        packets = link.down_packets if self._server else link.up_packets
        while (due := session.next_packets(now, now))[0]:
            for packet in due[0]:
                packets.send([packet])
            session.on_sent(due[0], now)
        if session.has_control(now):
            for parts in session.drain(now):
                if self._server:
                    TcpLink.server_sends(link, parts)
                else:
                    TcpLink.worker_sends(link, parts)
        control, pause = session.control_packets(now)
        for packet in control:
            packets.send([packet])
        wait = max(1e-3, min(due[1], pause, session.deadline(now) - now))
        present = link.events.now
        if wait < 60.0 and not (present < self._timer <= present + wait):
            self._timer = present + wait
            link.events.after(wait, self._on_timer, self._timer)

    def _on_timer(self, when: float) -> None:
        if when == self._timer and self._current:
            self._end.handle(self.deliver)


class UdpLink(TcpLink):
    """The udp transport: a TCP connection that loses nothing unless it breaks, and packets that are not reliable."""

    piece_bytes = piece_bytes(_MTU)

    def __init__(self, events: Events, trouble: Trouble) -> None:
        super().__init__(events, trouble, reliable=True)
        self.worker_side: UdpSide | None = None
        self.server_side: UdpSide | None = None
        self._early: list[Sequence[Buffer]] = []  # the worker's messages before it has a session
        self._token, self._answer = b"\0", (b"", 0, b"")  # the worker's; and the last one that the server answered
        self.up_packets, self.down_packets = (Direction(events, trouble, packets=True) for _ in range(2))
        self.up_packets.deliver = lambda parts: self._packet(self.server, self.server_side, parts)
        self.down_packets.deliver = lambda parts: self._packet(self.worker, self.worker_side, parts)
        self._join()

    @staticmethod
    def _packet(end: End, side: UdpSide | None, parts: Parts) -> None:
        if side is not None:
            end.handle(side.on_packet, parts)

    def _join(self) -> None:
        if self.worker_side is None and not self.closed:
            TcpLink.worker_sends(self, Envelope(EnvelopeKind.JOIN, 0, 0, [self._token]).as_parts())
            self.events.after(_JOIN_SECONDS, self._join)

    def server_receives(self, parts: Parts) -> None:
        envelope = read_envelope(parts)
        assert envelope is not None
        if envelope.kind is EnvelopeKind.JOIN:
            self._offer(bytes(envelope.parts[0]))
        elif self.server_side is None or envelope.session != self.server_side.session.number:
            TcpLink.server_sends(self, Envelope(EnvelopeKind.UNKNOWN, envelope.session, 0, []).as_parts())
        else:
            self.server_side.on_envelope(envelope)

    def _offer(self, token: bytes) -> None:
        """Begin a session; a worker that asks again with the same token gets the same answer, as from the listener."""
        if self.server_side is None or token != self._answer[0]:
            number, keys = self.events.chance.getrandbits(32), self.events.chance.randbytes(2 * KEY_BYTES)
            admitted = self.server_side is not None and self.server_side.session.admitted
            self._answer = token, number, keys
            self.server_side = UdpSide(self, number, keys, server=True)
            self.server_side.session.admitted = admitted
        _, number, keys = self._answer
        TcpLink.server_sends(self, Envelope(EnvelopeKind.KEY, number, 0, [keys]).as_parts())

    def worker_receives(self, parts: Parts) -> None:
        envelope = read_envelope(parts)
        assert envelope is not None
        side = self.worker_side
        if envelope.kind is EnvelopeKind.KEY and side is None:
            self.worker_side = UdpSide(self, envelope.session, bytes(envelope.parts[0]), server=False)
            early, self._early = self._early, []
            for each in early:
                self.worker_sends(each)
            self.worker_side.flush()
        elif side is not None and envelope.session == side.session.number:
            if envelope.kind is EnvelopeKind.UNKNOWN:
                self.worker_side = None
                self._token = bytes([(self._token[0] + 1) % 256])
                self._join()
            elif envelope.kind > EnvelopeKind.UNKNOWN:
                side.on_envelope(envelope)

    def worker_sends(self, parts: Sequence[Buffer]) -> None:
        if self.worker_side is None:
            self._early.append([bytes(part) for part in parts])
        else:
            self.worker_side.session.put(EnvelopeKind.PLAIN, [bytes(part) for part in parts], self.worker.now())

    def server_sends(self, parts: Sequence[Buffer]) -> bool:
        if self.server_side is None:
            return False
        self.server_side.session.put(EnvelopeKind.PLAIN, [bytes(part) for part in parts], self.server.now())
        return self.connected

    def worker_sends_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        if self.worker_side is None:
            self._early.append([head, pack_all(pieces)])
            return None
        return self.worker_side.send_pieces(head, pieces)

    def server_sends_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        return None if self.server_side is None else self.server_side.send_pieces(head, pieces)

    def keep(self) -> None:
        if self.server_side is not None:
            self.server_side.session.admitted = True

    def forget(self) -> None:
        if self.server_side is not None:
            self.server_side.session.clear()

    def worker_flushes(self) -> None:
        if self.worker_side is not None:
            self.worker_side.flush()

    def server_flushes(self) -> None:
        if self.server_side is not None:
            self.server_side.flush()

    def kept_messages(self) -> int:
        if self.server_side is None:
            return 0
        session = self.server_side.session
        return len(session.sender._unacked) + len(session.reassembly.open)

    def break_for(self, seconds: float) -> None:
        super().break_for(seconds)
        for packets in (self.up_packets, self.down_packets):
            packets.lose_all()

    def partition(self, seconds: float, *, up: bool = True, down: bool = True) -> None:
        super().partition(seconds, up=up, down=down)
        for way in [self.up_packets] * up + [self.down_packets] * down:
            way.partition(seconds)

    def server_restarts(self) -> None:
        self.server_side = None
        super().server_restarts()

    def close(self) -> None:
        super().close()
        self.worker_side = None


def new_link(events: Events, trouble: Trouble, transport: str) -> TcpLink:
    """Return the connection of a new worker."""
    return UdpLink(events, trouble) if transport == "udp" else TcpLink(events, trouble)
