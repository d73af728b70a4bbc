"""What the study of SparsifyGradients draws: curves, what may be dropped, how long it stays away, magnitudes."""

from typing import Any

from thinwire.reproduce.runs import Curve
from thinwire.reproduce.sparsify_seeds import Seeds
from thinwire.reproduce.sparsify_showing import DROPPED
from thinwire.reproduce.study import Figure, Series


def curve_figures(seeds: dict[str, Seeds], times: dict[str, dict[str, float | None]]) -> list[Figure]:
    """All seeds' curves over passes, and over time where a step was timed."""
    # By seed: the page gives colours in this order, and the methods keep theirs whatever seeds there are.
    runs = sorted((seed, place, name) for place, name in enumerate(seeds) for seed in seeds[name].curves)
    figures = []
    for split in ("train", "test"):
        title, axis = f"{split.capitalize()} accuracy over", f"{split} accuracy (%)"
        passes, timed = [], []
        for seed, _, name in runs:
            curve, seconds = seeds[name].curves[seed], times[name]["paper"]
            label = f"{name}, seed {seed}" if seed else name
            values: list[float | None] = [100 * v for v in getattr(curve, split)]
            passes.append(Series(label, curve.epoch, values))
            if seconds is not None:
                timed.append(Series(label, [step * seconds for step in curve.step], values))
        figures.append(Figure(f"{title} passes", "epoch", axis, passes))
        figures += [Figure(f"{title} time", "seconds, with a master", axis, timed)] if timed else []
    return figures


def sweep_figures(sweep: dict[str, dict[float, Curve]]) -> list[Figure]:
    series = []
    for words, found in sweep.items():
        kept = [d for d in DROPPED if d in found]
        series.append(
            Series(words, [f"{d:g} %" for d in kept], [None if found[d].diverged else found[d].loss[-1] for d in kept])
        )
    return [Figure("Training loss by what is dropped", "dropped", "loss after the same steps", series, "bars")]


def away_figures(away: Any) -> list[Figure]:
    if not away:
        return []
    series = []
    for name, found in away.items():
        total, share = 0.0, []
        for value in found["share"]:
            total += value
            share.append(100 * total)
        series.append(Series(name, list(range(1, len(share) + 1)), share))
    nothing = ", ".join(f"{name}: {100 * found['never']:.1f} %" for name, found in away.items())
    return [
        Figure(
            "How many steps until a value travels again",
            "steps since it last travelled",
            "share of what travels again (%)",
            series,
            log="x",
            note=f"Of one worker. Never sent in {len(series[0].x)} steps: {nothing}",
        )
    ]


def shape_figures(shapes: list[dict[str, Any]]) -> list[Figure]:
    layers = list(dict.fromkeys(shape["layer"] for shape in shapes))
    return [
        Figure(
            f"Gradient magnitudes: {layer}",
            "magnitude",
            "entries (%)",
            [Series(f"step {s['step']}", s["x"], s["y"]) for s in shapes if s["layer"] == layer],
            log="x",
        )
        for layer in layers
    ]
