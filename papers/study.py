"""Study: what a reproduction found, as plain data: claims, tables, figures, and what differs from the paper.

`results/` holds one JSON file per study and scale; the page, the picture and docs/results.md are made from it alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

VERSION = 1
MADE = ("command", "version", "machine", "date", "took")  # what a result says of how it was made


class StudyError(ThinwireError):
    """A study cannot be run, read or written; the message says why."""


@dataclass(frozen=True)
class Claim:
    """One of the paper's figures next to ours. `holds` is None where there is nothing to hold."""

    what: str
    paper: float | None
    ours: float | None
    unit: str = ""
    holds: bool | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.ours / self.paper if self.ours is not None and self.paper else None


@dataclass(frozen=True)
class Table:
    """Rows of text under headings, which the first row gives."""

    title: str
    rows: list[dict[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line, or points, or bars with their names in x."""

    name: str
    x: list[Any]
    y: list[float | None]


@dataclass(frozen=True)
class Figure:
    """A plot; kind is "lines", "points" or "bars"; log names the logarithmic axes, such as "xy"."""

    title: str
    x: str
    y: str
    series: list[Series]
    kind: str = "lines"
    log: str = ""
    note: str = ""


@dataclass(frozen=True)
class Study:
    """A finished reproduction."""

    name: str
    scale: str
    title: str
    paper: str  # authors and year
    verdict: str
    claims: list[Claim]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # parts that were not run
    facts: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)  # what MADE names

    @property
    def stem(self) -> str:
        """The name of its files."""
        return f"{self.name}-{self.scale}"

    def to_json(self) -> str:
        claims = [{**asdict(claim), "ratio": claim.ratio} for claim in self.claims]
        return json.dumps({"version": VERSION, **asdict(self), "claims": claims}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Study":
        """A study from its file; StudyError if it is none."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.pop("version") != VERSION:
                raise StudyError(f"{path} is of another version of thinwire: run the study again")
            raw["claims"] = [Claim(**{k: v for k, v in c.items() if k != "ratio"}) for c in raw["claims"]]
            raw["tables"] = [Table(**table) for table in raw["tables"]]
            raw["figures"] = [
                Figure(**{**f, "series": [Series(**series) for series in f["series"]]}) for f in raw["figures"]
            ]
            study = cls(**raw)
            lacking = [key for key in MADE if not isinstance(study.made.get(key), str)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StudyError(f"{path} is not the result of a study ({error})") from error
        if lacking:
            raise StudyError(f"{path} does not say how it was made ({', '.join(lacking)}): run the study again")
        return study


def number(value: float | None, unit: str = "") -> str:
    """A figure as text: four significant digits, thousands apart."""
    if value is None:
        return "–"
    size = abs(value)
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip() if unit != "x" else f"{text}x"


def claim_rows(claims: Sequence[Claim]) -> list[dict[str, str]]:
    """The claims as text: the paper's, ours, the ratio, and whether it holds."""
    words = {True: "yes", False: "no", None: ""}
    return [
        {
            "Claim": claim.what,
            "Paper": number(claim.paper, claim.unit),
            "Here": number(claim.ours, claim.unit),
            "Ratio": number(claim.ratio),
            "Holds": words[claim.holds],
            "Note": claim.note,
        }
        for claim in claims
    ]
