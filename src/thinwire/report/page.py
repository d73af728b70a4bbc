"""Write the page: text, table, figures and plotly.js in one HTML file that needs no network."""

from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.events import Run, RunLog
from thinwire.report.figures import figures
from thinwire.report.logs import prepare, target_of
from thinwire.report.markup import Row, fill, replace_file
from thinwire.report.summary import MethodSummary, headline, show_metric, summarise


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
    logs = prepare(logs, named=table is not None)
    metric = logs[0].run.metric
    summaries = summarise(logs)
    page = fill(
        "page",
        title=title or _title(logs),
        verdict=verdict or headline(summaries, metric=metric),
        facts=_facts(logs),
        table=summary_rows(summaries, metric=metric) if table is None else table,
        runs=_runs(logs),
        data=figures(logs),
    )
    replace_file(path, page)


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


def _all(logs: Sequence[RunLog], word: Callable[[Run], str]) -> str:
    """Every distinct value of a fact about the runs."""
    return ", ".join(dict.fromkeys(word(log.run) for log in logs))


def _title(logs: Sequence[RunLog]) -> str:
    hosts, rates = _all(logs, lambda run: f"{run.workers}"), _all(logs, lambda run: run.rate)
    return f"{_all(logs, lambda run: run.recipe)}: {hosts} hosts at {rates}"


def _facts(logs: Sequence[RunLog]) -> list[tuple[str, str]]:
    seeds = sorted({log.run.seed for log in logs})
    facts = [
        ("recipe", _all(logs, lambda run: run.recipe)),
        ("hosts", _all(logs, lambda run: f"{run.workers}")),
        ("link", _all(logs, lambda run: run.rate)),
        ("parameters", _all(logs, lambda run: f"{run.parameters:,}")),
        ("batch", _all(logs, lambda run: f"{run.batch} × {run.workers}")),
        ("seed" if len(seeds) == 1 else "seeds", ", ".join(map(str, seeds))),
    ]
    if any(log.run.transport for log in logs):
        facts.append(("transport", _all(logs, lambda run: run.transport or "none")))
    if any(log.run.packet_loss for log in logs):
        facts.append(("packets lost", _all(logs, lambda run: f"{100 * run.packet_loss:.4g} %")))
    if any(target_of(log.run) is not None for log in logs):
        facts.append(("target", _all(logs, lambda run: show_metric(target_of(run), run.metric))))
    return facts


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
