"""The state of updates: resumed, continued by another number of ranks, gathered, and replaced by loaded weights."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks.test_optimizer import adamw, made
from tests.link import jobs
from thinwire.hooks.optimizer import attached_hook


def unbroken(rank: int, codec: Any) -> list[int]:
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    tw.attach(model, codec, optimizer=optimizer)
    jobs.train(model, rank, range(10), optimizer)
    return jobs.digest(net)


def saved(rank: int, codec: Any, folder: str) -> None:
    _, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, codec, optimizer=optimizer)
    jobs.train(model, rank, range(6), optimizer)
    torch.save(link.state_dict(), f"{folder}/link-{rank}.pt")


def resumed(rank: int, codec: Any, folder: str) -> list[int]:
    """Neither the model nor the optimizer is saved besides the link's state."""
    net, model = made(rank + 7, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, codec, optimizer=optimizer)
    link.load_state_dict(torch.load(f"{folder}/link-{rank}.pt", weights_only=True))
    jobs.train(model, rank, range(6, 10), optimizer)
    return jobs.digest(net)


@pytest.mark.parametrize("codec", [None, "rotate", 0.05], ids=str)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(cluster: Cluster, tmp_path: Any, codec: Any) -> None:
    expected = cluster.run(unbroken, 3, codec)
    cluster.run(saved, 3, codec, str(tmp_path))
    assert cluster.run(resumed, 3, codec, str(tmp_path)) == expected


def fewer(rank: int, folder: str, gather: bool) -> tuple[bool, bool, bool]:
    """Two ranks continue what three have saved: mean residuals, shared parameters, mean second moments."""
    states = [torch.load(f"{folder}/link-{r}.pt", weights_only=True) for r in range(3)]
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer)
    link.load_state_dict(tw.merge_states(states) if gather else states)
    name, p = "layers.2.weight", net.get_parameter("layers.2.weight")
    residual = torch.stack([s["codec"]["residuals"][name]["residual"] for s in states]).mean(0)
    square = torch.stack([s["updates"]["optimizers"][0][name]["exp_avg_sq"] for s in states]).mean(0)
    seen = (
        torch.allclose(link.codec.residuals(name)["residual"], residual, atol=1e-7),
        torch.equal(p.detach().flatten(), states[0]["updates"]["shared"][name]),
        torch.allclose(optimizer.state[p]["exp_avg_sq"], square),
    )
    jobs.train(model, rank, range(6, 8), optimizer)
    link.detach()
    return seen


@pytest.mark.parametrize("gather", [True, False])
def test_another_number_of_ranks_keeps_the_mean(cluster: Cluster, tmp_path: Any, gather: bool) -> None:
    cluster.run(saved, 3, "rotate", str(tmp_path))
    assert cluster.run(fewer, 2, str(tmp_path), gather) == [(True, True, True)] * 2


def alone(folder: str) -> None:
    """One process continues what three have saved: nothing that they had not sent is lost; saves its own state."""
    states = [torch.load(f"{folder}/link-{r}.pt", weights_only=True) for r in range(3)]
    torch.manual_seed(5)
    net = jobs.Net()
    optimizer = adamw(net)
    link = tw.attach(net, "rotate", optimizer=optimizer)
    assert link.domain == "update" and link.world == 1
    link.load_state_dict(states)
    for name, p in net.named_parameters():
        residual = torch.stack([s["codec"]["residuals"][name]["residual"] for s in states]).mean(0)
        torch.testing.assert_close(p.detach().flatten(), states[0]["updates"]["shared"][name] - residual)
        square = torch.stack([s["updates"]["optimizers"][0][name]["exp_avg_sq"] for s in states]).mean(0)
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], square)
    jobs.train(net, 0, range(6, 8), optimizer)
    link.flush()
    torch.save({"link": link.state_dict(), "model": net.state_dict()}, f"{folder}/alone.pt")


def several_again(rank: int, folder: str) -> tuple[bool, bool, list[int]]:
    """Two ranks continue from the state of one process."""
    saved = torch.load(f"{folder}/alone.pt", weights_only=True)
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer)
    link.load_state_dict([saved["link"]])
    same = all(torch.equal(t, saved["model"][name]) for name, t in net.state_dict().items())
    none = all(not t["residual"].any() for t in link.codec.state_dict()["residuals"].values())
    jobs.train(model, rank, range(8, 12), optimizer)
    link.detach()
    return same, none, jobs.digest(net)


def test_one_process_continues_the_updates_of_several_and_the_reverse(cluster: Cluster, tmp_path: Any) -> None:
    cluster.run(saved, 3, "rotate", str(tmp_path))
    alone(str(tmp_path))
    (same, none, first), (_, _, second) = cluster.run(several_again, 2, str(tmp_path))
    assert same and none and first == second


def gathered(rank: int) -> tuple[float, float]:
    """The mean state that all ranks compute together, and the mean of what they hold."""
    _, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer)
    jobs.train(model, rank, range(4), optimizer)
    state = link.state_dict(gather=True)
    name = "layers.2.weight"
    mine = link.codec.residuals(name)["residual"].clone()
    dist.all_reduce(mine)
    apart = (state["codec"]["residuals"][name]["residual"] - mine / dist.get_world_size()).abs().max()
    assert state["updates"]["optimizers"][0][name]["exp_avg"].shape == (96, 96)
    link.detach()
    return float(apart), float(mine.abs().max())


def test_a_gathered_state_is_the_mean(cluster: Cluster) -> None:
    for apart, largest in cluster.run(gathered, 2):
        assert apart < 1e-6 and largest > 1e-4


def unevenly_gathered(rank: int) -> tuple[int, bool]:
    """Rank 1 has no optimizer state for the last layer, because it never had a gradient there."""
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, "rotate", optimizer=optimizer)
    for step in range(2):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if rank == 1:
            net.get_parameter("layers.6.weight").grad = None
        optimizer.step()
    state = link.state_dict(gather=True)
    found = state["updates"]["optimizers"][0]
    link.detach()
    return len(found), bool(found["layers.6.weight"]["exp_avg"].any())


def test_states_that_a_rank_lacks_are_gathered_from_the_others(cluster: Cluster) -> None:
    assert cluster.run(unevenly_gathered, 2) == [(8, True)] * 2


def reloaded(rank: int) -> list[bool]:
    """Weights that are loaded into an attached model become the shared ones."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, check_every=1)
    first = copy.deepcopy(net.state_dict())
    jobs.train(model, rank, range(4), optimizer)
    model.load_state_dict({f"module.{name}": t for name, t in first.items()})
    hook = attached_hook(net)
    assert hook is not None
    seen = [all(torch.equal(hook.updates.shared[name], t.flatten()) for name, t in first.items())]
    jobs.train(model, rank, range(4, 8), optimizer)
    link.detach()
    return seen


def test_loaded_weights_become_the_shared_ones(cluster: Cluster) -> None:
    assert cluster.run(reloaded, 2) == [[True]] * 2
