"""The command `thinwire report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    logs: Annotated[list[Path], typer.Argument(help="Event logs of one or more runs.", metavar="LOG...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures per method, for machines.")] = False,
) -> None:
    """Make one self-contained HTML page from event logs: plots, summary, command and machine."""
    import json
    from dataclasses import asdict

    from thinwire.events import read_log
    from thinwire.report.page import write_report
    from thinwire.report.summary import summarise

    runs = [read_log(path) for path in logs]
    write_report(runs, output, title=title)
    if as_json:
        summaries = [asdict(summary) for summary in summarise(runs)]
        typer.echo(json.dumps({"page": str(output), "methods": summaries}))
    else:
        typer.echo(f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e6:.1f} MB; open it in a browser.")
