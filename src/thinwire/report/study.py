"""The page of a reproduced paper: its claims next to ours, what differs, figures and tables."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from thinwire.report.markup import Row, fill, replace_file, table_of


def write_study_page(
    path: Path,
    *,
    title: str,
    verdict: str,
    facts: Mapping[str, str],
    claims: Sequence[Row],
    notes: Sequence[str],
    tables: Sequence[tuple[str, str, Sequence[Row]]],
    figures: Sequence[Mapping[str, Any]],
    made: Mapping[str, str],
) -> None:
    """Write one self-contained page; tables are (title, note, rows), figures are what study.js draws."""
    page = fill(
        "study",
        title=title,
        verdict=verdict,
        facts=list(facts.items()),
        table=claims,
        runs=list(made.items()),
        data={"figures": list(figures)},
        more={
            "NOTES": "".join(f"<li>{escape(note)}</li>" for note in notes),
            "TABLES": "".join(_section(*table) for table in tables),
        },
    )
    replace_file(path, page)


def _section(title: str, note: str, rows: Sequence[Row]) -> str:
    quiet = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{quiet}{table_of(rows)}</section>"
