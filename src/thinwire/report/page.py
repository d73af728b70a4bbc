"""Write the page: text, table, figures and plotly.js in one HTML file that needs no network."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire.errors import LogError
from thinwire.events import RunLog
from thinwire.report.figures import figures
from thinwire.report.summary import MethodSummary, headline, show_metric, summarise

Row = Mapping[str, str]


def write_report(
    logs: Sequence[RunLog],
    path: Path,
    *,
    title: str | None = None,
    verdict: str | None = None,
    table: Sequence[Row] | None = None,
) -> None:
    """Write one self-contained page about these runs.

    `verdict` is the sentence under the title and `table` the rows of the summary, heading to text, with the
    method under its first heading; both are computed from the logs where they are not given.
    """
    if not logs:
        raise LogError("a report needs at least one event log.")
    run = logs[0].run
    summaries = summarise(logs)
    page = _page(
        title=title or f"{run.recipe}: {run.workers} hosts at {run.rate}",
        verdict=verdict or headline(summaries, metric=run.metric, target=run.target),
        facts=_facts(logs),
        table=summary_rows(summaries, metric=run.metric) if table is None else table,
        runs=_runs(logs),
        data=figures(logs),
    )
    replace_page(path, page)


def summary_rows(summaries: Sequence[MethodSummary], *, metric: str) -> list[Row]:
    """The summary as text, one row per method."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    several = any(summary.runs > 1 for summary in summaries)
    return [
        {
            "Method": s.method + (f" ({s.runs} run{'s' * (s.runs > 1)})" if several else ""),
            "Step": number(s.step_ms, "{:,.0f} ms" if (s.step_ms or 0) >= 10 else "{:.1f} ms"),
            "Sent per host and step": "–" if s.bytes_per_host_step is None else megabytes(s.bytes_per_host_step),
            "Steps to target": number(s.steps_to_target, "{:,.0f}"),
            "Time to target": number(s.seconds_to_target, "{:,.1f} s"),
            "Speed-up": number(s.speedup, "{:.1f}×"),
            f"Final train {metric}": show_metric(s.train, metric),
            f"Final test {metric}": show_metric(s.test, metric),
        }
        for s in summaries
    ]


def megabytes(amount: float) -> str:
    """Bytes as megabytes with three significant digits."""
    mb = amount / 1e6
    return f"{mb:.1f} MB" if mb >= 10 else f"{mb:.2f} MB" if mb >= 0.1 else f"{1000 * mb:.1f} kB"


def _facts(logs: Sequence[RunLog]) -> list[tuple[str, str]]:
    run = logs[0].run
    seeds = sorted({log.run.seed for log in logs})
    return [
        ("recipe", run.recipe),
        ("hosts", f"{run.workers}"),
        ("link", run.rate),
        ("parameters", f"{run.parameters:,}"),
        ("batch", f"{run.batch} × {run.workers}"),
        ("seed" if len(seeds) == 1 else "seeds", ", ".join(map(str, seeds))),
    ]


def _runs(logs: Sequence[RunLog]) -> list[tuple[str, str]]:
    """Each distinct fact about where the page comes from, once."""
    ends = {"target": "reached the target", "max_steps": "all steps done"}
    outcomes = [
        f"{log.run.method}, seed {log.run.seed}: "
        + (ends.get(log.end.reason, log.end.reason) if log.end else "no end record, the run may have died")
        for log in logs
    ]
    labels = (
        ("Command", dict.fromkeys(log.run.command for log in logs)),
        ("Machine", dict.fromkeys(log.run.machine for log in logs)),
        ("Version", dict.fromkeys(f"thinwire {log.run.version}" for log in logs if log.run.version)),
        ("Date", dict.fromkeys(log.run.date for log in logs)),
        ("Runs", dict.fromkeys(outcomes)),
        ("Logs", dict.fromkeys(log.path.name for log in logs if log.path)),
    )
    return [(label, "\n".join(filter(None, values))) for label, values in labels if any(values)]


def _page(
    *,
    title: str,
    verdict: str,
    facts: Sequence[tuple[str, str]],
    table: Sequence[Row],
    runs: Sequence[tuple[str, str]],
    data: Mapping[str, Any],
) -> str:
    from plotly.offline import get_plotlyjs

    here = resources.files("thinwire.report")
    facts_html = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    runs_html = "".join(f"<dt>{escape(k)}</dt><dd><pre>{escape(v)}</pre></dd>" for k, v in runs)
    parts = {
        "TITLE": escape(title),
        "VERDICT": escape(verdict),
        "FACTS": facts_html,
        "TABLE": table_html(table),
        "RUNS": runs_html,
        "STYLE": (here / "page.css").read_text(encoding="utf-8"),
        # A log is foreign text: without "<" it cannot end the script element that holds it.
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": (here / "page.js").read_text(encoding="utf-8"),
        "PLOTLY": get_plotlyjs(),
    }
    return fill((here / "page.html").read_text(encoding="utf-8"), parts)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with its @@NAMES@@ replaced."""
    pieces = template.split("@@")  # text and names take turns, so nothing inserted is searched again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def table_html(rows: Sequence[Row]) -> str:
    """Rows as a table that folds into a list on a narrow screen."""
    if not rows:
        return ""
    headings = list(rows[0])
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    body = ""
    for row in rows:
        first, *rest = headings
        cells = "".join(f'<td data-label="{escape(h)}">{escape(row.get(h, "–"))}</td>' for h in rest)
        method = escape(row.get(first, ""))
        body += f'<tr><th scope=row data-method="{method}">{method}</th>{cells}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def replace_page(path: Path, text: str) -> None:
    """Write the whole page or nothing."""
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as out:
            out.write(text)
        os.chmod(out.name, 0o644)
        os.replace(out.name, path)
    except OSError as error:
        raise LogError(f"cannot write the report {path} ({error.strerror}): choose another place.") from error
