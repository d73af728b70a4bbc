"""Packets that are sent and received many at a time are the same as those handled one by one."""

import errno
import socket
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import _native
from thinwire.transport.udp.packet import (
    OVERHEAD,
    PREFIX,
    Envelope,
    EnvelopeKind,
    SplitPacket,
    new_keys,
    pack_control,
    pack_end,
    read_envelope,
    read_records,
    split_packet,
)
from thinwire.transport.udp.recovery import OutgoingMessage, PacketGroup, Reassembly
from thinwire.transport.udp.session import EnvelopeQueue, UdpSession
from thinwire.transport.udp.socket import _TIMESTAMP, PacketReceiver, SocketThread, _equal_runs, open_socket

FIVE = [bytes([i]) * 1000 for i in range(4)] + [b"e" * 300]


def sessions() -> tuple[UdpSession, UdpSession]:
    """Return the worker's side and the server's side of one session."""
    keys = new_keys()
    worker, server = (UdpSession(7, keys, 0.0, server=server, mtu=1400) for server in (False, True))
    worker.address = ("127.0.0.1", 0)
    return worker, server


@given(st.lists(st.sampled_from([40, 1000, 1001, 1400, 9216]), max_size=200))
def test_equal_runs_keep_all_packets_in_order(sizes: list[int]) -> None:
    packets = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    runs = list(_equal_runs(packets))
    assert [each for run in runs for each in run] == packets
    for run in runs:
        assert len({len(each) for each in run[:-1]}) <= 1 and len(run[-1]) <= len(run[0])
        assert len(run) <= 64 and sum(map(len, run)) <= 65_000


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=20))
def test_padding_is_removed_on_receipt(pieces: list[bytes]) -> None:
    plains = OutgoingMessage(3, b"head", pieces, 0).packet_contents(len(pieces), 0.0)
    groups, broken = _native.read_data(plains, [9.0] * len(plains), 1.0)
    ((message, count, head, found, repeated, _, first, last),) = groups
    assert (message, count, head, repeated, first, last, broken) == (3, len(pieces), b"head", 0, 9.0, 9.0, 0)
    assert found == dict(enumerate(pieces))


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.sampled_from([0.1, 0.2, 1.1]), st.floats(0.0, 0.09)),
        max_size=30,
    )
)
def test_packets_parsed_together_equal_packets_parsed_one_by_one(rows: list[tuple[int, int, float, float]]) -> None:
    """This holds for any order, duplicates, delays and boundaries between time spans."""
    plains = [_native.pack_data(m, i, 5, b"h", [bytes([m, i])], sent, 0)[0] for m, i, _, sent in rows]
    stamps = sorted(stamp for _, _, stamp, _ in rows)
    groups, broken = _native.read_data(plains, stamps, 1.0)
    assert broken == 0
    assert all(int(first) == int(last) for *_, first, last in groups)
    alone = [_native.read_data([plain], [stamp], 1.0)[0][0] for plain, stamp in zip(plains, stamps, strict=True)]
    assert reassembled(groups) == reassembled(alone)


def reassembled(groups: list[PacketGroup]) -> Any:
    reassembly = Reassembly()
    for group in groups:
        reassembly.add(group, time.monotonic())
    # A duplicate may be the last of its group, so times are compared only if there was none.
    times = {} if reassembly.repeated else {n: m.stamps for n, m in reassembly.open.items()}
    assert all(m.queue >= 0.0 for m in reassembly.open.values())
    return {n: m.pieces for n, m in reassembly.open.items()}, times, reassembly.received, reassembly.repeated


@given(st.integers(0, 200), st.integers(0, 255), st.integers(0, 7))
def test_malformed_packets_in_a_batch_are_counted(cut: int, at: int, bit: int) -> None:
    plains = _native.pack_data(9, 0, 3, b"head", [b"x" * 40] * 3, 1.0, 0)
    changed = bytearray(plains[1])
    changed[at % len(changed)] ^= 1 << bit
    groups, broken = _native.read_data([plains[0], bytes(changed[:cut]), plains[2]], [2.0] * 3, 1.0)
    assert sum(len(group[3]) + group[4] for group in groups) + broken == 3
    assert sum(len(group[3]) for group in groups if group[0] == 9) >= 2


def test_a_group_has_its_least_one_way_delay() -> None:
    plains = [_native.pack_data(1, i, 3, b"", [b"x"], sent, 0)[0] for i, sent in enumerate((4.0, 4.75, 4.5))]
    ((*_, flight, first, last),), _ = _native.read_data(plains, [5.0, 5.125, 5.25], 1.0)
    assert (flight, first, last) == (0.375, 5.0, 5.25)


def test_pieces_of_several_sessions_with_end_markers_between_them() -> None:
    """Pieces go to their own sessions, and an end marker is read after the pieces that came before it."""
    sides = {}
    for session in (7, 8):
        keys = new_keys()
        sides[session] = [UdpSession(session, keys, 0.0, server=server, mtu=1400) for server in (False, True)]
    receiver = PacketReceiver({session: server for session, (_, server) in sides.items()}, Counter(), server=True)
    rows: list[tuple[SplitPacket, bytes, float]] = []
    for i in range(3):
        for session, (worker, _) in sides.items():
            pieces = worker.encryptor.encrypt(_native.pack_data(1, i, 3, b"h", [bytes([session, i])], 1.0, 0))
            rows += [(found, bytes([session]), 2.0 + i) for each in pieces if (found := split_packet(each)) is not None]
    end = Envelope(EnvelopeKind.END, 8, 1, [pack_end(1, 3, 6, b"h")]).as_record()
    late = split_packet(sides[8][0].encryptor.encrypt([pack_control(1, [end])])[0])
    assert late is not None
    assert receiver.receive([*rows[:5], (late, bytes([8]), 5.0), *rows[5:]], 6.0)
    for session, (_, server) in sides.items():
        assert server.reassembly.open[1].pieces == {i: bytes([session, i]) for i in range(3)}
        assert server.reassembly.open[1].complete and server.origin == bytes([session])
    message = sides[8][1].reassembly.open[1]
    assert message.ended is not None and message.ended <= message.last  # its last piece came after the end marker
    assert sides[7][1].reassembly.open[1].ended is None


@pytest.mark.parametrize("count", [0, 31, 32, 33, 64, 100])
def test_all_packets_in_the_socket_are_read(count: int) -> None:
    worker, _ = sessions()
    with open_socket(socket.AF_INET) as sink, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sink.bind(("127.0.0.1", 0))
        sock.connect(sink.getsockname())
        packets = worker.encryptor.encrypt([bytes([i]) * (i + 1) for i in range(count)])
        for packet in packets:
            sock.send(packet)
        found, truncated, foreign = _native.receive_datagrams(sink.fileno(), 128, 9216, PREFIX, OVERHEAD)
        assert [parts for parts, _, _ in found] == [split_packet(each) for each in packets]
        assert truncated == foreign == 0


def test_a_piece_that_does_not_fit_into_a_packet_is_refused() -> None:
    for head, pieces, first, count in (
        (bytes(256), [b"x"], 0, 1),
        (b"", [bytes(1 << 16)], 0, 1),
        (b"", [b"x"], 0, 1 << 16),
        (b"", [b"x", b"y"], 4, 5),
    ):
        with pytest.raises(ValueError, match=r"datagram|packet"):
            _native.pack_data(1, first, count, head, pieces, 0.0, 0)


def test_pieces_of_similar_length_become_packets_of_equal_length() -> None:
    pieces = [b"a" * 1300, b"b" * 1299, b"c" * 1270, b"d" * 900]
    lengths = [len(plain) for plain in OutgoingMessage(3, b"", pieces, 0).packet_contents(4, 0.0)]
    assert lengths[0] == lengths[1] == lengths[2] == lengths[3] + 400


class Counts(socket.socket):
    """Counts how often it was asked to split a buffer into packets."""

    asked = 0

    def sendmsg(self, *arguments: Any) -> int:
        self.asked += 1
        return super().sendmsg(*arguments)


class Refuses(Counts):
    """A kernel, or a device, that cannot split buffers."""

    def sendmsg(self, *arguments: Any) -> int:
        self.asked += 1
        raise OSError(errno.EIO, "no checksum offload")


class Hesitates(Counts):
    """Reports once that an earlier packet reached a closed port; then works."""

    def sendmsg(self, *arguments: Any) -> int:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        return socket.socket.sendmsg(self, *arguments)


@pytest.mark.parametrize(("kind", "asked"), [(Counts, 2), (Refuses, 1), (Hesitates, 2)])
def test_packets_arrive_separately_whatever_the_kernel_supports(kind: type[Counts], asked: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        sink.settimeout(10)
        sock = kind(socket.AF_INET, socket.SOCK_DGRAM)
        sock.connect(sink.getsockname())
        thread, (worker, _) = SocketThread(sock, lambda: None, server=False), sessions()
        try:
            for _ in range(2):
                thread.send_packets(worker, FIVE)
                assert [sink.recv(9999) for _ in FIVE] == FIVE
            assert sock.asked == asked
        finally:
            thread.close()


def read_batches(sink: socket.socket, count: int) -> tuple[list[tuple[SplitPacket, bytes, float]], int, int]:
    """Read so many packets, three by one call."""
    found: list[tuple[SplitPacket, bytes, float]] = []
    truncated, foreign, until = 0, 0, time.monotonic() + 10
    while len(found) + truncated + foreign < count and time.monotonic() < until:
        more, short, strange = _native.receive_datagrams(sink.fileno(), 3, 2000, PREFIX, OVERHEAD)
        found, truncated, foreign = found + more, truncated + short, foreign + strange
    return found, truncated, foreign


def test_a_batch_has_senders_and_times_of_arrival() -> None:
    worker, _ = sessions()
    with open_socket(socket.AF_INET) as sink, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sink.bind(("127.0.0.1", 0))
        sock.connect(sink.getsockname())
        sink.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
        for _ in range(50):  # the kernel begins to note arrivals a little after it was asked to do so
            packets = worker.encryptor.encrypt([b"one", b"two"])
            for packet in (*packets, b"short", b"x" * 100):
                sock.send(packet)
            sent = time.time()
            time.sleep(0.2)
            found, truncated, foreign = read_batches(sink, 4)
            assert [parts for parts, _, _ in found] == [split_packet(each) for each in packets]
            assert (truncated, foreign) == (1, 1)
            assert all(_native.address_of(origin) == sock.getsockname() for _, origin, _ in found)
            if all(sent - 10 < stamp < sent + 0.1 for _, _, stamp in found):
                return
        raise AssertionError("the times are those of reading, not of arrival")


def test_addresses_of_both_families() -> None:
    assert _native.address_of(b"") is None and _native.address_of(b"\xff" * 200) is None
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sink,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s,
    ):
        try:
            sink.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        s.sendto(PREFIX + bytes(OVERHEAD), sink.getsockname())
        sink.settimeout(10)
        sink.recv(1, socket.MSG_PEEK)
        ((_, origin, _),), _, _ = _native.receive_datagrams(sink.fileno(), 9, 2000, PREFIX, OVERHEAD)
        assert _native.address_of(origin) == ("::1", s.getsockname()[1], 0, 0)


def kinds(messages: list[list[Any]]) -> list[EnvelopeKind]:
    batches = [read_envelope(parts) for parts in messages]
    return [each.kind for batch in batches if batch is not None for each in read_records(1, batch.parts[0])]


def test_an_end_marker_alone_waits_and_is_dropped_when_its_message_was_acknowledged() -> None:
    out, now = EnvelopeQueue(1, 1000), 1.0
    number = out.reserve(0.0)
    out.release(number, b"e" * 20)
    assert out.drain(1, now, now, now - 10) == [] and out.waiting
    out.on_ack(number + 1)
    assert out.drain(1, now, now, now) == []
    out.release(out.reserve(0.0), b"e" * 20)
    assert kinds(out.drain(1, now, now, now)) == [EnvelopeKind.END]  # it has waited long enough
    out.release(out.reserve(0.0), b"e" * 20)
    out.put(EnvelopeKind.PLAIN, [b"pull"], 0.0)
    assert kinds(out.drain(1, now, now, now - 10)) == [
        EnvelopeKind.END,
        EnvelopeKind.PLAIN,
    ]  # in order


def send_all(session: UdpSession, now: float) -> None:
    """Let all packets of messages leave that the pacer allows."""
    while packets := session.next_packets(now, now)[0]:
        session.on_sent(packets, now)


def test_a_waiting_end_marker_is_sent_over_both_channels_once_packets_are_lost() -> None:
    worker, _ = sessions()
    now = 10.0
    worker.submit(b"head", [b"piece"] * 3, now)
    send_all(worker, now)
    assert worker.control_packets(now) == ([], 3600.0) and worker.drain(now) == []  # without loss
    assert not worker.has_control(now) and worker.deadline(now) == now + 0.03 and worker.has_control(now + 0.1)
    worker._loss_level = 2
    packets, pause = worker.control_packets(now)
    assert len(packets) == 2 and 0 < pause < 1.0
    worker.sender.blocked_until = now + 60  # no packet arrives any more
    assert worker.deadline(now) <= now
    assert kinds(worker.drain(now)) == [EnvelopeKind.END]
    worker.control_packets(now)
    assert not worker.has_control(now + 3600)


def test_only_end_markers_that_are_sent_change_the_loss_timer() -> None:
    _, server = sessions()
    begun = server.reassembly.loss_timer.timeout
    for number in range(1, 50):
        assert server.receive_pieces((number, 1, b"head", {0: b"piece"}, 0, 1.0, 10.0, 10.0), time.monotonic())
        server.deliver(time.monotonic())
    assert server.reassembly.loss_timer.timeout == begun
    for number in range(1, 50):
        server.reassembly.end(number, 1, 5, b"head", time.monotonic())
    assert server.reassembly.loss_timer.timeout < 0.5 * begun


def one(index: int, stamp: float) -> PacketGroup:
    return 1, 4, b"head", {index: b"piece"}, 0, stamp - 9.0, stamp, stamp


def test_a_reader_sleeps_while_the_rest_of_a_message_arrives() -> None:
    _, server = sessions()
    now = time.monotonic()
    assert server.time_to_complete(now) == 0.0
    for index, stamp in ((0, 10.0), (1, 10.0004)):
        server.receive_pieces(one(index, stamp), time.monotonic())
    now = server.reassembly.open[1].last
    assert server.time_to_complete(now) == pytest.approx(0.0008)
    assert server.time_to_complete(now + 1.0) == 0.0  # nothing has come for a long time
    server.receive_pieces(one(2, 12.0), time.monotonic())
    assert server.time_to_complete(server.reassembly.open[1].last) == 0.002
    assert server.receive_pieces(one(3, 12.0), time.monotonic())
    assert server.time_to_complete(server.reassembly.open[1].last) == 0.0
