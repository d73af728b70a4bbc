"""The command `thinwire report`, which makes a page from event logs."""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.tools.options import JsonFile, write_json


def report(
    logs: Annotated[list[Path], typer.Argument(help="Event logs of one or more runs.", metavar="LOG...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Make one self-contained HTML page from event logs, with plots, a summary, the commands and the machine."""
    from dataclasses import asdict

    from thinwire.tools.events import read_log
    from thinwire.tools.report.page import write_report
    from thinwire.tools.report.summary import prepare, summarise

    _check_output(output, logs)
    runs = [read_log(path) for path in logs]
    write_report(runs, output, title=title)
    if json_file is not None:
        summaries = [asdict(summary) for summary in summarise(prepare(runs))]
        write_json(json_file, {"page": str(output), "methods": summaries})
    print(f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e6:.1f} MB; open it in a browser.")


def _check_output(output: Path, logs: list[Path]) -> None:
    """Refuse to overwrite anything but a page, because `report -o *.jsonl` would destroy a log."""
    if not output.exists():
        return
    if any(log.exists() and output.samefile(log) for log in logs):
        raise ValueError(f"-o {output} is one of the logs: give the path of the page to write")
    if not output.is_file():
        raise ValueError(f"-o {output} is no file: give the path of the page to write")
    try:
        with output.open("rb") as file:
            begin = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    except OSError as error:
        raise ValueError(f"-o {output} exists and cannot be read ({error.strerror}): give another path") from error
    if begin and not begin.startswith((b"<!doctype html", b"<html")):
        raise ValueError(f"-o {output} exists and is no HTML page: remove it or give another path")
