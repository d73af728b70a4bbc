"""`python -m papers`, which `thinwire reproduce` starts: one paper's claims, run again, as JSON, page and picture."""

import contextlib
import ctypes
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from papers import STUDIES

if TYPE_CHECKING:
    from rich.console import Console

    from papers.study import Study


PLACES = ("--data", "--out", "--work")  # options that name folders


def reproduce_command(
    name: Annotated[str | None, typer.Argument(help=f"A study: {', '.join(STUDIES)}.")] = None,
    scale: Annotated[str, typer.Option(help="small: minutes on two cores; full: the paper's size.")] = "small",
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets; default: download them.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, pages and pictures.")] = Path("results"),
    work: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints and finished parts; default: OUT/work.")
    ] = None,
    lab: Annotated[bool, typer.Option(help="Measure on emulated hosts too.")] = True,
    only: Annotated[str, typer.Option(help="Runs and parts to make now, by name, with commas; default: all.")] = "",
    docs: Annotated[
        bool, typer.Option("--docs", help="Write docs/results.md from OUT's results, and run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")] = False,
) -> None:
    """Run a paper's experiments again and put its figures next to ours. What is done already is not run again."""
    from papers.workshop import SCALES

    if docs:
        _document(out)
        return
    if name not in STUDIES or scale not in SCALES:
        called = "name a study" if name is None else f"no study is called {name!r}"
        what = called if name not in STUDIES else f"no scale is called {scale!r}"
        raise ValueError(f"{what}; studies are {', '.join(STUDIES)}, scales {' and '.join(SCALES)}")
    study = _run(name, scale, data, out, work, lab, tuple(filter(None, map(str.strip, only.split(",")))))
    _tell(study, out, as_json)


def _run(
    name: str, scale: str, data: Path | None, out: Path, work: Path | None, lab: bool, only: tuple[str, ...]
) -> "Study":
    from importlib import import_module

    from papers.study import StudyError
    from papers.workshop import Workshop, names_of

    _keep_freed_memory()
    folder = (work if work is not None else out / "work") / f"{name}-{scale}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        workshop = Workshop(scale, data, folder, lab=lab, only=only)
    except OSError as error:
        raise StudyError(f"cannot write to {error.filename} ({error.strerror}): choose another folder") from error
    module, _, function = STUDIES[name].partition(":")
    make = getattr(import_module(module), function)
    if only:
        names = names_of(make, workshop)
        unknown = [wanted for wanted in only if wanted not in names]
        if unknown:
            raise StudyError(f"{name} has no run or part called {', '.join(unknown)}; there are {', '.join(names)}")
    study: Study = make(workshop)
    made = {"command": _without_places(["thinwire", "reproduce", *sys.argv[1:]]), **workshop.made()}
    return replace(study, made=made, missing=list(dict.fromkeys([*study.missing, *workshop.skipped])))


def _without_places(words: Sequence[str]) -> str:
    """A command without this machine's folders, which are nobody else's."""
    said: list[str] = []
    for word in words:
        option, equals, _ = word.partition("=")
        if said and said[-1] in PLACES:
            said.append("DIR")
        else:
            said.append(f"{option}=DIR" if equals and option in PLACES else word)
    return shlex.join(said)


def _keep_freed_memory() -> None:
    """Have glibc keep what large tensors leave: fetching zeroed pages for the next ones is a quarter of a step."""
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another system, another library
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)


def _document(out: Path) -> None:
    from papers.study import StudyError
    from papers.writing import document, read_studies
    from thinwire.tools.report.markup import replace_file

    target = out.parent / "docs" / "results.md"
    if not target.parent.is_dir():
        raise StudyError(f"there is no folder {target.parent} next to {out}: run it in the project's folder")
    studies = read_studies(out)
    if not studies:
        raise StudyError(f"there are no results of studies in {out}: name the folder that has them by --out")
    replace_file(target, document(studies))
    typer.echo(f"{target}: {len(studies)} studies.")


def _tell(study: "Study", out: Path, as_json: bool) -> None:
    """Write the result, print it, and only then ask a browser for the picture."""
    from rich.console import Console

    from papers.writing import photograph, write_study

    json_file, page = write_study(study, out)
    # Machines read stdout: what is said besides the result goes to stderr then.
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() or as_json else 140)
    if as_json:
        typer.echo(study.to_json(), nl=False)
    else:
        _show(study, console)
    picture = page.with_suffix(".png")
    why = photograph(page, picture)
    written = [json_file, page, *([picture] if why is None else [])]
    console.print(f"Written: {', '.join(str(path) for path in written)}", highlight=False)
    if json_file.stem != study.stem:
        whole = out / f"{study.stem}.json"
        console.print(f"{whole} has parts that this result lacks, and was left as it is.", highlight=False)
    if why is not None:
        console.print(f"No picture: {why}.", highlight=False)


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
    console.print(table)
    console.print(study.verdict, highlight=False)
    for part in study.missing:
        console.print(f"not run: {part}", highlight=False)


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    from thinwire.tools.cli import run

    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(reproduce_command)
    return run(list(arguments), application, "thinwire reproduce")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
