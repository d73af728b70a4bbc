"""The command `thinwire advise`: what each method would do on a network, before the machines are rented."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.tools.options import Batch, Data, JsonFile, invocation, refuse, writable, write_json

if TYPE_CHECKING:
    from thinwire.tools.race.advise import Report


METHODS = "percentile90,0.1,topk1,topk0.1,2bit"


def advise_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A recipe's name, or module:function (docs/tuning.md).")] = "digits",
    hosts: Annotated[int, typer.Option(min=2, help="Machines that would train together.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of every machine's link: 500mbit, or up/down.")] = "500mbit",
    latency: Annotated[str, typer.Option(help="One way between two machines: 200us, 5ms.")] = "200us",
    probe: Annotated[bool, typer.Option("--probe", help="Measure the real links; under torchrun.")] = False,
    methods: Annotated[str, typer.Option(help="Comma-separated, besides dense and fp16.")] = METHODS,
    batch: Batch = None,
    data: Data = None,
    json_file: JsonFile = None,
    report: Annotated[Path | None, typer.Option(callback=writable, help="Write a page with a plot.")] = None,
) -> None:
    """Predict step time, tax and bytes of each method, and say whether to compress at all."""
    import torch.distributed as dist

    from thinwire.tools.lab.units import parse_delay
    from thinwire.tools.race.advise import make_report, probed_wire, subject_of, wire_of
    from thinwire.tune.presets import resolve_codec

    names = [name for name in dict.fromkeys(map(str.strip, methods.split(","))) if name not in ("dense", "fp16", "")]
    for name in names:
        resolve_codec(name)
    wire = wire_of(hosts, rate, parse_delay(latency, "--latency"))
    if probe:
        if "RANK" not in os.environ:
            raise ValueError("--probe measures the links of a process group: start it with torchrun on all machines")
        refuse(context, ("hosts", "rate", "latency"), "are what --probe finds out: leave them out")
        dist.init_process_group("gloo")
        wire = probed_wire()
    rank = dist.get_rank() if probe else 0
    found = make_report(subject_of(model, data=data, batch=batch, rank=rank), wire, names, invocation())
    if rank == 0:
        write_json(json_file, found.to_json())
        if report is not None:
            found.page(report)
        _show(found, report)
    if probe:
        dist.barrier()
        dist.destroy_process_group()


def _show(found: "Report", page: Path | None) -> None:
    work = found.figures.work
    table = Table(
        title=f"{found.subject}: {found.hosts} hosts at {found.wire.shown}",
        caption=f"A step without exchange: {1e3 * work.compute:,.1f} ms. MB: sent per host. eff.: share of computing",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    columns = ("method", "step ms", "±", "tax", "MB", "eff.", "alpha", "exchange", "pays up to")
    for column in columns:
        table.add_column(column, justify="left" if column in ("method", "exchange") else "right", no_wrap=True)
    limits = found.crossings()
    for row in found.advice.rows:
        chosen = row is found.advice.best
        table.add_row(
            f"[bold]{row.method}[/]" if chosen else row.method,
            f"{1e3 * row.seconds:,.1f}",
            f"{row.uncertainty:.0%}",
            f"{row.tax:+.0%}",
            f"{row.sent / 1e6:.3g}",
            f"{row.efficiency:.0%}",
            f"{row.alpha:.2f}",
            row.exchange.partition("-")[0],
            "" if row.method == "dense" else _rate(limits[row.method]),
        )
    console = Console()
    console.print(table)
    console.print(found.advice.verdict, highlight=False)
    if page is not None:
        console.print(f"The page is {page}.", highlight=False)


def _rate(rate: float | None) -> str:
    if rate is None:
        return "any rate"
    return f"{rate / 1e9:.2g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.2g} Mbit/s"
