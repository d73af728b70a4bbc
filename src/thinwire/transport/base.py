"""The interface of a transport, which carries messages between a parameter server and its workers.

A message is a few buffers. They arrive together and complete, in the order in which messages were sent, or not at all.
What uses a transport is a state machine without I/O and clocks; `serve` drives the server's. The limits on messages and
packets are here, too; they need no library, so that a command line can be checked without one.
"""

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

Buffer = bytes | bytearray | memoryview
Parts = list[memoryview]
Peer = bytes  # names a connection to the server; a worker that reconnects by itself keeps its name

# The largest message that either side takes, checked before anything is allocated for it.
LARGEST = 1 << 28

T = TypeVar("T")


class Side(ABC, Generic[T]):
    """What both sides share; `poll` returns messages of type T. One thread uses a side; others may only call `wake`.

    Where `piece_bytes` is not None, `send_pieces` sends a message whose body may arrive in part.
    """

    piece_bytes: int | None = None

    @abstractmethod
    def poll(self, timeout: float) -> list[T]:
        """Return the messages that have arrived; wait up to `timeout` seconds for the first."""

    @abstractmethod
    def wake(self) -> None:
        """Make the present `poll` of another thread, or the next one, return at once."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, within a second, and free all resources."""


class Listener(Side[tuple[Peer, Parts]]):
    """The server's side, which has many peers."""

    address: str  # to which workers connect, with the actual port
    # Called with the pieces of a message that were lost: the peer, the ticket, and the pieces.
    on_report: Callable[[Peer, int, frozenset[int]], None] = staticmethod(lambda peer, ticket, lost: None)
    # Called when messages of a peer, perhaps with such reports, were lost together with a connection.
    on_gap: Callable[[Peer], None] = staticmethod(lambda peer: None)

    @abstractmethod
    def send(self, peer: Peer, parts: Sequence[Buffer]) -> bool:
        """Queue a message; return False if the peer cannot be reached now. The buffers must not change afterwards."""

    def send_pieces(self, peer: Peer, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        """Queue a message in pieces of at most `piece_bytes`; it arrives as the head and the packed pieces.

        Return the ticket that `on_report` gets; None if all of it will arrive.
        """
        raise NotImplementedError

    def figures(self, peer: Peer) -> dict[str, float]:
        """Return statistics of the connection to a peer, for people."""
        return {}

    def keep(self, peer: Peer) -> None:
        """Keep what belongs to a peer until `forget`: the server has admitted it. What strangers need expires."""

    def forget(self, peer: Peer) -> None:
        """Free what is kept for a peer that is gone or was refused; it may come back with a new message."""


class Connection(Side[Parts]):
    """A worker's side, which has one server and reconnects by itself."""

    on_report: Callable[[int, frozenset[int]], None] = staticmethod(lambda ticket, lost: None)

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Queue a message without waiting. The buffers must not change afterwards."""

    def send_pieces(self, head: bytes, pieces: Sequence[Buffer]) -> int | None:
        """Queue a message in pieces, as `Listener.send_pieces` does."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Return statistics of the connection to the server, for people."""
        return {}


class Outgoing(NamedTuple):
    """What a state machine wants to have done: mostly that a message is sent."""

    parts: Sequence[Buffer] = ()
    shards: Sequence[Buffer] | None = None  # the message's body, any of which may be lost
    place: tuple[int, int, int] = (0, 0, 0)  # what these shards are of: layer, part and step
    # On the server, which may also want a peer's connection kept (it was admitted) or forgotten:
    peer: Peer = b""
    session: int = 0  # the message's session, which ends if the message cannot be sent; 0 outside of one
    action: Literal["send", "keep", "forget"] = "send"


class Service(Protocol):
    """The state machine of a server, as `serve` drives it. `now` is time.monotonic."""

    stopped: str | None  # why it ends, once it does
    remaining: set[Peer]  # after the end: peers that have not confirmed that they know of it
    timeout: float

    def open(self, piece_bytes: int | None, now: float, *, session: int) -> None: ...
    def receive(self, peer: Peer, parts: Parts, now: float) -> None: ...
    def next_outgoing(self, now: float) -> Outgoing | None: ...
    def on_ticket(self, sent: Outgoing, ticket: int | None) -> None: ...
    def on_report(self, peer: Peer, ticket: int, lost: frozenset[int], now: float) -> None: ...
    def on_gap(self, peer: Peer, now: float) -> None: ...
    def on_unreachable(self, session: int, now: float) -> None: ...
    def on_timer(self, now: float) -> None: ...
    def call_owner(self) -> bool: ...
    def excuse(self, seconds: float) -> None: ...
    def save(self) -> bool: ...
    def on_end(self, reason: str) -> None: ...


# Seconds between two calls of a service's timer, and those in which peers may confirm that they know of the end.
_TURN, _PARTING = 0.25, 3.0


def serve(service: Service, listener: Listener) -> str:
    """Drive a service in this thread until it stops, and return why it did; close the listener.

    This is all input and output of a server, and its only clock.
    """
    listener.on_report = lambda peer, ticket, lost: service.on_report(peer, ticket, lost, time.monotonic())
    listener.on_gap = lambda peer: service.on_gap(peer, time.monotonic())
    try:
        service.open(listener.piece_bytes, time.monotonic(), session=secrets.randbits(30))
        while service.stopped is None:
            _take_turn(service, listener)
        service.save()
        _announce_end(service, listener, service.stopped)
        return service.stopped
    except Exception:
        with contextlib.suppress(Exception):
            _announce_end(service, listener, "failed")  # so that peers do not wait for this server
        raise
    finally:
        listener.close()


def _take_turn(service: Service, listener: Listener) -> None:
    arrived, now = listener.poll(_TURN), time.monotonic()
    _transmit(service, listener)  # `poll` calls `on_report`, which may let replies leave
    for peer, parts in arrived:
        service.receive(peer, parts, time.monotonic())
        _transmit(service, listener)
        if service.stopped is not None:
            return
    service.on_timer(now)  # not the present time: messages may have come while others were handled
    _transmit(service, listener)


def _transmit(service: Service, listener: Listener) -> None:
    """Do what the service wants, and let it call its owner; its peers are not silent meanwhile."""
    while (out := service.next_outgoing(now := time.monotonic())) is not None:
        if out.action == "keep":
            listener.keep(out.peer)
        elif out.action == "forget":
            listener.forget(out.peer)
        elif out.shards is not None:
            service.on_ticket(out, listener.send_pieces(out.peer, bytes(out.parts[0]), out.shards))
        elif not listener.send(out.peer, out.parts) and out.session:
            service.on_unreachable(out.session, now)
    if service.call_owner():
        service.excuse(time.monotonic() - now)


def _announce_end(service: Service, listener: Listener, reason: str) -> None:
    """Tell all peers that the service has ended, and wait for a while until they have left."""
    service.on_end(reason)
    deadline = time.monotonic() + min(_PARTING, service.timeout)
    _transmit(service, listener)
    while service.remaining and time.monotonic() < deadline:
        for peer, parts in listener.poll(0.1):
            service.receive(peer, parts, time.monotonic())
        _transmit(service, listener)


# The largest number of parts of a message. It bounds what a hostile peer can make the receiver collect.
MOST_PARTS = 8
# The default and the largest size of a UDP packet in bytes, without IP and UDP headers.
MTU = 1400
LARGEST_PACKET = 9216
# The most messages that one poll returns, so that a peer that never stops sending cannot keep the server in it.
AT_ONCE = 256


def views(parts: Sequence[Buffer]) -> list[memoryview]:
    """Return the parts of a message as byte views; raise ValueError if the message exceeds the limits."""
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"a message has 1 to {MOST_PARTS} parts, not {len(parts)}")
    found = [memoryview(part) for part in parts]
    found = [view.cast("B") if view.nbytes else memoryview(b"") for view in found]  # Python cannot cast an empty view
    size = sum(map(len, found))
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes is larger than {LARGEST}; cut it in pieces")
    return found


def acceptable(sizes: Iterable[int]) -> bool:
    """Return whether a received message, given the sizes of its parts, keeps the limits."""
    known = list(sizes)
    return 1 <= len(known) <= MOST_PARTS and sum(known) <= LARGEST


def check_mtu(mtu: int) -> int:
    """Return `mtu`; raise ValueError if frames would not fit into such packets, or networks would not carry them."""
    if not 256 <= mtu <= LARGEST_PACKET:
        raise ValueError(f"--mtu is from 256 to {LARGEST_PACKET} bytes, not {mtu}")
    return mtu
