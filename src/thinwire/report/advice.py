"""The page of `thinwire advise`: the answer, the table, and step time over bandwidth."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire.report.page import Row, fill, replace_page, table_html


def write_advice(
    path: Path,
    *,
    title: str,
    verdict: str,
    facts: Mapping[str, str],
    table: Sequence[Row],
    made: Mapping[str, str],
    data: Mapping[str, Any],
) -> None:
    """Write one self-contained page; `data` has rates, curves, crossings, best, rate and here."""
    from plotly.offline import get_plotlyjs

    here = resources.files("thinwire.report")
    parts = {
        "TITLE": escape(title),
        "VERDICT": escape(verdict),
        "FACTS": "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()),
        "TABLE": table_html(table),
        "RUNS": "".join(f"<dt>{escape(k)}</dt><dd><pre>{escape(v)}</pre></dd>" for k, v in made.items()),
        "STYLE": (here / "page.css").read_text(encoding="utf-8"),
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": (here / "advice.js").read_text(encoding="utf-8"),
        "PLOTLY": get_plotlyjs(),
    }
    replace_page(path, fill((here / "advice.html").read_text(encoding="utf-8"), parts))
