"""Advising: from a model and a network to the table, the page and the JSON of `thinwire advise`."""

import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.ddp.probe import probe_network
from thinwire.exchange.agree import gather_json
from thinwire.exchange.channel import Channel
from thinwire.lab.units import parse_rates
from thinwire.observe import describe_machine, now
from thinwire.race.measuring import Figures, Subject, measure
from thinwire.report.markup import Row as Cells
from thinwire.report.markup import write_page
from thinwire.report.page import megabytes
from thinwire.tune.advise import Advice, Row, advise, at_rates, crossings
from thinwire.tune.forecast import DENSE, FP16, Setting
from thinwire.tune.network import Line, Network

# TCP's payload of a full Ethernet frame.
GOODPUT = 1448 / 1514


@dataclass(frozen=True)
class Wire:
    """The network in question: as probed, or from the rate of the hosts' links and the time of a round."""

    network: Network
    rate: float  # bits a second
    shown: str
    probed: bool
    crowded: bool = False  # ranks share cores: what computes beside the backward pass slows it down

    def at(self, rate: float) -> Network:
        """The same network at another rate."""
        ideal = Network.ideal(self.network.world, GOODPUT * rate, 0.0)
        gather, reduce = self.network.gather, self.network.reduce
        return Network(
            self.network.world,
            Line(gather.fixed, ideal.gather.per_byte),
            Line(reduce.fixed, ideal.reduce.per_byte),
        )


def wire_of(hosts: int, rate: str, latency: float) -> Wire:
    """From the command line's words."""
    both = parse_rates(rate)
    slower = min((r for r in (both.up, both.down) if r is not None), default=None)
    if slower is None:
        raise ValueError("--rate: advice needs a rate such as 500mbit; to measure real links use --probe")
    return Wire(Network.ideal(hosts, GOODPUT * slower, latency), slower, rate, False)


def probed_wire() -> Wire:
    """From the process group that torchrun, or the lab, made; call it on all ranks."""
    channel = Channel(dist.group.WORLD)  # type: ignore[arg-type]
    network = probe_network(channel)
    rate = network.bandwidth / GOODPUT
    machines = gather_json(channel, _machine())
    crowded = torch.get_num_threads() * machines.count(machines[channel.rank]) > (os.cpu_count() or 1)
    everybody = any(gather_json(channel, crowded))
    return Wire(network, rate, f"{rate / 1e6:,.0f} Mbit/s, probed", True, everybody)


def _machine() -> str:
    """Names the machine; emulated hosts have names of their own and one kernel in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return platform.node()


@dataclass(frozen=True)
class Report:
    """Everything that was found out."""

    subject: str
    hosts: int
    wire: Wire
    figures: Figures
    advice: Advice
    command: str

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (DENSE, FP16, *self.figures.settings)

    def crossings(self) -> dict[str, float | None]:
        """The rate up to which each method is faster than dense."""
        return crossings(self.settings, self.figures.work, self.wire.at)

    def to_json(self) -> dict[str, Any]:
        """Under the names that machines rely on."""
        work = self.figures.work
        return {
            "model": self.subject,
            "hosts": self.hosts,
            "rate": self.wire.rate,
            "probed": self.wire.probed,
            "parameters": work.elements,
            "compute_ms": 1e3 * work.compute,
            "alpha": {f"{density:g}": alpha for density, alpha in (work.alpha or {}).items()},
            "network": asdict(self.wire.network),
            "methods": [_figures(row) for row in self.advice.rows],
            "crossings": self.crossings(),
            "recommended": self.advice.best.method,
            "compress": self.advice.compress,
            "verdict": self.advice.verdict,
            "version": thinwire.__version__,
            "command": self.command,
        }

    def page(self, path: Path) -> None:
        """Write the page."""
        work = self.figures.work
        rates, curves = at_rates(self.settings, work, self.wire.at)
        write_page(
            path,
            "advice",
            title=f"{self.subject}: {self.hosts} hosts at {self.wire.shown}",
            verdict=self.advice.verdict,
            facts={
                "model": self.subject,
                "parameters": f"{work.elements:,}",
                "hosts": f"{self.hosts}",
                "link": self.wire.shown,
                "step without exchange": f"{1e3 * work.compute:,.1f} ms",
            },
            table=[cells(row) for row in self.advice.rows],
            made={
                "Command": self.command,
                "Machine": describe_machine(),
                "Version": f"thinwire {thinwire.__version__}",
                "Date": now(),
            },
            data={
                "rates": rates,
                "curves": {name: [1e3 * s for s in seconds] for name, seconds in curves.items()},
                "crossings": self.crossings(),
                "best": self.advice.best.method,
                "rate": self.wire.rate,
                "here": self.wire.shown,
            },
        )


def _figures(row: Row) -> dict[str, Any]:
    return {
        "name": row.method,
        "exchange": row.exchange,
        "step_ms": 1e3 * row.seconds,
        "tax": row.tax,
        "bytes_per_host_step": row.sent,
        "efficiency": row.efficiency,
        "alpha": row.alpha,
        "uncertainty": row.uncertainty,
        "setting": row.setting,
    }


def cells(row: Row) -> Cells:
    """A row as text."""
    return {
        "Method": row.method,
        "Step": f"{1e3 * row.seconds:,.0f} ms" if row.seconds >= 0.01 else f"{1e3 * row.seconds:.1f} ms",
        "Give or take": f"{row.uncertainty:.0%}",
        "Tax": f"{row.tax:+.0%}",
        "Sent per host": megabytes(row.sent),
        "Efficiency": f"{row.efficiency:.0%}",
        "Alpha": f"{row.alpha:.2f}",
        "Setting": row.setting,
    }


def make_report(subject: Subject, wire: Wire, methods: list[str], command: str) -> Report:
    """Measure and advise; on all ranks together where the network was probed."""
    threads = torch.get_num_threads()
    figures = measure(subject, methods, sync=dist.barrier if wire.probed else lambda: None)
    if wire.crowded:
        alone = replace(figures.work, ready=(0.0,) * len(figures.work.ready))
        figures = replace(figures, work=alone)
    torch.set_num_threads(threads)
    settings = (DENSE, FP16, *figures.settings)
    advice = advise(settings, figures.work, wire.network, spread=figures.spread, probed=wire.probed)
    return Report(subject.name, wire.network.world, wire, figures, advice, command)
