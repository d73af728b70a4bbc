"""The page of `thinwire simulate scale`: step time, volume and efficiency over workers, and what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.report.markup import Row, fill, replace_file


def write_scale(
    path: Path,
    *,
    title: str,
    verdict: str,
    facts: Mapping[str, str],
    table: Sequence[Row],
    made: Mapping[str, str],
    data: Mapping[str, Any],
) -> None:
    """Write one self-contained page; `data` has workers, curves, lab (one entry per measured rate) and cores."""
    page = fill(
        "scale",
        title=title,
        verdict=verdict,
        facts=list(facts.items()),
        table=table,
        runs=list(made.items()),
        data=data,
    )
    replace_file(path, page)
