"""Saved links: a resumed run is the unbroken one bit by bit; the mean residual survives other worker counts."""

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import jobs

# Of two ranks' buckets the larger ones are scattered, the smaller ones gathered.
MIXED = tw.exchange.ScatterReduce(gather_below=2000)


def run(rank: int, codec: Any, exchange: Any, buckets: int, steps: range, directory: str) -> list[int]:
    """Train from a checkpoint, if steps do not begin at 0, to a checkpoint; parameters' checksums at the end."""
    model = jobs.make(buckets=buckets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    link = tw.attach(model, codec, exchange=exchange, optimizer=optimizer)
    path = Path(directory) / f"{steps.start}-{rank}.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        link.load_state_dict(saved["link"])
        assert link.step == steps.start
    jobs.train(model, rank, steps, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "link": link.state_dict()}
    torch.save(state, Path(directory) / f"{steps.stop}-{rank}.pt")
    return jobs.digest(model)


@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize(
    "exchange", ["gather", "scatter-reduce", tw.exchange.Hierarchical(per_machine=2), MIXED], ids=str
)
@pytest.mark.parametrize("codec", [0.05, "dgc", "dynamic"])
def test_a_resumed_run_is_the_uninterrupted_run(
    cluster: Cluster, tmp_path: Path, codec: Any, exchange: Any, buckets: int
) -> None:
    whole = cluster.run(run, 2, codec, exchange, buckets, range(40), str(tmp_path))
    cluster.run(run, 2, codec, exchange, buckets, range(25), str(tmp_path))
    assert cluster.run(run, 2, codec, exchange, buckets, range(25, 40), str(tmp_path)) == whole


def save(rank: int, exchange: Any, directory: str) -> dict[str, Any]:
    """Ten steps, then a file per rank; returns the gathered state."""
    model = jobs.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = tw.attach(model, 0.02, exchange=exchange)
    jobs.train(model, rank, range(10), optimizer)
    torch.save(link.state_dict(), Path(directory) / f"{rank}.pt")
    gathered = link.state_dict(gather=True)
    return gathered if rank == 0 else {}


def load(rank: int, exchange: Any, state: Any) -> tuple[dict[str, Any], int, bool]:
    """What a rank's memory is after loading, its weight, and whether training goes on from there."""
    model = jobs.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = tw.attach(model, 0.02, exchange=exchange)
    link.load_state_dict(state)
    state = link.state_dict()
    jobs.train(model, rank, range(10, 13), optimizer)
    return state["codec"]["residuals"], state["weight"], link.step == 13


def mean(memories: list[tuple[dict[str, Any], int]]) -> dict[str, torch.Tensor]:
    """The residual that the mean gradient will get."""
    total: dict[str, torch.Tensor] = {}
    for memory, weight in memories:
        for name, slots in memory.items():
            total[name] = total.get(name, 0.0) + weight * slots["residual"].double() / len(memories)
    return total


@pytest.mark.parametrize(
    ("before", "after", "exchanges"),
    [
        (4, 2, ("gather", "gather")),
        (2, 4, ("scatter-reduce", "scatter-reduce")),
        (4, 4, (tw.exchange.Hierarchical(per_machine=2), "gather")),
        (4, 2, (tw.exchange.Hierarchical(per_machine=2), tw.exchange.Hierarchical(per_machine=2))),
        (2, 4, ("gather", tw.exchange.Hierarchical(per_machine=2))),
    ],
    ids=str,
)
def test_the_mean_residual_survives_another_number_of_workers(
    cluster: Cluster, tmp_path: Path, before: int, after: int, exchanges: tuple[Any, Any]
) -> None:
    gathered = cluster.run(save, before, exchanges[0], str(tmp_path))[0]
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(before)]
    expected = mean([(state["codec"]["residuals"], state["weight"]) for state in states])
    assert max(float(t.abs().max()) for t in expected.values()) > 0
    for given in (states, tw.merge_states(states), gathered):
        loaded = cluster.run(load, after, exchanges[1], given)
        assert all(goes_on for _, _, goes_on in loaded)
        found = mean([(memory, weight) for memory, weight, _ in loaded])
        assert found.keys() == expected.keys()
        for name, residual in expected.items():
            torch.testing.assert_close(found[name], residual, rtol=1e-5, atol=1e-7)


def refused(rank: int, state: Any) -> str:
    link = tw.attach(jobs.make(), 0.02, exchange="gather")
    before = link.state_dict()["codec"]["residuals"]
    try:
        link.load_state_dict(state)
    except ValueError as error:
        assert link.state_dict()["codec"]["residuals"] == before == {}
        return str(error)
    return ""


def test_states_that_do_not_fit_are_refused_with_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save, 2, "gather", str(tmp_path))
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert cluster.run(refused, 2, states[0])[0] == ""
    assert "that of rank 0 of 2 and this is rank 1 of 2" in cluster.run(refused, 2, states[0])[1]
    assert all("gather=True" in message for message in cluster.run(refused, 3, states[1]))
    assert "ranks [1]" in cluster.run(refused, 1, states[1:])[0]
    strange = {**states[0], "codec": {**states[0]["codec"], "residuals": {"x": {"residual": torch.zeros(3)}}}}
    assert "strict=False" in cluster.run(refused, 2, strange)[0]
    assert "version 7" in cluster.run(refused, 1, {**states[0], "version": 7})[0]
    for key in ("step", "codec", "exchange", "units", "buckets"):
        partial = {name: value for name, value in states[0].items() if name != key}
        assert f"lacks {key}" in cluster.run(refused, 2, partial)[0]
        assert f"lacks {key}" in cluster.run(refused, 2, [states[1], partial])[0]
    for codec in ({"version": 2, "step": 1, "selection": {}}, None):
        assert "the codec's memory" in cluster.run(refused, 2, {**states[0], "codec": codec})[0]
    with pytest.raises(ValueError, match="different steps"):
        tw.merge_states([states[0], {**states[1], "step": 3}])


def unopened(rank: int) -> dict[str, Any]:
    """Rank 1 never used a layer: its memory lacks what rank 0's has, and gathering still matches."""
    model = jobs.make(find_unused_parameters=True)
    link = tw.attach(model, 0.02, exchange="gather")
    x, _ = jobs.batch(rank, 0)
    layers = model.module.layers
    original = layers.forward
    if rank == 1:
        layers.forward = lambda x: layers[4](layers[2](layers[0](x)))
    model(x).sum().backward()
    layers.forward = original
    memory: dict[str, Any] = link.state_dict(gather=True)["codec"]["residuals"]
    return memory


def test_gathering_where_ranks_opened_different_memories(cluster: Cluster) -> None:
    first, second = cluster.run(unopened, 2)
    assert first.keys() == second.keys()
    for name, slots in first.items():
        torch.testing.assert_close(slots["residual"], second[name]["residual"], rtol=0, atol=0)


def to_dense(rank: int, state: Any) -> tuple[float, float]:
    """A memory loaded into a dense link travels with the first gradients."""
    model = jobs.make()
    link = tw.attach(model, 0.02, exchange="dense")
    link.load_state_dict(state)
    (model(torch.zeros(4, 20)).sum() * 0.0).backward()
    (model(torch.ones(4, 20)).sum() * 1e-9).backward()
    weight = model.module.layers[2].weight
    assert weight.grad is not None
    held = link.state_dict()["codec"]["residuals"]["layers.2.weight"]["residual"]
    return float(weight.grad.abs().sum()), float(held.abs().sum())


def test_a_dense_link_sends_a_loaded_memory(cluster: Cluster, tmp_path: Path) -> None:
    gathered = cluster.run(save, 2, "gather", str(tmp_path))[0]
    expected = float(gathered["codec"]["residuals"]["layers.2.weight"]["residual"].abs().sum())
    for applied, held in cluster.run(to_dense, 2, gathered):
        assert applied == pytest.approx(expected, rel=1e-3)
        assert held == 0.0
