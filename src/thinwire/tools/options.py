"""Options: what several commands ask for, in the same words; and what they all do with it."""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer


def verdict(bars: Iterable[bool | None]) -> int:
    """Say how many bars were missed; 1 if any was. None is a bar that could not be measured."""
    met = list(bars)
    missed, unknown = met.count(False), met.count(None)
    if met:
        said = f"{missed} of {len(met)} bars missed" if missed else f"none of {len(met)} bars missed"
        print(f"{said}, {unknown} not measured." if unknown else f"{said}.")
    return 1 if missed else 0


def writable(path: Path | None) -> Path | None:
    """A place for results, refused before the work that would be lost there."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written, because it is a directory or its folder cannot be written")
    return path


# What is trained
RecipeName = Annotated[str, typer.Argument(help="A recipe's name, or module:function.")]
Data = Annotated[Path | None, typer.Option(help="Folder with the recipe's files.")]
Seed = Annotated[int, typer.Option(help="Of weights and data order.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples per worker and step.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate.")]

# How long, and what is looked at meanwhile
Target = Annotated[float | None, typer.Option(help="Metric on the test split that ends the run.")]
Epochs = Annotated[float | None, typer.Option(help="Passes of the data at the most.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Steps at the most.")]
EvaluateEvery = Annotated[int | None, typer.Option(min=1, help="Steps between evaluations.")]
Diagnose = Annotated[int, typer.Option(min=0, help="Diagnose the link every so many steps; 0: never.")]

# The parameter server
Bound = Annotated[int, typer.Option(min=0, help="With ssp: steps that workers may be apart.")]
OnLoss = Annotated[str, typer.Option(help="With udp, of lost gradients: restore or ignore.")]
Mtu = Annotated[int | None, typer.Option(help="With udp: bytes of a datagram; default 1400.")]

# What is left of it
JsonFile = Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the figures to a file.")]
Page = Annotated[Path | None, typer.Option(callback=writable, help="Write a page with plots.")]


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """ValueError if any of these options was typed: it would be accepted and do nothing."""
    sources = {name: context.get_parameter_source(name) for name in names}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if typed:
        raise ValueError(f"{', '.join('--' + name.replace('_', '-') for name in typed)} {why}")


def invocation() -> str:
    """The command as it was typed, for logs and pages."""
    return shlex.join(["thinwire", *sys.argv[1:]])


def log_path(wanted: Path | None, name: str) -> Path:
    """Where a run's event log goes; unless somebody wants it elsewhere, its name tells what and when."""
    date = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return wanted if wanted is not None else Path("runs") / f"{name}-{date}.jsonl"


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures for machines, if they are wanted; ValueError if that place cannot be written."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}): choose another place") from error
