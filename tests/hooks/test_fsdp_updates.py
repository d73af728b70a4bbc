"""Models that FSDP2 shards, in the update domain: each rank exchanges what its optimizer changed in its shard."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks import sharded
from tests.hooks.sharded import CASES, FULL, mesh_of
from tests.link import jobs
from thinwire.link.shards import local_part

KINDS = ["plain", "nested units", "bf16 parameters", "no reshard", "offload", "columns", "accumulation", "tied"]
KINDS += ["divided by 3", "activation checkpoints", "accumulation of shards", "several modules in a unit"]
# Rounds of local steps. None of their lengths divides the 14 steps of the test.
ROUNDS: dict[str, dict[str, Any]] = {
    "rounds": {"every": 4},
    "overlap": {"every": 4, "overlap": True},
    "nesterov": {"every": 3, "outer": tw.Nesterov(0.7, momentum=0.9)},
}
# What is resumed after five steps: by default low-rank coordinates, whose bases are state; rounds in their midst.
RESUMED: dict[str, dict[str, Any]] = {
    "default": {},
    "top-k": {"codec": 0.05},
    "rounds": {"codec": 0.05, "every": 3},
    "overlap": {"codec": 0.05, "every": 3, "overlap": True},
}


def both(rank: int) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Trainings by updates at density 1, and by native HSDP. With SGD they compute the same."""
    mesh, found = mesh_of(4), {}
    for kind in KINDS:
        parts, case = [], CASES[kind]
        for attached in (True, False):
            model = sharded.build(case, mesh["shard"] if attached else mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            options: dict[str, Any] = {"domain": "update", "optimizer": optimizer}
            link = tw.attach(model, FULL, mesh=mesh, **options) if attached else None
            sharded.train(model, optimizer, rank, range(4), case)
            parts.append(sharded.parts_of(model))
            if link is not None:
                assert link.domain == "update" and link.stats()["steps"] == 4
                link.detach()
        found[kind] = parts[0], parts[1]
    return found


def test_updates_at_density_1_are_native_hsdp_but_for_rounding(cluster: Cluster) -> None:
    for found in cluster.run(both, 4):
        for ours, theirs in found.values():
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def adam(rank: int) -> tuple[dict[str, Tensor], list[list[float]], list[float]]:
    """The parameters, what evaluations between the steps give, and the losses."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"], seed=rank // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer, check_every=4)
    seen, losses = [], []
    for step in range(20):
        losses += sharded.train(model, optimizer, rank, range(step, step + 1))
        if step % 5 == 0:
            model.eval()
            x, _ = jobs.batch(9, 9)
            with torch.no_grad():
                seen.append(model(x).flatten().tolist())
            model.train()
            shown = {name: t.to_local() for name, t in model.state_dict().items()}
            assert all(torch.equal(shown[name], local_part(p)) for name, p in model.named_parameters())
    link.flush()
    parameters = sharded.whole(model)
    link.detach()
    return parameters, seen, losses


def test_adam_trains_equal_replicas_and_evaluations_see_what_all_share(cluster: Cluster) -> None:
    results = cluster.run(adam, 4)
    for parameters, seen, losses in results:
        assert all(torch.equal(tensor, results[0][0][name]) for name, tensor in parameters.items())
        assert seen == results[0][1]
        assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def local_steps(rank: int, options: dict[str, Any]) -> tuple[list[bool], int, bool, dict[str, Tensor], list[float]]:
    """Train 14 steps by rounds: when replicas differ, the exchanges, whether they are right, parameters, losses."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"], seed=rank // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    link = tw.attach(model, 0.1, mesh=mesh, optimizer=optimizer, check_every=1, **options)
    apart, losses = [], []
    for step in range(14):
        losses += sharded.train(model, optimizer, rank, range(step, step + 1))
        parts = torch.cat([local_part(p).detach().reshape(-1) for p in model.parameters()])
        others = [torch.empty_like(parts) for _ in range(2)]
        torch.distributed.all_gather(others, parts, group=mesh.get_group("replicate"))
        apart.append(not torch.equal(*others))
    exchanges = link.stats()["steps"]
    link.flush()
    parameters = sharded.whole(model)
    shown = {name: t.full_tensor() for name, t in model.state_dict().items()}
    right = all(torch.equal(tensor, shown[name]) for name, tensor in parameters.items())
    link.detach()
    return apart, exchanges, right, parameters, losses


@pytest.mark.parametrize("setting", ROUNDS)
def test_replicas_exchange_after_every_round_of_local_steps(cluster: Cluster, setting: str) -> None:
    options = ROUNDS[setting]
    results = cluster.run(local_steps, 4, options)
    for apart, exchanges, right, parameters, losses in results:
        assert exchanges == 14 // options["every"] and right
        assert any(apart)  # between exchanges replicas train alone
        assert all(torch.equal(tensor, results[0][3][name]) for name, tensor in parameters.items())
        assert sum(losses[-4:]) < sum(losses[:4])


def averaged(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Twelve steps of rounds of four at density 1, and the mean of two trainings by FSDP2 alone after each four."""
    mesh, found = mesh_of(4), []
    for attached in (True, False):
        model = sharded.build(CASES["plain"], mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"domain": "update", "optimizer": optimizer, "every": 4}
        link = tw.attach(model, FULL, mesh=mesh, **options) if attached else None
        for begin in (0, 4, 8):
            sharded.train(model, optimizer, rank, range(begin, begin + 4))
            for p in model.parameters() if link is None else ():
                torch.distributed.all_reduce(part := local_part(p).clone(), group=mesh.get_group("replicate"))
                local_part(p).copy_(part / 2)
        found.append(sharded.parts_of(model))
        if link is not None:
            link.detach()
    return found[0], found[1]


def test_rounds_at_density_1_average_the_parameters(cluster: Cluster) -> None:
    for ours, theirs in cluster.run(averaged, 4):
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def in_the_midst(rank: int) -> bool:
    """An evaluation between a forward pass and its backward pass changes nothing."""
    mesh, found = mesh_of(4), []
    for evaluates in (False, True):
        model = sharded.build(CASES["plain"], mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer)
        for step in range(6):
            x, y = jobs.batch(rank, step)
            loss = nn.functional.cross_entropy(model(x), y)
            if evaluates:
                with torch.no_grad():
                    model(x)
            optimizer.zero_grad()
            loss.backward()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append(sharded.parts_of(model))
        link.detach()
    return all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_an_evaluation_before_the_backward_pass_changes_nothing(cluster: Cluster) -> None:
    assert cluster.run(in_the_midst, 4) == [True] * 4


def evaluated(rank: int) -> list[bool]:
    """Whether evaluations see what `flush` and `load_state_dict` wrote: FSDP still holds gathered parameters then."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer)

    def shown() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(jobs.batch(9, 9)[0])
        return found

    def fresh() -> Tensor:
        for module in (*model.blocks, model):
            module.reshard()
        return shown()

    sharded.train(model, optimizer, rank, range(4))
    state, found = link.state_dict(), []
    sharded.train(model, optimizer, rank, range(4, 8))
    for write in (link.flush, lambda: link.load_state_dict(state)):
        shown()
        write()
        found.append(torch.equal(shown(), fresh()))
    link.detach()
    return found


def test_an_evaluation_sees_what_was_flushed_or_loaded_after_another_one(cluster: Cluster) -> None:
    assert cluster.run(evaluated, 4) == [[True, True]] * 4


def resumed(rank: int, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training of ten steps, and two of new objects, which continue what it has saved after five."""
    mesh, found = mesh_of(4), {}
    for way in ("unbroken", "file", "checkpoint"):
        model = sharded.build(CASES["plain"], mesh["shard"], seed=int(way != "unbroken"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        link = tw.attach(model, mesh=mesh, optimizer=optimizer, **options)
        if way == "unbroken":
            sharded.train(model, optimizer, rank, range(5))
            save({"model": model.state_dict(), "link": link.sharded()}, checkpoint_id=f"{directory}/both")
            torch.save(link.state_dict(), f"{directory}/{rank}.pt")
        else:
            state = {"model": model.state_dict()}
            loaded = {"link": link.sharded(f"{directory}/both")} if way == "checkpoint" else {}
            load({**state, **loaded}, checkpoint_id=f"{directory}/both")
            model.load_state_dict(state["model"])
            if way == "file":
                link.load_state_dict(torch.load(f"{directory}/{rank}.pt", weights_only=True))
        assert link.exchanges == 5 // options.get("every", 1)
        sharded.train(model, optimizer, rank, range(5, 10))
        found[way] = sharded.parts_of(model), link.state_dict()["codec"]["residuals"]
        link.detach()
    return found


@pytest.mark.parametrize("setting", RESUMED)
def test_a_resumed_training_is_the_unbroken_one_bit_for_bit(cluster: Cluster, tmp_path: Path, setting: str) -> None:
    for found in cluster.run(resumed, 4, str(tmp_path), RESUMED[setting]):
        parameters, residuals = found.pop("unbroken")
        for others, kept in found.values():
            assert all(torch.equal(tensor, others[name]) for name, tensor in parameters.items())
            assert all(torch.equal(residuals[name]["residual"], kept[name]["residual"]) for name in residuals)


def reshaped(rank: int, directory: str) -> list[dict[str, Any]]:
    """The state of two replicas of two shards, and as four replicas of whole parameters load it, in three ways."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer)
    sharded.train(model, optimizer, rank, range(5))
    found = [link.state_dict(gather=True)]
    save({"link": link.sharded()}, checkpoint_id=f"{directory}/link")
    torch.save(link.state_dict(), f"{directory}/{rank}.pt")
    link.detach()
    torch.distributed.barrier()
    saved = [torch.load(f"{directory}/{r}.pt", weights_only=True) for r in range(4)]
    mesh = mesh_of(4, 4)
    for way in ("gathered", "list", "checkpoint"):
        model = sharded.build(CASES["plain"], mesh["shard"], seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer)
        if way == "checkpoint":
            load({"link": link.sharded(f"{directory}/link")}, checkpoint_id=f"{directory}/link")
        else:
            link.load_state_dict(found[0] if way == "gathered" else saved)
        found.append(link.state_dict(gather=True))
        sharded.train(model, optimizer, rank, range(5, 7))
        link.detach()
    return found


def test_another_number_of_replicas_and_shards_loads_the_means(cluster: Cluster, tmp_path: Path) -> None:
    for first, *others in cluster.run(reshaped, 4, str(tmp_path)):
        moments = first["updates"]["optimizers"][0]["blocks.0.up.weight"]
        assert moments["exp_avg"].shape == (99, 33) and float(moments["step"]) == 5
        for other in others:
            assert other["step"] == 5 and other["updates"]["clocks"] == [5]
            _check_close(other["codec"]["residuals"], first["codec"]["residuals"])
            _check_close(other["updates"]["shared"], first["updates"]["shared"])
            _check_close(other["updates"]["optimizers"][0], first["updates"]["optimizers"][0])


def _check_close(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found.reshape(-1), expected.reshape(-1), rtol=1e-5, atol=1e-7)
    else:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _check_close(found[key], value)


def poisoned(rank: int) -> tuple[int, bool, dict[str, Tensor]]:
    """A gradient of one rank's shard is infinite in step 3: all ranks skip it, and keep what they changed."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer, check_every=1)
    for step in range(6):
        before = sharded.parts_of(model)
        model.factor = float("inf") if (rank, step) == (2, 3) else 1.0
        sharded.train(model, optimizer, rank, range(step, step + 1))
        same = all(torch.equal(tensor, before[name]) for name, tensor in sharded.parts_of(model).items())
        assert same == (step == 3)
    residuals = link.state_dict()["codec"]["residuals"].values()
    clean = all(bool(slots["residual"].isfinite().all()) for slots in residuals)
    skipped = link.stats()["skipped"]
    link.detach()
    return skipped, clean, sharded.whole(model)


def test_an_infinite_gradient_of_one_shard_skips_the_step_on_all_ranks(cluster: Cluster) -> None:
    results = cluster.run(poisoned, 4)
    for skipped, clean, parameters in results:
        assert skipped == 1 and clean
        assert all(torch.equal(tensor, results[0][2][name]) for name, tensor in parameters.items())


def poisoned_rounds(rank: int, overlap: bool) -> tuple[int, int, bool, dict[str, Tensor]]:
    """A gradient of one rank's shard is infinite in one step of the first of three rounds, and in all of the second."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer, every=3, overlap=overlap, check_every=1)
    for step in range(9):
        before = sharded.parts_of(model)
        model.factor = float("inf") if rank == 2 and step in (1, 3, 4, 5) else 1.0
        sharded.train(model, optimizer, rank, range(step, step + 1))
        if step in (1, 4):  # amid rounds: this rank's optimizer alone takes no step
            same = all(torch.equal(tensor, before[name]) for name, tensor in sharded.parts_of(model).items())
            assert same == (rank == 2)
    figures = link.stats()
    link.flush()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    residuals = [t["residual"] for t in link.state_dict()["codec"]["residuals"].values()]
    clean = all(bool(local_part(tensor).isfinite().all()) for tensor in (*moments, *residuals))
    link.detach()
    return figures["steps"], figures["skipped"], clean, sharded.whole(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_all_ranks_skip_the_exchange_of_a_round_in_which_a_shard_took_no_step(cluster: Cluster, overlap: bool) -> None:
    results = cluster.run(poisoned_rounds, 4, overlap)
    for steps, skipped, clean, parameters in results:
        assert (steps, skipped) == (3, 1) and clean
        assert all(torch.equal(tensor, results[0][3][name]) for name, tensor in parameters.items())


def figures(rank: int) -> list[dict[str, Any]]:
    """What loggers get in both domains."""
    mesh, found = mesh_of(4), []
    for domain in ("gradient", "update"):
        model = sharded.build(CASES["plain"], mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer, domain=domain)
        sharded.train(model, optimizer, rank, range(3))
        found.append(dict(link.metrics()))
        link.detach()
    return found


def test_metrics_are_floats_of_the_same_names_in_both_domains(cluster: Cluster) -> None:
    for gradient, update in cluster.run(figures, 4):
        assert gradient.keys() == update.keys()
        for metrics in (gradient, update):
            assert all(name.startswith("thinwire/") for name in metrics)
            assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
            assert metrics["thinwire/steps"] == 3 and metrics["thinwire/skipped_steps"] == 0
            assert 0 < metrics["thinwire/bytes_sent"] < metrics["thinwire/total_bytes_sent"]
            assert 0.0 < metrics["thinwire/density"] < 0.5 and metrics["thinwire/compression_ratio"] > 1
            assert metrics["thinwire/residual_norm"] > 0


def detached(rank: int) -> bool:
    """After an update link a model takes one for gradients, and without any it is native HSDP."""
    mesh, found = mesh_of(4), []
    for attached in (True, False):
        model = sharded.build(CASES["plain"], mesh["shard"] if attached else mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attached:
            tw.attach(model, mesh=mesh, optimizer=optimizer, domain="update").detach()
            tw.attach(model, mesh=mesh).detach()
        sharded.train(model, optimizer, rank, range(3))
        found.append(sharded.parts_of(model))
    return all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_detached_model_is_native_hsdp(cluster: Cluster) -> None:
    assert cluster.run(detached, 4) == [True] * 4
