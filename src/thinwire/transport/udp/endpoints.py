"""Udp, the server's side: a socket for the datagrams of all workers, next to the tcp listener that they joined by."""

import contextlib
import logging
import math
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
from thinwire.transport.udp.congestion import Shares
from thinwire.transport.udp.packet import DATA_BYTES, KEY_BYTES, OVERHEAD, Envelope, Kind, new_keys, read_envelope
from thinwire.transport.udp.recovery import MOST_PIECES, pack_all
from thinwire.transport.udp.session import Path
from thinwire.transport.udp.socket import Engine, open_socket

# What a worker is told of its session: number, port, mtu; after it the keys.
SESSION = struct.Struct("<IHH")
TOKEN_BYTES = 8
# Seconds between two lines on a path in the log.
TOLD_EVERY = 30.0
# A message's head that every datagram repeats.
HEAD_BYTES = 48


def piece_bytes(mtu: int) -> int:
    """What a datagram has room for."""
    return mtu - OVERHEAD - DATA_BYTES - HEAD_BYTES


def send_pieces(engine: Engine, path: Path, head: bytes, pieces: Sequence[Buffer]) -> int | None:
    """Send a message in datagrams, or reliably where they do not pass; its ticket, or None if all will arrive."""
    if len(head) > HEAD_BYTES:
        raise ValueError(f"a head has at most {HEAD_BYTES} bytes, not {len(head)}")
    with engine.lock:
        if not pieces or len(pieces) > MOST_PIECES or not path.can_send(time.monotonic()):
            path.put(Kind.WHOLE, [head, pack_all(pieces)])
            return None
        ticket = path.submit(head, pieces)
        engine.pump(path)
        if path.queue:
            engine.poke()
    return ticket


def figures(path: Path) -> dict[str, float]:
    """What there is to know of a path."""
    gathering, sent = path.gathering, path.counts["sent"]
    missing = gathering.lost / max(gathering.lost + gathering.received, 1)
    return {
        "datagrams_sent": sent,
        "datagrams_lost": path.counts["lost"],
        "datagrams_received": gathering.received,
        "datagrams_missing": gathering.lost,
        "loss_sent": path.counts["lost"] / max(sent, 1),
        "loss_received": missing,
        "late": gathering.late,
        "repeated": gathering.repeated,
        "forged": path.opener.rejected["forged"],
        "replayed": path.opener.rejected["replayed"],
        "rate": path.pacer.rate,
        "round_trip": path.pacer.trip,
    }


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
