"""Tsai 2018, first half: how to choose a threshold: a fixed share, standard deviations, or a dynamic threshold.

Accuracy per iteration and per second for each, and the time that choosing takes compared with a sort. The thesis left
open the comparison with 1, 2 and 3 standard deviations and the time of the dynamic threshold.
"""

import itertools
import statistics
import timeit
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from papers.labs import ConfirmationRun, LabTestbed, accuracy_figures, accuracy_row, confirm, step_times_part
from papers.simulation import Cluster, Curve, Goal, TrainingSetting
from papers.study import Claim, Figure, Series, Study, Table, number, percent
from papers.workspace import Workspace, without_skipped
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import Vector
from thinwire.codec.selection import Dynamic, NativeGroup, Selection, StdDev, TopK
from thinwire.codec.values import Bits
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Splits

WORKERS, BATCH, LR = 4, 16, 0.05
RECIPE = "mnist-conv"
ENTRIES = 1_756_426  # of the gradient for which thresholds are timed: the size of SparsifyGradients' network
SELECTIONS: dict[str, Selection] = {
    "static 10 %": TopK(0.1),
    "static 1 %": TopK(0.01),
    "static 0.1 %": TopK(0.001),
    "1 sigma": StdDev(1.0),
    "2 sigma": StdDev(2.0),
    "3 sigma": StdDev(3.0),
    "dynamic": Dynamic(),
}
# The lab's methods by run; the lab has no method for the others.
LAB = {"dense": "dense", "static 10 %": "percentile90-residual", "static 1 %": "8bit", "static 0.1 %": "topk0.1"}
LAB |= {"2 sigma": "stddev2", "dynamic": "dynamic"}


def study(workspace: Workspace) -> Study:
    """Train the same network with every threshold, and time how long choosing takes."""
    splits = workspace.load(get_recipe(RECIPE))
    curves = _train(workspace, splits)
    choosing = workspace.part("choosing", lambda: _time_choosing(splits), setup=f"{SELECTIONS}", data=splits) or {}
    testbed = LabTestbed(RECIPE, workspace.data, hosts=WORKERS, rate="100mbit", batch=BATCH, lr=LR)
    lab = step_times_part(workspace, "step-times", testbed, list(LAB.values()), 25, splits)
    run = ConfirmationRun(testbed, "dynamic", Codec(Dynamic(), Bits(8)), 0.9, 600, 25)
    confirm_claims, confirm_tables = confirm(workspace, run, lab)
    ms = {name: lab[method]["ms"] for name, method in LAB.items()} if lab else {}
    target = max(curves["dense"].test) - 0.005 if "dense" in curves else 1.0
    return Study(
        "thresholds",
        workspace.scale,
        "Thresholds: static, deviations, dynamic",
        "Tsai, 2018",
        _verdict(curves, choosing, target),
        [*_accuracy_claims(curves), *_choosing_claims(choosing), *confirm_claims],
        [_table(curves, ms, target), *([_choosing_table(choosing)] if choosing else []), *confirm_tables],
        _figures(curves, ms, choosing),
        [
            "The data is MNIST and the network is a small convolutional one; the thesis states no figures that can be "
            "compared with these, so the claims are its expectations.",
            "Entries that are not sent stay in the residual, and values are sent in 8 bits.",
            "The dynamic threshold as published rises until nothing is sent; thinwire limits the density to 0.1 % to "
            "10 %.",
            "The network is emulated: all hosts share this machine's cores.",
        ],
        facts={"workers": f"{WORKERS}", "batch": f"{BATCH} x {WORKERS}", "data": "MNIST"},
    )


def _train(workspace: Workspace, splits: Splits) -> dict[str, Curve]:
    steps, test = (4000, 4000) if workspace.full else (300, 1000)
    goal = Goal(steps, steps // 20, train_samples=0, test_samples=test)
    codecs = {"dense": None, **{name: Codec(selection, Bits(8)) for name, selection in SELECTIONS.items()}}
    curves = {}
    for name, codec in codecs.items():
        setting = TrainingSetting(WORKERS, BATCH, LR, 0.0, codec)
        file = name.replace(" ", "-").replace("%", "pc")
        curves[name] = workspace.train(file, get_recipe(RECIPE), splits, setting, goal)
    return without_skipped(curves)


def _gradient(splits: Splits) -> Tensor:
    """Return a real gradient, repeated with noise until it has ENTRIES entries."""
    with closing(Cluster(get_recipe(RECIPE), splits.train, TrainingSetting(WORKERS, BATCH, LR))) as cluster:
        for _ in range(10):
            cluster.step()
        flat = torch.cat([g.flatten() for g in cluster.gradients([0])[1].values()])
    generator = torch.Generator().manual_seed(0)
    copies = [flat * (1.0 + 0.1 * torch.randn(flat.shape, generator=generator)) for _ in range(5)]
    return torch.cat(copies)[:ENTRIES].contiguous()


def _time_choosing(splits: Splits) -> dict[str, float]:
    """Return the milliseconds that each way takes to find a threshold in the same gradient, with one thread."""
    gradient = _gradient(splits)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways: dict[str, Callable[[], object]] = {
            "sort": lambda: gradient.abs().sort(),
            "torch.topk, 1 %": lambda: gradient.abs().topk(len(gradient) // 100),
            **{name: _chooser(selection, gradient) for name, selection in SELECTIONS.items()},
        }
        return {name: 1e3 * statistics.median(timeit.repeat(way, number=1, repeat=9)) for name, way in ways.items()}
    finally:
        torch.set_num_threads(threads)


def _chooser(selection: Selection, gradient: Tensor) -> Callable[[], object]:
    state: dict[str, float] = {}
    steps = itertools.count()
    vector = Vector(gradient, None, 1.0, None, None)
    return lambda: selection.select(NativeGroup([vector]), step=next(steps), key=0, state=state)


def _accuracy_claims(curves: dict[str, Curve]) -> list[Claim]:
    if "dense" not in curves:
        return []
    claims, dense = [], 100 * curves["dense"].best_test
    for name, curve in curves.items():
        if name == "dense":
            continue
        ours, sent = 100 * curve.best_test, 100 * curve.density
        note = f"{ours:.2f} % against {dense:.2f} %, {sent:.2g} % sent; holds within 0.5"
        what = f"{name}: best test accuracy, points above dense's"
        claims.append(Claim(what, 0.0, ours - dense, "", ours >= dense - 0.5, note))
    return claims


def _choosing_claims(choosing: dict[str, float]) -> list[Claim]:
    return [
        Claim(f"{name}: times faster to choose than a sort", 1.0, gain, "x", gain > 1.0)
        for name in ("static 1 %", "2 sigma", "dynamic")
        if choosing and (gain := choosing["sort"] / choosing[name])
    ]


def _verdict(curves: dict[str, Curve], choosing: dict[str, float], target: float) -> str:
    compared = {name: curve for name, curve in curves.items() if name != "dense" and "dense" in curves}
    reached = [name for name, curve in compared.items() if curve.first_at(target)]
    parts = []
    if compared:
        ratio = f"{len(reached)} of {len(compared)} thresholds"
        parts.append(f"{ratio} come within half a point of dense in the same steps")
    if choosing:
        parts.append(f"the dynamic rule chooses {choosing['sort'] / choosing['dynamic']:,.0f}x faster than a sort")
    if not parts:
        return "Nothing is judged: no threshold was run in comparison with dense."
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _table(curves: dict[str, Curve], times: dict[str, float], target: float) -> Table:
    rows = [
        {"Threshold": name, "Sent": f"{100 * curve.density:.3g} %", **accuracy_row(curve, target, times.get(name))}
        for name, curve in curves.items()
    ]
    note = f"Target: {percent(target)} test accuracy. The lab has 4 hosts at 100 Mbit/s."
    return Table("Accuracy per iteration and per second", rows, note)


def _choosing_table(choosing: dict[str, float]) -> Table:
    rows = [
        {"Way": name, "Time": number(ms, "ms"), "A sort takes": number(choosing["sort"] / ms, "x")}
        for name, ms in choosing.items()
    ]
    return Table("Time to choose a threshold among 1.76 million entries", rows, "One thread, median of nine.")


def _figures(curves: dict[str, Curve], times: dict[str, float], choosing: dict[str, float]) -> list[Figure]:
    titles = ("Accuracy per iteration", "Accuracy per second", "Accuracy over what a worker sent")
    figures = accuracy_figures(curves, times, titles, "4 hosts at 100 Mbit/s")
    bars = [Series("time", list(choosing), list(choosing.values()))]
    return [*figures, *([Figure("Time to choose", "", "ms", bars, "bars", "y")] if choosing else [])]
