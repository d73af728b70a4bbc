"""A simulated link with a drop-tail queue, shared by senders that use the pacer and by TCP streams."""

import heapq
import random
from collections.abc import Callable
from typing import Any

from thinwire.transport.udp.congestion import AckSample, FairShares, Pacer

SIZE, PIECES, WINDOW = 1400, 64, 16  # bytes of a packet, packets of a message, messages in flight
RATE, QUEUE, DELAY = 12.5e6, 625e3, 2e-4  # bytes a second, bytes, seconds one way
WARM = 0.25  # share of the time that is not measured


class Bottleneck:
    """Simulates senders for some seconds, and counts the bytes of each and the packets lost."""

    def __init__(self, seconds: float, *, loss: float = 0.0) -> None:
        self.began = 1.0
        self.counts_from, self.ends = self.began + WARM * seconds, self.began + seconds
        self.chance, self.loss, self.shares = random.Random(0), loss, FairShares()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._free, self._serial = self.began, 0
        self.bytes: dict[object, int] = {}
        self.sent = self.lost = 0

    def at(self, when: float, what: Callable[..., None], *rest: Any) -> None:
        """Schedule a call at a time; the time is its first argument."""
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, what, rest))

    def carry(self, now: float, size: int) -> float | None:
        """Return when so many bytes arrive; None if the queue has no room for them."""
        if max(0.0, self._free - now) * RATE + size > QUEUE:
            return None
        self._free = max(self._free, now) + size / RATE
        return self._free + DELAY

    def count(self, who: object, size: int, now: float) -> None:
        """Count bytes that have arrived."""
        if now > self.counts_from:
            self.bytes[who] = self.bytes.get(who, 0) + size

    def run(self, senders: int, streams: int = 0, *, late: float = 0.0) -> list[float]:
        """Return mbit/s of each sender, then of each TCP stream; the senders start `late` seconds after the streams."""
        flows: list[Paced | Stream] = [Paced(self, i) for i in range(senders)]
        flows += [Stream(self) for _ in range(streams)]
        for i, flow in enumerate(flows):
            self.at(self.began + 1e-3 * i + (late if i < senders else 0.0), flow.pump)
        while self._events and self._events[0][0] < self.ends:
            when, _, what, rest = heapq.heappop(self._events)
            what(when, *rest)
        return [8e-6 * self.bytes.get(flow, 0) / (self.ends - self.counts_from) for flow in flows]


class Paced:
    """A sender that always has messages to send."""

    def __init__(self, link: Bottleneck, number: int) -> None:
        self._link, self._number, self.pacer = link, number, Pacer(SIZE, link.began)
        self._waiting, self._least = WINDOW, 1e9
        self._left = 0  # packets left of the message that is being sent
        self._began, self._waited = 0.0, False
        self._flights: list[tuple[float, float]] = []

    def pump(self, now: float) -> None:
        while self._left or self._waiting:
            if not self._left:
                self._left, self._began, self._waited, self._flights = PIECES, 0.0, False, []
                self._waiting -= 1
            count, delay = self.pacer.allowed(now)
            if not count:
                self._waited = True
                self._link.at(now + max(delay, 1e-4), self.pump)
                return
            self._send(now)

    def _send(self, now: float) -> None:
        link = self._link
        self._began = self._began or now
        self.pacer.spend(SIZE)
        self._left -= 1
        there = link.carry(now, SIZE)
        lost = there is None or link.chance.random() < link.loss
        if now > link.counts_from:
            link.sent, link.lost = link.sent + 1, link.lost + lost
        if there is not None and not lost:
            self._flights.append((now, there))
            link.at(there, self._arrive)
        if not self._left:
            last = self._flights[-1][1] if self._flights else now
            link.at(last + (0.0 if len(self._flights) == PIECES else 4e-3), self._close, self._flights, now)

    def _arrive(self, now: float) -> None:
        self._link.shares.on_packets(self._number, SIZE, now)
        self._link.count(self, SIZE, now)

    def _close(self, now: float, flights: list[tuple[float, float]], left: float) -> None:
        least = min((there - sent for sent, there in flights), default=self._least)
        self._least = min(self._least, least)
        lost, queue = PIECES - len(flights), least - self._least
        self._link.shares.on_message(queue, lost / PIECES)
        span = flights[-1][1] - flights[0][1] if flights else 0.0
        ack_delay = now - flights[-1][1] if flights else 0.0
        took = left - flights[0][0] if flights else 0.0
        rtt, share = now + DELAY + 1e-3 - left - ack_delay, self._link.shares.share(now)
        sample = AckSample(PIECES, PIECES * SIZE, lost, queue, span, took, rtt, True, share)
        self._link.at(now + DELAY + 1e-3, self._on_ack, sample)

    def _on_ack(self, now: float, sample: AckSample) -> None:
        self.pacer.on_ack(sample, now)
        self._waiting += 1
        if not self._left:
            self.pump(now)


class Stream:
    """An approximation of Linux's TCP: CUBIC, in bundles of eight packets."""

    BUNDLE, PACKET = 8, 1500

    def __init__(self, link: Bottleneck) -> None:
        self._link, self._window, self._top, self._trip = link, 10.0, 10.0, 1e-3
        self._under_way, self._fell, self._starting = 0, link.began, True

    def pump(self, now: float) -> None:
        while self._under_way + self.BUNDLE <= max(self._window, self.BUNDLE):
            self._under_way += self.BUNDLE
            there = self._link.carry(now, self.BUNDLE * self.PACKET)
            if there is None:
                self._link.at(now + self._trip, self._lose)
            else:
                self._link.at(there + DELAY, self._acknowledge, now)

    def _acknowledge(self, now: float, sent: float) -> None:
        self._under_way -= self.BUNDLE
        self._trip += (now - sent - self._trip) / 8
        self._link.count(self, self.BUNDLE * self.PACKET, now)
        if self._starting:
            self._window += self.BUNDLE
            if self._trip > 0.012:
                self._starting, self._top, self._fell = False, self._window, now
        else:
            since = now - self._fell
            cubic = 0.4 * (since + self._trip - (0.75 * self._top) ** (1 / 3)) ** 3 + self._top
            target = max(cubic, 0.7 * self._top + 0.53 * since / self._trip)
            self._window += min(max(target - self._window, 0.0) / self._window * self.BUNDLE, 4.0)
        self.pump(now)

    def _lose(self, now: float) -> None:
        self._under_way -= self.BUNDLE
        if now - self._fell > self._trip:
            self._top, self._fell, self._starting = self._window, now, False
            self._window = max(4.0, 0.7 * self._window)
        self.pump(now)
