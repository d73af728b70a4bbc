"""The report of training runs: one HTML file with text, a table, figures and plotly.js, which needs no network."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.tools.events import PHASES, Histogram, Run, RunLog
from thinwire.tools.recipes.metric import metric_title, show_metric
from thinwire.tools.report.markup import Row, write_page
from thinwire.tools.report.summary import (
    MethodSummary,
    by_method,
    delay_cost,
    headline,
    last_value,
    phase_ms,
    prepare,
    reached,
    settled,
    summarise,
    target_of,
)

LAYERS_SHOWN = 12
DIAGNOSED = ("delta", "xi", "residual_ratio", "cosine", "age", "waited")


def figures(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Return the data that page.js draws."""
    run = logs[0].run
    percent = run.metric == "accuracy"
    scale = 100.0 if percent else 1.0
    goal, *others = dict.fromkeys(target_of(log.run) for log in logs)
    return {
        "methods": list(by_method(logs)),
        "metric": "accuracy (%)" if percent else metric_title(run.metric),
        "percent": percent,
        "decimals": 1 if percent or run.metric == "bleu" else 3,
        "higher_is_better": run.higher_is_better,
        "target": None if goal is None or others else goal * scale,
        "curves": [curve for log in logs for curve in _curves(log, scale)],
        "phases": _phases(logs),
        "bytes": _bytes(logs),
        "layers": _layers(logs),
        "loss": _loss(logs, scale),
        "diagnoses": [_diagnosis(log) for log in logs if log.diagnoses],
    }


def _curves(log: RunLog, scale: float) -> list[dict[str, Any]]:
    """Return a curve for each split: the metric over time and over passes, and where it reached the target."""
    hit = reached(log)
    return [
        {
            "method": log.run.method,
            "seed": log.run.seed,
            "split": split,
            "wall": [round(e.wall, 3) for e in points],
            "epoch": [round(e.epoch, 4) for e in points],
            "value": [_rounded(e.value, scale) for e in points],
            "met": points.index(hit) if hit is not None and split == "test" else None,
        }
        for split in ("test", "train")
        if (points := [e for e in log.evals if e.split == split])
    ]


def _rounded(value: float | None, scale: float) -> float | None:
    return round(scale * value, 3) if value is not None and math.isfinite(value) else None


def _phases(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Return the milliseconds of each phase of a step by method."""
    known = {method: values for method, runs in by_method(logs).items() if (values := phase_ms(runs)) is not None}
    return {
        "methods": list(known),
        "series": [{"phase": phase, "ms": [round(values[phase], 3) for values in known.values()]} for phase in PHASES],
    }


def _bytes(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Return the megabytes that a worker sends in a step by method, as in the table."""
    sent = {s.method: s.bytes_per_host_step / 1e6 for s in summarise(logs) if s.bytes_per_host_step is not None}
    return {"methods": list(sent), "mb": list(sent.values())}


def _loss(logs: Sequence[RunLog], scale: float) -> list[dict[str, Any]]:
    """Return the waiting time of a step and the last value of the metric by transport, delay and packet loss."""
    if not any(log.run.packet_loss for log in logs):
        return []
    several = len({log.run.delay for log in logs}) > 1

    def name(run: Run) -> str:
        return f"{run.transport}, {run.delay or 'no delay'}" if several else run.transport

    ordered = sorted(logs, key=lambda log: log.run.packet_loss)
    names = dict.fromkeys(name(log.run) for log in logs if log.run.transport)
    groups = {each: [log for log in ordered if name(log.run) == each] for each in names}
    return [
        {
            "transport": transport,
            "loss": [round(100 * log.run.packet_loss, 4) for log in runs],
            "wait": [round(1e3 * sum(s.exchange for s in settled(log)) / max(len(settled(log)), 1), 3) for log in runs],
            "value": [_rounded(last_value(log, "test"), scale) for log in runs],
        }
        for transport, runs in groups.items()
    ]


def _layers(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Return the last histogram of each layer and method, for the largest layers."""
    latest: dict[str, dict[str, Histogram]] = {}
    for log in logs:
        for histogram in log.histograms:
            of_layer = latest.setdefault(histogram.layer, {})
            last = of_layer.get(log.run.method)
            if last is None or histogram.step >= last.step:
                of_layer[log.run.method] = histogram

    def size(layer: str) -> int:
        return max(sum(h.counts) + h.zeros for h in latest[layer].values())

    shown = set(sorted(latest, key=size, reverse=True)[:LAYERS_SHOWN])
    return {
        "left_out": max(0, len(latest) - LAYERS_SHOWN),
        "shown": [
            {
                "layer": layer,
                "entries": size(layer),
                "step": max(h.step for h in by.values()),
                "series": [{"method": method, **_shares(h)} for method, h in by.items() if h.counts],
            }
            for layer, by in latest.items()
            if layer in shown
        ],
    }


def _diagnosis(log: RunLog) -> dict[str, Any]:
    """Return the diagnostics of one run, as a list for each figure; unknown values are None."""
    values = {name: [getattr(d, name) for d in log.diagnoses] for name in DIAGNOSED}
    return {
        "method": log.run.method,
        "seed": log.run.seed,
        "step": [d.step for d in log.diagnoses],
        **{name: [value if math.isfinite(value) else None for value in each] for name, each in values.items()},
    }


def _shares(histogram: Histogram) -> dict[str, Any]:
    """Return the middle of each bin and the percentage of the layer's entries in it."""
    total = sum(histogram.counts) + histogram.zeros
    pairs = zip(histogram.edges, histogram.edges[1:], strict=False)
    return {
        "x": [(low * high) ** 0.5 for low, high in pairs],
        "share": [round(100 * count / total, 4) for count in histogram.counts],
        "zeros": round(100 * histogram.zeros / total, 2),
    }


def write_report(
    logs: Sequence[RunLog],
    path: Path,
    *,
    title: str | None = None,
    verdict: str | None = None,
    table: Sequence[Row] | None = None,
) -> None:
    """Write a self-contained page about these runs.

    Args:
        logs: the event logs of the runs.
        path: the page to write.
        title: the page's title; by default made from the logs.
        verdict: the sentence under the title; by default computed from the logs.
        table: rows of the summary, which map headings to text and begin with the method; by default computed too.
    """
    logs = prepare(logs, named=table is not None)
    metric = logs[0].run.metric
    summaries = summarise(logs)
    write_page(
        path,
        "page",
        title=title or _title(logs),
        verdict=verdict or headline(summaries, metric=metric),
        facts=_facts(logs),
        table=summary_rows(summaries, metric=metric) if table is None else table,
        made=_made(logs),
        data=figures(logs),
    )


def summary_rows(summaries: Sequence[MethodSummary], *, metric: str) -> list[Row]:
    """Return the summary as text, with one row per method."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    several = any(summary.runs > 1 for summary in summaries)
    return [
        {
            "Method": s.method + (f" ({s.runs} run{'s' * (s.runs > 1)})" if several else ""),
            "Step": number(s.step_ms, "{:,.0f} ms" if (s.step_ms or 0) >= 10 else "{:.1f} ms"),
            "Sent per worker and step": "–" if s.bytes_per_host_step is None else megabytes(s.bytes_per_host_step),
            "Steps to target": number(s.steps_to_target, "{:,.0f}"),
            "Time to target": number(s.seconds_to_target, "{:,.1f} s"),
            "Speed-up": number(s.speedup, "{:.1f}×"),
            f"Final train {metric_title(metric)}": show_metric(s.train, metric),
            f"Final test {metric_title(metric)}": show_metric(s.test, metric),
        }
        for s in summaries
    ]


def megabytes(amount: float) -> str:
    """Format bytes as megabytes or kilobytes."""
    mb = amount / 1e6
    return f"{mb:.1f} MB" if mb >= 10 else f"{mb:.2f} MB" if mb >= 0.1 else f"{1000 * mb:.1f} kB"


def _all(logs: Sequence[RunLog], word: Callable[[Run], str]) -> str:
    """Return all distinct values of a property of the runs."""
    return ", ".join(dict.fromkeys(word(log.run) for log in logs))


def _title(logs: Sequence[RunLog]) -> str:
    workers, rates = _all(logs, lambda run: f"{run.workers}"), _all(logs, lambda run: run.rate)
    delays, several = _delays(logs), len({log.run.delay for log in logs}) > 1
    delays = f", one-way delays {delays}" if several else f", {delays} one way" if logs[0].run.delay else ""
    return f"{_all(logs, lambda run: run.recipe)}: {workers} workers at {rates}{delays}"


def _delays(logs: Sequence[RunLog]) -> str:
    return _all(logs, lambda run: run.delay or "0")


def _facts(logs: Sequence[RunLog]) -> dict[str, str]:
    seeds = sorted({log.run.seed for log in logs})
    facts = {
        "recipe": _all(logs, lambda run: run.recipe),
        "workers": _all(logs, lambda run: f"{run.workers}"),
        "link": _all(logs, lambda run: run.rate),
        "parameters": _all(logs, lambda run: f"{run.parameters:,}"),
        "batch": _all(logs, lambda run: f"{run.batch} × {run.workers}"),
        "seed" if len(seeds) == 1 else "seeds": ", ".join(map(str, seeds)),
    }
    if any(log.run.delay for log in logs):
        facts["one-way delay"] = _delays(logs)
        cost = delay_cost(logs)
        facts["delay line"] = (
            f"{cost.share:.1%} of one core, p99 {cost.p99_late_ms:.2f} ms late" if cost else "the kernel's netem"
        )
    if any(log.run.transport for log in logs):
        facts["transport"] = _all(logs, lambda run: run.transport or "none")
    if any(log.run.packet_loss for log in logs):
        facts["packets lost"] = _all(logs, lambda run: f"{100 * run.packet_loss:.4g} %")
    if any(target_of(log.run) is not None for log in logs):
        facts["target"] = _all(logs, lambda run: show_metric(target_of(run), run.metric))
    return facts


def _made(logs: Sequence[RunLog]) -> dict[str, str]:
    """Return how the page was made: commands, machines, versions, dates, outcomes and logs."""
    ends = {"target": "reached the target", "max_steps": "all steps done"}
    outcomes = [
        f"{log.run.method}, seed {log.run.seed}: "
        + (ends.get(log.end.reason, log.end.reason) if log.end else "no end record, the run may have died")
        for log in logs
    ]
    lines = {
        "Command": [log.run.command for log in logs],
        "Machine": [log.run.machine for log in logs],
        "Version": [f"thinwire {log.run.version}" for log in logs if log.run.version],
        "Date": [log.run.date for log in logs],
        "Runs": outcomes,
        "Logs": [log.path.name for log in logs if log.path],
    }
    return {label: "\n".join(filter(None, dict.fromkeys(each))) for label, each in lines.items() if any(each)}
