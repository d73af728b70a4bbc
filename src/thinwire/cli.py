"""The command `thinwire`: one typer application; each room adds its own commands.

Modules of commands import torch only inside the functions, so that `--help` answers at once.
"""

import sys
from typing import Annotated

import click
import typer

import thinwire
from thinwire.errors import ThinwireError
from thinwire.recipes.command import recipes
from thinwire.report.command import report

app = typer.Typer(
    name="thinwire",
    help="Data-parallel PyTorch training over thin wires.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {thinwire.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Data-parallel PyTorch training over thin wires."""


app.command()(recipes)
app.command()(report)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; a user's mistake is one sentence on stderr."""
    try:
        code = app(arguments, prog_name="thinwire", standalone_mode=False)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "thinwire"
        message = error.format_message().rstrip(".")
        print(f"{where}: {message}; see '{where} --help'.", file=sys.stderr)
        return 2
    except click.ClickException as error:
        print(f"thinwire: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except (ThinwireError, ValueError) as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt):
        print("thinwire: stopped.", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))
