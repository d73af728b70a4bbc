"""The two sides of the udp transport: each is a UDP socket next to a tcp transport, over which a worker joins."""

import contextlib
import logging
import secrets
import socket
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import TransportError
from thinwire.limits import LogLimit
from thinwire.transport.base import AT_ONCE, MTU, Buffer, Connection, Listener, Parts, Peer, check_mtu
from thinwire.transport.tcp import TcpConnection, TcpListener
from thinwire.transport.udp.congestion import FairShares
from thinwire.transport.udp.packet import (
    DATA_BYTES,
    HEAD_BYTES,
    OVERHEAD,
    Envelope,
    EnvelopeKind,
    new_keys,
    read_envelope,
)
from thinwire.transport.udp.recovery import MOST_PIECES, pack_all
from thinwire.transport.udp.session import UdpSession
from thinwire.transport.udp.socket import SocketThread, open_socket

log = logging.getLogger("thinwire.transport")

# What the server tells a worker of its session: number, port, mtu, keys
_WELCOME = struct.Struct("<IHH64s")
_TOKEN_BYTES = 8
# Seconds between two log lines about a session, and between two attempts of a worker to join.
_LOG_SECONDS, _JOIN_SECONDS = 30.0, 2.0
# Seconds that the last packets have to leave when a worker closes its connection.
_CLOSE_SECONDS = 1.0
# Sessions that were offered and not used yet: how many are remembered, and for how many seconds.
_MOST_OFFERS, _OFFER_SECONDS = 4096, 10.0
# Sessions of peers that the server has not admitted: as many as one `poll` can begin, so that a new worker's session is
# not dropped before the server has read its HELLO message. One is dropped after so many seconds without a message; the
# session of a peer that was admitted once is kept longer, because it may still be sent something, or come back.
_MOST_STRANGERS, _STRANGER_SECONDS, _LINGER_SECONDS = AT_ONCE, 5.0, 30.0


def piece_bytes(mtu: int) -> int:
    """Return the bytes of a message's body that fit into a packet."""
    return mtu - OVERHEAD - DATA_BYTES - HEAD_BYTES


def send_pieces(thread: SocketThread, session: UdpSession, head: bytes, pieces: Sequence[Buffer]) -> int | None:
    """Send a message in packets and return its ticket; or send it over TCP and return None if packets do not arrive."""
    if len(head) > HEAD_BYTES:
        raise ValueError(f"the head of a message in pieces has at most {HEAD_BYTES} bytes, not {len(head)}")
    with thread.lock:
        now = time.monotonic()
        if not pieces or len(pieces) > MOST_PIECES or not session.can_send(now):
            session.put(EnvelopeKind.WHOLE, [head, pack_all(pieces)], now)
            return None
        ticket = session.submit(head, pieces, now)
        thread.send_due(session)
        if session.sender.queue:
            thread.wake()
    return ticket


def figures(session: UdpSession) -> dict[str, float]:
    """Return statistics of a session, for people."""
    reassembly, counts, pacer = session.reassembly, session.sender.counts, session.sender.pacer
    return {
        "datagrams_sent": counts["sent"],
        "datagrams_lost": counts["lost"],
        "datagrams_missing": reassembly.lost,
        "loss_sent": counts["lost"] / max(counts["sent"], 1),
        "loss_received": reassembly.lost / max(reassembly.lost + reassembly.received, 1),
        "rate": pacer.rate,
        "round_trip": pacer.rtt,
    }


class UdpConnection(Connection):
    """A worker's side. Until the server has given it a session, messages wait."""

    def __init__(self, tcp: TcpConnection, host: str) -> None:
        self._tcp, self._host = tcp, host
        self.piece_bytes = piece_bytes(MTU)  # until the server has told its mtu
        self._thread: SocketThread | None = None  # there is a thread whenever there is a session
        self._session: UdpSession | None = None
        self._waiting: deque[list[Buffer]] = deque()  # messages to send once there is a session
        self._token, self._asked = b"", 0.0
        self._logged = time.monotonic()

    def _join(self) -> None:
        """Ask for a session if there is none, and again every two seconds: the server need not be there yet."""
        now = time.monotonic()
        if self._session is None and now - self._asked > _JOIN_SECONDS:
            self._token, self._asked = self._token or secrets.token_bytes(_TOKEN_BYTES), now
            self._tcp.send(Envelope(EnvelopeKind.JOIN, 0, 0, [self._token]).as_parts())

    def poll(self, timeout: float) -> list[Parts]:
        self._join()
        self._flush()
        pause = _JOIN_SECONDS if self._thread is None else self._thread.time_to_deadline()
        found: list[Parts] = []
        for parts in self._tcp.poll(min(timeout, pause)):
            found += self._receive_tcp(parts)
        found += self._deliver(read=self._tcp.watched)
        if not found and timeout and self._thread is not None and self._thread.sleep_while_arriving():
            return self._deliver()
        return found

    def _receive_tcp(self, parts: Parts) -> list[Parts]:
        """Process a message that came over TCP; return it if it is not an envelope of this transport."""
        envelope = read_envelope(parts)
        if envelope is None:
            return [parts]
        session, thread = self._session, self._thread
        if session is None or thread is None:
            if envelope.kind is EnvelopeKind.KEY:
                self._begin_session(bytes(envelope.parts[0]) if envelope.parts else b"")
        elif envelope.session == session.number:
            if envelope.kind is EnvelopeKind.UNKNOWN:
                self._close_thread()
                self._thread = self._session = None
                self._token, self._asked = b"", 0.0
                self._join()
                return []
            with thread.lock:
                if envelope.kind is EnvelopeKind.OPEN:
                    session.address = (self._host, 0)
                elif envelope.kind > EnvelopeKind.UNKNOWN:
                    session.receive_envelope(envelope, time.monotonic(), reliable=True)
        return []

    def _begin_session(self, welcome: bytes) -> None:
        if len(welcome) != _WELCOME.size:
            raise TransportError("the server's answer to a request for a udp session is malformed")
        number, port, mtu, keys = _WELCOME.unpack(welcome)
        self.piece_bytes = piece_bytes(check_mtu(mtu))
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET  # a name means IPv4, as for tcp
        found = socket.getaddrinfo(self._host.strip("[]"), port, family, socket.SOCK_DGRAM)[0]
        sock = open_socket(found[0])
        sock.connect(found[4])
        self._session = UdpSession(number, keys, time.monotonic(), server=False, mtu=mtu)
        self._thread = SocketThread(sock, self._tcp.wake, server=False)
        self._thread.sessions[number] = self._session
        self._tcp.watch(self._thread.fileno())
        self._thread.start()
        while self._waiting:
            self.send(self._waiting.popleft())

    def _close_thread(self) -> None:
        if self._thread is not None:
            self._tcp.watch(self._thread.fileno(), on=False)
            self._thread.close()

    def _deliver(self, *, read: bool = True) -> list[Parts]:
        """Return the messages that can be delivered, after on_report was called for the acks before them."""
        if self._thread is None or self._session is None:
            return []
        if read:
            self._thread.receive()
        with self._thread.lock:
            messages, acked = self._session.deliver(time.monotonic())
        for ticket, lost in acked:
            self.on_report(ticket, lost)
        return [[memoryview(part) for part in parts] for parts in messages]

    def _flush(self, *, everything: bool = False) -> None:
        if self._thread is None or self._session is None:
            return
        for parts in self._thread.drain(self._session, everything=everything):
            self._tcp.send(parts)
        now, sender = time.monotonic(), self._session.sender
        if now - self._logged > _LOG_SECONDS and sender.counts["sent"]:
            self._logged = now
            log.info("UDP packets to the server: %s", sender.pacer)

    def send(self, parts: Sequence[Buffer]) -> None:
        if self._session is None or self._thread is None:
            self._waiting.append(list(parts))
            self._join()
            return
        with self._thread.lock:
            self._session.put(EnvelopeKind.PLAIN, parts, time.monotonic())

    def send_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        if self._session is None or self._thread is None:
            self.send([head, pack_all(pieces)])
            return None
        return send_pieces(self._thread, self._session, head, pieces)

    def figures(self) -> dict[str, float]:
        return {} if self._session is None else figures(self._session)

    def wake(self) -> None:
        self._tcp.wake()

    def close(self) -> None:
        until = time.monotonic() + _CLOSE_SECONDS
        while self._session is not None and self._session.sender.queue and time.monotonic() < until:
            time.sleep(0.002)  # the socket's thread sends them
        with contextlib.suppress(TransportError):
            self._flush(everything=True)
        self._close_thread()
        self._tcp.close()


@dataclass(frozen=True)
class _Offer:
    """A session that a worker has asked for and not used yet. It costs far less than a session."""

    token: bytes
    number: int
    keys: bytes
    welcome: bytes
    since: float


class UdpListener(Listener):
    """The server's side: one UDP socket for the sessions of all workers."""

    def __init__(self, tcp: TcpListener, host: str, *, mtu: int | None = None) -> None:
        self._tcp, self._mtu = tcp, check_mtu(MTU if mtu is None else mtu)
        self.address = "udp" + tcp.address[3:]
        self.piece_bytes = piece_bytes(self._mtu)
        sock = open_socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            sock.bind((host, int(tcp.address.rpartition(":")[2])))
        except OSError:  # another program has the UDP port of that number; workers are told which port it is
            sock.bind((host, 0))
        self._port = int(sock.getsockname()[1])
        self._sessions: dict[Peer, UdpSession] = {}
        self._offers: OrderedDict[Peer, _Offer] = OrderedDict()
        # Peers with a session that the server has not admitted, or not any more, and when their sessions expire. The
        # one that was heard from least recently comes first.
        self._strangers: OrderedDict[Peer, float] = OrderedDict()
        self._unreachable: set[Peer] = set()
        self._discards = LogLimit(log, logging.WARNING)
        self._shares = FairShares()
        self._logged = time.monotonic()
        self._thread = SocketThread(sock, tcp.wake, server=True)
        tcp.watch(self._thread.fileno())
        self._thread.start()

    @property
    def rejected(self) -> dict[str, int]:
        """The number of packets that were rejected, by reason."""
        with self._thread.lock:
            total = self._thread.rejected.copy()
            for session in self._thread.sessions.values():
                total += session.decryptor.rejected
        return dict(total)

    def poll(self, timeout: float) -> list[tuple[Peer, Parts]]:
        self._flush()
        found: list[tuple[Peer, Parts]] = []
        for peer, parts in self._tcp.poll(min(timeout, self._thread.time_to_deadline())):
            try:
                found += self._receive_tcp(peer, parts)
            except TransportError as error:
                self._discards.say(time.monotonic(), "Discarded a worker's message: %s", error)
        found += self._deliver(read=self._tcp.watched)
        if not found and timeout and self._thread.sleep_while_arriving():
            return self._deliver()
        return found

    def _receive_tcp(self, peer: Peer, parts: Parts) -> list[tuple[Peer, Parts]]:
        """Process a message that came over TCP; return it if it is not an envelope of this transport."""
        envelope, now = read_envelope(parts), time.monotonic()
        if envelope is None:  # the worker uses tcp alone; the server will refuse it
            return [(peer, parts)]
        if envelope.kind is EnvelopeKind.JOIN:
            self._offer(peer, bytes(envelope.parts[0]) if envelope.parts else b"", now)
            return []
        session = self._session_of(peer, envelope.session, now)
        if session is None:
            self._tcp.send(peer, Envelope(EnvelopeKind.UNKNOWN, envelope.session, 0, []).as_parts())
        elif envelope.kind > EnvelopeKind.UNKNOWN:
            with self._thread.lock:
                session.receive_envelope(envelope, now, reliable=True)
        return []

    def _offer(self, peer: Peer, token: bytes, now: float) -> None:
        """Offer a worker a session; one that asks again with the same token gets the same answer."""
        if len(token) != _TOKEN_BYTES:
            raise TransportError("a request for a session is malformed")
        known = self._sessions.get(peer) or self._offers.get(peer)
        if known is None or known.token != token:
            number, keys = secrets.randbits(32), new_keys()
            known = _Offer(token, number, keys, _WELCOME.pack(number, self._port, self._mtu, keys), now)
            self._offers.pop(peer, None)
            while len(self._offers) >= _MOST_OFFERS:
                self._offers.popitem(last=False)
            self._offers[peer] = known
        self._tcp.send(peer, Envelope(EnvelopeKind.KEY, known.number, 0, [known.welcome]).as_parts())

    def _session_of(self, peer: Peer, number: int, now: float) -> UdpSession | None:
        """Return a peer's session with this number, which begins if it was only offered before; None if there is none.

        A session begins with its first message, so that whoever only asks for sessions makes the server keep none.
        """
        session, offer = self._sessions.get(peer), self._offers.get(peer)
        if offer is not None and offer.number == number and number not in self._thread.sessions:
            del self._offers[peer]
            admitted = session is not None and session.admitted and peer not in self._strangers
            self._drop(peer)
            with self._thread.lock:
                session = UdpSession(number, offer.keys, now, server=True, mtu=self._mtu, shares=self._shares)
                session.token, session.welcome, session.admitted = offer.token, offer.welcome, admitted
                self._sessions[peer] = self._thread.sessions[number] = session
            if not admitted:
                self._strangers[peer] = now + _STRANGER_SECONDS
                while len(self._strangers) > _MOST_STRANGERS:
                    self._drop(next(iter(self._strangers)))
        if session is None or session.number != number:
            return None
        if peer in self._strangers:
            linger = _LINGER_SECONDS if session.admitted else _STRANGER_SECONDS
            self._strangers[peer] = now + linger
            self._strangers.move_to_end(peer)
        return session

    def _drop(self, peer: Peer) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            with self._thread.lock:
                self._thread.sessions.pop(session.number, None)
        self._strangers.pop(peer, None)
        self._unreachable.discard(peer)

    def _expire(self, now: float) -> None:
        """Drop offers that nobody used, and sessions of strangers that are silent."""
        while self._offers and now - next(iter(self._offers.values())).since > _OFFER_SECONDS:
            self._offers.popitem(last=False)
        for peer in [peer for peer, until in self._strangers.items() if now >= until]:
            self._drop(peer)

    def _deliver(self, *, read: bool = True) -> list[tuple[Peer, Parts]]:
        """Return the messages that can be delivered, after on_report was called for the acks before them."""
        if read:
            self._thread.receive()
        found: list[tuple[Peer, list[Buffer]]] = []
        reports, gaps = [], []
        with self._thread.lock:
            now = time.monotonic()
            for peer, session in self._sessions.items():
                if not session.has_news:
                    continue
                before = session.gaps
                messages, acked = session.deliver(now)
                found += [(peer, parts) for parts in messages]
                reports += [(peer, ticket, lost) for ticket, lost in acked]
                gaps += [peer] if session.gaps > before else []
        for report in reports:
            self.on_report(*report)
        for peer in gaps:
            self.on_gap(peer)
        return [(peer, [memoryview(part) for part in parts]) for peer, parts in found]

    def _flush(self, *, everything: bool = False) -> None:
        """Send what was queued since the last time, and drop what has expired."""
        for peer, session in list(self._sessions.items()):
            for parts in self._thread.drain(session, everything=everything):
                if not self._tcp.send(peer, parts):
                    self._unreachable.add(peer)
        now = time.monotonic()
        self._expire(now)
        if now - self._logged > _LOG_SECONDS:
            self._logged = now
            for session in self._sessions.values():
                if session.sender.counts["sent"]:
                    log.info("UDP packets to %s: %s", session.address, session.sender.pacer)
            if self.rejected:
                log.info("Rejected UDP packets so far: %s", self.rejected)

    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        session = self._sessions.get(peer)
        if session is None:
            return self._tcp.send(peer, parts)
        with self._thread.lock:
            session.put(EnvelopeKind.PLAIN, parts, time.monotonic())
        if peer in self._unreachable:  # this is known of an earlier message, because messages are sent by `_flush`
            self._unreachable.discard(peer)
            return False
        return True

    def send_pieces(self, peer: Peer, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        session = self._sessions.get(peer)
        if session is None:
            self._tcp.send(peer, [head, pack_all(pieces)])
            return None
        return send_pieces(self._thread, session, head, pieces)

    def figures(self, peer: Peer) -> dict[str, float]:
        return figures(self._sessions[peer]) if peer in self._sessions else {}

    def keep(self, peer: Peer) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.admitted = True
            self._strangers.pop(peer, None)

    def forget(self, peer: Peer) -> None:
        self._tcp.forget(peer)
        session = self._sessions.get(peer)
        if session is not None:
            linger = _LINGER_SECONDS if session.admitted else _STRANGER_SECONDS
            self._strangers[peer] = time.monotonic() + linger
            with self._thread.lock:
                session.clear()

    def wake(self) -> None:
        self._tcp.wake()

    def close(self) -> None:
        self._flush(everything=True)
        self._tcp.watch(self._thread.fileno(), on=False)
        self._thread.close()
        self._tcp.close()
