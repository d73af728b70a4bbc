"""The program that `thinwire reproduce` starts: runs one study and writes its result as JSON, page and picture."""

import contextlib
import ctypes
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from papers import SCALES, STUDIES
from thinwire.tools.options import writable

if TYPE_CHECKING:
    from rich.console import Console

    from papers.study import Study

# Options that name places on this machine, and what stands for them in the command that a result records.
PLACES = {"--data": "DIR", "--out": "DIR", "--work": "DIR", "--json": "FILE"}

WORK_HELP = "Folder for checkpoints and finished parts; default: OUT/work."
ONLY_HELP = "Runs and parts to do now, by name, separated by commas; default: all."
DOCS_HELP = "Write docs/results.md from the results in OUT and run nothing."
JSON_HELP = "Also write the result as JSON here; - is stdout."


def reproduce_command(
    name: Annotated[str | None, typer.Argument(help=f"A study: {', '.join(STUDIES)}.")] = None,
    scale: Annotated[str, typer.Option(help="small: minutes on two cores; full: the paper's size, hours.")] = "small",
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets; default: download them.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, pages and pictures.")] = Path("results"),
    work: Annotated[Path | None, typer.Option(help=WORK_HELP)] = None,
    lab: Annotated[bool, typer.Option(help="Also measure on emulated hosts.")] = True,
    only: Annotated[str, typer.Option(help=ONLY_HELP)] = "",
    docs: Annotated[bool, typer.Option("--docs", help=DOCS_HELP)] = False,
    json: Annotated[Path | None, typer.Option(metavar="PATH", callback=writable, help=JSON_HELP)] = None,
) -> None:
    """Run a paper's experiments again and compare its figures with ours. Finished runs and parts are reused."""
    if docs:
        _write_docs(out)
        return
    if name not in STUDIES or scale not in SCALES:
        unknown = "name a study" if name is None else f"there is no study {name!r}"
        what = unknown if name not in STUDIES else f"there is no scale {scale!r}"
        raise ValueError(f"{what}; studies are {', '.join(STUDIES)}, scales {' and '.join(SCALES)}")
    folder = (work if work is not None else out / "work") / f"{name}-{scale}"
    try:
        study = _run(name, scale, data, out, folder, lab, tuple(filter(None, map(str.strip, only.split(",")))))
    except KeyboardInterrupt:
        typer.echo(f"thinwire: stopped; finished work is in {folder}, and the same command continues it.", err=True)
        raise typer.Exit(130) from None
    report(study, out, json)


def _run(
    name: str, scale: str, data: Path | None, out: Path, folder: Path, lab: bool, only: tuple[str, ...]
) -> "Study":
    from importlib import import_module

    from papers.study import StudyError
    from papers.workspace import Workspace, requested_names

    _keep_freed_memory()
    try:
        out.mkdir(parents=True, exist_ok=True)
        workspace = Workspace(scale, data, folder, lab=lab, only=only)
    except OSError as error:
        raise StudyError(f"cannot write to {error.filename} ({error.strerror}): choose another folder") from error
    module, _, function = STUDIES[name].partition(":")
    make = getattr(import_module(module), function)
    if only:
        names = requested_names(make, workspace)
        unknown = [wanted for wanted in only if wanted not in names]
        if unknown:
            raise StudyError(f"{name} has no run or part called {', '.join(unknown)}; there are {', '.join(names)}")
    study: Study = make(workspace)
    made = {"command": without_places(["thinwire", "reproduce", *sys.argv[1:]]), **workspace.made()}
    return replace(study, made=made, missing=list(dict.fromkeys([*study.missing, *workspace.skipped])))


def without_places(words: Sequence[str]) -> str:
    """Return a command line without the paths of this machine."""
    shown: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        option, equals, _ = word.partition("=")
        named = f"{option}={PLACES[option]}" if equals and option in PLACES else word
        shown.append(PLACES.get(before, named))
    return shlex.join(shown)


def _keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors: fetching zeroed pages again takes a quarter of a step."""
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)


def _write_docs(out: Path) -> None:
    from papers.files import read_studies, results_page
    from papers.study import StudyError
    from thinwire.tools.report.markup import replace_file

    target = out.parent / "docs" / "results.md"
    if not target.parent.is_dir():
        raise StudyError(f"there is no folder {target.parent} next to {out}: run it in the project's folder")
    studies = read_studies(out)
    if not studies:
        raise StudyError(f"there are no results of studies in {out}: name the folder that has them by --out")
    replace_file(target, results_page(studies))
    typer.echo(f"{target}: {len(studies)} studies.")


def report(study: "Study", out: Path, json: Path | None) -> None:
    """Write the result, print it, and make the picture last, because that needs a browser."""
    from rich.console import Console

    from papers.files import take_screenshot, write_study
    from thinwire.tools.report.markup import replace_file

    json_file, page = write_study(study, out)
    to_stdout = json == Path("-")
    # With JSON on stdout, everything else goes to stderr.
    width = None if sys.stdout.isatty() or to_stdout else 140
    console = Console(stderr=to_stdout, width=width, highlight=False)
    if to_stdout:
        typer.echo(study.to_json(), nl=False)
    else:
        _show(study, console)
        if json is not None:
            replace_file(json, study.to_json())
    picture = page.with_suffix(".png")
    why = take_screenshot(page, picture)
    written = [json_file, page, *([picture] if why is None else [])]
    console.print(f"Written: {', '.join(map(str, written))}")
    if json_file.stem != study.stem:
        console.print(f"{out / study.stem}.json has parts that this result lacks, and was not changed.")
    if why is not None:
        console.print(f"No picture: {why}.")


def _show(study: "Study", console: "Console") -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from papers.study import claim_rows

    table = Table(title=f"{study.title} ({study.scale})", box=SIMPLE)
    rows = claim_rows(study.claims)
    for heading in rows[0] if rows else ():
        table.add_column(heading, justify="left" if heading in ("Claim", "Note") else "right")
    for row in rows:
        table.add_row(*row.values())
    console.print(table, study.verdict, *(f"not run: {part}" for part in study.missing), sep="\n")


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    from thinwire.tools.cli import run

    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(reproduce_command)
    return run(list(arguments), application, "thinwire reproduce")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
