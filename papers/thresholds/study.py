"""Tsai 2018: thresholds: a fixed share, standard deviations, or a threshold that follows the gradients.

Accuracy per iteration and per second for each, and what choosing takes against a sort; the thesis left the
comparison with 1, 2 and 3 deviations and the time of the dynamic rule to be done.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from papers.cluster import Cluster, Setting
from papers.labs import Bed, Trial, confirm, step_times
from papers.runs import Curve, Goal
from papers.study import Claim, Figure, Series, Study, Table, number
from papers.workshop import Workshop
from thinwire.codec.codec import Codec
from thinwire.codec.selection import Dynamic, Selection, StdDev, TopK
from thinwire.codec.vectors import NativeGroup, Vector
from thinwire.tools.recipes import get_recipe

WORKERS, BATCH, LR = 4, 16, 0.05
RECIPE = "mnist-conv"
SELECTIONS: dict[str, Selection] = {
    "static 10 %": TopK(0.1),
    "static 1 %": TopK(0.01),
    "static 0.1 %": TopK(0.001),
    "1 sigma": StdDev(1.0),
    "2 sigma": StdDev(2.0),
    "3 sigma": StdDev(3.0),
    "dynamic": Dynamic(),
}
# What the lab knows under a name; the others' steps are taken from the same frame sizes.
LAB = {"dense": "dense", "static 10 %": "percentile90-residual", "static 1 %": "topk1", "static 0.1 %": "topk0.1"}
LAB |= {"2 sigma": "stddev2", "dynamic": "dynamic"}


def study(workshop: Workshop) -> Study:
    """Every threshold on the same network and data, and the time that choosing takes."""
    recipe = get_recipe(RECIPE)
    splits = workshop.load(recipe)
    steps, test = (4000, 4000) if workshop.full else (300, 1000)
    goal = Goal(steps, steps // 20, train_samples=0, test_samples=test)
    curves = {}
    for name, selection in {"dense": None, **SELECTIONS}.items():
        setting = Setting(WORKERS, BATCH, LR, 0.0, Codec(selection) if selection is not None else None)
        curve = workshop.train(name.replace(" ", "-").replace("%", "pc"), recipe, splits, setting, goal)
        if curve is not None:
            curves[name] = curve
    choosing = workshop.part("choosing", lambda: _choosing(_gradient(splits)), setup=f"{SELECTIONS}", data=splits) or {}
    bed = Bed(RECIPE, workshop.data, hosts=WORKERS, rate="100mbit", batch=BATCH, lr=LR)
    methods = list(LAB.values())
    timed = f"{bed.setup} {', '.join(methods)} steps=25"
    lab = workshop.lab_part("step-times", lambda: step_times(bed, methods, steps=25), setup=timed, data=splits)
    confirmed, proof = confirm(workshop, Trial(bed, "dynamic", Codec(Dynamic()), 0.9, 600, 25), lab)
    seconds = {name: lab[method]["ms"] / 1e3 for name, method in LAB.items()} if lab else {}
    target = max(curves["dense"].test) - 0.005 if "dense" in curves else 1.0
    return Study(
        "thresholds",
        workshop.scale,
        "Thresholds: static, deviations, dynamic",
        "Tsai, 2018",
        _verdict(curves, choosing, target),
        [*_accuracy_claims(curves), *_choosing_claims(choosing), *confirmed],
        [_table(curves, seconds, target), *([_choosing_table(choosing)] if choosing else []), *proof],
        _figures(curves, seconds, choosing),
        [
            "The data is MNIST and the network a small convolutional one; the thesis names no figures that can be set "
            "next to these, so that the claims are its expectations.",
            "What is not sent stays in a memory, and values travel in 8 bits, as thinwire does by default.",
            "The dynamic rule as published climbs until nothing is sent; thinwire's keeps it between 0.1 % and 10 %.",
            "The network is emulated: all hosts compute on this machine's cores.",
        ],
        facts={"workers": f"{WORKERS}", "batch": f"{BATCH} x {WORKERS}", "data": "MNIST"},
    )


def _gradient(splits: Any) -> Tensor:
    """A real gradient, repeated with noise to the size of SparsifyGradients' network."""
    cluster = Cluster(get_recipe(RECIPE), splits.train, Setting(WORKERS, BATCH, LR))
    for _ in range(10):
        cluster.step()
    flat = torch.cat([g.flatten() for g in cluster.gradients([0])[1].values()])
    cluster.close()
    generator = torch.Generator().manual_seed(0)
    copies = [flat * (1.0 + 0.1 * torch.randn(flat.shape, generator=generator)) for _ in range(5)]
    return torch.cat(copies)[:1_756_426].contiguous()


def _choosing(gradient: Tensor) -> dict[str, float]:
    """Milliseconds to find a threshold in the same gradient, one thread, median of several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways: dict[str, Any] = {"sort": lambda: gradient.abs().sort()}
        ways["torch.topk, 1 %"] = lambda: gradient.abs().topk(len(gradient) // 100)
        for name, selection in SELECTIONS.items():
            ways[name] = _cut(selection, gradient)
        return {name: 1e3 * _median(way) for name, way in ways.items()}
    finally:
        torch.set_num_threads(threads)


def _cut(selection: Selection, gradient: Tensor) -> Any:
    state: dict[str, float] = {}
    step = iter(range(1_000_000))

    def cut() -> None:
        group = NativeGroup([Vector(gradient, None, 1.0, None, None)])
        selection.select(group, step=next(step), key=0, state=state)

    return cut


def _median(way: Any) -> float:
    times = []
    for _ in range(9):
        began = time.perf_counter()
        way()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _accuracy_claims(curves: dict[str, Curve]) -> list[Claim]:
    if "dense" not in curves:
        return []
    dense = 100 * curves["dense"].best_test
    return [
        Claim(
            f"{name}: best test accuracy, points above dense's",
            0.0,
            100 * curve.best_test - dense,
            "",
            100 * curve.best_test >= dense - 0.5,
            f"{100 * curve.best_test:.2f} % against {dense:.2f} %, {100 * curve.density:.2g} % sent; holds within 0.5",
        )
        for name, curve in curves.items()
        if name != "dense"
    ]


def _choosing_claims(choosing: dict[str, float]) -> list[Claim]:
    return [
        Claim(f"{name}: times faster to choose than a sort", 1.0, gain, "x", gain > 1.0)
        for name in ("static 1 %", "2 sigma", "dynamic")
        if choosing and (gain := choosing["sort"] / choosing[name])
    ]


def _verdict(curves: dict[str, Curve], choosing: dict[str, float], target: float) -> str:
    compared = {name: curve for name, curve in curves.items() if name != "dense" and "dense" in curves}
    met = [name for name, curve in compared.items() if curve.first_at(target)]
    parts = []
    if compared:
        parts.append(f"{len(met)} of {len(compared)} thresholds come within half a point of dense in the same steps")
    if choosing:
        parts.append(f"the dynamic rule chooses {choosing['sort'] / choosing['dynamic']:,.0f}x faster than a sort")
    if not parts:
        return "Nothing is judged: no threshold was run next to dense."
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}."


def _table(curves: dict[str, Curve], seconds: dict[str, float], target: float) -> Table:
    rows = []
    for name, curve in curves.items():
        steps, each = curve.first_at(target), seconds.get(name)
        rows.append(
            {
                "Threshold": name,
                "Sent": f"{100 * curve.density:.3g} %",
                "Best accuracy": f"{100 * curve.best_test:.2f} %",
                "Steps to target": number(steps),
                "Step in the lab": number(1e3 * each if each else None, "ms"),
                "Time to target": number(steps * each if steps and each else None, "s"),
                "MB sent": number(curve.megabytes[-1]),
            }
        )
    note = f"Target: {100 * target:.2f} % test accuracy. The lab has 4 hosts at 100 Mbit/s."
    return Table("Accuracy per iteration and per second", rows, note)


def _choosing_table(choosing: dict[str, float]) -> Table:
    rows = [
        {"Way": name, "Time": number(ms, "ms"), "A sort takes": number(choosing["sort"] / ms, "x")}
        for name, ms in choosing.items()
    ]
    return Table("Time to choose a threshold among 1.76 million entries", rows, "One thread, median of nine.")


def _figures(curves: dict[str, Curve], seconds: dict[str, float], choosing: dict[str, float]) -> list[Figure]:
    values = {name: [100 * v for v in curve.test] for name, curve in curves.items()}
    axis = "test accuracy (%)"
    per_step = [Series(name, curve.step, list(values[name])) for name, curve in curves.items()]
    figures = [Figure("Accuracy per iteration", "step", axis, per_step)]
    timed = [
        Series(name, [step * seconds[name] for step in curve.step], list(values[name]))
        for name, curve in curves.items()
        if name in seconds
    ]
    figures += [Figure("Accuracy per second", "seconds, 4 hosts at 100 Mbit/s", axis, timed)] if timed else []
    sent = [Series(name, curve.megabytes, list(values[name])) for name, curve in curves.items()]
    figures.append(Figure("Accuracy over what a worker sent", "MB", axis, sent, log="x"))
    bars = [Series("time", list(choosing), list(choosing.values()))]
    return [*figures, *([Figure("Time to choose", "", "ms", bars, "bars", "y")] if choosing else [])]
