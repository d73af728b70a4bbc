"""The udp transport: lost pieces are reported, and everything else arrives once and in order."""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.lossy_socket import lose
from thinwire import _native
from thinwire.errors import TransportError
from thinwire.transport.addresses import connect, listen
from thinwire.transport.udp import endpoints
from thinwire.transport.udp.endpoints import UdpConnection, UdpListener
from thinwire.transport.udp.packet import (
    KEY_BYTES,
    Envelope,
    EnvelopeKind,
    MessageAck,
    PacketDecryptor,
    PacketEncryptor,
    missing_ranges,
    new_keys,
    read_acks,
    read_control,
    read_envelope,
    read_records,
    split_packet,
)
from thinwire.transport.udp.recovery import Reassembly, pack, unpack
from thinwire.transport.udp.session import ReorderBuffer

Sides = tuple[UdpListener, UdpConnection]


@contextmanager
def sides() -> Iterator[Sides]:
    listener = listen("udp://127.0.0.1:0")
    connection = connect(listener.address)
    assert isinstance(listener, UdpListener) and isinstance(connection, UdpConnection)
    try:
        yield listener, connection
    finally:
        connection.close()
        listener.close()


def until(both: Sides, done: Callable[[], bool], got: list[list[bytes]], answers: list[list[bytes]]) -> bytes:
    """Poll both sides until a condition holds; return the worker's name."""
    peer, limit = b"", time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit, "the condition did not hold in time"
        for sender, parts in both[0].poll(0.01):
            peer = sender
            got.append([bytes(part) for part in parts])
        for parts in both[1].poll(0.01):
            answers.append([bytes(part) for part in parts])
    return peer


def opened(both: Sides) -> bytes:
    """Wait for the handshake, after which packets pass in both directions; return the worker's name."""
    got: list[list[bytes]] = []
    both[1].send([b"hello"])
    peer = until(both, lambda: len(got) == 1, got, [])
    both[0].keep(peer)
    until(both, lambda: both[1]._session is not None and both[1]._session.address is not None, got, [])
    return peer


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_messages_keep_their_order_and_losses_are_reported(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, loss)
    with sides() as both:
        listener, connection = both
        peer = opened(both)
        lost: dict[int, frozenset[int]] = {}
        connection.on_report = lambda ticket, missing: lost.update({ticket: missing})
        got: list[list[bytes]] = []
        sent = {}
        for i in range(60):
            pieces = [os.urandom(700) for _ in range(5)]
            ticket = connection.send_pieces(b"bulk %d" % i, pieces)
            assert ticket is not None
            sent[b"bulk %d" % i] = pieces, ticket
            connection.send([b"plain %d" % i])
        until(both, lambda: len(got) == 120 and len(lost) == 60, got, [])
        assert [parts[0] for parts in got] == [text % i for i in range(60) for text in (b"bulk %d", b"plain %d")]
        missing = 0
        for head, body in (parts for parts in got if parts[0].startswith(b"bulk")):
            pieces, ticket = sent.pop(head)
            arrived = unpack(body)
            assert arrived.total == 3500 and arrived.count == 5
            assert {i: bytes(p) for i, p in arrived.arrived.items()} == {
                i: p for i, p in enumerate(pieces) if i not in lost[ticket]
            }
            missing += len(lost[ticket])
        assert not sent
        assert (missing > 20) == (loss > 0)
        # The other direction.
        answers: list[list[bytes]] = []
        assert listener.send_pieces(peer, b"head", [b"x" * 100]) is not None
        listener.send(peer, [b"end"])
        until(both, lambda: len(answers) == 2, [], answers)
        assert [a[0] for a in answers] == [b"head", b"end"]


def test_forged_and_replayed_packets_change_nothing() -> None:
    """Noise, and copies of genuine packets, are counted and have no other effect."""
    with sides() as both:
        opened(both)
        listener, connection = both
        assert connection._session is not None
        true = [
            connection._session.encryptor.encrypt(_native.pack_data(7, 0, 2, b"h", [b"p" * 50], 0.0, 0))[0]
            for _ in range(4)
        ]
        chance = random.Random(1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            to = ("127.0.0.1", listener._port)
            for i in range(3000):
                forged = bytearray(true[i % 4])
                forged[chance.randrange(len(forged))] ^= 1 << chance.randrange(8)
                stranger.sendto(bytes(forged), to)
                stranger.sendto(chance.randbytes(chance.randrange(200)), to)
                listener._thread.receive()
            for _ in range(2):
                stranger.sendto(true[0], to)
        got: list[list[bytes]] = []
        connection.send([b"still here"])
        until(both, lambda: got == [[b"still here"]] and sum(listener.rejected.values()) >= 6001, got, [])
        counted = listener.rejected
        assert counted["forged"] > 1000 and counted["foreign"] > 1000
        assert counted["replayed"] >= 1 and counted["truncated"] > 10
        session = next(iter(listener._sessions.values()))
        assert session.reassembly.received == 1  # the one genuine copy


def test_everything_arrives_over_tcp_if_no_packet_does(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, 1.0)
    with sides() as both:
        listener, connection = both
        got: list[list[bytes]] = []
        connection.send([b"hello"])
        peer = until(both, lambda: len(got) == 1, got, [])
        assert connection.send_pieces(b"head", [b"a", b"bc"]) is None
        answers: list[list[bytes]] = []
        assert listener.send_pieces(peer, b"back", [b"d"]) is None
        until(both, lambda: len(got) == 2 and len(answers) == 1, got, answers)
        assert {i: bytes(p) for i, p in unpack(got[1][1]).arrived.items()} == {0: b"a", 1: b"bc"}


def test_a_worker_gets_a_new_session_from_a_restarted_server() -> None:
    with sides() as both:
        opened(both)
        address = both[0].address
        both[0].close()
        again = listen(address)
        assert isinstance(again, UdpListener)
        try:
            got: list[list[bytes]] = []

            def heard() -> bool:
                both[1].send([b"anybody?"])
                return bool(got)

            until((again, both[1]), heard, got, [])
            assert got[0] == [b"anybody?"]
        finally:
            again.close()


def test_packets_are_encrypted_and_authenticated() -> None:
    keys = new_keys()
    encryptor, decryptor = PacketEncryptor(5, keys[:KEY_BYTES]), PacketDecryptor(keys[:KEY_BYTES])
    [packet] = encryptor.encrypt([b"one"])
    first, second, third = (split_packet(each) for each in (packet, *encryptor.encrypt([b"two", b"three"])))
    cut = split_packet(packet[:-1])
    assert first is not None and second is not None and third is not None and cut is not None
    assert first[:3] == (5, 1, bytes([1, *bytes(11)])) and first[3] + first[4] == packet
    assert split_packet(b"short") is None and split_packet(b"X" + packet[1:]) is None
    assert decryptor.decrypt(third) == b"three" and decryptor.decrypt(first) == b"one"  # reordering is allowed
    assert decryptor.decrypt(first) is None and decryptor.decrypt(third) is None
    assert decryptor.decrypt(cut) is None and decryptor.decrypt(second) == b"two"
    assert PacketDecryptor(keys[KEY_BYTES:]).decrypt(first) is None
    assert b"one" not in packet


@given(st.binary(max_size=200))
def test_malformed_bytes_raise_an_expected_error(data: bytes) -> None:
    for read in (
        unpack,
        lambda d: _native.read_data([d], [0.0], 1.0),
        lambda d: read_acks(d, lambda message: 9),
        lambda d: read_control(1, d),
        lambda d: read_envelope([d]),
        lambda d: read_records(1, d),
    ):
        try:
            read(data)
        except (TransportError, IndexError):
            pass
        except Exception as error:
            assert type(error).__name__ == "error"  # struct.error, which the socket thread expects


@given(st.sets(st.integers(0, 40)), st.integers(41, 60))
def test_acks_and_pieces_tell_what_was_lost(lost: set[int], count: int) -> None:
    ack = MessageAck(9, count, missing_ranges(count, set(range(count)) - lost), 0.001, 0.002, 0.5, 77)
    other = MessageAck(7, 3)
    assert frozenset(chain(*ack.lost)) == lost
    assert read_acks(ack.pack() + other.pack() + ack.pack(), {9: count, 7: 3}.get) == [ack, other]
    assert read_acks(ack.pack() + other.pack(), {7: 3}.get) == [other]  # nobody waits for the first
    arrived = {i: bytes([i]) * i for i in range(count) if i not in lost}
    back = unpack(pack(count, 1000, arrived.items()))
    assert {i: bytes(p) for i, p in back.arrived.items()} == arrived and back.count == count


def test_the_loss_timer_follows_measured_delays() -> None:
    reassembly, waits = Reassembly(), []
    for late in (0.0, 0.2):
        for message in range(100):
            number = message + int(late * 1000)
            now = time.monotonic()
            reassembly.add((number, 2, b"", {0: b"x"}, 0, 0.0, 0.0, 0.0), now)
            reassembly.end(number, 2, 2, b"", now - late)
            reassembly.add((number, 2, b"", {1: b"x"}, 0, 0.0, 0.0, 0.0), now)
            reassembly.close(number)
        waits.append(reassembly.loss_timer.timeout)
    assert waits[0] < 0.01 and 0.2 < waits[1] < 0.4


def test_the_reorder_buffer_jumps_to_a_number_far_ahead() -> None:
    incoming = ReorderBuffer()
    assert incoming.add(Envelope(EnvelopeKind.PLAIN, 1, 1 << 62, [b"x"]), lambda message: None, reliable=True)
    found = incoming.current()
    assert found is not None and found.number == incoming.expected == 1 << 62


def test_an_envelope_that_tcp_lost_is_skipped_though_packets_brought_the_next_one() -> None:
    incoming = ReorderBuffer()
    second = Envelope(EnvelopeKind.PLAIN, 1, 2, [b"x"])
    assert incoming.add(second, lambda message: None, reliable=False) and incoming.current() is None
    assert not incoming.add(second, lambda message: None, reliable=True)  # a duplicate, which shows that 1 never comes
    assert incoming.current() is second and incoming.gaps == 1


def test_the_session_of_a_forgotten_peer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_LINGER_SECONDS", 0.0)
    with sides() as both:
        opened(both)
        (peer,) = both[0]._sessions
        both[0].forget(peer)
        time.sleep(0.01)
        both[0]._flush()
        assert not both[0]._sessions and not both[0]._thread.sessions
        got: list[list[bytes]] = []

        def heard() -> bool:
            both[1].send([b"again"])
            return bool(got)

        until(both, heard, got, [])  # a worker that is still there gets a new session
        assert got[0] == [b"again"]
