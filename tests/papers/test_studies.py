"""Parts of the studies: predicted times, costs and the theory's quantities, on inputs with known answers."""

import pytest
import torch
from papers.cat import study as cat
from papers.gradient_dropping import study as gradient_dropping
from papers.labs import LabTestbed
from papers.problems import logistic, optimum
from papers.simulation import Cluster, Curve, TrainingSetting, objective
from papers.sparsify_gradients import process as paper_process
from papers.sparsify_gradients.study import broadcast_phases, served_phases
from papers.topk_convergence import study as topk_convergence
from papers.tsai_thesis import request_scheduling

from thinwire.codec.frame import FrameReader
from thinwire.codec.values import Float32
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tools.recipes.recipe import TensorSplit
from thinwire.tune.presets import resolve_codec


def curve(name: str, reached: int | None, test: list[float]) -> Curve:
    steps = [10 * (i + 1) for i in range(len(test))]
    megabytes = [float(step) for step in steps]
    return Curve(name, 10, steps, test, test, [1.0 - v for v in test], test, megabytes, megabytes, reached=reached)


def test_lab_times_are_given_only_for_codecs_that_the_lab_ran() -> None:
    lab = {method: {"ms": 10.0 * (i + 1), "bytes": 1e6} for i, method in enumerate(gradient_dropping.LAB.values())}
    times = {name: gradient_dropping.lab_ms(lab, name, codec) for name, codec in gradient_dropping.MNIST.items()}
    # The lab's values are 8 bits wide, those of "90 %" and "99.9 %" 32.
    assert {name: ms for name, ms in times.items() if ms is not None} == {"dense": 10.0, "99 %, 8 bit": 40.0}
    assert gradient_dropping.lab_ms(lab, "90 %", resolve_codec("percentile90-residual")) == 20.0
    assert len(gradient_dropping.lab_tables(lab)[0].rows) == 4
    found = {"dense": curve("dense", None, [0.5, 0.9]), "99 %": curve("99 %", None, [0.9, 0.9])}
    claims = {c.what: c for c in gradient_dropping.digit_claims(found, lab)}
    timed = claims["MNIST, 99 % dropped: time to dense's accuracy"]
    assert timed.ours == pytest.approx(20 * 10.0 / (10 * 40.0)) and "32-bit" in timed.note
    found["99 %, 8 bit"] = curve("99 %, 8 bit", None, [0.5, 0.9])
    claims = {c.what: c for c in gradient_dropping.digit_claims(found, lab)}
    timed = claims["MNIST, 99 % dropped: time to dense's accuracy"]
    assert timed.ours == pytest.approx(20 * 10.0 / (20 * 40.0)) and "8-bit" in timed.note
    table = gradient_dropping.translation_tables(
        {"translate": {"99 %": found["99 %"], "99 %, global": found["99 %"]}}, {"translate": lab}
    )
    assert [row["Step in the lab"] for row in table[0].rows] == ["40 ms", "–"]


def test_costs_of_cat() -> None:
    run = curve("CAT affine", None, [0.2, 0.6, 0.9])
    assert cat.spent("payload", run, 1) == 20.0
    assert cat.spent("affine", run, 1) == pytest.approx(20.0 + 20 * cat.FIXED_BYTES / 1e6)
    costs = cat._costs({"dense": run, "CAT payload": run}, goal=0.45)
    assert costs["dense"]["steps"] == 20
    assert cat._costs({"dense": run}, goal=0.01)["dense"]["payload"] is None


def test_xi_of_a_single_worker_is_zero() -> None:
    recipe = get_recipe("digits")
    codec = topk_convergence.topk_codec(0.01, Float32())
    cluster = Cluster(recipe, recipe.load(None).train, TrainingSetting(1, 8, 0.05, 0.0, codec))
    found = Curve("one", 1)
    for _ in range(2):
        cluster.step(topk_convergence.theory_probe(found, cluster, 0.01))
    cluster.close()
    assert found.notes["xi"] == [0.0, 0.0]
    assert all(0.0 < share < 1.0 for share in found.notes["delta"]) and found.notes["residual"][1] > 0.0


def test_savings_are_compared_at_equal_accuracy() -> None:
    dense, thin = curve("dense", None, [0.5, 0.9]), curve("1 %", None, [0.2, 0.5, 0.9])
    thin.megabytes = [0.1, 0.2, 0.3]
    rows = {row["name"]: row for row in topk_convergence.savings({"dense": dense, "1 %": thin})}
    assert rows["1 %"]["times"] == pytest.approx(20.0 / 0.3)


def test_the_optimum_is_below_the_initial_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(60, 1, 28, 28, generator=generator)
    split = TensorSplit(inputs, torch.randint(10, (60,), generator=generator))
    recipe = logistic()
    best = optimum(recipe, split, 10_000)  # more samples than there are means all
    with torch.no_grad():
        begun = float(recipe.loss(recipe.build(0), split.batch(range(60))))
    assert best["value"] < begun == pytest.approx(objective(recipe, recipe.build(0), split, 10_000))
    assert best["smoothness"] > 0.0


def test_the_model_of_scheduling() -> None:
    setup = request_scheduling.SchedulingSetup(2, 3, (0.02, 0.01), slowness=(2.0, 1.0))
    rows = request_scheduling.predict(setup)
    assert len(rows) == 24 and all(row["seconds"] > 0 for row in rows)
    assert all(row["most"] <= row["bound"] for row in rows)
    claims = request_scheduling.claims({"lab": rows, "model": rows})
    assert len(claims) == 11 and claims[-1].ours == pytest.approx(1.0) and claims[-1].holds
    assert request_scheduling.verdict({"lab": rows, "model": rows}).startswith("In the lab, ")


def test_noise_does_not_make_a_claim_of_scheduling_hold() -> None:
    """One fast bound of six is not enough, nor is a difference within the margin."""

    def rows(**seconds: list[float]) -> list[dict[str, object]]:
        return [
            {"policy": policy, "bound": bound, "seconds": value, "staleness": 0.99 if policy == "stalest" else 1.0}
            for policy, values in seconds.items()
            for bound, value in enumerate(values)
        ]

    same = [10.0] * 6
    lucky = [10.0, 10.0, 8.0, 10.0, 10.0, 10.0]
    noisy = rows(fifo=lucky, filo=[12.0, *same[1:]], stalest=lucky, forward=[9.8] * 6)
    assert [claim.holds for claim in request_scheduling.expectations("lab", noisy)] == [False] * 5
    assert not any("starves" in claim.note for claim in request_scheduling.expectations("lab", noisy))
    clear = rows(fifo=[12.0, *same[1:]], filo=[14.0] * 6, stalest=[9.0] * 6, forward=[9.0] * 6)
    judged = request_scheduling.expectations("lab", clear)
    assert [claim.holds for claim in judged] == [True, True, True, True, False]
    assert "starves" in judged[2].note and "starves" not in judged[0].note


@pytest.mark.parametrize("method", ["dense", "percentile90"])
def test_a_step_as_in_the_paper_is_gradient_descent(method: str) -> None:
    """All phases are measured, and the master's model equals that of one process that applies the summed gradients."""
    testbed = LabTestbed("cifar10", None, hosts=3, rate=None, batch=2, lr=0.1)
    found = broadcast_phases(testbed, [method], steps=4)[method]
    assert found["ms"] > 0 and all(found[name] > 0 for name in ("synchronise", "compute", "alone", "aggregate"))
    torch.manual_seed(0)
    model = cuda_convnet()
    parameters = dict(model.named_parameters())
    begun = torch.nn.utils.parameters_to_vector(parameters.values()).detach().clone()
    codecs = {rank: paper_process.PAPER["percentile90"].copy() for rank in (1, 2)}
    generators = {rank: torch.Generator().manual_seed(rank) for rank in (1, 2)}
    for _ in range(4):
        total = [torch.zeros_like(p) for p in parameters.values()]
        for rank in (1, 2):
            images = torch.randn(2, 3, 32, 32, generator=generators[rank])
            labels = torch.randint(0, 10, (2,), generator=generators[rank])
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            if method == "dense":
                for out, gradient in zip(total, grads.values(), strict=True):
                    out += gradient
            else:
                frame = codecs[rank].encode(grads)
                FrameReader(frame, [p.numel() for p in parameters.values()]).add_to(total)
        with torch.no_grad():
            for p, out in zip(parameters.values(), total, strict=True):
                p.sub_(out, alpha=paper_process.RATE)
    moved = torch.nn.utils.parameters_to_vector(parameters.values()).detach() - begun
    assert found["moved"] == pytest.approx(float(moved.norm()), rel=1e-3)
    share = found["sent"] / begun.numel()
    assert share == 4 if method == "dense" else 0.4 < share < 0.82  # at most a tenth, in 8 bytes each


def test_phases_of_a_served_step() -> None:
    testbed = LabTestbed("digits", None, hosts=3, rate=None, batch=8, lr=0.05)
    found = served_phases(testbed, "dense", "dense", steps=6)
    assert set(found) == {"compute", "aggregate", "synchronise", "ms"} and all(v >= 0 for v in found.values())
    assert found["ms"] > 0
