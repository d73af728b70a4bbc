"""Khirirat et al. 2020 (CAT): send as many entries as buy the most descent for their cost.

Objective against communication for fixed densities and for the rule, under three costs, with entries as they are, as
signs, and chosen at random; on logistic regression by full gradients, as the theory has it, and on a small network.
"""

from dataclasses import dataclass, replace
from typing import Any

from papers.cluster import Setting
from papers.labs import Bed, Trial, confirm
from papers.problems import logistic, optimum
from papers.runs import Curve, Goal
from papers.study import Claim, Figure, Series, Study, Table, number
from papers.workshop import Workshop
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import ErrorFeedback, Feedback, NoFeedback
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits, Float32, Sign, Values
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Recipe, Splits
from thinwire.tune.adaptive import Adaptive, Rule
from thinwire.tune.cost import Affine, Cost, Packets, Payload

WORKERS = 4
FIXED = (0.001, 0.01, 0.1)
# A step's other cost is that of so many bytes, in the affine and the packet model: about 5 ms at 10 Mbit/s.
OTHER_BYTES = 6000.0
COSTS: dict[str, Cost] = {
    "payload": Payload(),
    "affine": Affine(latency=8 * OTHER_BYTES, bandwidth=1.0),
    "packets": Packets(fixed=OTHER_BYTES),
}
RULES: dict[Rule, tuple[Values, str]] = {"plain": (Float32(), "as they are"), "sign": (Sign(), "signs")}


def spent(cost: str, curve: Curve, place: int) -> float:
    """Megabytes' worth that a worker had spent at an evaluation, by a cost model."""
    steps = curve.step[place]
    if cost == "payload":
        return curve.megabytes[place]
    if cost == "affine":
        return curve.megabytes[place] + steps * OTHER_BYTES / 1e6
    return (curve.packets[place] * (1448 + 66) + steps * OTHER_BYTES) / 1e6


@dataclass(frozen=True)
class Problem:
    """A recipe with its data and how it is trained; the goal is a value of the objective."""

    name: str
    recipe: Recipe
    splits: Splits
    batch: int
    lr: float
    goal: Goal
    feedback: Feedback

    def codecs(self) -> dict[str, Codec | None]:
        """Every method by name."""
        elements = self.recipe.parameter_count()
        found: dict[str, Codec | None] = {"dense": None}
        for density in FIXED:
            found[f"{100 * density:g} %"] = self._codec(TopK(density), Float32())
        for rule, (values, words) in RULES.items():
            for cost, model in COSTS.items():
                name = f"CAT {cost}" if rule == "plain" else f"CAT {cost}, {words}"
                found[name] = self._codec(_adaptive(model, rule, values, elements), values)
        chance = _adaptive(COSTS["affine"], "stochastic", Float32(), elements)
        found["CAT affine, stochastic"] = Codec(chance, Float32(), NoFeedback(), scope="global", min_numel=0)
        found["CAT affine, 8 bit"] = self._codec(_adaptive(COSTS["affine"], "plain", Bits(8), elements), Bits(8))
        return found

    def _codec(self, selection: Any, values: Values) -> Codec:
        return Codec(selection, values, self.feedback, scope="global", min_numel=0)

    def run(self, workshop: Workshop) -> dict[str, Curve]:
        """The curves by name. A random choice is right on average only, and takes a smaller rate to be stable."""
        curves = {}
        for name, codec in self.codecs().items():
            rate = self.lr * (0.2 if "stochastic" in name else 1.0)
            setting = Setting(WORKERS, self.batch, rate, 0.0, codec)
            # Where only bits cost, a step sends one entry, and needs many.
            patient = 4 if "payload" in name and self.name == "logistic" else 1
            goal = replace(self.goal, max_steps=patient * self.goal.max_steps)
            file = f"{self.name}-{name.replace(' %', '').replace(', ', '-').replace(' ', '-')}".lower()
            curve = workshop.train(file, self.recipe, self.splits, setting, goal)
            if curve is not None:
                curves[name] = curve
        return curves


def _adaptive(cost: Cost, rule: Rule, values: Values, elements: int) -> Adaptive:
    """CAT's own rule: any number of entries, chosen anew at each step by each worker."""
    least = 1.0 / elements
    selection = Adaptive(cost, rule=rule, floor=least, ceiling=1.0, start=0.01, smooth=1.0, agree=None)
    return selection.within(bits=float(values.bits), elements=elements, seed=0)


def study(workshop: Workshop) -> Study:
    """Both problems with every method; the rule must cost less than the best fixed density under its own cost."""
    convex, best = _convex(workshop)
    network = get_recipe("mnist-conv")
    steps = 2500 if workshop.full else 300
    goal = Goal(steps, steps // 30, train_samples=0, test_samples=0, objective_samples=1000)
    other = Problem("network", network, workshop.load(network), 16, 0.05, goal, ErrorFeedback())
    curves = {"logistic": convex.run(workshop), "network": other.run(workshop)}
    goals = {name: _goal(found) for name, found in curves.items()}
    bed = Bed("mnist-conv", workshop.data, hosts=4, rate="100mbit", batch=16, lr=0.05)
    confirmed, proof = confirm(workshop, Trial(bed, "topk1", Codec(TopK(0.01), Bits(8)), 0.9, 600, 25))
    rows = {name: _costs(found, goals[name]) for name, found in curves.items()}
    claims = [claim for name in curves for claim in _claims(name, rows[name])]
    return Study(
        "cat",
        workshop.scale,
        "CAT: communication-aware sparsification",
        "Khirirat et al., 2020",
        _verdict(claims),
        [*claims, *confirmed],
        [_table(name, found, rows[name], goals[name]) for name, found in curves.items()] + proof,
        _figures(curves, best["value"]),
        [
            "The data is MNIST. The paper's theory is of gradient descent at one node: logistic regression runs by "
            "full gradients and without a memory here, on 4 workers; the network by batches and with a memory.",
            f"In the affine and the packet model a step's other cost is that of {OTHER_BYTES:,.0f} bytes.",
            "Bits are those of thinwire's frames, whose positions take about their entropy instead of log2(n) bits.",
            "Signs travel with two means a block of 512 values instead of one scale in all.",
            "What the rule's density costs is weighed by each worker for itself.",
            "The goal is the objective that dense has after a third of its steps.",
        ],
        facts={"workers": f"{WORKERS}", "data": "MNIST"},
    )


def _convex(workshop: Workshop) -> tuple[Problem, dict[str, float]]:
    recipe = logistic()
    splits = workshop.load(recipe, first=20_000 if workshop.full else 2000)
    samples = len(splits.train)

    def find() -> dict[str, float]:
        found = optimum(recipe, splits.train, samples)
        return {"value": found.value, "smoothness": found.smoothness}

    best = workshop.part("optimum", find, setup=f"{recipe.name} samples={samples}", data=splits, needed=True)
    assert best is not None  # the rate is made of it
    steps = 1500 if workshop.full else 400
    goal = Goal(steps, 10, train_samples=0, test_samples=0, objective_samples=samples)
    rate = 1.0 / best["smoothness"]
    return Problem("logistic", recipe, splits, samples // WORKERS, rate, goal, NoFeedback()), best


def _goal(curves: dict[str, Curve]) -> float:
    """The objective that dense has after a third of its steps: the others have time to meet it."""
    dense = curves.get("dense")
    return dense.objective[len(dense.objective) // 3] if dense is not None else 0.0


def _costs(curves: dict[str, Curve], goal: float) -> dict[str, dict[str, float | None]]:
    """What each method had spent, by each cost model, when the objective met the goal; None if it never did."""
    found: dict[str, dict[str, float | None]] = {}
    for name, curve in curves.items():
        place = next((i for i, value in enumerate(curve.objective) if value <= goal), None)
        found[name] = {cost: spent(cost, curve, place) if place is not None else None for cost in COSTS}
        found[name]["steps"] = curve.step[place] if place is not None else None
    return found


def _claims(name: str, rows: dict[str, dict[str, float | None]]) -> list[Claim]:
    """Under each cost: the rule's over the best fixed density's, dense among them."""
    claims = []
    for cost in COSTS:
        fixed = {n: found for n, row in rows.items() if not n.startswith("CAT") and (found := row[cost]) is not None}
        rule = f"CAT {cost}"
        ours = rows.get(rule, {}).get(cost)
        all_ran = {rule, "dense", *(f"{100 * density:g} %" for density in FIXED)} <= set(rows)
        if not fixed:
            continue
        best = min(fixed, key=lambda n: fixed[n])
        share = ours / fixed[best] if ours is not None else None
        dense = rows.get("dense", {}).get(cost)
        note = f"best fixed: {best}" + (f"; {dense / ours:.3g}x less than dense" if dense and ours else "")
        claims.append(
            Claim(
                f"{name}, {cost}: the rule's cost over the best fixed density's",
                1.0,
                share,
                "x",
                (share is not None and share <= 1.0) if all_ran else None,
                note,
            )
        )
    return claims


def _verdict(claims: list[Claim]) -> str:
    judged = [claim for claim in claims if claim.holds is not None]
    kept = sum(1 for claim in judged if claim.holds)
    if not judged:
        return "Nothing is judged: not all runs of any comparison were made."
    return f"The rule costs no more than the best fixed density in {kept} of {len(judged)} comparisons."


def _table(name: str, curves: dict[str, Curve], rows: dict[str, dict[str, float | None]], goal: float) -> Table:
    table = [
        {
            "Method": method,
            "Mean density": f"{100 * curves[method].density:.3g} %",
            "Steps": number(row["steps"]),
            **{f"MB, {cost}": number(row[cost]) for cost in COSTS},
            "Final objective": number(curves[method].objective[-1]),
        }
        for method, row in rows.items()
    ]
    return Table(f"{name}: what an objective of {goal:.4g} costs a worker", table, "In megabytes' worth by each model.")


def _figures(curves: dict[str, dict[str, Curve]], best: float) -> list[Figure]:
    figures = []
    for name, found in curves.items():
        base, words = (best, "objective above the least") if name == "logistic" else (0.0, "training loss")
        for cost in COSTS:
            shown = {n: c for n, c in found.items() if not n.startswith("CAT") or cost in n}
            series = [
                Series(n, [spent(cost, c, i) for i in range(len(c.step))], [max(v - base, 1e-5) for v in c.objective])
                for n, c in shown.items()
            ]
            figures.append(Figure(f"{name}: {cost}", "MB's worth, a worker", words, series, log="xy"))
    return figures
