"""The command `thinwire recipes`."""

from typing import Annotated, Any

import typer


def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON, for machines.")] = False,
) -> None:
    """List the recipes: what `train` and `race` can train by name."""
    from thinwire.tools.recipes import get_recipe, recipe_names

    rows = [describe(get_recipe(name)) for name in recipe_names()]
    if as_json:
        import json

        typer.echo(json.dumps({"recipes": rows}, indent=2))
    else:
        _show(rows)


def describe(recipe: Any) -> dict[str, Any]:
    """A recipe as plain data."""
    from dataclasses import asdict

    return {
        "name": recipe.name,
        "description": recipe.description,
        "parameters": recipe.parameter_count(),
        "data": recipe.data,
        "metric": recipe.metric,
        "defaults": asdict(recipe.defaults),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("recipe", style="bold", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("what, and on which data")
    table.add_column("metric, target", no_wrap=True)
    table.add_column("batch", justify="right")
    table.add_column("rate", justify="right")
    for row in rows:
        defaults = row["defaults"]
        target = f"{100 * defaults['target']:g} %" if row["metric"] == "accuracy" else f"{defaults['target']:g}"
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['description']}\n[dim]{row['data']}[/dim]",
            f"{row['metric']} {target}",
            str(defaults["batch"]),
            f"{defaults['lr']:g}",
        )
    console = Console()
    console.print(table)
    console.print("Your own: any function that returns a Recipe, as module:function (docs/recipes.md).")
