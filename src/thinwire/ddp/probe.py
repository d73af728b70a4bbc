"""Probe: measures the network between the ranks of a channel, in a fraction of a second on any network.

Messages grow until one takes long enough to be timed; all ranks take the same figures away.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from thinwire.exchange.channel import Channel
from thinwire.tune.network import Line, Network

_TINY = 64
_FIRST = 16 * 1024
_GROWTH = 4
_LARGEST = 8 << 20
# A message that takes so much longer than three empty ones tells the bandwidth well enough.
_ENOUGH = 0.03


def share(channel: Channel, mine: Sequence[float]) -> list[list[float]]:
    """Everybody's numbers, in rank order."""
    message = torch.tensor(list(mine), dtype=torch.float64).view(torch.uint8)
    return [m.clone().view(torch.float64).tolist() for m in channel.all_gather(message)]


def probe_network(channel: Channel, elements: int | None = None) -> Network:
    """Call it on all ranks at the same point; the same network comes back everywhere.

    With the model's `elements` no message is larger than those of a step would be: what is slower than that to
    measure is of no interest.
    """
    frame, vector = (elements // 4, 4 * elements) if elements is not None else (_LARGEST, _LARGEST)

    def reduced(size: int) -> None:
        channel.all_reduce(torch.zeros(size // 4, device=channel.device))

    return Network(channel.world, gather_line(channel, frame), measured_line(channel, reduced, vector))


def gather_line(channel: Channel, largest: int) -> Line:
    """All-gathers between the ranks of a channel."""
    return measured_line(channel, lambda size: channel.all_gather(torch.zeros(size, dtype=torch.uint8)), largest)


def measured_line(channel: Channel, collective: Callable[[int], object], largest: int) -> Line:
    """What a collective takes by its bytes, up to about the largest that matters."""
    _timed(channel, collective, _TINY)  # the first makes connections
    empty = sorted(_timed(channel, collective, _TINY) for _ in range(3))
    size, most = _FIRST, max(_FIRST, min(largest, _LARGEST))
    while (took := _timed(channel, collective, size)) < 3.0 * empty[0] + _ENOUGH and size < most:
        size = min(size * _GROWTH, most)
    # Noise only ever adds: the better of two, and of three where that is cheap.
    for _ in range(2 if took < 2 * _ENOUGH else 1):
        took = min(took, _timed(channel, collective, size))
    # The best ones tell the slope; a step meets the usual delay, not the shortest.
    return replace(Line.through((_TINY, empty[0]), (size, took)), fixed=empty[1])


def _timed(channel: Channel, collective: Callable[[int], object], size: int) -> float:
    """Seconds until the slowest rank has its result; all begin together, having just told each other of the last."""
    began = time.perf_counter()
    collective(size)
    return max(took for (took,) in share(channel, [time.perf_counter() - began]))
