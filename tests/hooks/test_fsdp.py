"""Models that FSDP2 shards: replicas exchange compressed gradients of their shards."""

import os
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

Both = dict[str, tuple[dict[str, Tensor], dict[str, Tensor], int]]


def both(rank: int, replicas: int, kinds: list[str]) -> Both:
    """This rank's parts of the parameters after a training by thinwire at density 1, and by native HSDP."""
    mesh, found = mesh_of(4, replicas), {}
    for kind in kinds:
        parts, case = [], CASES[kind]
        for attached in (True, False):
            model = sharded.build(case, mesh["shard"] if attached else mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            filled: list[int] = []  # an entry for each step whose last bucket was announced
            options: dict[str, Any] = {"exchange": "gather", "on_last_bucket": lambda seen=filled: seen.append(1)}
            link = tw.attach(model, FULL, mesh=mesh, optimizer=optimizer, **options) if attached else None
            sharded.train(model, optimizer, rank, range(4), case)
            parts.append(sharded.parts_of(model))
            if link is not None:
                steps = link.stats()["steps"]
                assert len(filled) == steps
                link.detach()
        found[kind] = *parts, steps
    return found


@pytest.fixture(scope="module")
def compared(cluster: Cluster) -> list[Both]:
    return cluster.run(both, 4, 2, list(CASES))


@pytest.mark.parametrize("kind", CASES)
def test_two_replicas_at_density_1_are_native_hsdp_bit_for_bit(compared: list[Both], kind: str) -> None:
    steps = {"every backward": 8}.get(kind, 4)
    for found in compared:
        ours, theirs, exchanged = found[kind]
        assert exchanged == steps
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


def test_four_replicas_at_density_1_are_native_hsdp_but_for_the_order_of_additions(cluster: Cluster) -> None:
    for found in cluster.run(both, 4, 4, ["plain"]):
        ours, theirs, _ = found["plain"]
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


def replicas(rank: int, settings: list[tuple[Any, Any]], steps: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    """The full parameters after a training with each codec and exchange, and this rank's losses."""
    mesh, found = mesh_of(4), []
    for codec, exchange in settings:
        model = sharded.build(CASES["plain"], mesh["shard"], seed=mesh.get_rank() // 2)  # attach makes replicas equal
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, codec, mesh=mesh, exchange=exchange, check_every=5):
            losses = sharded.train(model, optimizer, rank, range(steps))
        found.append((sharded.whole(model), losses))
    return found


def test_compressed_replicas_are_equal_and_train(cluster: Cluster) -> None:
    settings = [(0.05, "gather"), (0.05, "scatter-reduce"), ("auto", None)]
    results = cluster.run(replicas, 4, settings, 30)
    for setting in zip(*results, strict=True):
        for parameters, losses in setting:
            assert all(torch.equal(tensor, setting[0][0][name]) for name, tensor in parameters.items())
            assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def resumed(rank: int, directory: str) -> dict[str, Any]:
    """Two trainings of ten steps, one of them broken after five; the state is saved in two ways."""
    mesh, found = mesh_of(4), {}
    for way in ("unbroken", "file", "checkpoint"):
        model = sharded.build(CASES["plain"], mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer)
        sharded.train(model, optimizer, rank, range(5))
        if way != "unbroken":
            state = {"model": model.state_dict(), "optimizer": _momenta(model, optimizer)}
            save({**state, "link": link.sharded()}, checkpoint_id=f"{directory}/{way}")
            torch.save(link.state_dict(), f"{directory}/{rank}.pt")
            link.detach()
            model = sharded.build(CASES["plain"], mesh["shard"], seed=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            link = tw.attach(model, 0.05, mesh=mesh, optimizer=optimizer)
            state = {"model": model.state_dict(), "optimizer": _momenta(model, optimizer)}
            loaded = {"link": link.sharded(f"{directory}/{way}")} if way == "checkpoint" else {}
            load({**state, **loaded}, checkpoint_id=f"{directory}/{way}")
            model.load_state_dict(state["model"])
            if way == "file":
                link.load_state_dict(torch.load(f"{directory}/{rank}.pt", weights_only=True))
        assert link.step == 5
        sharded.train(model, optimizer, rank, range(5, 10))
        found[way] = sharded.parts_of(model), link.state_dict()["codec"]["residuals"]
        link.detach()
    return found


def _momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's momenta by parameter name, made where they are missing."""
    for p in model.parameters():
        optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
    return {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}


def test_a_resumed_training_is_the_unbroken_one_bit_for_bit(cluster: Cluster, tmp_path: Any) -> None:
    for found in cluster.run(resumed, 4, str(tmp_path)):
        parameters, residuals = found.pop("unbroken")
        assert sum(float(slots["residual"].abs().sum()) for slots in residuals.values()) > 0
        for others, kept in found.values():
            assert all(torch.equal(tensor, others[name]) for name, tensor in parameters.items())
            assert all(torch.equal(residuals[name]["residual"], kept[name]["residual"]) for name in residuals)


def reshaped(rank: int, directory: str) -> list[dict[str, Tensor]]:
    """The mean residual of two replicas of two shards, and as four replicas of the whole load it, by three ways."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    link = tw.attach(model, 0.05, mesh=mesh)
    sharded.train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(5))
    gathered = link.state_dict(gather=True)
    save({"link": link.sharded()}, checkpoint_id=f"{directory}/link")
    torch.save(link.state_dict(), f"{directory}/{rank}.pt")
    link.detach()
    torch.distributed.barrier()
    saved = [torch.load(f"{directory}/{r}.pt", weights_only=True) for r in range(4)]
    found = [_residuals(gathered), _residuals(tw.merge_states(saved))]
    for way in ("gathered", "list", "checkpoint", "ddp"):
        mesh = mesh_of(4, 4)
        if way == "ddp":
            torch.manual_seed(0)
            link = tw.attach(nn.parallel.DistributedDataParallel(sharded.Stack()), 0.05)
        else:
            link = tw.attach(sharded.build(CASES["plain"], mesh["shard"]), 0.05, mesh=mesh)
        if way == "checkpoint":
            load({"link": link.sharded(f"{directory}/link")}, checkpoint_id=f"{directory}/link")
        else:
            link.load_state_dict(gathered if way == "gathered" else saved)
        found.append(_residuals(link.state_dict(gather=True)))
        assert link.step == 5
        link.detach()
    return found


def _residuals(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: slots["residual"].reshape(-1) for name, slots in state["codec"]["residuals"].items()}


def test_another_number_of_replicas_and_shards_keeps_the_mean_residual(cluster: Cluster, tmp_path: Any) -> None:
    for mean, *others in cluster.run(reshaped, 4, str(tmp_path)):
        assert float(mean["blocks.0.up.weight"].abs().sum()) > 0
        for other in others:
            assert other.keys() == mean.keys()
            for name, tensor in mean.items():
                torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-7)


def poisoned(rank: int) -> tuple[list[bool], int, bool, dict[str, Tensor]]:
    """A gradient on one rank, and of one shard only, is infinite in step 3, and that of another shard in step 5."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = tw.attach(model, 0.05, mesh=mesh)
    seen = []
    for step in range(8):
        model.factor = float("inf") if (rank, step) in ((3, 3), (0, 5)) else 1.0
        optimizer.zero_grad()
        x, y = jobs.batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()
        gradients = [local_part(p.grad) for p in model.parameters()]
        seen.append(any(bool(g.isnan().all()) for g in gradients if g.numel()))
        if not seen[-1]:
            assert all(bool(g.isfinite().all()) for g in gradients)
            optimizer.step()
    residuals = link.state_dict()["codec"]["residuals"]
    clean = all(bool(slots["residual"].isfinite().all()) for slots in residuals.values())
    skipped = link.stats()["skipped"]
    link.detach()
    return seen, skipped, clean, sharded.whole(model)


def test_an_infinite_gradient_of_one_shard_skips_the_step_on_all_ranks(cluster: Cluster) -> None:
    results = cluster.run(poisoned, 4)
    for seen, skipped, clean, parameters in results:
        assert [step for step, was in enumerate(seen) if was] == [3, 5]
        assert skipped == 2 and clean
        assert all(torch.equal(tensor, results[0][3][name]) for name, tensor in parameters.items())


def uneven(rank: int) -> str:
    """The second replica leaves a parameter unused that the first one uses."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    model.blocks[0].uses_scale = rank < 2
    tw.attach(model, 0.05, mesh=mesh)
    try:
        sharded.train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(1))
    except tw.LinkError as error:
        return str(error)
    return ""


def test_a_parameter_that_only_some_replicas_use_is_named(cluster: Cluster) -> None:
    for message in cluster.run(uneven, 4)[2:]:
        assert "blocks.0.scale has a gradient in another replica" in message


def dies(rank: int, directory: str) -> None:
    """A rank dies in step 3. The others write what they raise, and end, as a training script does."""
    mesh = mesh_of(4)
    model = sharded.build(CASES["plain"], mesh["shard"])
    tw.attach(model, 0.05, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        sharded.train(model, optimizer, rank, range(3))
        if rank != 3:
            sharded.train(model, optimizer, rank, range(3, 9))
    except RuntimeError as error:
        Path(directory, str(rank)).write_text(f"{type(error).__name__}: {error}")
    os._exit(1)


def test_a_rank_that_dies_ends_the_training_of_all(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(dies, 4, str(tmp_path), timeout=60.0, died=True) == [None] * 4
    raised = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert raised.keys() == {"0", "1", "2"}
    assert "step 3: the exchange failed" in raised["1"]  # it exchanges the same shard


def refused(rank: int) -> dict[str, str]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

    mesh, messages = mesh_of(4), {}
    shards = mesh["shard"]

    def attempt(what: str, model: Any, **options: Any) -> None:
        with pytest.raises((TypeError, ValueError, tw.LinkError)) as caught:
            tw.attach(model, 0.05, **{"mesh": mesh, **options})
        messages[what] = str(caught.value)

    attempt("native", sharded.build(CASES["plain"], mesh))
    attempt("no mesh", sharded.build(CASES["plain"], shards), mesh=None)
    attempt("not a mesh", sharded.build(CASES["plain"], shards), mesh=4)
    attempt("no replicas", sharded.build(CASES["plain"], shards), mesh=shards)
    attempt("not sharded", sharded.Stack())
    attempt("fsdp1", FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    partly = sharded.Stack()
    fully_shard(partly.blocks[0], mesh=shards)
    attempt("not wholly sharded", partly)
    attempt("frozen", fully_shard(nn.Linear(4, 4).requires_grad_(False), mesh=shards))
    for name, made in (("sgd too early", torch.optim.SGD), ("adamw too early", torch.optim.AdamW)):
        early = sharded.Stack()
        optimizer = made(early.parameters())
        attempt(name, sharded.shard(early, shards), optimizer=optimizer)
    hooked = sharded.build(CASES["plain"], shards)
    hooked.set_all_reduce_hook(lambda buffer: None)
    attempt("hooked", hooked)
    model = sharded.build(CASES["plain"], shards)
    link = tw.attach(model, 0.05, mesh=mesh)
    attempt("twice", model)
    link.detach()
    tw.attach(model, 0.05, mesh=mesh).detach()
    with pytest.MonkeyPatch.context() as patch:  # as in PyTorch 2.6
        patch.delattr(FSDPModule, "set_all_reduce_hook")
        attempt("old torch", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "_get_fsdp_state")
        attempt("without _get_fsdp_state", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(model._get_fsdp_state()._fsdp_param_group, "all_reduce_grads")
        attempt("without all_reduce_grads", model)
    attempt("replicate", replicate(sharded.Stack()))
    replicated = replicate(sharded.Stack())
    attempt("replicate with AdamW", replicated, mesh=None, optimizer=torch.optim.AdamW(replicated.parameters()))
    attempt("replicate with FSDP", replicate_with_fsdp(sharded.Stack(), mesh=mesh["replicate"]))
    attempt("shards differ", model, check_every=rank % 2 and rank)  # shard 1's replicas differ, those of shard 0 do not
    return messages


def test_what_cannot_be_attached_is_refused_with_the_way_out(cluster: Cluster) -> None:
    expected = {
        "native": 'fully_shard(module, mesh=mesh["shard"])',
        "no mesh": "mesh=mesh",
        "not a mesh": "not 4",
        "no replicas": 'mesh["replicate", "shard"]',
        "not sharded": "Stack is not sharded",
        "fsdp1": "use FSDP2 instead",
        "not wholly sharded": "shift requires gradients and is not sharded",
        "frozen": "no sharded parameter",
        "sgd too early": "make the optimizer from model.parameters() after sharding",
        "adamw too early": "make the optimizer from model.parameters() after sharding",
        "hooked": "all-reduce hook already",
        "twice": "attached already",
        "old torch": f"PyTorch 2.7 or later, whose FSDPModule has set_all_reduce_hook; this is {torch.__version__}",
        "without _get_fsdp_state": f"{torch.__version__} has no FSDPStack._get_fsdp_state, which thinwire reads",
        "without all_reduce_grads": "has no FSDPParamGroup.all_reduce_grads, which thinwire reads",
        "replicate": "wrap the model in DistributedDataParallel instead",
        "replicate with AdamW": "wrap the model in DistributedDataParallel instead",
        "replicate with FSDP": "wrap the model in DistributedDataParallel instead",
        "shards differ": "check_every",
    }
    for messages in cluster.run(refused, 4):
        assert messages.keys() == expected.keys()
        for what, part in expected.items():
            assert part in messages[what], what


def detached(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """After detach gradients are averaged without compression; the state can still be gathered."""
    mesh, found = mesh_of(4), []
    for attached in (True, False):
        model = sharded.build(CASES["plain"], mesh["shard"] if attached else mesh)
        if attached:
            link = tw.attach(model, 0.05, mesh=mesh)
            link.detach()
            assert link.state_dict(gather=True)["shard"] is None
        sharded.train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        found.append(sharded.parts_of(model))
    return found[0], found[1]


def test_a_detached_model_is_native_hsdp(cluster: Cluster) -> None:
    for ours, theirs in cluster.run(detached, 4):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def alone(rank: int) -> bool:
    """A mesh with a single replica: nothing is exchanged."""
    mesh = mesh_of(2, 1)
    model = sharded.build(CASES["plain"], mesh["shard"])
    link = tw.attach(model, 0.05, mesh=mesh)
    sharded.train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    return "nothing is exchanged" in link.why and link.stats()["steps"] == 0


def test_a_single_replica(cluster: Cluster) -> None:
    assert cluster.run(alone, 2) == [True, True]
