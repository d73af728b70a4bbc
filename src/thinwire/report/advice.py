"""The page of `thinwire advise`: the answer, the table, and step time over bandwidth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.report.markup import Row, fill, replace_file


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
    page = fill(
        "advice",
        title=title,
        verdict=verdict,
        facts=list(facts.items()),
        table=table,
        runs=list(made.items()),
        data=data,
    )
    replace_file(path, page)
