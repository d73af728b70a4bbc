"""Settings of emulated links, as commands take them, and what delaying their packets cost."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.errors import LabError
from thinwire.tools.lab.delay import DelayFigures, check_carried
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.units import format_delay, parse_delay, parse_loss, parse_rates


def parse_hosts(items: Iterable[str] | None, option: str, example: str) -> dict[int, str]:
    """Read `3=80ms` for single hosts, repeated or comma-separated."""
    found: dict[int, str] = {}
    for item in (part.strip() for text in items or () for part in text.split(",")):
        if not (match := re.fullmatch(r"(\d+)=(.+)", item)):
            raise ValueError(f"{option} takes HOST=VALUE, such as {example}, not '{item}'")
        found[int(match[1])] = match[2]
    return found


@dataclass(frozen=True)
class LinkSettings:
    """What is emulated on the links of a lab's hosts, in the notation of the options; checked when it is made."""

    rate: str | None = None
    delay: str | None = None
    loss: str | None = None
    host_delays: tuple[tuple[int, str], ...] = ()  # of single hosts

    def __post_init__(self) -> None:
        parse_rates(self.rate)
        parse_loss(self.loss)
        parse_delay(self.delay)
        for host, delay in self.host_delays:
            parse_delay(delay, f"the delay of host {host}")

    @property
    def seconds(self) -> float:
        """The delay of all hosts without one of their own, in seconds."""
        return parse_delay(self.delay)

    @property
    def delayed(self) -> bool:
        """Whether any host has a delay."""
        return any((self.seconds, *(parse_delay(delay) for _, delay in self.host_delays)))

    def round_trip(self, hosts: int) -> float:
        """Return the longest round trip between two of these hosts in seconds, without the time of sending."""
        single = dict(self.host_delays)
        delays = [parse_delay(single.get(host, self.delay)) for host in range(hosts)]
        return 2 * max(delays)  # the larger delay of two hosts counts

    @property
    def emulated(self) -> bool:
        """Whether there is anything to emulate; otherwise processes can run without a lab."""
        return parse_rates(self.rate).limited or self.delayed or parse_loss(self.loss) > 0

    @property
    def delays(self) -> str:
        """All delays as text: `25ms`, or `25ms, h3 80ms`; "" if there are none."""
        if not self.delayed:
            return ""
        single = [f"h{host} {format_delay(parse_delay(delay))}" for host, delay in self.host_delays]
        return ", ".join([format_delay(self.seconds), *single])

    def lab(self, hosts: int, **options: Any) -> Lab:
        """Return a lab with such links, which is not running yet. `options` are further arguments of Lab."""
        options |= {"rate": self.rate, "loss": self.loss}
        return Lab(hosts, delay=self.delay, host_delays=dict(self.host_delays), **options)

    def check(self, hosts: int) -> None:
        """Raise ValueError or LabError before hours of work if a lab of so many hosts cannot have such links.

        Only the kernel tells whether netem delays the packets. Links that are too fast for a delay line are tried.
        """
        lab = self.lab(hosts)
        if self.delayed:
            try:
                check_carried(lab.rates)
            except LabError:
                with lab:
                    pass

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON, in the notation of the options."""
        figures = {"rate": self.rate or "none", "delay": self.delay or "0", "packet_loss": self.loss or "0%"}
        return {**figures, "host_delays": dict(self.host_delays)}

    def __str__(self) -> str:
        words = [f"at {self.rate}" if self.rate and self.rate != "none" else "without a rate limit"]
        words += [f"{self.delays} one way"] if self.delayed else []
        return ", ".join([*words, *([f"{self.loss} loss"] if parse_loss(self.loss) else [])])


@dataclass(frozen=True)
class DelayCost:
    """What delaying packets cost: the delay line's share of one core, and how late its packets left."""

    share: float
    p99_late_ms: float
    packets: int
    dropped: int

    @classmethod
    def of(cls, figures: DelayFigures | None) -> "DelayCost | None":
        """Return the cost that a delay line's figures amount to; None where none runs."""
        if figures is None:
            return None
        return cls(figures.share, figures.p99_late_ms, figures.packets, figures.dropped)

    @classmethod
    def worst(cls, costs: Iterable["DelayCost | None"]) -> "DelayCost | None":
        """Return the largest of each figure, and the sums of the packets; None if there are none."""
        known = [cost for cost in costs if cost is not None]
        if not known:
            return None
        packets, dropped = (sum(getattr(cost, name) for cost in known) for name in ("packets", "dropped"))
        return cls(max(c.share for c in known), max(c.p99_late_ms for c in known), packets, dropped)

    def __str__(self) -> str:
        lost = f"; it dropped {self.dropped:,} packets" if self.dropped else ""
        return f"Delay line: {self.share:.1%} of one core, p99 lateness {self.p99_late_ms:.2f} ms{lost}"


def delay_note(links: LinkSettings, cost: DelayCost | None) -> str:
    """Return the sentence that every table made with a delay states; "" without a delay."""
    if not links.delayed:
        return ""
    return str(cost) if cost is not None else "Delays by the kernel's netem"


def delay_json(cost: DelayCost | None) -> dict[str, Any] | None:
    """Return the delay line's figures for JSON; None where none ran."""
    return None if cost is None else asdict(cost)
