"""Alistarh et al. 2018: sparsified methods with error feedback converge, on convex and non-convex problems.

Every worker sends the K largest entries of gradient + memory; theory needs that these are nearly the largest of the
mean (xi), that a step carries its share of the norm (delta), and bounds what the memories hold.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from papers.cluster import Cluster, Gradients, Probe, Setting
from papers.labs import Bed, Trial, confirm
from papers.problems import logistic, optimum
from papers.runs import Curve, Goal, Probing
from papers.study import Claim, Figure, Series, Study, Table, number
from papers.workshop import Workshop
from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits, Float32
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Recipe, Splits


def note(curve: Curve, cluster: Cluster, density: float) -> Probe:
    """Note xi, delta and the largest memory, over the whole gradient as one vector."""

    def look(gradients: list[Gradients], codecs: list[Codec]) -> None:
        fresh = [torch.cat([g.flatten() for g in own.values()]) for own in gradients]
        summed = [g + _held(codec, cluster.names, g) for g, codec in zip(fresh, codecs, strict=True)]
        k = max(1, round(density * summed[0].numel()))
        tops = [_top(vector, k) for vector in summed]
        mean = torch.stack(summed).mean(0)
        gap = float((_top(mean, k) - torch.stack(tops).mean(0)).norm())
        norm = float(torch.stack(fresh).mean(0).norm())
        shares = [float(t.square().sum() / v.square().sum()) for t, v in zip(tops, summed, strict=True)]
        notes = curve.notes
        for key, value in (
            ("step", cluster.done),
            ("xi", gap / norm),
            ("delta", sum(shares) / len(shares)),
            ("held", max(float((v - t).norm()) for v, t in zip(summed, tops, strict=True))),
            ("gradient", max(float(g.norm()) for g in fresh)),
        ):
            notes.setdefault(key, []).append(value)

    return look


def _held(codec: Codec, names: list[str], like: Tensor) -> Tensor:
    parts = [codec.residuals(name).get("residual") for name in names]
    return torch.cat([p for p in parts if p is not None]) if all(p is not None for p in parts) else like * 0.0


def _top(vector: Tensor, k: int) -> Tensor:
    out = torch.zeros_like(vector)
    places = vector.abs().topk(k).indices
    out[places] = vector[places]
    return out


DENSITIES = (0.1, 0.01, 0.001, 0.0001)
RUNS = len(DENSITIES) + 2  # dense, and one in 8 bits
CLAIMED = 1000.0  # times less communication
XI = 10.0  # that is taken for a small constant


def study(workshop: Workshop) -> Study:
    """Both problems at every K, the theory's quantities on the way, and what equal accuracy costs."""
    convex = Problem(workshop, logistic(), workers=8, batch=16, lr=0.02, epochs=6.0 if workshop.full else 1.5)
    network = get_recipe("mnist-conv")
    other = Problem(workshop, network, workers=4, batch=16, lr=0.05, epochs=5.0 if workshop.full else 0.5)
    best = workshop.part(
        "optimum",
        lambda: _optimum(convex.recipe, convex.splits),
        setup=f"{convex.recipe.name} samples=10000",
        data=convex.splits,
        needed=True,
    )
    assert best is not None  # the figures are drawn above it
    curves = {"logistic": convex.run(), "network": other.run()}
    bed = Bed("mnist-conv", workshop.data, hosts=4, rate="100mbit", batch=16, lr=0.05)
    confirmed, proof = confirm(workshop, Trial(bed, "0.001", Codec(TopK(0.001)), 0.9, 600, 25))
    saved = {name: _savings(found) for name, found in curves.items()}
    claims = [_claim(name, saved[name]) for name in curves]
    claims += [_xi_claim(name, found) for name, found in curves.items()]
    claims += [_bound_claim(name, found) for name, found in curves.items()]
    return Study(
        "topk-convergence",
        workshop.scale,
        "Convergence of sparsified gradient methods",
        "Alistarh et al., 2018",
        _verdict(saved),
        [*claims, *confirmed],
        [_table(name, found, saved[name]) for name, found in curves.items()] + proof,
        _figures(curves, best["value"]),
        [
            "The data is MNIST for both problems; the paper used other sets and networks on GPUs.",
            "The rate is constant, so it makes no difference whether it is folded in before or after accumulation.",
            "One threshold serves the whole gradient (the paper's K of n), chosen by thinwire's codec; values are 32 "
            "bits wide except in the runs marked 8 bit; bytes are those of thinwire's frames, one worker's messages.",
            "xi and delta are taken every so many steps from exact top-K of all workers' gradients + memories.",
        ],
        facts={"workers": "8 (logistic), 4 (network)", "data": "MNIST"},
    )


def _optimum(recipe: Recipe, splits: Splits) -> dict[str, float]:
    found = optimum(recipe, splits.train, 10_000)
    return {"value": found.value, "smoothness": found.smoothness}


class Problem:
    """A recipe that is trained dense and at every density."""

    def __init__(
        self, workshop: Workshop, recipe: Recipe, *, workers: int, batch: int, lr: float, epochs: float
    ) -> None:
        self.workshop, self.recipe, self.splits = workshop, recipe, workshop.load(recipe)
        self.workers, self.batch, self.lr = workers, batch, lr
        self.steps = max(1, int(epochs * len(self.splits.train) / (workers * batch)))

    def run(self) -> dict[str, Curve]:
        """The curves by name: dense, every density with 32-bit values, and the thinnest also in 8 bits."""
        codecs: dict[str, Codec | None] = {"dense": None}
        for density in DENSITIES:
            codecs[f"{100 * density:g} %"] = _codec(density, 32)
        codecs["0.1 %, 8 bit"] = _codec(0.001, 8)
        assert len(codecs) == RUNS
        # Evaluating the network takes as long as training it on a third of as many samples.
        looks, test, samples = (40, 4000, 10_000) if self.recipe.name == "logistic" else (25, 2000, 1000)
        every = max(1, self.steps // looks)
        goal = Goal(self.steps, every, train_samples=0, test_samples=test, objective_samples=samples)
        found = {}
        for name, codec in codecs.items():
            setting = Setting(self.workers, self.batch, self.lr, 0.0, codec)
            density = next((d for d in DENSITIES if name.startswith(f"{100 * d:g} %")), 1.0)
            probe = Probing(every, partial(note, density=density)) if codec else None
            file = f"{self.recipe.name}-{name.replace(' %', '').replace(', ', '-').replace(' ', '')}"
            curve = self.workshop.train(file, self.recipe, self.splits, setting, goal, probe=probe)
            if curve is not None:
                found[name] = curve
        return found


def _codec(density: float, bits: int) -> Codec:
    return Codec(TopK(density, exact=True), Float32() if bits == 32 else Bits(8), scope="global", min_numel=0)


def _savings(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """Bytes until the accuracy that dense ends with, less 0.2 points: dense's over each one's."""
    dense = curves.get("dense")
    if dense is None:
        return []
    goal = max(dense.test) - 0.002
    needed = {name: _first(curve, goal) for name, curve in curves.items()}
    base = needed["dense"]
    return [
        {
            "name": name,
            "goal": goal,
            "place": place,
            "times": dense.megabytes[base] / curves[name].megabytes[place]
            if place is not None and base is not None
            else 0.0,
        }
        for name, place in needed.items()
    ]


def _first(curve: Curve, goal: float) -> int | None:
    return next((i for i, value in enumerate(curve.test) if value >= goal), None)


def _claim(name: str, rows: list[dict[str, Any]]) -> Claim:
    """The best of all runs: a run that was left out could still make it hold."""
    what = f"{name}: communication saved at equal accuracy"
    if all(row["name"] == "dense" for row in rows):
        return Claim(what, CLAIMED, None, "x")
    best = max(rows, key=lambda row: row["times"])
    times = best["times"]
    note = f"at {best['name']}, to {100 * best['goal']:.2f} % test accuracy"
    held = True if times >= CLAIMED else False if len(rows) == RUNS else None
    return Claim(what, CLAIMED, times, "x", held, note)


def _below(value: float | None, bar: float, curves: dict[str, Curve]) -> bool | None:
    """Whether the largest of all runs stays below a bar: a run that was left out could still break it."""
    if value is None or (value <= bar and len(curves) < RUNS):
        return None
    return value <= bar


def _xi_claim(name: str, curves: dict[str, Curve]) -> Claim:
    sparse = {n: c for n, c in curves.items() if c.notes}
    largest = max((max(c.notes["xi"]) for c in sparse.values()), default=None)
    means = ", ".join(f"{n}: {sum(c.notes['xi']) / len(c.notes['xi']):.2f}" for n, c in sparse.items())
    return Claim(
        f"{name}: xi stays a small constant (largest seen)",
        None,
        largest,
        "",
        _below(largest, XI, curves),
        f"taken to hold below {XI:g}; means {means}",
    )


def _bound_claim(name: str, curves: dict[str, Curve]) -> Claim:
    """The largest memory over the bound sqrt(4 (1 - d)) / d x the largest gradient, with the theory's d = k/n."""
    shares = {}
    for label, curve in curves.items():
        if curve.notes:
            k = float(label.split(" ")[0]) / 100
            bound = math.sqrt(4 * (1 - k)) / k * max(curve.notes["gradient"])
            shares[label] = max(curve.notes["held"]) / bound
    what = f"{name}: what a memory holds, over its bound"
    if not shares:
        return Claim(what, 1.0, None, "x")
    where = max(shares, key=lambda label: shares[label])
    worst = shares[where]
    return Claim(what, 1.0, worst, "x", _below(worst, 1.0, curves), f"closest to it at {where}")


def _verdict(saved: dict[str, list[dict[str, Any]]]) -> str:
    best = {name: max(row["times"] for row in rows) for name, rows in saved.items() if len(rows) > 1}
    if not best:
        return "Nothing is judged: no sparse run was made next to dense."
    parts = [f"{times:,.0f} times less on the {name} problem" for name, times in best.items()]
    if len(best) < len(saved) or any(len(rows) < RUNS for rows in saved.values()):
        return f"Communication at equal accuracy, in the runs that were made: {', '.join(parts)}."
    if all(times >= CLAIMED for times in best.values()):
        return f"Three orders of magnitude less communication at equal accuracy hold: {', '.join(parts)}."
    return f"Communication at equal accuracy: {', '.join(parts)}; three orders of magnitude do not hold everywhere."


def _table(name: str, curves: dict[str, Curve], saved: list[dict[str, Any]]) -> Table:
    by_name = {row["name"]: row for row in saved}
    rows = []
    for label, curve in curves.items():
        place = by_name[label]["place"] if label in by_name else None
        notes = curve.notes
        rows.append(
            {
                "K of n": label,
                "Final objective": number(curve.objective[-1]),
                "Best test accuracy": f"{100 * curve.best_test:.2f} %",
                "Steps to dense's accuracy": number(curve.step[place] if place is not None else None),
                "MB sent until then": number(curve.megabytes[place] if place is not None else None),
                "Less than dense": number(by_name[label]["times"] or None, "x") if label in by_name else "–",
                "Mean xi": number(sum(notes["xi"]) / len(notes["xi"])) if notes else "–",
                "Mean delta": number(sum(notes["delta"]) / len(notes["delta"])) if notes else "–",
            }
        )
    return Table(f"{name}: at every K", rows, "Dense's accuracy: its best on the test split, less 0.2 points.")


def _figures(curves: dict[str, dict[str, Curve]], best: float) -> list[Figure]:
    figures = []
    for name, found in curves.items():
        base = best if name == "logistic" else 0.0
        gap = "objective above the least" if name == "logistic" else "training loss"
        loss = {label: [max(v - base, 1e-5) for v in c.objective] for label, c in found.items()}
        figures += [
            Figure(
                f"{name}: over steps",
                "step",
                gap,
                [Series(label, c.step, list(loss[label])) for label, c in found.items()],
                log="y",
            ),
            Figure(
                f"{name}: over what a worker sent",
                "MB",
                gap,
                [Series(label, c.megabytes, list(loss[label])) for label, c in found.items()],
                log="xy",
            ),
        ]
        sparse = {label: c for label, c in found.items() if c.notes}
        for key, title in (("xi", "xi: top-K of the mean against the mean of top-Ks"), ("delta", "delta")):
            series = [Series(label, c.notes["step"], c.notes[key]) for label, c in sparse.items()]
            figures.append(Figure(f"{name}: {title}", "step", key, series, log="y"))
    return figures
