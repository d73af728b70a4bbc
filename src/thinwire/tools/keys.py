"""The commands `thinwire keys ...`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Keys that let workers reach a server from other machines.", no_args_is_help=True)


@app.callback()
def _keys() -> None:
    """Keys that let workers reach a server from other machines."""


@app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The server's folder of keys; made if need be.")],
    name: Annotated[list[str] | None, typer.Option(help="A worker, may be repeated. Default: worker.")] = None,
) -> None:
    """Make keys for a server, once, and for each named worker."""
    from thinwire.transport.keys import new

    files = new(folder, name or ["worker"])
    typer.echo(f"The server lets in {', '.join(file.stem for file in files)}: start it with --keys {folder}")
    for file in files:
        typer.echo(f"Move {file} to that worker by a safe way, and start the worker with --keys {file.name}")
