"""The command group `thinwire bench`."""

import typer

from thinwire.bench.ddp import ddp_command

bench = typer.Typer(help="Measure speed and size, as ratios within one run.", no_args_is_help=True)
bench.command("ddp")(ddp_command)
