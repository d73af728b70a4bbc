"""Udp, the server's side: a socket for the datagrams of all workers, next to the tcp listener that they joined by."""

import logging
import math
import secrets
import socket
import time
from collections.abc import Sequence

from thinwire.errors import TransportError
from thinwire.transport.base import Buffer, Listener, Parts, Peer
from thinwire.transport.datagrams import SESSION, TOKEN_BYTES, TOLD_EVERY, figures, piece_bytes, send_pieces
from thinwire.transport.engine import Engine, open_socket
from thinwire.transport.envelope import Envelope, Kind, read_envelope
from thinwire.transport.mtu import MTU, check_mtu
from thinwire.transport.path import Path
from thinwire.transport.pieces import pack_all
from thinwire.transport.sealing import new_keys
from thinwire.transport.shares import Shares
from thinwire.transport.tcp import TcpListener

log = logging.getLogger("thinwire.transport")

# Workers that have asked for a session; more than any server has.
_MOST_PATHS = 8192
# Seconds for which the path of a peer that is gone is kept: it may be told something yet, or come back.
_LINGERS = 30.0


class UdpListener(Listener):
    """The server's side."""

    def __init__(self, tcp: TcpListener, host: str, *, mtu: int | None = None) -> None:
        self._tcp, self._mtu = tcp, check_mtu(MTU if mtu is None else mtu)
        self.piece_bytes = piece_bytes(self._mtu)
        sock = open_socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            sock.bind((host, int(tcp.address.rpartition(":")[2])))
        except OSError:  # somebody else has the port of that number: workers are told which one it is
            sock.bind((host, 0))
        self._port = int(sock.getsockname()[1])
        self._paths: dict[Peer, Path] = {}
        self._peers: dict[int, Peer] = {}
        self._tokens: dict[Peer, bytes] = {}
        self._unreachable: set[Peer] = set()
        self._forgotten: dict[Peer, float] = {}  # and when
        self._shares = Shares()
        self._told = time.monotonic()
        self._engine = Engine(sock, tcp.wake, probes=False)
        tcp.watch(self._engine.fileno())
        self._engine.start()

    @property
    def address(self) -> str:
        return "udp" + self._tcp.address[3:]

    @property
    def rejected(self) -> dict[str, int]:
        """Datagrams that were not believed, by reason."""
        with self._engine.lock:
            total = self._engine.counts.copy()
            for path in self._engine.paths.values():
                total += path.opener.rejected
        return dict(total)

    def poll(self, timeout: float) -> list[tuple[Peer, Parts]]:
        self._flush()
        found: list[tuple[Peer, Parts]] = []
        now = time.monotonic()
        with self._engine.lock:
            deadline = min([path.deadline(now) for path in self._paths.values()], default=math.inf)
        pause = min(timeout, max(0.0, deadline - now))
        for peer, parts in self._tcp.poll(pause):
            try:
                found += self._arrived(peer, parts)
            except TransportError as error:
                log.warning("a worker's message is discarded: %s", error)
        found += self._ready(read=self._tcp.watched)
        if not found and timeout and self._engine.sleep_while_arriving():
            return self._ready()
        return found

    def _arrived(self, peer: Peer, parts: Parts) -> list[tuple[Peer, Parts]]:
        envelope = read_envelope(parts)
        self._forgotten.pop(peer, None)
        if envelope is None:  # a worker that speaks tcp alone: its hello will be refused
            return [(peer, parts)]
        path = self._paths.get(peer)
        if envelope.kind is Kind.JOIN:
            self._join(peer, bytes(envelope.parts[0]) if envelope.parts else b"")
        elif path is None or path.session != envelope.session:
            self._tcp.send(peer, Envelope(Kind.AGAIN, envelope.session, 0, []).as_parts())
        elif envelope.kind > Kind.AGAIN:
            with self._engine.lock:
                path.take(envelope, reliable=True)
        return []

    def _join(self, peer: Peer, token: bytes) -> None:
        with self._engine.lock:
            if self._tokens.get(peer) != token or len(token) != TOKEN_BYTES:
                self._drop(peer)
                while len(self._paths) >= _MOST_PATHS:
                    self._drop(next(iter(self._paths)))
                session = next(s for s in iter(lambda: secrets.randbits(32), None) if s not in self._peers)
                keys = new_keys()
                path = Path(session, keys, server=True, mtu=self._mtu, shares=self._shares)
                path.welcome = SESSION.pack(session, self._port, self._mtu) + keys
                self._paths[peer], self._peers[session], self._tokens[peer] = path, peer, token
                self._engine.paths[session] = path
            path = self._paths[peer]
        self._tcp.send(peer, Envelope(Kind.KEY, path.session, 0, [path.welcome]).as_parts())

    def _drop(self, peer: Peer) -> None:
        path = self._paths.pop(peer, None)
        if path is not None:
            self._engine.paths.pop(path.session, None)
            self._peers.pop(path.session, None)
        self._tokens.pop(peer, None)
        self._forgotten.pop(peer, None)
        self._unreachable.discard(peer)

    def _ready(self, *, read: bool = True) -> list[tuple[Peer, Parts]]:
        """Messages that are complete or in turn; reports go to their listener first."""
        if read:
            self._engine.receive()
        found: list[tuple[Peer, list[Buffer]]] = []
        reports, gaps = [], []
        with self._engine.lock:
            now = time.monotonic()
            for peer, path in self._paths.items():
                if not path.has_news:
                    continue
                before = path.gaps
                messages, outcomes = path.ready(now)
                found += [(peer, parts) for parts in messages]
                reports += [(peer, outcome) for outcome in outcomes]
                gaps += [peer] if path.gaps > before else []
        for peer, outcome in reports:
            self.on_report(peer, outcome.ticket, outcome.lost)
        for peer in gaps:
            self.on_gap(peer)
        return [(peer, [memoryview(part) for part in parts]) for peer, parts in found]

    def _flush(self, *, all_of_it: bool = False) -> None:
        """Send what was queued since the last time, as few messages."""
        now = time.monotonic()
        for peer, path in list(self._paths.items()):
            with self._engine.lock:
                if not all_of_it and not path.has_words(now):
                    continue
                messages = path.drain(all_of_it=all_of_it)
                self._engine.express(path)
            for parts in messages:
                if not self._tcp.send(peer, parts):
                    self._unreachable.add(peer)
            self._engine.poke_before(path.express_at)
        for peer in [peer for peer, since in self._forgotten.items() if now - since > _LINGERS]:
            with self._engine.lock:
                self._drop(peer)
        if now - self._told > TOLD_EVERY:
            self._told = now
            for path in self._paths.values():
                if path.counts["sent"]:
                    log.info("datagrams to %s: %s", path.address, path.pacer)
            if self.rejected:
                log.info("datagrams that were not believed so far: %s", self.rejected)

    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        path = self._paths.get(peer)
        if path is None:
            return self._tcp.send(peer, parts)
        with self._engine.lock:
            path.put(Kind.PLAIN, parts)
        if peer in self._unreachable:  # of an earlier message: they are sent together, and it is known a little later
            self._unreachable.discard(peer)
            return False
        return True

    def send_pieces(self, peer: Peer, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        path = self._paths.get(peer)
        if path is None:
            self._tcp.send(peer, [head, pack_all(pieces)])
            return None
        self._forgotten.pop(peer, None)
        return send_pieces(self._engine, path, head, pieces)

    def figures(self, peer: Peer) -> dict[str, float]:
        path = self._paths.get(peer)
        return {} if path is None else figures(path)

    def forget(self, peer: Peer) -> None:
        self._tcp.forget(peer)
        path = self._paths.get(peer)
        if path is not None:
            self._forgotten[peer] = time.monotonic()
            with self._engine.lock:
                path.clear()

    def wake(self) -> None:
        self._tcp.wake()

    def close(self) -> None:
        self._flush(all_of_it=True)
        self._tcp.watch(self._engine.fileno(), on=False)
        self._engine.close()
        self._tcp.close()
