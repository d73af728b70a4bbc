"""The two sides of the udp transport: each is a UDP socket next to a tcp transport, over which a worker joins."""

import contextlib
import logging
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer, Connection, Listener, Parts, Peer
from thinwire.transport.limits import MTU, check_mtu
from thinwire.transport.tcp import TcpConnection, TcpListener
from thinwire.transport.udp.congestion import FairShares
from thinwire.transport.udp.packet import DATA_BYTES, OVERHEAD, Envelope, EnvelopeKind, new_keys, read_envelope
from thinwire.transport.udp.recovery import MOST_PIECES, pack_all
from thinwire.transport.udp.session import UdpSession
from thinwire.transport.udp.socket import SocketThread, open_socket

log = logging.getLogger("thinwire.transport")

# What the server tells a worker of its session: number, port, mtu, keys
_WELCOME = struct.Struct("<IHH64s")
_TOKEN_BYTES = 8
# The largest head of a message, which every packet repeats.
_HEAD_BYTES = 48
# Seconds between two log lines about a session, and between two attempts of a worker to join.
_LOG_SECONDS, _JOIN_SECONDS = 30.0, 2.0
# Seconds that the last packets have to leave when a worker closes its connection.
_CLOSE_SECONDS = 1.0
# The most sessions of a server, more than it ever has workers.
_MOST_SESSIONS = 8192
# Seconds for which the session of a peer that is gone is kept: it may still be sent something, or come back.
_LINGER_SECONDS = 30.0


def piece_bytes(mtu: int) -> int:
    """Return the bytes of a message's body that fit into a packet."""
    return mtu - OVERHEAD - DATA_BYTES - _HEAD_BYTES


def send_pieces(thread: SocketThread, session: UdpSession, head: bytes, pieces: Sequence[Buffer]) -> int | None:
    """Send a message in packets and return its ticket; or send it over TCP and return None if packets do not arrive."""
    if len(head) > _HEAD_BYTES:
        raise ValueError(f"the head of a message in pieces has at most {_HEAD_BYTES} bytes, not {len(head)}")
    with thread.lock:
        if not pieces or len(pieces) > MOST_PIECES or not session.can_send(time.monotonic()):
            session.put(EnvelopeKind.WHOLE, [head, pack_all(pieces)])
            return None
        ticket = session.submit(head, pieces)
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
        "datagrams_received": reassembly.received,
        "datagrams_missing": reassembly.lost,
        "loss_sent": counts["lost"] / max(counts["sent"], 1),
        "loss_received": reassembly.lost / max(reassembly.lost + reassembly.received, 1),
        "late": reassembly.late,
        "repeated": reassembly.repeated,
        "forged": session.decryptor.rejected["forged"],
        "replayed": session.decryptor.rejected["replayed"],
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
                    session.receive_envelope(envelope, reliable=True)
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
        self._session = UdpSession(number, keys, server=False, mtu=mtu)
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
            self._session.put(EnvelopeKind.PLAIN, parts)

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
        self._unreachable: set[Peer] = set()
        self._forgotten: dict[Peer, float] = {}  # peers that are gone, and since when
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
                log.warning("Discarded a worker's message: %s", error)
        found += self._deliver(read=self._tcp.watched)
        if not found and timeout and self._thread.sleep_while_arriving():
            return self._deliver()
        return found

    def _receive_tcp(self, peer: Peer, parts: Parts) -> list[tuple[Peer, Parts]]:
        """Process a message that came over TCP; return it if it is not an envelope of this transport."""
        envelope = read_envelope(parts)
        self._forgotten.pop(peer, None)
        if envelope is None:  # the worker uses tcp alone; the server will refuse it
            return [(peer, parts)]
        session = self._sessions.get(peer)
        if envelope.kind is EnvelopeKind.JOIN:
            self._admit(peer, bytes(envelope.parts[0]) if envelope.parts else b"")
        elif session is None or session.number != envelope.session:
            self._tcp.send(peer, Envelope(EnvelopeKind.UNKNOWN, envelope.session, 0, []).as_parts())
        elif envelope.kind > EnvelopeKind.UNKNOWN:
            with self._thread.lock:
                session.receive_envelope(envelope, reliable=True)
        return []

    def _admit(self, peer: Peer, token: bytes) -> None:
        """Give a worker a session; one that asks again with the same token gets the same session."""
        sessions = self._thread.sessions
        with self._thread.lock:
            session = self._sessions.get(peer)
            if session is None or session.token != token or len(token) != _TOKEN_BYTES:
                self._drop(peer)
                while len(self._sessions) >= _MOST_SESSIONS:
                    self._drop(next(iter(self._sessions)))
                number = next(n for n in iter(lambda: secrets.randbits(32), None) if n not in sessions)
                keys = new_keys()
                session = UdpSession(number, keys, server=True, mtu=self._mtu, shares=self._shares)
                session.token, session.welcome = token, _WELCOME.pack(number, self._port, self._mtu, keys)
                self._sessions[peer] = sessions[number] = session
        self._tcp.send(peer, Envelope(EnvelopeKind.KEY, session.number, 0, [session.welcome]).as_parts())

    def _drop(self, peer: Peer) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            self._thread.sessions.pop(session.number, None)
        self._forgotten.pop(peer, None)
        self._unreachable.discard(peer)

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
        """Send what was queued since the last time, and drop the sessions of peers that are gone for long enough."""
        for peer, session in list(self._sessions.items()):
            for parts in self._thread.drain(session, everything=everything):
                if not self._tcp.send(peer, parts):
                    self._unreachable.add(peer)
        now = time.monotonic()
        for peer in [peer for peer, since in self._forgotten.items() if now - since > _LINGER_SECONDS]:
            with self._thread.lock:
                self._drop(peer)
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
            session.put(EnvelopeKind.PLAIN, parts)
        if peer in self._unreachable:  # this is known of an earlier message, because messages are sent by `_flush`
            self._unreachable.discard(peer)
            return False
        return True

    def send_pieces(self, peer: Peer, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        session = self._sessions.get(peer)
        if session is None:
            self._tcp.send(peer, [head, pack_all(pieces)])
            return None
        self._forgotten.pop(peer, None)
        return send_pieces(self._thread, session, head, pieces)

    def figures(self, peer: Peer) -> dict[str, float]:
        return figures(self._sessions[peer]) if peer in self._sessions else {}

    def forget(self, peer: Peer) -> None:
        self._tcp.forget(peer)
        session = self._sessions.get(peer)
        if session is not None:
            self._forgotten[peer] = time.monotonic()
            with self._thread.lock:
                session.clear()

    def wake(self) -> None:
        self._tcp.wake()

    def close(self) -> None:
        self._flush(everything=True)
        self._tcp.watch(self._thread.fileno(), on=False)
        self._thread.close()
        self._tcp.close()
