"""Diagnoses on real processes: every figure is what its definition gives when computed directly, from all ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import jobs, probe
from thinwire.link import diagnostics as module
from thinwire.tools.events import Diagnosis

DENSITY, EVERY, STEPS, WORLD = 0.02, 3, 6, 2
EXACT = tw.Codec(tw.TopK(DENSITY, exact=True), tw.Float32())
Named = dict[str, Tensor]


def diagnosed(rank: int, codec: Any, exchange: Any) -> tuple[list[Diagnosis], list[Named], list[Named]]:
    """The diagnoses of some steps; the residual before each step and after the last; what each step applied."""
    module.SAMPLE = 1 << 20  # every entry's age is followed
    model = probe.make()
    with tw.attach(model, codec, exchange=exchange) as link:
        link.diagnose(every=EVERY)
        residuals, applied = [_residual_of(link)], []
        for step in range(STEPS):
            model.zero_grad()
            probe.plain(model, rank, step, probe.Account())
            applied.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
            residuals.append(_residual_of(link))
        return link.diagnoses, residuals, applied


def _residual_of(link: Any) -> Named:
    slots = link.state_dict()["codec"]["residuals"]
    return {n: slots.get(n, {}).get("residual", torch.zeros(size)) for n, size in probe.SIZES.items()}


def top(vector: Tensor) -> Tensor:
    """What EXACT sends of a vector."""
    n = vector.numel()
    if n < EXACT.min_numel:
        return vector
    places = vector.abs().topk(EXACT.selection.expected(n, 0)).indices
    return torch.zeros(n).index_put((places,), vector[places])


def together(named: Named) -> Tensor:
    return torch.cat([named[name].double() for name in probe.SIZES])


def each(function: Any, named: Named) -> Named:
    return {name: function(tensor) for name, tensor in named.items()}


def mean(many: list[Named]) -> Named:
    return {name: torch.stack([one[name] for one in many]).mean(0) for name in probe.SIZES}


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce", tw.exchange.Hierarchical(per_machine=2)], ids=str)
def test_figures_are_what_their_definitions_say(cluster: Cluster, exchange: Any) -> None:
    ranks = cluster.run(diagnosed, WORLD, EXACT, exchange)
    diagnoses = ranks[0][0]
    assert [d.step for d in diagnoses] == [EVERY, 2 * EVERY]
    assert repr(ranks[1][0]) == repr(diagnoses)
    for found in diagnoses:
        step = found.step - 1
        gradients = [probe.coefficients(rank, step) for rank in range(WORLD)]
        dense = mean(gradients)
        applied = ranks[0][2][step]
        given, residuals = gradients, [(ranks[r][1][step], ranks[r][1][step + 1]) for r in range(WORLD)]
        if isinstance(exchange, tw.exchange.Hierarchical):  # one machine: its mean is all that is selected from
            given, residuals = [dense], residuals[:1]
        accumulated = [{n: g[n] + m[n] for n in g} for g, (m, _) in zip(given, residuals, strict=True)]
        sent = [each(top, a) for a in accumulated]
        squares = [sum(float(together(x).square().sum()) for x in xs) for xs in (sent, accumulated, gradients)]
        held = sum(float(together(m).square().sum()) for _, m in residuals) * WORLD / len(residuals)
        apart = together(each(top, mean(accumulated))) - together(applied)
        assert found.delta == pytest.approx(squares[0] / squares[1], rel=1e-5)
        assert found.residual_ratio == pytest.approx(math.sqrt(held / squares[2]), rel=1e-5)
        assert found.xi == pytest.approx(float(apart.norm() / together(dense).norm()), rel=1e-4, abs=1e-6)
        cosine = torch.dot(together(applied), together(dense)) / (together(applied).norm() * together(dense).norm())
        assert found.cosine == pytest.approx(float(cosine), rel=1e-5)


def test_ages_count_the_steps_that_entries_wait(cluster: Cluster) -> None:
    diagnoses, residuals, _ = cluster.run(diagnosed, WORLD, EXACT, "gather")[0]
    found, wanted = iter(diagnoses), []
    large = [name for name, size in probe.SIZES.items() if size >= EXACT.min_numel]
    residual = [{name: torch.zeros(probe.SIZES[name]) for name in large} for _ in range(WORLD)]
    since = [{name: torch.zeros(probe.SIZES[name], dtype=torch.int64) for name in large} for _ in range(WORLD)]
    waits: list[Tensor] = []
    for step in range(STEPS):
        for rank in range(WORLD):
            for name in large:
                accumulated = probe.coefficients(rank, step)[name] + residual[rank][name]
                gone = top(accumulated) != 0.0
                residual[rank][name] = torch.where(gone, 0.0, accumulated)
                waits.append(step + 1 - since[rank][name][gone])
                since[rank][name][gone] = step + 1
        if (step + 1) % EVERY == 0:
            now = torch.cat([step + 1 - since[r][n][residual[r][n] != 0.0] for r in range(WORLD) for n in large])
            wanted.append((float(now.double().mean()), int(now.max()), float(torch.cat(waits).double().mean())))
            waits.clear()
    assert torch.equal(residual[0]["d"], residuals[-1]["d"])  # the account is that of the link
    for age, oldest, waited in wanted:
        one = next(found)
        assert (one.age, one.age_oldest, one.waited) == (pytest.approx(age), oldest, pytest.approx(waited))


def others(rank: int) -> dict[str, Any]:
    """Codecs that hold nothing back, or round; a step that is skipped; and what cannot be asked for."""
    found: dict[str, Any] = {}
    cases = {"percentile90": None, "2bit": "gather", "dgc": "scatter-reduce", "1bit": None, "dense": "dense"}
    for name, exchange in cases.items():
        model = jobs.make()
        with tw.attach(model, 0.01 if name == "dense" else name, exchange=exchange) as link:
            link.diagnose(every=2)
            jobs.train(model, rank, range(4), torch.optim.SGD(model.parameters(), lr=0.1))
            link.diagnose(every=0)
            jobs.train(model, rank, range(4, 6), torch.optim.SGD(model.parameters(), lr=0.1))
            found[name] = link.diagnoses, jobs.digest(model)
    model = jobs.make()
    with tw.attach(model, 0.01) as link:
        link.diagnose(every=1)
        for step in range(3):
            x, y = jobs.batch(rank, step)
            model.zero_grad()
            bad = math.inf if step == 1 and rank == 1 else 1.0
            (bad * torch.nn.functional.cross_entropy(model(x), y)).backward()
        found["skipped"] = [d.step for d in link.diagnoses]
        for wish in (-1, 5 + rank):
            with pytest.raises(ValueError) as refused:
                link.diagnose(every=wish)
            found.setdefault("refused", []).append(str(refused.value))
    return found


def test_all_codecs_and_skipped_steps(cluster: Cluster) -> None:
    first, second = cluster.run(others, 2)
    for name in ("percentile90", "2bit", "dgc", "1bit", "dense"):
        diagnoses, digest = first[name]
        assert [d.step for d in diagnoses] == [2, 4]
        assert (repr(diagnoses), digest) == (repr(second[name][0]), second[name][1])
        for d in diagnoses:
            assert d.delta > 0.0 and 0.0 < d.cosine <= 1.0 + 1e-9 and d.xi >= 0.0
            assert (d.residual_ratio == 0.0) == (name in ("percentile90", "dense"))
            assert math.isnan(d.age) == (name in ("percentile90", "dense"))
    exact = first["dense"][0][-1]
    assert (exact.delta, exact.cosine) == (pytest.approx(1.0), pytest.approx(1.0))
    assert exact.xi == pytest.approx(0.0, abs=1e-5)
    assert first["skipped"] == [1, 3]
    assert "every counts steps" in first["refused"][0]
    assert "rank 0 asks for a diagnosis every 5 steps and rank 1 every 6" in second["refused"][1]


def test_an_entry_is_told_in_one_line() -> None:
    told = Diagnosis(step=100, delta=0.25, xi=1.5, residual_ratio=4.0, cosine=0.5, age=12.34, age_oldest=99, waited=3.0)
    assert told.text() == (
        "delta 0.25, xi 1.5, residual/gradient 4, cosine 0.5, age 12.3 steps (oldest 99), waited 3.0"
    )
