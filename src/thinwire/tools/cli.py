"""The command `thinwire`: one typer application; each room adds its own commands.

Modules of commands import torch only inside the functions, so that `--help` answers at once.
"""

import sys
from typing import Annotated

import typer

import thinwire
from thinwire.errors import ThinwireError
from thinwire.tools.bench.command import app as bench
from thinwire.tools.keys import app as keys
from thinwire.tools.lab.command import lab_command
from thinwire.tools.race.advise_command import advise_command
from thinwire.tools.race.race_command import race_command
from thinwire.tools.race.serve_command import serve_command, work_command
from thinwire.tools.race.train_command import train_command
from thinwire.tools.recipes.command import recipes
from thinwire.tools.report.command import report
from thinwire.tools.reproduce import reproduce_command
from thinwire.tools.simulate.command import app as simulate

app = typer.Typer(
    name="thinwire",
    help="Data-parallel PyTorch training over thin wires.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# What follows the command's first word is the command's own, options too.
app.command("lab", context_settings={"allow_interspersed_args": False})(lab_command)

app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.add_typer(simulate, name="simulate")

# Typer brings its own copy of click since 0.2x and used the real one before: these names hold for both.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_ClickException: type[Exception] = _UsageError.__bases__[0]


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


app.command("race")(race_command)
app.command("advise")(advise_command)
# What follows belongs to the study, which is a program of its own.
app.command(
    "reproduce", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(reproduce_command)
app.command("train")(train_command)
app.command("serve")(serve_command)
app.command("work")(work_command)
app.command()(recipes)
app.command()(report)


def _sentence(error: Exception) -> str:
    message = error.format_message() if isinstance(error, _ClickException) else str(error)  # type: ignore[attr-defined]
    return " ".join(message.split()).rstrip(".")


def run(arguments: list[str], application: typer.Typer | None = None, name: str = "thinwire") -> int:
    """Run one command line and return its exit code; a user's mistake is one sentence on stderr."""
    try:
        code = (application or app)(arguments, prog_name=name, standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else name
        print(f"{where}: {_sentence(error)}; see '{where} --help'.", file=sys.stderr)
        return 2
    except (_ClickException, ThinwireError, ValueError) as error:
        sentence = _sentence(error)
        print(f"thinwire: {sentence}{'' if sentence.endswith('?') else '.'}", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("thinwire: stopped.", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))
