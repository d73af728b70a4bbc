"""Udp: bodies of messages in datagrams, next to a tcp transport that carries everything that must arrive.

A worker asks for a session over tcp and is told keys and a port; its first datagram shows the server where it is.
Until then, and where datagrams do not pass, everything goes over tcp. The worker's side; see docs/udp.md.
"""

import contextlib
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer, Connection, Parts
from thinwire.transport.datagrams import SESSION, TOKEN_BYTES, TOLD_EVERY, figures, piece_bytes, send_pieces
from thinwire.transport.engine import Engine, open_socket
from thinwire.transport.envelope import Envelope, Kind, read_envelope
from thinwire.transport.mtu import MTU, check_mtu
from thinwire.transport.path import Path
from thinwire.transport.pieces import pack_all
from thinwire.transport.sealing import KEY_BYTES
from thinwire.transport.tcp import TcpConnection

log = logging.getLogger("thinwire.transport")

_JOIN_EVERY = 2.0
# Seconds that the last datagrams are given to leave.
_PARTING = 1.0


class UdpConnection(Connection):
    """A worker's side."""

    def __init__(self, tcp: TcpConnection, host: str) -> None:
        self._tcp, self._host = tcp, host
        self.piece_bytes = piece_bytes(MTU)  # until the server has said how much it is
        self._engine: Engine | None = None
        self._path: Path | None = None
        self._waiting: deque[list[Buffer]] = deque()  # until there is a session
        self._token, self._asked = b"", 0.0
        self._told = time.monotonic()

    def _ask(self) -> None:
        """Ask for a session, again from time to time: the server need not be there yet."""
        now = time.monotonic()
        if self._path is None and now - self._asked > _JOIN_EVERY:
            self._token, self._asked = self._token or secrets.token_bytes(TOKEN_BYTES), now
            self._tcp.send(Envelope(Kind.JOIN, 0, 0, [self._token]).as_parts())

    def poll(self, timeout: float) -> list[Parts]:
        self._ask()
        self._flush()
        found: list[Parts] = []
        pause = timeout
        if self._path is None:
            pause = min(pause, _JOIN_EVERY)
        elif self._engine is not None:
            now = time.monotonic()
            with self._engine.lock:
                deadline = self._path.deadline(now)
            pause = min(pause, max(0.0, deadline - now))
        for parts in self._tcp.poll(pause):
            found += self._arrived(parts)
        found += self._ready(read=self._tcp.watched)
        if not found and timeout and self._engine is not None and self._engine.sleep_while_arriving():
            return self._ready()
        return found

    def _arrived(self, parts: Parts) -> list[Parts]:
        envelope = read_envelope(parts)
        if envelope is None:
            return [parts]
        path = self._path
        if envelope.kind is Kind.KEY and path is None:
            self._begin(bytes(envelope.parts[0]) if envelope.parts else b"")
        elif path is not None and self._engine is not None and envelope.session == path.session:
            if envelope.kind is Kind.AGAIN:
                self._end_session()
                self._ask()
                return []
            with self._engine.lock:
                if envelope.kind is Kind.OPEN:
                    path.address = (self._host, 0)
                elif envelope.kind > Kind.AGAIN:
                    path.take(envelope, reliable=True)
        return []

    def _begin(self, welcome: bytes) -> None:
        if len(welcome) != SESSION.size + 2 * KEY_BYTES:
            raise TransportError("the server's answer to a worker that wants datagrams makes no sense")
        session, port, mtu = SESSION.unpack_from(welcome)
        self.piece_bytes = piece_bytes(check_mtu(mtu))
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET  # a name means IPv4, as for tcp
        found = socket.getaddrinfo(self._host.strip("[]"), port, family, socket.SOCK_DGRAM)[0]
        sock = open_socket(found[0])
        sock.connect(found[4])
        self._path = Path(session, welcome[SESSION.size :], server=False, mtu=mtu)
        self._engine = Engine(sock, self._tcp.wake, probes=True)
        self._engine.paths[session] = self._path
        self._tcp.watch(self._engine.fileno())
        self._engine.start()
        while self._waiting:
            self.send(self._waiting.popleft())

    def _end_session(self) -> None:
        self._close_engine()
        self._engine = self._path = None
        self._token, self._asked = b"", 0.0

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._tcp.watch(self._engine.fileno(), on=False)
            self._engine.close()

    def _ready(self, *, read: bool = True) -> list[Parts]:
        if self._engine is None or self._path is None:
            return []
        if read:
            self._engine.receive()
        with self._engine.lock:
            messages, outcomes = self._path.ready(time.monotonic())
        for outcome in outcomes:
            self.on_report(outcome.ticket, outcome.lost)
        return [[memoryview(part) for part in parts] for parts in messages]

    def _flush(self, *, all_of_it: bool = False) -> None:
        if self._engine is None or self._path is None:
            return
        now = time.monotonic()
        messages: list[list[Buffer]] = []
        with self._engine.lock:
            words = all_of_it or self._path.has_words(now)
            if words:
                messages = self._path.drain(all_of_it=all_of_it)
                self._engine.express(self._path)
        for parts in messages:
            self._tcp.send(parts)
        if words:
            self._engine.poke_before(self._path.express_at)
        if now - self._told > TOLD_EVERY and self._path.counts["sent"]:
            self._told = now
            log.info("datagrams to the server: %s", self._path.pacer)

    def send(self, parts: Sequence[Buffer]) -> None:
        if self._path is None or self._engine is None:
            self._waiting.append(list(parts))
            self._ask()
            return
        with self._engine.lock:
            self._path.put(Kind.PLAIN, parts)

    def send_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        if self._path is None or self._engine is None:
            self.send([head, pack_all(pieces)])
            return None
        return send_pieces(self._engine, self._path, head, pieces)

    def figures(self) -> dict[str, float]:
        return {} if self._path is None else figures(self._path)

    def wake(self) -> None:
        self._tcp.wake()

    def close(self) -> None:
        until = time.monotonic() + _PARTING
        while self._path is not None and self._path.queue and time.monotonic() < until:
            time.sleep(0.002)  # the engine's thread lets them leave
        with contextlib.suppress(TransportError):
            self._flush(all_of_it=True)
        self._close_engine()
        self._tcp.close()
