"""The delay line of a lab: the native program that delays packets where the kernel has no netem, and its figures.

The one-way delay between two hosts is the larger of their two delays, in both directions. The program is described in
`native/delay_line.cpp`. It holds the packets of all hosts and runs inside the lab, so that it ends with the lab.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import LabError
from thinwire.tools.lab import shaping
from thinwire.tools.lab.namespaces import Namespaces
from thinwire.tools.lab.units import Rates, format_rate

# Bits per second that one delay line carries for all hosts together. On two shared virtual cores it delayed TCP streams
# of 400 Mbit/s with a third of a core; of 600 Mbit/s, 1 % of the packets left 45 ms too late or later.
CARRIED = 400_000_000


@dataclass(frozen=True)
class DelayFigures:
    """What a delay line did since it started; the difference of two such figures is what it did in between."""

    packets: int
    bytes: int
    dropped: int
    cpu_seconds: float
    wall_seconds: float
    late: tuple[tuple[int, int], ...]  # microseconds at most, and how many packets left so late after they were due
    scheduling: str

    def __sub__(self, earlier: "DelayFigures") -> "DelayFigures":
        before = dict(earlier.late)
        late = ((limit, count - before.get(limit, 0)) for limit, count in self.late)
        return DelayFigures(
            self.packets - earlier.packets,
            self.bytes - earlier.bytes,
            self.dropped - earlier.dropped,
            self.cpu_seconds - earlier.cpu_seconds,
            self.wall_seconds - earlier.wall_seconds,
            tuple((limit, count) for limit, count in late if count),
            self.scheduling,
        )

    @property
    def share(self) -> float:
        """Processor time as a share of one core."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def p50_late_ms(self) -> float:
        """Milliseconds: half of the packets left at most so late after they were due."""
        return self.late_ms(0.5)

    @property
    def p99_late_ms(self) -> float:
        """Milliseconds: 99 % of the packets left at most so late after they were due."""
        return self.late_ms(0.99)

    @property
    def max_late_ms(self) -> float:
        """Milliseconds: no packet left later after it was due."""
        return self.late_ms(1.0)

    def late_ms(self, share: float) -> float:
        """Return how many milliseconds after they were due this share of the packets had left, rounded up to 12 %."""
        total, seen = sum(count for _, count in self.late), 0
        for limit, count in self.late:
            seen += count
            if seen >= share * total:
                return limit / 1000
        return 0.0

    def __str__(self) -> str:
        return (
            f"delay line: {self.share:.1%} of a core ({self.scheduling}), 99% of {self.packets} packets at most "
            f"{self.p99_late_ms:.2g} ms late, {self.dropped} dropped"
        )


class DelayLine:
    """Starts the program of a delay line in a lab whose network is built, and talks to it."""

    def __init__(self, spaces: Namespaces, hosts: int) -> None:
        self._spaces = spaces
        self._longest = 0.0  # the longest delay so far
        try:
            spaces.ask(
                "start_delay_line",
                program=str(_program()),
                device=shaping.DELAY_PORT,
                index=shaping.DELAY_PORT_INDEX,
                switch=shaping.SWITCH_INDEX,
                hosts=hosts,
            )
        except LabError as error:
            why = f"a delay needs a kernel with netem, or TAP devices (/dev/net/tun) for the delay line: {error}"
            raise LabError(why) from None

    def set(self, delays: Sequence[float], rates: Sequence[Rates]) -> None:
        """Set the delays of all hosts in seconds; packets that wait keep theirs, and no packet overtakes another.

        Args:
            delays: the delay of each host.
            rates: the rates of each host, which tell how many bytes may be in flight.
        """
        # After a delay has become shorter, packets still wait for the longer one, and newer ones wait behind them.
        self._longest = max(self._longest, *delays)
        requests = []
        for host, (delay, rate) in enumerate(zip(delays, rates, strict=True)):
            room = bytes_in_flight(rate.up, self._longest)
            requests.append(
                f"host {host} {shaping.port_index(host)} {shaping.hardware(host)} {round(delay * 1e9)} {room}"
            )
        self._spaces.ask("ask_delay_line", requests=requests)

    def figures(self) -> DelayFigures:
        """Return what the delay line did since it started."""
        answer = self._spaces.ask("ask_delay_line", requests=["figures"])
        return DelayFigures(
            answer["packets"],
            answer["bytes"],
            answer["dropped"],
            answer["cpu_ns"] / 1e9,
            answer["wall_ns"] / 1e9,
            tuple((limit, count) for limit, count in answer["late"]),
            answer["scheduling"],
        )


def bytes_in_flight(rate: int | None, delay: float) -> int:
    """Return how many bytes of one sender may wait: what its rate sends in the delay, and a queue."""
    rate = CARRIED if rate is None else rate
    return round(rate / 8 * delay) + sum(shaping.bucket(rate))


def check_carried(rates: Sequence[Rates]) -> None:
    """Raise LabError if the hosts could send more at the same time than a delay line carries."""
    ups, downs = [rate.up for rate in rates], [rate.down for rate in rates]
    totals = [sum(known) for side in (ups, downs) if len(known := [rate for rate in side if rate]) == len(side)]
    if totals and min(totals) > CARRIED:
        raise LabError(
            f"the links carry {format_rate(min(totals))} together, and a delay line carries {format_rate(CARRIED)}: "
            "lower the rates, use fewer hosts, or leave the delay out"
        )


def _program() -> Path:
    native = importlib.util.find_spec("thinwire._native")
    path = Path(native.origin).parent / "delay_line" if native and native.origin else Path("delay_line")
    if not path.is_file():
        raise LabError("the program of the delay line is not installed: install thinwire again")
    return path
