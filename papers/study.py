"""The result of a study as plain data: claims, tables, figures, and how it differs from the paper.

`results/` contains one JSON file per study and scale. The page, the picture and docs/results.md are made from it alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

VERSION = 1
MADE = ("command", "version", "machine", "date", "took")  # the keys of Study.made


class StudyError(ThinwireError):
    """A study cannot be run, read or written; the message says why."""


@dataclass(frozen=True)
class Claim:
    """One of the paper's figures and ours. `holds` is None if the claim could not be judged."""

    what: str
    paper: float | None
    ours: float | None
    unit: str = ""
    holds: bool | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Our figure divided by the paper's."""
        return self.ours / self.paper if self.ours is not None and self.paper else None


@dataclass(frozen=True)
class Table:
    """A table of text; the keys of the first row are the headings."""

    title: str
    rows: list[dict[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """The points of one line, or bars whose labels are in `x`."""

    name: str
    x: list[Any]
    y: list[float | None]


@dataclass(frozen=True)
class Figure:
    """A plot; `kind` is "lines", "points" or "bars"; `log` names the logarithmic axes, for example "xy"."""

    title: str
    x: str
    y: str
    series: list[Series]
    kind: str = "lines"
    log: str = ""
    note: str = ""


@dataclass(frozen=True)
class Study:
    """The result of a study."""

    name: str
    scale: str
    title: str
    paper: str  # authors and year
    verdict: str
    claims: list[Claim]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # how this study differs from the paper's experiments
    missing: list[str] = field(default_factory=list)  # runs and parts that were skipped: "NAME: why"
    facts: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)  # how it was made; the keys are MADE

    @property
    def stem(self) -> str:
        """The name of the study's files, without a suffix."""
        return f"{self.name}-{self.scale}"

    def to_json(self) -> str:
        claims = [{**asdict(claim), "ratio": claim.ratio} for claim in self.claims]
        return json.dumps({"version": VERSION, **asdict(self), "claims": claims}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Read a study from its JSON file; raise StudyError if the file does not contain one."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.pop("version") != VERSION:
                raise StudyError(f"{path} was written by another version of thinwire: run the study again")
            raw["claims"] = [Claim(**{k: v for k, v in c.items() if k != "ratio"}) for c in raw["claims"]]
            raw["tables"] = [Table(**table) for table in raw["tables"]]
            for figure in raw["figures"]:
                figure["series"] = [Series(**series) for series in figure["series"]]
            raw["figures"] = [Figure(**figure) for figure in raw["figures"]]
            study = cls(**raw)
            lacking = [key for key in MADE if not isinstance(study.made.get(key), str)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StudyError(f"{path} is not the result of a study ({error})") from error
        if lacking:
            raise StudyError(f"{path} does not say how it was made ({', '.join(lacking)}): run the study again")
        return study


def number(value: float | None, unit: str = "") -> str:
    """Format a figure with four significant digits and thousands separators."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip() if unit != "x" else f"{text}x"


def percent(share: float) -> str:
    """Format a share, such as an accuracy, as a percentage with two decimals."""
    return f"{100 * share:.2f} %"


def claim_rows(claims: Sequence[Claim]) -> list[dict[str, str]]:
    """Return the claims as the rows of a table."""
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
