"""What a hostile peer sends to the udp transport takes little memory, expires, and never displaces workers."""

import contextlib
import logging
import time
import tracemalloc

import pytest

from tests.transport.test_udp import Sides, opened, sides, until
from thinwire.errors import TransportError
from thinwire.limits import LogLimit
from thinwire.transport.udp import endpoints, packet, session
from thinwire.transport.udp.packet import Envelope, EnvelopeKind, MessageAck, new_keys, pack_end, read_acks
from thinwire.transport.udp.session import UdpSession

NOW = 1000.0
ALL_LOST = MessageAck(5, 0xFFFF, (range(0xFFFF),)).pack()


def server_side() -> UdpSession:
    return UdpSession(7, new_keys(), 0.0, server=True, mtu=1400)


def test_acks_of_messages_that_were_not_sent_take_no_memory() -> None:
    """Each of them claims that 65,535 pieces were lost."""
    server, acks = server_side(), ALL_LOST * 270
    tracemalloc.start()
    try:
        for number in range(10, 210):  # with an end marker that is malformed, and so never delivered
            with contextlib.suppress(TransportError):
                server.receive_envelope(Envelope(EnvelopeKind.END, 7, number, [b"bad"], acks), NOW, reliable=True)
        assert tracemalloc.get_traced_memory()[0] < 100_000
        for number in range(2, 202):  # 1 is missing, and the peer has not said that it never comes
            server.receive_envelope(Envelope(EnvelopeKind.ACK, 7, number, [], acks), NOW, reliable=False)
        assert server.deliver(NOW) == ([], [])
        assert tracemalloc.get_traced_memory()[1] < 500_000
        server.receive_envelope(Envelope(EnvelopeKind.ACK, 7, 1, [], acks), NOW, reliable=True)
        assert server.deliver(NOW) == ([], []) and not server.has_news
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def acked(ranges: bytes, count: int = 9) -> bytes:
    return packet._ACK.pack(5, count, 0, len(ranges), 0, 0, 0) + ranges


@pytest.mark.parametrize(
    "ranges",
    [
        b"\x00",
        b"\x00\x00",
        b"\x09\x01",
        b"\x00\x0a",
        b"\x00\x01\x08\x01",
        b"\x80",
        b"\x80\x80\x80\x01\x01",
        b"\x01\x81",
    ],
)
def test_malformed_ranges_are_refused(ranges: bytes) -> None:
    with pytest.raises(TransportError, match="range"):
        read_acks(acked(ranges), {5: 9}.get)
    assert read_acks(acked(ranges), {5: 8}.get) == []  # it is not looked at


def test_acks_are_bounded_by_what_is_outstanding() -> None:
    server = server_side()
    server.address = ("127.0.0.1", 1)
    number = server.submit(b"head", [b"piece"] * 3, NOW)
    packets, _ = server.next_packets(NOW, NOW)
    server.on_sent(packets, NOW)
    for count in (2, 4, 0xFFFF):
        server.receive_envelope(
            Envelope(EnvelopeKind.ACK, 7, count, [], MessageAck(number, count, (range(count),)).pack()),
            NOW,
            reliable=True,
        )
    assert server.deliver(NOW) == ([], [])
    right = MessageAck(number, 3, (range(1, 3),)).pack()
    server.receive_envelope(Envelope(EnvelopeKind.ACK, 7, 0xFFFFF, [], right * 2), NOW, reliable=True)
    assert server.deliver(NOW) == ([], [(number, frozenset({1, 2}))])
    with pytest.raises(TransportError, match="too many"):
        read_acks(bytes(2 << 20), lambda message: None)


@pytest.mark.parametrize(
    "end",
    [
        pack_end(9, 3, 6, b"h"),  # of another message
        pack_end(4, 0, 0, b"h"),
        pack_end(4, 1, 1 << 20, b"h"),
        pack_end(4, 1, 6, bytes(49)),
        b"short",
    ],
)
def test_an_invalid_end_marker_changes_nothing(end: bytes) -> None:
    server = server_side()
    with pytest.raises(TransportError, match="end marker"):
        server.receive_envelope(Envelope(EnvelopeKind.END, 7, 4, [end], ALL_LOST), NOW, reliable=True)
    assert not server.has_news and not server.reassembly.open
    server.receive_envelope(Envelope(EnvelopeKind.PLAIN, 7, 4, [b"next"]), NOW, reliable=True)
    assert server.deliver(NOW) == ([[b"next"]], [])


def test_nothing_waits_for_lost_packets_once_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "AHEAD", 10)
    server = server_side()
    server.receive_envelope(Envelope(EnvelopeKind.END, 7, 1, [pack_end(1, 3, 6, b"h")]), NOW, reliable=True)
    for number in range(2, 11):
        server.receive_envelope(Envelope(EnvelopeKind.PLAIN, 7, number, [b"x"]), NOW, reliable=True)
    assert server.deliver(NOW)[0] == []  # packets of the first message may still come
    server.receive_envelope(Envelope(EnvelopeKind.PLAIN, 7, 11, [b"x"]), NOW, reliable=True)
    assert len(server.deliver(NOW)[0]) == 11 and not server.has_news


def test_a_stranger_sends_no_messages_in_pieces() -> None:
    server = server_side()
    server.admitted = False
    assert not server.receive_pieces((1, 1, b"h", {0: b"x"}, 0, 1.0, 1.0, 1.0), NOW)
    assert not server.reassembly.open


def ask(both: Sides, number: int, *, use: bool) -> None:
    """Ask for a session as a stranger, and perhaps use it."""
    listener, peer = both[0], b"\1" + number.to_bytes(15, "little")
    listener._receive_tcp(peer, [memoryview(part) for part in Envelope(EnvelopeKind.JOIN, 0, 0, [bytes(8)]).as_parts()])
    if use:
        first = Envelope(EnvelopeKind.PLAIN, listener._offers[peer].number, 1, [b"hello"]).as_parts()
        listener._receive_tcp(peer, [memoryview(part) for part in first])


@pytest.mark.parametrize("use", [False, True])
def test_sessions_of_strangers_are_few_expire_and_do_not_displace_workers(
    monkeypatch: pytest.MonkeyPatch, use: bool
) -> None:
    with sides() as both:
        peer = opened(both)
        listener, mine = both[0], both[0]._sessions[peer]
        for number in range(10_000):
            ask(both, number, use=use)
        assert len(listener._sessions) == len(listener._thread.sessions) == (257 if use else 1)
        assert len(listener._offers) == (0 if use else 4096)
        assert not listener._tcp._pending
        assert listener._sessions[peer] is mine
        got: list[list[bytes]] = []
        both[1].send([b"still here"])
        until(both, lambda: [b"still here"] in got, got, [])
        listener._expire(time.monotonic() + endpoints._OFFER_SECONDS + 1)
        assert list(listener._sessions) == [peer] and not listener._offers and not listener._strangers


def test_a_log_about_one_subject_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    limit = LogLimit(logging.getLogger("thinwire.transport"), logging.WARNING)
    for i in range(1000):
        limit.say(NOW + i / 100, "line %d", i)
    assert [record.getMessage() for record in caplog.records] == [f"line {i}" for i in range(10)]
    limit.say(NOW + 61, "again")
    assert [r.getMessage() for r in caplog.records][10:] == ["990 more lines like the next one were left out", "again"]


def test_malformed_messages_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with sides() as both:
        opened(both)
        assert both[1]._session is not None
        number = both[1]._session.number
        got: list[list[bytes]] = []
        for i in range(300):
            both[1]._tcp.send(Envelope(EnvelopeKind.END, number, 1000 + i, [b"bad"]).as_parts())
        both[1].send([b"still here"])
        until(both, lambda: [b"still here"] in got, got, [])
    assert caplog.text.count("Discarded a worker's message") == 10
