"""The command `thinwire recipes`, which lists the recipes."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.tools.options import write_json


def recipes(
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
        _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
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
