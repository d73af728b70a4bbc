"""Congestion control: how fast packets leave (`Pacer`), and how a receiver divides its link (`FairShares`).

The congestion window follows CUBIC (RFC 9438). Unlike TCP, a loss alone does not reduce it: links may lose packets for
other reasons than congestion, so that a reduction also needs a queueing delay or another sign of a full queue.
docs/guides/lossy-networks.md describes the rules. Nothing here reads a clock: `now` is passed in.
"""

from collections import deque
from typing import NamedTuple

from thinwire.limits import TokenBucket


class WindowedMaximum:
    """The largest of the last `count` non-negative values; 0 if there is none yet."""

    def __init__(self, count: int) -> None:
        self._values: deque[float] = deque(maxlen=count)
        self.value = 0.0

    def add(self, value: float) -> None:
        """Add a value, and drop the one that leaves the window."""
        self._values.append(value)
        self.value = max(self._values)


# A probe begins above this smoothed loss, unless an earlier probe found that loss to be the link's own; then it begins
# again if the loss has grown by this factor.
_PROBE_LOSS, _PROBE_GROWTH = 0.02, 1.5
# The share of the congestion window that is left during a probe. The loss must fall below this share of what it was to
# show that the window was too large.
_PROBE_WINDOW, _PROBE_IMPROVEMENT = 0.5, 0.6
# A probe takes at least so many round trips and packets. Its result is valid for so many seconds.
_PROBE_RTTS, _PROBE_PACKETS, _PROBE_VALID = 4.0, 128, 10.0


class LossProbe:
    """Finds out whether loss is caused by congestion: sends less for a while and checks whether less is lost.

    A sender that starts while the queue is already full sees no change of delay, and could not tell otherwise.
    """

    def __init__(self) -> None:
        self.running = False
        self._loss = self._link_loss = 0.0  # smoothed loss, and the loss that was found to be the link's own
        self._valid_until = self._began = 0.0
        self._before = (0.0, 0.0)  # loss and congestion window before the probe
        self._sent = self._lost = 0

    def is_due(self, sent: int, lost: int, now: float) -> bool:
        """Take an ack into account while no probe runs; return whether a probe should begin."""
        self._loss += (lost / max(sent, 1) - self._loss) / 4
        known = now < self._valid_until and self._loss < _PROBE_GROWTH * self._link_loss + _PROBE_LOSS
        return self._loss > _PROBE_LOSS and not known

    def begin(self, window: float, now: float) -> float:
        """Begin a probe; return the congestion window to use during it."""
        self.running, self._began, self._before = True, now, (self._loss, window)
        self._sent = self._lost = 0
        return window * _PROBE_WINDOW

    def on_ack(self, sent: int, lost: int, rtt: float, now: float) -> float | None:
        """Take an ack into account during a probe; return the congestion window to use after it, None to go on.

        That is the window before the probe if less sending did not reduce the loss, and the smaller one if it did.
        """
        if now - self._began < 1.5 * rtt:  # the ack is for packets that left before the probe
            return None
        self._sent, self._lost = self._sent + sent, self._lost + lost
        if now - self._began < _PROBE_RTTS * rtt or self._sent < _PROBE_PACKETS:
            return None
        self.running = False
        before, window = self._before
        self._loss = after = self._lost / self._sent
        if after < _PROBE_IMPROVEMENT * before:
            return window * _PROBE_WINDOW
        self._link_loss, self._valid_until = max(after, before), now + _PROBE_VALID
        return window


# Packets that may leave back to back, as many as TCP's initial window.
BURST = 10
# The initial and the smallest congestion window, in packets; the RTT until one is measured, in seconds.
_INITIAL_WINDOW, _MINIMUM_WINDOW = 32, 4
_INITIAL_RTT = 0.005
_HIGHEST_RATE = 1.25e9  # bytes a second
# CUBIC's constants: the factor of a reduction after loss, and how steeply the window grows.
_BETA, _CUBIC = 0.7, 0.4
# The factor of a reduction that reacts to a queue alone.
_QUEUE_BETA = 0.82
# Seconds of delay above the recent minimum that count as a queue. Short bursts of several senders cause less.
QUEUE_DELAY = 0.020
# The same for a sender that waits for its pacer: its own packets come evenly, so that less delay shows a busy link.
_PACED_QUEUE_DELAY = 0.007
# The queue counts as full when its delay exceeds this share of the longest recent delay: other senders then lose
# packets even if this one does not. It counts as full again after it was below the second share.
_QUEUE_FULL, _QUEUE_LEFT = 0.85, 0.75
# A sender with more than this share of all packets in flight reduces a queue; one with less leaves that to the others.
# The capacity of the link is the highest arrival rate, which is halved after so many seconds.
_MAIN_SHARE, _CAPACITY_HALF_LIFE = 0.4, 30.0
# If the queue is caused by others, this sender competes with them for so many seconds: it ignores the queue, and its
# window grows by so many more packets per RTT.
_COMPETE_SECONDS, _COMPETE_GROWTH = 10.0, 2.0
# Above this loss the link counts as congested whatever the delays are: the queue may have been full from the start.
_CONGESTED_LOSS = 0.3
# Factors above the measured arrival rate, so that free capacity is found: in slow start, and after it.
_SLOW_START_GAIN, _STEADY_GAIN = 2.0, 1.25
# Acks whose arrival rates are remembered, and the packets that an ack must cover to show an arrival rate.
_RATES, _RATE_PACKETS = 32, 8
# Seconds of its fair share that a sender may save for a burst.
_SHARE_BURST = 0.05
# The weight of an ack in the smoothed loss, for each packet that it covers.
_LOSS_WEIGHT = 1 / 256


class AckSample(NamedTuple):
    """What the ack of one message tells: packets and bytes sent, packets lost, and times in seconds."""

    sent: int
    size: int
    lost: int
    queue: float  # the least queueing delay of the packets
    span: float  # from the first arrival to the last
    took: float  # from the first departure to the last
    rtt: float
    limited: bool  # whether the message had to wait for the pacer
    share: int = 0  # the receiver's fair share for this sender, bytes a second; 0 means no limit


class Pacer:
    """Congestion controller of one session; packets leave through three token buckets.

    One lets a congestion window leave per RTT, one spaces packets evenly at about the rate at which they arrive, and
    one keeps to the fair share that the receiver grants.
    """

    def __init__(self, size: int, now: float) -> None:
        self._size = size  # bytes of a full packet
        self.window = float(_INITIAL_WINDOW)  # congestion window, packets
        self.loss = 0.0  # smoothed share of packets that are lost
        self.rtt = 0.0  # smoothed RTT
        self.reductions = 0
        self.share = 0
        self._rates = WindowedMaximum(_RATES)
        self._slow_start = True
        self._window_max, self._reduced = float(_INITIAL_WINDOW), now  # the window before the last reduction, and when
        self._longest_queue = WindowedMaximum(256)
        self._queue_full = False
        self._competes_until = 0.0
        self._capacity = 0.0, now  # the highest arrival rate with decay, and when that was computed
        self._probe = LossProbe()
        self._even = TokenBucket(_HIGHEST_RATE, BURST * size, now)
        self._windows = TokenBucket(self.rate, self.window * size, now)
        self._shared = TokenBucket(_HIGHEST_RATE, _HIGHEST_RATE, now)
        self._buckets = (self._even, self._windows, self._shared)

    @property
    def rate(self) -> float:
        """The pacing rate in bytes a second, without the receiver's fair share."""
        return min(self.window * self._size / max(self.rtt or _INITIAL_RTT, 1e-3), self._arrival_rate)

    @property
    def _arrival_rate(self) -> float:
        gain = _SLOW_START_GAIN if self._slow_start else _STEADY_GAIN
        return min(gain * self._rates.value, _HIGHEST_RATE) if self._rates.value else _HIGHEST_RATE

    def allowed(self, now: float) -> tuple[int, float]:
        """Return how many full packets may leave now, and if none, the seconds until one may."""
        tokens = [bucket.tokens(now) for bucket in self._buckets]
        count = int(min(tokens) // self._size)
        if count > 0:
            return count, 0.0
        return 0, max((self._size - there) / bucket.rate for there, bucket in zip(tokens, self._buckets, strict=True))

    def spend(self, size: int) -> None:
        """Account for so many bytes that leave."""
        for bucket in self._buckets:
            bucket.left -= size

    def on_ack(self, sample: AckSample, now: float) -> None:
        """Update the loss, the RTT and the congestion window from an ack."""
        usual = self.loss
        loss = sample.lost / sample.sent if sample.sent else 0.0
        self.loss += (1.0 - (1.0 - _LOSS_WEIGHT) ** sample.sent) * (loss - self.loss)
        rtt = max(sample.rtt, 2e-4)
        self.rtt = rtt if not self.rtt else self.rtt + (rtt - self.rtt) / 8
        self.share = sample.share
        arrived = sample.sent - sample.lost
        if arrived >= _RATE_PACKETS and sample.span > 0.0:
            rate = sample.size * (arrived - 1) / sample.sent / sample.span
            self._rates.add(rate)
            highest, since = self._capacity
            self._capacity = max(rate, highest * 0.5 ** ((now - since) / _CAPACITY_HALF_LIFE)), now
        self._longest_queue.add(sample.queue)
        if self._probe.running:
            window = self._probe.on_ack(sample.sent, sample.lost, self.rtt, now)
            if window is not None and window <= self.window:
                self._reduce(window, now)
            elif window is not None:
                self.window = max(_MINIMUM_WINDOW, window)
        elif self._is_congested(sample) or self._overflows(sample, usual) or self._causes_queue(sample, now):
            # The losses of one RTT are one event, whose effect shows an RTT later.
            if now - self._reduced > 2 * self.rtt:
                self._reduce(self.window * (_BETA if sample.lost else _QUEUE_BETA), now)
        elif sample.limited and self._probe.is_due(sample.sent, sample.lost, now):
            self.window = max(_MINIMUM_WINDOW, self._probe.begin(self.window, now))
        elif sample.limited:
            self._grow(sample, now)
        arrival_rate, burst, limit = self._arrival_rate, BURST * self._size, sample.share or _HIGHEST_RATE
        # Timers have a resolution of a millisecond, so that a fast link stays busy only with more than that in a burst.
        self._even.rate, self._even.depth = arrival_rate, max(burst, 0.002 * arrival_rate)
        self._windows.rate, self._windows.depth = self.rate, self.window * self._size
        self._shared.rate, self._shared.depth = limit, max(burst, _SHARE_BURST * limit)

    def _is_congested(self, sample: AckSample) -> bool:
        """Return whether there is a queue that is full, or too much loss."""
        before, level = self._queue_full, sample.queue / max(self._longest_queue.value, 1e-9)
        self._queue_full = level > (_QUEUE_LEFT if before else _QUEUE_FULL)
        full = sample.lost > 0 or (self._queue_full and not before)  # a queue that stays full counts once
        queue_delay = _PACED_QUEUE_DELAY if sample.limited else QUEUE_DELAY
        return (sample.queue > queue_delay and full) or self.loss > _CONGESTED_LOSS

    def _causes_queue(self, sample: AckSample, now: float) -> bool:
        """Return whether there is a queue mostly of this sender's packets; BBR, which avoids queues, would starve."""
        if not sample.limited or sample.queue <= _PACED_QUEUE_DELAY:
            self._competes_until = 0.0 if sample.queue <= _PACED_QUEUE_DELAY else self._competes_until
            return False
        in_flight = self._capacity[0] * self.rtt / self._size  # estimated packets of all senders on the link
        if self.window > _MAIN_SHARE * in_flight:
            return now >= self._competes_until
        if sample.queue > QUEUE_DELAY:
            self._competes_until = now + _COMPETE_SECONDS
        return False

    def _overflows(self, sample: AckSample, usual: float) -> bool:
        """Return whether a queue overflows that is too short to show as a delay.

        Then far more packets are lost than usual, and the others arrive further apart than they left.
        """
        if not sample.lost:
            return False
        expected = sample.sent * usual
        excess = sample.lost > expected + 4.0 * (expected * (1.0 - usual)) ** 0.5 + 4.0
        return excess and sample.span > 1.3 * sample.took

    def _reduce(self, window: float, now: float) -> None:
        self._window_max, self._reduced, self._slow_start = self.window, now, False
        self.reductions += 1
        self.window = max(_MINIMUM_WINDOW, window)

    def _grow(self, sample: AckSample, now: float) -> None:
        """Double the window per RTT until there is a queue (slow start), then grow it as CUBIC does."""
        if self._slow_start:
            if sample.queue <= QUEUE_DELAY:
                self.window = min(self.window + sample.sent, 1e6)
                return
            self._slow_start, self._window_max, self._reduced = False, self.window, now
        turn = (self._window_max * (1.0 - _BETA) / _CUBIC) ** (1 / 3)
        since = now - self._reduced
        target = _CUBIC * (since + self.rtt - turn) ** 3 + self._window_max
        # Where RTTs are short, CUBIC grows like Reno: by about half a packet per RTT.
        friendly = self._window_max * _BETA + 3.0 * (1.0 - _BETA) / (1.0 + _BETA) * since / max(self.rtt, 1e-3)
        self.window = max(self.window, min(max(target, friendly), 1.5 * self.window))
        if now < self._competes_until:
            self.window += _COMPETE_GROWTH * sample.sent / self.window

    def __str__(self) -> str:
        shared = f", fair share {self.share * 8e-6:.1f} mbit/s" if self.share else ""
        return (
            f"{self.rate * 8e-6:.1f} mbit/s, congestion window {self.window:.0f} packets, RTT {self.rtt * 1e3:.1f} ms, "
            f"loss {self.loss:.2%}, window reduced {self.reductions} times{shared}"
        )


# Arrivals are counted over spans of so many seconds, of which so many are remembered.
SPAN, _SPANS = 0.020, 500
# A session counts as a sender if it sent within so many seconds.
_ACTIVE = 0.2
# The sum of all fair shares, relative to what the link was seen to carry: while it is not congested, and while it is.
_FREE, _FULL = 1.5, 0.95
# The share of packets lost above which the link counts as congested; the weight of a message in the smoothed values.
_FULL_LOSS = 0.02
_SHARE_WEIGHT = 1 / 16


class FairShares:
    """Divides the link of one receiver among those that send to it.

    Senders do not know of each other, and the queue in front of the receiver is full before each of them has found out
    by losses. The receiver knows what its link carries and who uses it, and tells each sender its share in every ack.
    """

    def __init__(self) -> None:
        self._span, self._bytes = 0, 0
        self._rates = WindowedMaximum(_SPANS)
        self._heard: dict[int, float] = {}  # when each session last sent
        self._queue = self._loss = 0.0

    def on_packets(self, session: int, size: int, stamp: float) -> None:
        """Count bytes of a session that arrived at this time by the kernel's clock."""
        span = int(stamp / SPAN)
        if span != self._span:
            if self._bytes:
                self._rates.add(self._bytes / SPAN)
            self._span, self._bytes = span, 0
        self._bytes += size
        self._heard[session] = stamp

    def on_message(self, queue: float, loss: float) -> None:
        """Take a received message into account: its least queueing delay and the share of its packets that was lost."""
        self._queue += (queue - self._queue) * _SHARE_WEIGHT
        self._loss += (loss - self._loss) * _SHARE_WEIGHT

    def share(self, stamp: float) -> int:
        """Return the bytes a second for each sender; 0, no limit, for a single sender or before any measurement."""
        self._heard = {session: when for session, when in self._heard.items() if when > stamp - _ACTIVE}
        if len(self._heard) < 2 or not self._rates.value:
            return 0
        full = self._queue > QUEUE_DELAY or self._loss > _FULL_LOSS
        return int(self._rates.value * (_FULL if full else _FREE) / len(self._heard))
