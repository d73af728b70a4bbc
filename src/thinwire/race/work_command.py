"""The command `thinwire work`: one worker of a parameter server, on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.race.options import Data, writable


def work_command(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or module:function; the server's.")],
    server: Annotated[str, typer.Option(help="Where the server is: tcp://master:7077, or udp://...")],
    compress: Annotated[str | None, typer.Option(help="Codec of the gradients; default: as the server says.")] = None,
    slot: Annotated[int | None, typer.Option(min=0, help="The number that this worker would like to have.")] = None,
    data: Data = None,
    keys: Annotated[Path | None, typer.Option(help="Folder with this worker's key and the server's.")] = None,
    overlap: Annotated[bool, typer.Option(help="Push and pull while computing.")] = True,
    profile: Annotated[
        Path | None, typer.Option(callback=writable, help="Write layer times for thinwire simulate schedule.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds without a sign of the server until giving up.")] = 300.0,
) -> None:
    """Compute gradients for a server (thinwire serve); may join and leave at any time."""
    import logging

    import torch

    from thinwire.race.served import work
    from thinwire.recipes import get_recipe

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(max(1, torch.get_num_threads()))
    why = work(
        get_recipe(recipe),
        data,
        server,
        compress,
        overlap=overlap,
        slot=slot,
        keys=keys,
        patience=patience,
        profile=profile,
    )
    Console(stderr=True).print(f"the server ended training ({why}).", highlight=False)
