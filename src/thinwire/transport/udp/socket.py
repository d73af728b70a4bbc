"""The UDP socket of a process: the thread that sends packets at the rate of the pacers, and the receive side.

The thread also reads the socket while its owner computes, because the socket's buffer holds only a few milliseconds of
traffic.
"""

import contextlib
import errno
import logging
import math
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
from thinwire.transport.base import LARGEST_PACKET, Buffer
from thinwire.transport.udp.congestion import SPAN
from thinwire.transport.udp.packet import CONTROL, DATA, OVERHEAD, PREFIX, PROBE, SplitPacket, read_control
from thinwire.transport.udp.session import Address, UdpSession

log = logging.getLogger("thinwire.transport")

_DATA = bytes([DATA])
# Packets that are read before the lock is released.
_AT_ONCE = 128
_BUFFER_BYTES = 1 << 22
# The owner reads packets itself while it polls. After so many seconds this thread does, because the owner computes.
_OWNER_SECONDS = 0.008
# SO_TIMESTAMPNS: the kernel notes when a packet arrives, so that a late reader does not look like a queue.
_TIMESTAMP = 35
# UDP_SEGMENT: the kernel takes packets of equal length by one call, at most 64, and splits them itself.
_SEGMENT, _SEGMENT_SIZE = 103, struct.Struct("@H")
_SEGMENTS, _SEGMENTS_BYTES = 64, 65_000
# Seconds between a worker's probes: until the server has received one, and after that.
_PROBE_SECONDS, _KEEPALIVE_SECONDS = 0.25, 5.0


def open_socket(family: int) -> socket.socket:
    """Open a UDP socket with large buffers."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return sock


class PacketReceiver:
    """Decrypts packets and hands them to their sessions; counts malformed packets and those of unknown sessions.

    server: learn from packets where their senders are.
    """

    def __init__(self, sessions: Mapping[int, UdpSession], rejected: Counter[str], *, server: bool) -> None:
        self._sessions, self._rejected, self._server = sessions, rejected, server

    def receive(self, packets: Sequence[tuple[SplitPacket, bytes, float]], now: float) -> bool:
        """Take packets, with their senders and times of arrival; return whether a session has something to deliver.

        Consecutive pieces of one session are parsed together, by one native call.
        """
        news = False
        run: UdpSession | None = None
        contents: list[bytes] = []
        stamps: list[float] = []
        for packet, origin, stamp in packets:
            session = self._sessions.get(packet[0])
            if session is None:
                self._rejected["foreign"] += 1
                continue
            plain = session.decryptor.decrypt(packet)
            if plain is None:
                continue
            if self._server and session.origin != origin:
                if session.address is None:
                    news = session.announce_open = True
                session.origin, session.address = origin, _native.address_of(origin)
            if plain[:1] != _DATA:
                if session is run:  # it may be about the pieces that came before it
                    news |= self._receive_pieces(run, contents, stamps, now)
                    run = None
                news |= self._receive_other(session, plain, now)
                continue
            if session is not run:
                news |= self._receive_pieces(run, contents, stamps, now)
                run, contents, stamps = session, [], []
            contents.append(plain)
            stamps.append(stamp)
        return self._receive_pieces(run, contents, stamps, now) or news

    def _receive_pieces(
        self, session: UdpSession | None, contents: list[bytes], stamps: list[float], now: float
    ) -> bool:
        if session is None:
            return False
        groups, broken = _native.read_data(contents, stamps, SPAN)
        if broken:
            self._rejected["broken"] += broken
        return any([session.receive_pieces(group, now) for group in groups])

    def _receive_other(self, session: UdpSession, plain: bytes, now: float) -> bool:
        try:
            if plain[0] == CONTROL:
                return session.receive_control(*read_control(session.number, plain), now)
            if plain[0] == PROBE:
                return False
        except (TransportError, struct.error, IndexError):
            pass  # it is counted, as is a packet of an unknown kind
        self._rejected["broken"] += 1
        return False


class SocketThread(threading.Thread):
    """The UDP socket of one process and its sessions. `lock` guards the state of all sessions.

    notify: called when the owner has something to do.
    server: the socket is not connected and sends to the address of each session. A worker's socket is connected, and
    probes the server.
    """

    def __init__(self, sock: socket.socket, notify: Callable[[], None], *, server: bool) -> None:
        super().__init__(name="thinwire-udp", daemon=True)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
        self._socket, self._notify, self._server = sock, notify, server
        self._segments = _can_segment(sock)
        self.lock = threading.RLock()
        self.sessions: dict[int, UdpSession] = {}
        self.rejected: Counter[str] = Counter()
        self._receiver = PacketReceiver(self.sessions, self.rejected, server=server)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._probed = self._sleeps_until = 0.0
        self._more = False  # whether the last `receive` left packets unread
        self._ending = False

    def run(self) -> None:
        packet_or_wake, wake_only = select.poll(), select.poll()
        packet_or_wake.register(self._socket, select.POLLIN)
        for each in (packet_or_wake, wake_only):
            each.register(self._woken, select.POLLIN)
        while not self._ending:
            try:
                pause = min(self.send_all_due(), 0.25)
                self._sleeps_until = time.monotonic() + pause
                ready = packet_or_wake.poll(1000 * pause)
                if ready and ready[0][0] == self._socket.fileno():
                    wake_only.poll(1000 * min(_OWNER_SECONDS, pause))
                with contextlib.suppress(OSError):
                    self._woken.recv(4096)
                if self.receive():
                    self._notify()
            except Exception:  # without this thread no packet is sent any more
                log.exception("The thread of the UDP socket continues after an error")
                time.sleep(0.1)

    def fileno(self) -> int:
        """Return the socket's file descriptor, to wait for packets."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the thread and close the socket."""
        self._ending = True
        self.wake()
        if self.is_alive():
            self.join(5.0)
        for each in (self._socket, self._woken, self._waker):
            each.close()

    def wake(self) -> None:
        """Wake the thread, because there is something new to send."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # Out

    def send_packets(self, session: UdpSession, packets: Iterable[bytes]) -> None:
        """Send without waiting. A packet that does not fit into the kernel's queue is lost, as on the network."""
        if session.address is None and self._server:
            return  # the peer's address is unknown
        to = (session.address,) if session.address is not None and self._server else ()
        send = self._socket.sendto if to else self._socket.send
        for run in _equal_runs(packets):
            if len(run) > 1 and self._segments and session.segments and self._send_segments(session, run, to):
                continue
            for packet in run:
                with contextlib.suppress(OSError):
                    send(packet, *to)

    def _send_segments(self, session: UdpSession, run: Sequence[bytes], to: Sequence[Address]) -> bool:
        """Send packets of equal length by one call, the last may be shorter; return False if none has left."""
        size = _SEGMENT_SIZE.pack(len(run[0]))
        try:
            self._socket.sendmsg(run, [(socket.IPPROTO_UDP, _SEGMENT, size)], 0, *to)
        except BlockingIOError:
            pass  # there is no room: the packets are lost
        except OSError as error:
            # Devices without checksum offload, tunnels and routes with a small MTU do not support it. Other errors,
            # such as an answer that a port is closed, do not mean that.
            session.segments = error.errno not in (errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP)
            return False
        return True

    def send_due(self, session: UdpSession) -> tuple[float, bool]:
        """Send what a session may send now; return the seconds until more may, and whether a message was finished."""
        with self.lock:
            waiting = len(session.sender.queue)
            while (due := session.next_packets(time.monotonic(), time.time()))[0]:
                self.send_packets(session, due[0])
                session.on_sent(due[0], time.monotonic())
            return min(due[1], self._send_control(session)), len(session.sender.queue) < waiting

    def _send_control(self, session: UdpSession) -> float:
        """Send the control packets that are due; return the seconds until more are."""
        now = time.monotonic()
        packets, pause = session.control_packets(now)
        if packets:
            self.send_packets(session, packets)
        session.control_due = now + pause
        return pause

    def drain(self, session: UdpSession, *, everything: bool = False) -> list[list[Buffer]]:
        """Send a session's control packets and return the messages to send over TCP now."""
        with self.lock:
            now = time.monotonic()
            if not everything and not session.has_control(now):
                return []
            messages = session.drain(now, everything=everything)
            self._send_control(session)
        if session.control_due < self._sleeps_until - 0.002:
            self.wake()
        return messages

    def send_all_due(self) -> float:
        """Send what all sessions may send now; return the seconds until more may."""
        now = time.monotonic()
        with self.lock:
            sessions = list(self.sessions.values())
            rounds = [self.send_due(each) for each in sessions if each.sender.queue or now >= each.control_due]
        if any(finished for _, finished in rounds):
            self._notify()
        if not self._server:
            for session in sessions:
                self._probe(session)
        later = [session.control_due - now for session in sessions]
        return max(0.0, min([*(delay for delay, _ in rounds), *later], default=3600.0))

    def _probe(self, session: UdpSession) -> None:
        """Send a probe of full size if due: it tells the server where this worker is, and that such packets arrive."""
        now = time.monotonic()
        if now - self._probed > (_PROBE_SECONDS if session.address is None else _KEEPALIVE_SECONDS):
            self._probed = now
            with self.lock:
                contents = bytes([PROBE]) + bytes(session.mtu - OVERHEAD - 1)
                self.send_packets(session, session.encryptor.encrypt([contents]))

    # In

    def receive(self) -> bool:
        """Read packets from the socket; return whether the owner has something to do."""
        with self.lock:
            found, truncated, foreign = _native.receive_datagrams(
                self._socket.fileno(), _AT_ONCE, LARGEST_PACKET, PREFIX, OVERHEAD
            )
            self._more = len(found) + truncated + foreign == _AT_ONCE
            news = self._receiver.receive(found, time.monotonic())
            if truncated or foreign:
                self.rejected.update(truncated=truncated, foreign=foreign)
        return news

    def time_to_deadline(self) -> float:
        """Return the seconds until the owner must look after a session even if nothing arrives."""
        now = time.monotonic()
        with self.lock:
            deadline = min((session.deadline(now) for session in self.sessions.values()), default=math.inf)
        return max(0.0, deadline - now)

    def sleep_while_arriving(self) -> bool:
        """Sleep until the rest of a message that is arriving should be here; return False at once if none is."""
        if self._more:
            return False
        now = time.monotonic()
        with self.lock:
            pauses = [session.time_to_complete(now) for session in self.sessions.values()]
        pause = min(filter(None, pauses), default=0.0)
        if pause:
            time.sleep(pause)
        return pause > 0


def _can_segment(sock: socket.socket) -> bool:
    """Return whether the kernel splits a buffer into packets. One that cannot would send it as one packet."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_UDP, _SEGMENT, 0)
            return True
    return False


def _equal_runs(packets: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield packets in their order, those of equal length together; the last of a run may be shorter."""
    run: list[bytes] = []
    for packet in packets:
        size = len(run[0]) if run else 0
        full = len(run) == _SEGMENTS or (len(run) + 1) * size > _SEGMENTS_BYTES
        if run and (full or len(run[-1]) != size or len(packet) > size):
            yield run
            run = []
        run.append(packet)
    if run:
        yield run
