"""What each figure of the report shows, as plain data; report/page.js draws it in the reader's colours."""

import math
from collections.abc import Sequence
from typing import Any

from thinwire.events import PHASES, Histogram, RunLog
from thinwire.report.logs import target_of
from thinwire.report.summary import by_method, last_value, phase_ms, reached, settled, summarise

LAYERS_SHOWN = 12
DIAGNOSED = ("delta", "xi", "residual_ratio", "cosine", "age", "waited")


def figures(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Everything that the page's script needs."""
    run = logs[0].run
    methods = list(by_method(logs))
    scale = 100.0 if run.metric == "accuracy" else 1.0
    goal, *others = dict.fromkeys(target_of(log.run) for log in logs)
    return {
        "methods": methods,
        "metric": "accuracy (%)" if run.metric == "accuracy" else run.metric.upper(),
        "percent": run.metric == "accuracy",
        "target": None if goal is None or others else goal * scale,
        "curves": [curve for log in logs for curve in _curves(log, scale)],
        "phases": _phases(logs),
        "bytes": _bytes(logs),
        "layers": _layers(logs),
        "loss": _loss(logs, scale),
        "diagnoses": [_diagnosis(log) for log in logs if log.diagnoses],
    }


def _curves(log: RunLog, scale: float) -> list[dict[str, Any]]:
    """One line per split: the metric over time and over passes, and where it met the target."""
    curves = []
    hit = reached(log)
    for split in ("test", "train"):
        points = [e for e in log.evals if e.split == split]
        if not points:
            continue
        met = hit is not None and split == "test"
        curves.append(
            {
                "method": log.run.method,
                "seed": log.run.seed,
                "split": split,
                "wall": [round(e.wall, 3) for e in points],
                "epoch": [round(e.epoch, 4) for e in points],
                "value": [round(e.value * scale, 3) if math.isfinite(e.value) else None for e in points],
                "met": points.index(hit) if met and hit is not None else None,
            }
        )
    return curves


def _phases(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Milliseconds of each phase of a step, per method."""
    means = {method: phase_ms(runs) for method, runs in by_method(logs).items()}
    known = {method: values for method, values in means.items() if values is not None}
    return {
        "methods": list(known),
        "series": [{"phase": phase, "ms": [round(values[phase], 3) for values in known.values()]} for phase in PHASES],
    }


def _bytes(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Megabytes that a host sends in a step, per method, as in the table."""
    sent = {s.method: s.bytes_per_host_step / 1e6 for s in summarise(logs) if s.bytes_per_host_step is not None}
    return {"methods": list(sent), "mb": list(sent.values())}


def _loss(logs: Sequence[RunLog], scale: float) -> list[dict[str, Any]]:
    """Per transport, over the links' loss: what a step waits, lost datagrams, the last value of the metric."""
    ways: dict[str, list[RunLog]] = {}
    for log in logs:
        if log.run.transport:
            ways.setdefault(log.run.transport, []).append(log)
    if not any(log.run.packet_loss for log in logs):
        return []
    found = []
    for way, runs in ways.items():
        runs.sort(key=lambda log: log.run.packet_loss)
        last = [last_value(log, "test") for log in runs]
        found.append(
            {
                "transport": way,
                "loss": [round(100 * log.run.packet_loss, 4) for log in runs],
                "wait": [
                    round(1e3 * sum(s.exchange for s in settled(log)) / max(len(settled(log)), 1), 3) for log in runs
                ],
                "value": [round(scale * v, 3) if v is not None and math.isfinite(v) else None for v in last],
            }
        )
    return found


def _layers(logs: Sequence[RunLog]) -> dict[str, Any]:
    """The last histogram of each layer and method; of many layers, the largest."""
    latest: dict[str, dict[str, Histogram]] = {}
    for log in logs:
        for histogram in log.histograms:
            of_layer = latest.setdefault(histogram.layer, {})
            held = of_layer.get(log.run.method)
            if held is None or histogram.step >= held.step:
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
    """One run's diagnoses, a list for each figure; what is not known is left out of the line."""

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "method": log.run.method,
        "seed": log.run.seed,
        "step": [d.step for d in log.diagnoses],
        **{name: [known(getattr(d, name)) for d in log.diagnoses] for name in DIAGNOSED},
    }


def _shares(histogram: Histogram) -> dict[str, Any]:
    """The middle of each bin and the share of the layer's entries in it, in per cent."""
    total = sum(histogram.counts) + histogram.zeros
    pairs = zip(histogram.edges, histogram.edges[1:], strict=False)
    return {
        "x": [(low * high) ** 0.5 for low, high in pairs],
        "share": [round(100 * count / total, 4) for count in histogram.counts],
        "zeros": round(100 * histogram.zeros / total, 2),
    }
