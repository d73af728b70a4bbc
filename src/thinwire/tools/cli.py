"""The command `thinwire`: all commands in one typer application.

Modules of commands import torch only inside their functions, so that `--help` answers at once.
"""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import thinwire
from thinwire.errors import ThinwireError
from thinwire.tools.bench.command import app as bench
from thinwire.tools.lab.command import lab_command
from thinwire.tools.options import write_json
from thinwire.tools.race.commands import advise_command, race_command, train_command
from thinwire.tools.race.serve_command import serve_command, work_command
from thinwire.tools.report.command import report
from thinwire.tools.simulate.command import app as simulate

keys = typer.Typer(help="Keys with which workers connect to a server from other machines.", no_args_is_help=True)
app = typer.Typer(
    name="thinwire",
    help="Data-parallel PyTorch training over thin wires.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
MAIN, MORE = "Commands", "More commands"
app.command("race", rich_help_panel=MAIN)(race_command)
app.command("advise", rich_help_panel=MAIN)(advise_command)
# Everything after the first word of the command to run, options too, belongs to that command.
app.command("lab", rich_help_panel=MAIN, context_settings={"allow_interspersed_args": False})(lab_command)
app.command("train", rich_help_panel=MAIN)(train_command)
app.command("serve", rich_help_panel=MAIN)(serve_command)
app.command("work", rich_help_panel=MAIN)(work_command)
app.command("report", rich_help_panel=MORE)(report)
app.add_typer(simulate, name="simulate", rich_help_panel=MORE)
app.add_typer(bench, name="bench", rich_help_panel=MORE)
app.add_typer(keys, name="keys", rich_help_panel=MORE)

# Newer versions of typer contain a copy of click, older ones import click: this works with both.
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


@app.command("recipes", rich_help_panel=MORE)
def recipes_command(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the list as JSON; - is stdout.")
    ] = None,
) -> None:
    """List the recipes that `train` and `race` can train by name."""
    from thinwire.tools.recipes import get_recipe, recipe_names

    rows = [
        {
            "name": recipe.name,
            "description": recipe.description,
            "parameters": recipe.parameter_count(),
            "data": recipe.data,
            "metric": recipe.metric,
            "defaults": asdict(recipe.defaults),
        }
        for recipe in map(get_recipe, recipe_names())
    ]
    write_json(json_file, {"recipes": rows})
    if json_file is None:
        _show_recipes(rows)


def _show_recipes(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("recipe", style="bold", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("description and data")
    table.add_column("target and defaults", no_wrap=True)
    for row in rows:
        defaults = row["defaults"]
        target = f"{100 * defaults['target']:g} %" if row["metric"] == "accuracy" else f"{defaults['target']:g}"
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['description']}\n[dim]{row['data']}[/dim]",
            f"{row['metric']} {target}\nbatch {defaults['batch']}, lr {defaults['lr']:g}",
        )
    console = Console()
    console.print(table)
    console.print("Your own recipe is any function that returns a Recipe: module:function or file.py:function.")


def _sentence(error: Exception) -> str:
    message = error.format_message() if isinstance(error, _ClickException) else str(error)  # type: ignore[attr-defined]
    return " ".join(message.split()).rstrip(".")


def run(arguments: list[str], application: typer.Typer | None = None, name: str = "thinwire") -> int:
    """Run one command line and return its exit code; a user's mistake is reported in one sentence on stderr."""
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
    if code == 130 and application is None:  # some versions of typer turn Ctrl-C into this code
        print("thinwire: stopped.", file=sys.stderr)
    return code if isinstance(code, int) else 0


@keys.callback()
def _keys() -> None:
    """Keys with which workers connect to a server from other machines."""


@keys.command("new")
def new_keys(
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


def papers_folder() -> Path:
    """Return the clone that holds the studies: the one that thinwire is installed from, or the current folder."""
    installed = Path(thinwire.__file__).resolve().parents[2]
    for clone in (installed, Path.cwd()):
        if (clone / "papers" / "__main__.py").is_file():
            return clone
    raise ValueError(
        "thinwire reproduce needs the folder 'papers' of a clone, which the installed package does not contain: "
        "run it in a clone of the project"
    )


# All options, --help too, are passed on to `python -m papers`.
@app.command(
    "reproduce",
    rich_help_panel=MORE,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def reproduce_command(context: typer.Context) -> int:
    """Repeat a paper's experiments and compare the figures (runs python -m papers)."""
    clone = papers_folder()
    path = os.pathsep.join(filter(None, (str(clone), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "papers", *context.args]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the study gets the same signal: it keeps the finished parts and ends by itself


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))
