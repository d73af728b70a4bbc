"""The commands `thinwire bench ...`.

Torch is imported inside the functions, so that `--help` answers at once.
"""

from typing import Annotated

import typer

from thinwire.tools.bench.advice import advice_command
from thinwire.tools.bench.ddp import ddp_command
from thinwire.tools.bench.server import server_command
from thinwire.tools.bench.udp import udp_command
from thinwire.tools.options import JsonFile

app = typer.Typer(help="Measure thinwire on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure thinwire on this machine."""


@app.command("codec")
def codec(
    json_file: JsonFile = None,
    n: Annotated[list[int] | None, typer.Option(min=100_000, help="Elements of the tensor; may be repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small tensor, few repetitions: a look, not a result.")
    ] = False,
) -> int:
    """Encode and decode, as ratios to copying the same tensor: one thread, best of several."""
    from thinwire.tools.bench.codec import run

    return run(n or ([1_756_426] if quick else [1_756_426, 25_000_000]), json_file, seconds=0.25 if quick else 1.2)


app.command("ddp")(ddp_command)
app.command("advice")(advice_command)
app.command("server")(server_command)
app.command("udp")(udp_command)
