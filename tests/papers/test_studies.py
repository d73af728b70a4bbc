"""Pieces of the studies: products, costs and the theory's quantities, on figures small enough to know the answer."""

import pytest
import torch
from papers.cat import study as cat
from papers.cluster import Cluster, Setting
from papers.gradient_dropping import findings as dropping_showing
from papers.gradient_dropping import study as gradient_dropping
from papers.labs import Bed, broadcast_phases, served_phases
from papers.problems import logistic, optimum
from papers.request_scheduling import findings as scheduling_showing
from papers.request_scheduling import study as request_scheduling
from papers.runs import Curve, objective
from papers.sparsify_gradients import process as paper_process
from papers.topk_convergence import study as theory
from papers.topk_convergence import study as topk_convergence

from thinwire.codec.frame import FrameReader
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tools.recipes.recipe import TensorSplit
from thinwire.tune.presets import resolve_codec


def curve(name: str, reached: int | None, test: list[float]) -> Curve:
    steps = [10 * (i + 1) for i in range(len(test))]
    megabytes = [float(step) for step in steps]
    return Curve(name, 10, steps, test, test, [1.0 - v for v in test], test, megabytes, megabytes, reached=reached)


def test_lab_times_are_only_told_of_what_the_lab_sent() -> None:
    lab = {method: {"ms": 10.0 * (i + 1), "bytes": 1e6} for i, method in enumerate(dropping_showing.LAB.values())}
    times = {name: dropping_showing.lab_ms(lab, name, codec) for name, codec in gradient_dropping.MNIST.items()}
    # The lab's values are 8 bits wide, those of "90 %" and "99.9 %" 32.
    assert {name: ms for name, ms in times.items() if ms is not None} == {"dense": 10.0, "99 %, 8 bit": 40.0}
    assert dropping_showing.lab_ms(lab, "90 %", resolve_codec("percentile90-residual")) == 20.0
    assert len(dropping_showing.lab_table(lab)[0].rows) == 4
    found = {"dense": curve("dense", None, [0.5, 0.9]), "99 %": curve("99 %", None, [0.9, 0.9])}
    claims = {c.what: c for c in dropping_showing.digit_claims(found, lab)}
    timed = claims["MNIST, 99 % dropped: time to dense's accuracy"]
    assert timed.ours == pytest.approx(20 * 10.0 / (10 * 40.0)) and "32-bit" in timed.note
    found["99 %, 8 bit"] = curve("99 %, 8 bit", None, [0.5, 0.9])
    claims = {c.what: c for c in dropping_showing.digit_claims(found, lab)}
    timed = claims["MNIST, 99 % dropped: time to dense's accuracy"]
    assert timed.ours == pytest.approx(20 * 10.0 / (20 * 40.0)) and "8-bit" in timed.note
    table = dropping_showing.translation_tables(
        {"translate": {"99 %": found["99 %"], "99 %, global": found["99 %"]}}, {"translate": lab}
    )
    assert [row["Step in the lab"] for row in table[0].rows] == ["40 ms", "–"]


def test_costs_of_cat() -> None:
    run = curve("CAT affine", None, [0.2, 0.6, 0.9])
    assert cat.spent("payload", run, 1) == 20.0
    assert cat.spent("affine", run, 1) == pytest.approx(20.0 + 20 * cat.OTHER_BYTES / 1e6)
    costs = cat._costs({"dense": run, "CAT payload": run}, goal=0.45)
    assert costs["dense"]["steps"] == 20
    assert cat._costs({"dense": run}, goal=0.01)["dense"]["payload"] is None


def test_one_worker_alone_has_no_xi() -> None:
    recipe = get_recipe("digits")
    codec = topk_convergence._codec(0.01, 32)
    cluster = Cluster(recipe, recipe.load(None).train, Setting(1, 8, 0.05, 0.0, codec))
    found = Curve("one", 1)
    for _ in range(2):
        cluster.step(theory.note(found, cluster, 0.01))
    cluster.close()
    assert found.notes["xi"] == [0.0, 0.0]
    assert all(0.0 < share < 1.0 for share in found.notes["delta"]) and found.notes["held"][1] > 0.0


def test_savings_are_at_equal_accuracy() -> None:
    dense, thin = curve("dense", None, [0.5, 0.9]), curve("1 %", None, [0.2, 0.5, 0.9])
    thin.megabytes = [0.1, 0.2, 0.3]
    rows = {row["name"]: row for row in topk_convergence._savings({"dense": dense, "1 %": thin})}
    assert rows["1 %"]["times"] == pytest.approx(20.0 / 0.3)


def test_the_optimum_is_below_whatever_was_trained() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(60, 1, 28, 28, generator=generator)
    split = TensorSplit(inputs, torch.randint(10, (60,), generator=generator))
    recipe = logistic()
    found = optimum(recipe, split, 10_000)  # more than there are: all
    with torch.no_grad():
        begun = float(recipe.loss(recipe.build(0), split.batch(range(60))))
    assert found.value < begun == pytest.approx(objective(recipe, recipe.build(0), split, 10_000))
    assert found.smoothness > 0.0


def test_the_model_of_scheduling() -> None:
    setup = request_scheduling.Setup(2, 3, (0.02, 0.01), slowness=(2.0, 1.0))
    rows = request_scheduling._model(setup)
    assert len(rows) == 24 and all(row["seconds"] > 0 for row in rows)
    assert all(row["most"] <= row["bound"] for row in rows)
    claims = scheduling_showing.claims({"lab": rows, "model": rows})
    assert len(claims) == 11 and claims[-1].ours == pytest.approx(1.0) and claims[-1].holds
    assert scheduling_showing.verdict({"lab": rows, "model": rows}).startswith("In the lab, ")


def test_noise_makes_no_claim_of_scheduling_hold() -> None:
    """One lucky bound of six is not enough, nor is a difference within the margin."""

    def rows(**seconds: list[float]) -> list[dict[str, object]]:
        return [
            {"policy": policy, "bound": bound, "seconds": value, "staleness": 0.99 if policy == "stalest" else 1.0}
            for policy, values in seconds.items()
            for bound, value in enumerate(values)
        ]

    same = [10.0] * 6
    lucky = [10.0, 10.0, 8.0, 10.0, 10.0, 10.0]
    noisy = rows(fifo=lucky, filo=[12.0, *same[1:]], stalest=lucky, forward=[9.8] * 6)
    assert [claim.holds for claim in scheduling_showing._expectations("lab", noisy)] == [False] * 5
    assert not any("starves" in claim.note for claim in scheduling_showing._expectations("lab", noisy))
    clear = rows(fifo=[12.0, *same[1:]], filo=[14.0] * 6, stalest=[9.0] * 6, forward=[9.0] * 6)
    judged = scheduling_showing._expectations("lab", clear)
    assert [claim.holds for claim in judged] == [True, True, True, True, False]
    assert "starves" in judged[2].note and "starves" not in judged[0].note


@pytest.mark.parametrize("method", ["dense", "percentile90"])
def test_a_step_as_in_the_paper_is_plain_descent(method: str) -> None:
    """Phases are measured, and the master's model is the one that a single process gets from the workers' sums."""
    found = broadcast_phases(Bed("cifar10", None, hosts=3, rate=None, batch=2, lr=0.1), [method], steps=4)[method]
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
    bed = Bed("digits", None, hosts=3, rate=None, batch=8, lr=0.05)
    found = served_phases(bed, "dense", "dense", steps=6)
    assert set(found) == {"compute", "aggregate", "synchronise", "ms"} and all(v >= 0 for v in found.values())
    assert found["ms"] > 0
