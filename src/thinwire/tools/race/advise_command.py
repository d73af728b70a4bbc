"""The command `thinwire advise`: predict the step of each method on a network, and recommend one."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from thinwire.tools import options

if TYPE_CHECKING:
    from thinwire.tools.race.advise import AdviceReport


METHODS = "percentile90,0.1,topk1,topk0.1,2bit"


def advise_command(
    context: typer.Context,
    recipe: options.RecipeName = "digits",
    workers: options.Workers = 4,
    rate: options.Rate = "500mbit",
    delay: options.Delay = "200us",
    probe: Annotated[bool, typer.Option("--probe", help="Measure the real links; under torchrun.")] = False,
    methods: Annotated[str, typer.Option(help="Methods besides dense and fp16, comma-separated.")] = METHODS,
    batch: options.Batch = None,
    data: options.Data = None,
    json_file: options.JsonFile = None,
    report: options.Page = None,
) -> None:
    """Predict each method's step time and traffic, and say whether to compress at all."""
    import torch.distributed as dist

    from thinwire.tools.lab.units import parse_delay
    from thinwire.tools.race.advise import make_report, probed_wire, subject_of, wire_of
    from thinwire.tune.presets import resolve_codec

    names = [name for name in options.listed(methods) if name not in ("dense", "fp16")]
    for name in names:
        resolve_codec(name)
    wire = wire_of(workers, rate, parse_delay(delay, "--delay"))
    if probe:
        if "RANK" not in os.environ:
            raise ValueError("--probe measures the links of a process group: start it with torchrun on all machines")
        options.refuse(context, ("workers", "rate", "delay"), "are what --probe finds out: leave them out")
        dist.init_process_group("gloo")
        wire = probed_wire()
    rank = dist.get_rank() if probe else 0
    found = make_report(subject_of(recipe, data=data, batch=batch, rank=rank), wire, names, options.invocation())
    if rank == 0:
        options.write_json(json_file, found.to_json())
        if report is not None:
            found.page(report)
        _show(found, report)
    if probe:
        dist.barrier()
        dist.destroy_process_group()


def _show(found: "AdviceReport", page: Path | None) -> None:
    compute, best = found.figures.work.compute, found.advice.rows.index(found.advice.best)
    caption = f"A step without communication: {1e3 * compute:,.1f} ms. sent: per worker and step"
    console, title = Console(), f"{found.subject}: {found.workers} workers at {found.wire.shown}"
    console.print(options.table_of(found.rows(), title=title, caption=caption, bold=(best,)))
    console.print(found.advice.verdict, highlight=False)
    if page is not None:
        console.print(f"The page is {page}.", highlight=False)
