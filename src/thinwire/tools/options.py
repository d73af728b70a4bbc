"""Options that several commands share, under one name each, and helpers for what commands write.

Names: `--workers` training processes, `--rate`, `--delay` and `--loss` of every link and `--preset` for all three,
`--host-delay` of one host, `--methods` a list of ways to average gradients and `--method` one of them, `--json PATH`
figures for machines (`-` is stdout), `--report PATH` a page.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from thinwire.tools.lab.presets import PRESETS, find_preset

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.lab.links import LinkSettings

LINE_EVERY = 5.0  # seconds between two lines of progress where there is no terminal
STDOUT = Path("-")
_json_stream: TextIO | None = None  # the real stdout while `--json -` sends everything else to stderr


def writable(path: Path | None) -> Path | None:
    """Return the path of a result file, or refuse it before hours of work would be lost."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written, because it is a directory or its folder cannot be written")
    return path


def json_file(context: typer.Context, path: Path | None) -> Path | None:
    """Check the place of the JSON figures; with `-`, stdout holds the figures alone and all else goes to stderr."""
    global _json_stream
    if path != STDOUT:
        return writable(path)
    _json_stream = sys.stdout
    context.with_resource(redirect_stdout(sys.stderr))
    return path


# What is trained
RecipeName = Annotated[str, typer.Argument(help="A recipe's name, or module:function, or file.py:function.")]
Data = Annotated[Path | None, typer.Option(help="Folder with the recipe's files.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the data order.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples per worker and step.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate.")]

# With whom, over which network, and how gradients are averaged
Workers = Annotated[int, typer.Option(min=2, help="Workers: training processes, one on each emulated host.")]
WorkerCounts = Annotated[str, typer.Option("--workers", help="Numbers of workers, comma-separated.")]
Rate = Annotated[str, typer.Option(help="Rate of every worker's link: 100mbit; none leaves it unlimited.")]
Delay = Annotated[str, typer.Option(help="One-way delay between two workers: 200us, 5ms.")]
Delays = Annotated[str, typer.Option("--delay", help="One-way delay between two hosts: 25ms; several: 0,10ms,25ms.")]
HostDelay = Annotated[list[str] | None, typer.Option(help="Delay of one host: 3=80ms; may be repeated.")]
Loss = Annotated[str, typer.Option(help="Share of packets lost between two hosts: 1%.")]
Preset = Annotated[str | None, typer.Option(help=f"Network: {', '.join(PRESETS)}; options override it.")]
Method = Annotated[str, typer.Option(help="How gradients are averaged: dense, fp16, a preset, a density, auto.")]
Methods = Annotated[str, typer.Option(help="Methods to average gradients, comma-separated.")]

# How long
Target = Annotated[float | None, typer.Option(help="Stop when the metric on the test split reaches this value.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Stop after this number of steps.")]

# Where results go
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", callback=json_file, help="Write the figures as JSON; - is stdout."),
]
Page = Annotated[
    Path | None, typer.Option("--report", metavar="PATH", callback=writable, help="Write an HTML page with plots.")
]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="TOML file with further settings; options override it.")
]


def typed(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Return those of the named parameters that the user typed on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise ValueError if any of these options was typed, because it would have no effect."""
    if found := typed(context, names):
        raise ValueError(f"{', '.join('--' + name.replace('_', '-') for name in found)} {why}")


def listed(text: str, option: str = "--methods") -> list[str]:
    """Split a comma-separated option into its distinct items; ValueError if one is empty."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError(f"{option} {text!r} has an empty item: write items with one comma between them")
    return list(dict.fromkeys(items))


def parse_counts(text: str, option: str = "--workers", *, least: int = 2, most: int = 1_000_000) -> list[int]:
    """Read a comma-separated list of numbers of workers, in ascending order."""
    items = listed(text, option)
    if not all(item.isdigit() and least <= int(item) <= most for item in items):
        raise ValueError(f"{option} takes numbers from {least:,} to {most:,}, comma-separated, not {text!r}")
    return sorted({int(item) for item in items})


def network_figures(context: typer.Context) -> dict[str, str]:
    """Return rate, delay and loss: what was typed, else the preset's figures, else the options' defaults."""
    names = [name for name in ("rate", "delay", "loss") if name in context.params]
    found: dict[str, str] = {name: context.params[name] for name in names}
    if (preset := context.params.get("preset")) is not None:
        figures = find_preset(preset)
        fixed = typed(context, names)
        found |= {name: getattr(figures, name) for name in names if name not in fixed}
    return found


def link_settings(context: typer.Context, hosts: int | None = None, **instead: str) -> "list[LinkSettings]":
    """Return the emulated links that the options ask for, once for each delay.

    hosts: number of hosts, of which --host-delay may name one. `instead` replaces figures.
    """
    from thinwire.tools.lab.links import LinkSettings, parse_hosts

    figures = {"delay": "0", "loss": "0%"} | network_figures(context) | instead
    rate = None if figures["rate"] == "none" else figures["rate"]
    single = tuple(parse_hosts(context.params.get("host_delay"), "--host-delay", "3=80ms").items())
    found = [LinkSettings(rate, delay, figures["loss"], single) for delay in listed(figures["delay"], "--delay")]
    for links in found if hosts is not None and found[0].emulated else ():
        links.check(hosts or 1)
    return found


def needed_rate(text: str, option: str = "--rate") -> int:
    """Read a rate that must be given, in bits per second."""
    from thinwire.tools.lab.units import parse_rate

    rate = parse_rate(text)
    if rate is None:
        raise ValueError(f"{option} must be a rate, such as 500mbit, not {text!r}")
    return rate


def invocation() -> str:
    """Return the command as it was typed, for logs and pages."""
    return shlex.join(["thinwire", *sys.argv[1:]])


def log_path(wanted: Path | None, name: str) -> Path:
    """Return where a run's event log goes; by default the file name tells what was run and when."""
    date = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return wanted if wanted is not None else Path("runs") / f"{name}-{date}.jsonl"


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures as JSON to a file, or to stdout if the path is `-`; do nothing if it is None."""
    if path is None:
        return
    text = json.dumps(figures, indent=1)
    if path == STDOUT:
        print(text, file=_json_stream or sys.stdout, flush=True)
        return
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}): choose another place") from error


@contextmanager
def json_lines(path: Path | None) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes one line of JSON at a time to a file, to stdout (`-`), or nowhere (None)."""
    if path is None:
        yield lambda figures: None
        return
    with nullcontext(_json_stream or sys.stdout) if path == STDOUT else path.open("w", encoding="utf-8") as file:
        yield lambda figures: print(json.dumps(figures), file=file, flush=True)


def by_delay(figures: Sequence[Any]) -> Any:
    """Return the figures of one delay as they are, those of several as the list `delays`."""
    return figures[0] if len(figures) == 1 else {"delays": list(figures)}


def caption(*notes: str) -> str:
    """Return the caption of a table from notes, of which some may be empty."""
    return ". ".join(filter(None, notes))


def verdict(bars: Iterable[bool | None]) -> int:
    """Print how many bars of a benchmark were missed and return the exit code; None is a bar not measured."""
    met = list(bars)
    missed, unknown = met.count(False), met.count(None)
    if met:
        said = f"{missed} of {len(met)} bars missed" if missed else f"none of {len(met)} bars missed"
        print(f"{said}, {unknown} not measured." if unknown else f"{said}.")
    return 1 if missed else 0


def table_of(
    rows: Sequence[Mapping[str, str]], *, title: str = "", caption: str = "", bold: Container[int] = ()
) -> "Table":
    """Return the table of all commands: a row per mapping, columns without any figure left out."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, caption=caption or None, box=SIMPLE, collapse_padding=True, pad_edge=False)
    columns = [name for name in rows[0] if any(row[name] not in ("-", "") for row in rows)]
    for name in columns:
        first = name == columns[0]  # folds where the table would not fit the terminal
        width = min(12, max(len(row[name]) for row in rows)) if first else None
        justify: Literal["left", "right"] = "left" if first or name == "exchange" else "right"
        table.add_column(name, justify=justify, no_wrap=not first, overflow="fold", min_width=width)
    for number, row in enumerate(rows):
        table.add_row(*(row[name] for name in columns), style="bold" if number in bold else "")
    return table
