"""Fills the HTML templates of all pages, with their text, tables, data and scripts in one file."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire import files
from thinwire.errors import LogError

Row = Mapping[str, str]
# The text above the title of each kind of page; the key is the name of its template, script and style.
BRANDS = {"page": "report", "advice": "advice", "gantt": "simulation", "scale": "scale", "study": "reproduces"}


def write_page(
    path: Path,
    name: str,
    *,
    title: str,
    verdict: str,
    facts: Mapping[str, str],
    table: Sequence[Row],
    made: Mapping[str, str],
    data: Mapping[str, Any],
    more: Mapping[str, str] | None = None,
) -> None:
    """Write a self-contained page: frame.html around `name`.html, with `name`.js, which draws `data`, and its style.

    `more` has further markup for the template by its placeholder.
    """
    from plotly.offline import get_plotlyjs

    here = resources.files("thinwire.tools.report")

    def read(*names: str) -> str:
        files = (here / each for each in names)
        return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())

    parts = {
        "BRAND": BRANDS[name],
        "TITLE": escape(title),
        "VERDICT": escape(verdict),
        "FACTS": "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()),
        "TABLE": table_of(table),
        "RUNS": "".join(f"<dt>{escape(k)}</dt><dd><pre>{escape(v)}</pre></dd>" for k, v in made.items()),
        "STYLE": read("page.css", f"{name}_more.css"),
        # Text from a log must not end the script element that contains it, so "<" is escaped.
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": read("plots.js", f"{name}.js"),
        "PLOTLY": get_plotlyjs(),
        **(more or {}),
    }
    parts["MAIN"] = _filled(read(f"{name}.html"), parts)
    replace_file(path, _filled(read("frame.html"), parts))


def _filled(template: str, parts: Mapping[str, str]) -> str:
    pieces = template.split("@@")  # text and placeholders alternate, so inserted text is not searched again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def table_of(rows: Sequence[Row]) -> str:
    """Return rows as an HTML table with the headings of the first row."""
    if not rows:
        return ""
    first, *rest = rows[0]
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in rows[0])
    body = ""
    for row in rows:
        cells = "".join(f'<td data-label="{escape(h)}">{escape(row.get(h, "–"))}</td>' for h in rest)
        method = escape(row.get(first, ""))
        body += f'<tr><th scope=row data-method="{method}">{method}</th>{cells}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def replace_file(path: Path, text: str) -> None:
    """Write a page completely or not at all."""
    try:
        files.replace_file(path, lambda out: out.write(text.encode()), shared=True, mode=0o644)
    except OSError as error:
        reason = files.explain(path, error)
        raise LogError(f"cannot write the report {path} ({reason}): choose another place.") from error


def write_study_page(
    path: Path,
    *,
    claims: Sequence[Row],
    notes: Sequence[str],
    tables: Sequence[tuple[str, str, Sequence[Row]]],
    figures: Sequence[Mapping[str, Any]],
    **page: Any,
) -> None:
    """Write the page of a reproduced paper; tables are (title, note, rows), and study.js draws the figures.

    `page` has the title, the verdict, the facts and the commands (`made`) for `write_page`.
    """
    more = {
        "NOTES": "".join(f"<li>{escape(note)}</li>" for note in notes),
        "TABLES": "".join(_section(*table) for table in tables),
    }
    write_page(path, "study", table=claims, data={"figures": list(figures)}, more=more, **page)


def _section(title: str, note: str, rows: Sequence[Row]) -> str:
    quiet = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{quiet}{table_of(rows)}</section>"
