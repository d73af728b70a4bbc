"""Khirirat et al. 2020 (CAT): each step sends the number of entries with the largest descent per communication cost.

The objective against communication for fixed densities and for CAT's rule, with three cost models; entries are sent as
they are, as signs, or chosen at random. The problems are logistic regression with full gradients, as in the theory, and
a small network.
"""

from dataclasses import dataclass, replace
from typing import Any

from papers.labs import ConfirmationRun, LabTestbed, confirm
from papers.problems import logistic, optimum_part
from papers.simulation import PACKET_BYTES, Curve, Goal, TrainingSetting
from papers.study import Claim, Figure, Series, Study, Table, number
from papers.workspace import Workspace, run_name, without_skipped
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
# The fixed cost of a step in the affine and the packet model, in bytes: about 5 ms at 10 Mbit/s.
FIXED_BYTES = 6000.0
HEADER_BYTES = 66  # of a packet
COSTS: dict[str, Cost] = {
    "payload": Payload(),
    "affine": Affine(latency=8 * FIXED_BYTES, bandwidth=1.0),
    "packets": Packets(fixed=FIXED_BYTES),
}
RULES: dict[Rule, tuple[Values, str]] = {"plain": (Float32(), "as they are"), "sign": (Sign(), "signs")}


def spent(cost: str, curve: Curve, place: int) -> float:
    """Return what a worker had spent at an evaluation by a cost model, expressed in megabytes."""
    if cost == "payload":
        return curve.megabytes[place]
    packets = curve.packets[place] * (PACKET_BYTES + HEADER_BYTES) / 1e6
    return (curve.megabytes[place] if cost == "affine" else packets) + curve.step[place] * FIXED_BYTES / 1e6


@dataclass(frozen=True)
class Problem:
    """A recipe with its data, which is trained with every method."""

    name: str
    recipe: Recipe
    splits: Splits
    batch: int
    lr: float
    goal: Goal
    feedback: Feedback

    def codecs(self) -> dict[str, Codec | None]:
        """Return the codec of every method; dense has none."""
        elements = self.recipe.parameter_count()
        codecs: dict[str, Codec | None] = {"dense": None}
        for density in FIXED:
            codecs[f"{100 * density:g} %"] = self._codec(TopK(density), Float32())
        for rule, (values, words) in RULES.items():
            for cost, model in COSTS.items():
                name = f"CAT {cost}" if rule == "plain" else f"CAT {cost}, {words}"
                codecs[name] = self._codec(_adaptive(model, rule, values, elements), values)
        random = _adaptive(COSTS["affine"], "stochastic", Float32(), elements)
        codecs["CAT affine, stochastic"] = Codec(random, Float32(), NoFeedback(), scope="global", min_numel=0)
        codecs["CAT affine, 8 bit"] = self._codec(_adaptive(COSTS["affine"], "plain", Bits(8), elements), Bits(8))
        return codecs

    def _codec(self, selection: Any, values: Values) -> Codec:
        return Codec(selection, values, self.feedback, scope="global", min_numel=0)

    def run(self, workspace: Workspace) -> dict[str, Curve]:
        """Train with every method and return the curves."""
        return without_skipped({name: self._train(workspace, name, codec) for name, codec in self.codecs().items()})

    def _train(self, workspace: Workspace, name: str, codec: Codec | None) -> Curve | None:
        # A random selection has a larger variance and needs a smaller learning rate to be stable.
        rate = self.lr * (0.2 if "stochastic" in name else 1.0)
        # If only the payload costs, the rule sends one entry per step and needs many steps.
        longer = 4 if "payload" in name and self.name == "logistic" else 1
        goal = replace(self.goal, max_steps=longer * self.goal.max_steps)
        setting = TrainingSetting(WORKERS, self.batch, rate, 0.0, codec)
        return workspace.train(run_name(self.name, name), self.recipe, self.splits, setting, goal)


def _adaptive(cost: Cost, rule: Rule, values: Values, elements: int) -> Adaptive:
    """Return CAT's rule as published: each worker chooses any number of entries at each step."""
    least = 1.0 / elements
    selection = Adaptive(cost, rule=rule, floor=least, ceiling=1.0, start=0.01, smooth=1.0, agree=None)
    return selection.within(bits=float(values.bits), elements=elements, seed=0)


def study(workspace: Workspace) -> Study:
    """Train both problems with every method and compare the rule with the best fixed density under each cost model."""
    convex, network = logistic(), get_recipe("mnist-conv")
    splits = workspace.load(convex, first=20_000 if workspace.full else 2000)
    samples = len(splits.train)
    best = optimum_part(workspace, convex, splits, samples)
    goal = Goal(1500 if workspace.full else 400, 10, train_samples=0, test_samples=0, objective_samples=samples)
    rate = 1.0 / best["smoothness"]
    one = Problem("logistic", convex, splits, samples // WORKERS, rate, goal, NoFeedback())
    steps = 2500 if workspace.full else 300
    goal = Goal(steps, steps // 30, train_samples=0, test_samples=0, objective_samples=1000)
    other = Problem("network", network, workspace.load(network), 16, 0.05, goal, ErrorFeedback())
    curves = {problem.name: problem.run(workspace) for problem in (one, other)}
    goals = {name: _goal(found) for name, found in curves.items()}
    testbed = LabTestbed("mnist-conv", workspace.data, hosts=4, rate="100mbit", batch=16, lr=0.05)
    run = ConfirmationRun(testbed, "8bit", Codec(TopK(0.01), Bits(8)), 0.9, 600, 25)
    confirm_claims, confirm_tables = confirm(workspace, run)
    rows = {name: _costs(found, goals[name]) for name, found in curves.items()}
    claims = [claim for name in curves for claim in _claims(name, rows[name])]
    return Study(
        "cat",
        workspace.scale,
        "CAT: communication-aware sparsification",
        "Khirirat et al., 2020",
        _verdict(claims),
        [*claims, *confirm_claims],
        [_table(name, found, rows[name], goals[name]) for name, found in curves.items()] + confirm_tables,
        _figures(curves, best["value"]),
        [
            "The data is MNIST. The theory is about gradient descent on one node. Here logistic regression uses full "
            "gradients without error feedback on 4 workers, and the network uses batches with error feedback.",
            f"In the affine and the packet model a step has a fixed cost of {FIXED_BYTES:,.0f} bytes.",
            "Bits are those of thinwire's frames, whose indices take about their entropy instead of log2(n) bits each.",
            "Signs are sent with two means per block of 512 values instead of one scale for all.",
            "Each worker chooses its own density.",
            "The goal is the objective that dense reaches after a third of its steps.",
        ],
        facts={"workers": f"{WORKERS}", "data": "MNIST"},
    )


def _goal(curves: dict[str, Curve]) -> float:
    """Return the objective that dense reaches after a third of its steps, so that slower methods can reach it too."""
    dense = curves.get("dense")
    return dense.objective[len(dense.objective) // 3] if dense is not None else 0.0


def _costs(curves: dict[str, Curve], goal: float) -> dict[str, dict[str, float | None]]:
    """Return what each method had spent by each cost model when it reached the goal; None if it did not reach it."""
    found: dict[str, dict[str, float | None]] = {}
    for name, curve in curves.items():
        place = next((i for i, value in enumerate(curve.objective) if value <= goal), None)
        found[name] = {cost: spent(cost, curve, place) if place is not None else None for cost in COSTS}
        found[name]["steps"] = curve.step[place] if place is not None else None
    return found


def _claims(name: str, rows: dict[str, dict[str, float | None]]) -> list[Claim]:
    """Compare the rule's cost with that of the best fixed density, including dense, under each cost model."""
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
        holds = (share is not None and share <= 1.0) if all_ran else None
        what = f"{name}, {cost}: the rule's cost over the best fixed density's"
        claims.append(Claim(what, 1.0, share, "x", holds, note))
    return claims


def _verdict(claims: list[Claim]) -> str:
    judged = [claim.holds for claim in claims if claim.holds is not None]
    if not judged:
        return "Nothing is judged: not all runs of any comparison were made."
    return f"The rule costs no more than the best fixed density in {sum(judged)} of {len(judged)} comparisons."


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
    title = f"{name}: what an objective of {goal:.4g} costs a worker"
    return Table(title, table, "Cost by each model, expressed in megabytes.")


def _figures(curves: dict[str, dict[str, Curve]], best: float) -> list[Figure]:
    figures = []
    for name, found in curves.items():
        base, words = (best, "objective above the optimum") if name == "logistic" else (0.0, "training loss")
        for cost in COSTS:
            series = [
                Series(n, [spent(cost, c, i) for i in range(len(c.step))], [max(v - base, 1e-5) for v in c.objective])
                for n, c in found.items()
                if not n.startswith("CAT") or cost in n
            ]
            figures.append(Figure(f"{name}: {cost}", "cost of a worker (MB)", words, series, log="xy"))
    return figures
