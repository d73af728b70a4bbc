"""Counting: the bytes that training moves, by the kernel's counters where a link of its own exists.

In the lab every host has its own interface, whose counters see everything, protocol headers too. Elsewhere a link's
own figures are used, and for all-reduces what a ring moves.
"""

import os
from pathlib import Path

from thinwire.ddp.link import Link


def interface_bytes(interface: str) -> tuple[int, int] | None:
    """Bytes sent and received by an interface, or None if there is none."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            numbers = [int(word) for word in figures.split()]
            return numbers[8], numbers[0]
    return None


def ring_bytes(method: str, parameters: int, world: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of 32- or 16-bit gradients."""
    width = {"dense": 4, "fp16": 2}.get(method, 0)
    return 2 * width * parameters * (world - 1) // world


class TrafficMeter:
    """Bytes sent and received since the last reading."""

    def __init__(self, link: Link | None, per_step: int = 0) -> None:
        self._link = link
        self._per_step = per_step  # where nothing can be counted: what the method is known to move
        self._interface = "eth0" if "THINWIRE_LAB" in os.environ else None
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        if self._interface is not None:
            return interface_bytes(self._interface) or (0, 0)
        if self._link is None:
            return 0, 0
        figures = self._link.stats()
        return int(figures["bytes_sent"]), int(figures["bytes_received"])

    def read(self) -> tuple[int, int]:
        """Bytes sent and received since the last call."""
        if self._interface is None and self._link is None:
            return self._per_step, self._per_step
        now = self._now()
        sent, received = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        return sent, received
