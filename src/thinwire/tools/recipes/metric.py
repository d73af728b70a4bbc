"""Metrics: whether a value reaches a target, and how values are written.

A metric has a name and a direction. Accuracy and BLEU are better if they are higher, a loss if it is lower.
"""

import math


def reaches(value: float, target: float, *, higher_is_better: bool = True) -> bool:
    """Return whether a value of the metric is at the target or better; a value that is not a number never is."""
    return value >= target if higher_is_better else value <= target


def show_metric(value: float | None, metric: str) -> str:
    """Format a value: accuracy in per cent, BLEU with one decimal, others with four significant digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if metric == "accuracy":
        return f"{100 * value:.1f} %"
    return f"{value:.1f}" if metric == "bleu" else f"{value:#.4g}"


def name_metric(value: float | None, metric: str) -> str:
    """Return a value with the name of its metric, as in a sentence: "96.0 % accuracy", "loss 1.482"."""
    shown = show_metric(value, metric)
    return f"{shown} {metric}" if metric == "accuracy" else f"{metric_title(metric)} {shown}"


def metric_title(metric: str) -> str:
    """Return the metric's name as it is written in text."""
    return "BLEU" if metric == "bleu" else metric
