"""The commands `thinwire keys ...`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Keys with which workers connect to a server from other machines.", no_args_is_help=True)


@app.callback()
def _keys() -> None:
    """Keys with which workers connect to a server from other machines."""


@app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The server's folder of keys; made if needed.")],
    name: Annotated[list[str] | None, typer.Option(help="A worker's name; may be repeated. Default: worker.")] = None,
) -> None:
    """Make keys for a server, unless it has some, and for each named worker."""
    from thinwire.transport.keys import create_keys

    files = create_keys(folder, name or ["worker"])
    names = ", ".join(file.stem for file in files)
    typer.echo(f"The server accepts these workers: {names}. Start it with --keys {folder}")
    for file in files:
        typer.echo(f"Copy {file} to that worker over a secure channel, and start the worker with --keys {file.name}")
