"""Engine: a socket for datagrams, and the thread that lets them leave as fast as the pacers say.

A socket's buffer holds a few milliseconds of traffic: whoever computes cannot also read it in time.
"""

import contextlib
import errno
import logging
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.limits import LARGEST_DATAGRAM
from thinwire.transport.udp.congestion import SPAN
from thinwire.transport.udp.packet import CONTROL, DATA, OVERHEAD, PREFIX, PROBE, Split, read_control, split
from thinwire.transport.udp.session import Address, Path

_DATA = bytes([DATA])


class Intake:
    """Takes datagrams in for some paths, by session; counts what makes no sense.

    finds: whether a datagram tells where its sender is, as a server must learn.
    """

    def __init__(self, paths: Mapping[int, Path], counts: Counter[str], *, finds: bool) -> None:
        self._paths, self._counts, self._finds = paths, counts, finds

    def take(self, datagrams: Sequence[tuple[Split, bytes, float]]) -> bool:
        """Datagrams, who sent them and when they came; True if their owner has something to do.

        Pieces of one path that came one after the other are read together.
        """
        news = False
        run: Path | None = None
        plains: list[bytes] = []
        stamps: list[float] = []
        for datagram, origin, stamp in datagrams:
            path = self._paths.get(datagram[0])
            if path is None:
                self._counts["foreign"] += 1
                continue
            plain = path.opener.open(datagram)
            if plain is None:
                continue
            if self._finds and path.origin != origin:
                news |= _found(path, origin)
            if plain[:1] != _DATA:
                if path is run:  # a word on pieces that came before it
                    news |= self._take_pieces(run, plains, stamps)
                    run = None
                news |= self._take_other(path, plain)
                continue
            if path is not run:
                news |= self._take_pieces(run, plains, stamps)
                run, plains, stamps = path, [], []
            plains.append(plain)
            stamps.append(stamp)
        return self._take_pieces(run, plains, stamps) or news

    def _take_pieces(self, path: Path | None, plains: list[bytes], stamps: list[float]) -> bool:
        if path is None:
            return False
        groups, broken = _native.read_data(plains, stamps, SPAN)
        if broken:
            self._counts["broken"] += broken
        return any([path.take_pieces(group) for group in groups])

    def _take_other(self, path: Path, plain: bytes) -> bool:
        try:
            if plain[0] == CONTROL:
                return path.take_control(*read_control(path.session, plain))
            if plain[0] != PROBE:
                raise TransportError("a datagram of a kind that there is not")
        except (TransportError, struct.error, IndexError):
            self._counts["broken"] += 1
        return False


def _found(path: Path, origin: bytes) -> bool:
    """A sender is there; whether it was unknown before."""
    first, path.origin, path.address = path.address is None, origin, _native.address_of(origin)
    if first:
        path.open_to_peer()
    return first


log = logging.getLogger("thinwire.transport")

# Datagrams that are read before others get a turn.
_AT_ONCE = 128
_BUFFER = 1 << 22
# The owner reads datagrams itself while it waits. Seconds after which this thread does, because the owner computes.
_OWNERS = 0.008
# The kernel's own time of arrival (SO_TIMESTAMPNS): a reader that comes late must not look like a queue.
_STAMP = 35
# Datagrams of one length that the kernel takes by one call and parts itself (UDP_SEGMENT, 64 of them at the most).
_SEGMENT, _SEGMENT_SIZE = 103, struct.Struct("@H")
_SEGMENTS, _SEGMENTS_BYTES = 64, 65_000
# Seconds between signs of life: until the server has seen one, and after it.
_PROBE, _ALIVE = 0.25, 5.0


def open_socket(family: int) -> socket.socket:
    """A socket for datagrams, with room for what comes while nobody reads."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return sock


class Engine(threading.Thread):
    """One UDP socket with the paths that use it. `lock` guards everything that paths hold."""

    def __init__(self, sock: socket.socket, wake: Callable[[], None], *, probes: bool) -> None:
        super().__init__(name="thinwire-datagrams", daemon=True)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _STAMP, 1)
        self._socket, self._wake, self._probes = sock, wake, probes
        self._segments = _can_segment(sock)
        self.lock = threading.RLock()
        self.paths: dict[int, Path] = {}
        self.counts: Counter[str] = Counter()
        self._intake = Intake(self.paths, self.counts, finds=not probes)
        self._poked, self._poker = socket.socketpair()
        self._poked.setblocking(False)
        self._poker.setblocking(False)
        self._probed = self._sleeps_until = 0.0
        self.more = False  # whether the last `receive` left datagrams where they were
        self._ending = False

    def run(self) -> None:
        waiting, poked = select.poll(), select.poll()
        waiting.register(self._socket, select.POLLIN)
        for each in (waiting, poked):
            each.register(self._poked, select.POLLIN)
        while not self._ending:
            try:
                pause = min(self.pump_all(), 0.25)
                self._sleeps_until = time.monotonic() + pause
                ready = waiting.poll(1000 * pause)
                if ready and ready[0][0] == self._socket.fileno():
                    poked.poll(1000 * min(_OWNERS, pause))
                with contextlib.suppress(OSError):
                    self._poked.recv(4096)
                if self.receive():
                    self._wake()
            except Exception:  # without this thread nothing moves any more
                log.exception("the thread that sends and reads datagrams goes on after an error")
                time.sleep(0.1)

    def fileno(self) -> int:
        """Of the socket, to wait for datagrams."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the thread and close the socket."""
        if not self._ending:
            self._ending = True
            self.poke()
        if self.is_alive():
            self.join(5.0)
        for each in (self._socket, self._poked, self._poker):
            each.close()

    # Out

    def transmit(self, path: Path, datagrams: Iterable[bytes]) -> None:
        """Send without waiting; what does not fit in the kernel's queue is lost like anything else."""
        if path.address is None and not self._probes:
            return  # nobody knows where to
        there = (path.address,) if path.address is not None and not self._probes else ()
        send = self._socket.sendto if there else self._socket.send
        for run in _runs(datagrams):
            if len(run) > 1 and self._segments and path.batches and self._send_together(path, run, there):
                continue
            for datagram in run:
                with contextlib.suppress(OSError):
                    send(datagram, *there)

    def _send_together(self, path: Path, run: Sequence[bytes], there: Sequence[Address]) -> bool:
        """Send datagrams of one length, but for the last, by one call; False if none of them has left."""
        size = _SEGMENT_SIZE.pack(len(run[0]))
        try:
            self._socket.sendmsg(run, [(socket.IPPROTO_UDP, _SEGMENT, size)], 0, *there)
        except BlockingIOError:
            pass  # no room: lost
        except OSError as error:
            # Devices without checksums, tunnels and narrow paths do without. A port that was closed is no such thing.
            path.batches = error.errno not in (errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP)
            return False
        return True

    def pump(self, path: Path) -> tuple[float, bool]:
        """Let leave what may; returns the seconds until more may, and whether a message's last word may be said."""
        with self.lock:
            waiting = len(path.queue)
            delay = path.pump(lambda datagrams: self.transmit(path, datagrams))
            return min(delay, self.express(path)), len(path.queue) < waiting

    def express(self, path: Path) -> float:
        """Send short envelopes as datagrams where that is worth it; returns the seconds until it is again."""
        now = time.monotonic()
        datagrams, pause = path.express(now)
        if datagrams:
            self.transmit(path, datagrams)
        path.express_at = now + pause
        return pause

    def pump_all(self) -> float:
        """One round over all paths that have anything to send; returns the seconds until the next is due."""
        now = time.monotonic()
        with self.lock:
            paths = list(self.paths.values())
            rounds = [self.pump(path) for path in paths if path.queue or now >= path.express_at]
        if any(ended for _, ended in rounds):
            self._wake()
        if self._probes:
            for path in paths:
                self._probe(path)
        later = [path.express_at - now for path in paths]
        return max(0.0, min([*(delay for delay, _ in rounds), *later], default=3600.0))

    def poke(self) -> None:
        """Something new waits to leave."""
        with contextlib.suppress(OSError):
            self._poker.send(b"\0")

    def poke_before(self, moment: float) -> None:
        """Something must be looked after at that time: wake the thread if it would sleep for longer."""
        if moment < self._sleeps_until - 0.002:
            self.poke()

    def _probe(self, path: Path) -> None:
        """A datagram of full size: it tells the server where we are, and proves that such datagrams pass."""
        now = time.monotonic()
        if now - self._probed > (_PROBE if path.address is None else _ALIVE):
            self._probed = now
            with self.lock:
                self.transmit(path, [path.sealer.seal(bytes([PROBE]) + bytes(path.mtu - OVERHEAD - 1))])

    # In

    def receive(self) -> bool:
        """Read what has come; True if the owner has something to do."""
        with self.lock:
            found, truncated, foreign = _native.receive_datagrams(
                self._socket.fileno(), _AT_ONCE, LARGEST_DATAGRAM, PREFIX, OVERHEAD
            )
            self.more = len(found) + truncated + foreign == _AT_ONCE
            news = self._intake.take(found)
            if truncated or foreign:
                self.counts.update(truncated=truncated, foreign=foreign)
        return news

    def sleep_while_arriving(self) -> bool:
        """Sleep until the rest of a message that comes in should be there; False, at once, if none does."""
        if self.more:
            return False
        now = time.monotonic()
        with self.lock:
            pause = min(filter(None, (path.arriving(now) for path in self.paths.values())), default=0.0)
        if pause:
            time.sleep(pause)
        return pause > 0

    def take(self, datagram: bytes, origin: bytes, stamp: float) -> bool:
        """As if it had been read from the socket: for tests and benchmarks."""
        parts = split(datagram)
        if parts is None:
            self.counts["truncated" if len(datagram) < OVERHEAD else "foreign"] += 1
        return parts is not None and self._intake.take([(parts, origin, stamp)])


def _can_segment(sock: socket.socket) -> bool:
    """Whether the kernel parts a long buffer into datagrams. One that does not would send it as it is."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.IPPROTO_UDP, _SEGMENT, 0)
    except OSError:
        return False
    return True


def _runs(datagrams: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Datagrams in their order, those of one length together; the last of a run may be shorter."""
    run: list[bytes] = []
    for datagram in datagrams:
        size = len(run[0]) if run else 0
        full = len(run) == _SEGMENTS or (len(run) + 1) * size > _SEGMENTS_BYTES
        if run and (full or len(run[-1]) != size or len(datagram) > size):
            yield run
            run = []
        run.append(datagram)
    if run:
        yield run
