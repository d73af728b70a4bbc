"""States of sharded models load into other numbers of replicas and of shards, and the mean residual stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks import sharded
from tests.hooks.sharded import CASES, mesh_of

# Replicas and shards, of the mesh that saves and of the one that loads.
MESHES = {
    "more replicas": ((2, 2), (3, 2)),
    "whole to shards": ((4, 1), (2, 2)),
    "more shards": ((2, 2), (2, 3)),
}
# Gradients, and updates by low-rank coordinates, whose bases fit one sharding only.
CODECS = {"gradient": 0.05, "update": None}
WAYS = ("gathered", "list", "checkpoint")


def _attach(domain: str, mesh: Any, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, tw.Link]:
    model = sharded.build(CASES["plain"], mesh["shard"], seed)
    if domain == "update":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, tw.attach(model, CODECS[domain], mesh=mesh, optimizer=optimizer)


def saved(rank: int, world: int, replicas: int, directory: str) -> dict[str, Any]:
    """Train five steps with each domain, save in three ways, and return the gathered states."""
    mesh, found = mesh_of(world, replicas), {}
    for domain in CODECS:
        model, optimizer, link = _attach(domain, mesh)
        sharded.train(model, optimizer, rank, range(5))
        found[domain] = link.state_dict(gather=True)
        save({"model": model.state_dict(), "link": link.sharded()}, checkpoint_id=f"{directory}/{domain}")
        torch.save(link.state_dict(), f"{directory}/{domain}-{rank}.pt")
        link.detach()
    return found


def loaded(
    rank: int, world: int, replicas: int, directory: str, gathered: dict[str, Any], files: int
) -> dict[tuple[str, str], tuple[dict[str, Any], int]]:
    """The gathered states of a mesh that has loaded them, and after two further steps the number of all steps."""
    mesh, found = mesh_of(world, replicas), {}
    for domain in CODECS:
        for way in WAYS:
            model, optimizer, link = _attach(domain, mesh, seed=1)
            state = {"model": model.state_dict()}
            rest = {"link": link.sharded(f"{directory}/{domain}")} if way == "checkpoint" else {}
            load({**state, **rest}, checkpoint_id=f"{directory}/{domain}")
            if domain == "gradient":
                model.load_state_dict(state["model"])
            if way == "list":
                parts = [f"{directory}/{domain}-{r}.pt" for r in range(files)]
                link.load_state_dict([torch.load(part, weights_only=True) for part in parts])
            elif way == "gathered":
                link.load_state_dict(gathered[domain])
            kept = link.state_dict(gather=True)
            sharded.train(model, optimizer, rank, range(5, 7))
            found[domain, way] = kept, link.step
            link.detach()
    return found


@pytest.mark.parametrize("meshes", MESHES)
def test_the_mean_residual_stays(cluster: Cluster, tmp_path: Path, meshes: str) -> None:
    (replicas, shards), (others, parts) = MESHES[meshes]
    world = replicas * shards
    before = cluster.run(saved, world, world, replicas, str(tmp_path))[0]
    results = cluster.run(loaded, others * parts, others * parts, others, str(tmp_path), before, world)
    for found in results:
        for (domain, way), (state, steps) in found.items():
            assert (state["step"], steps) == (5, 7), (domain, way)
            kept = before[domain]["codec"]["residuals"]
            assert float(kept["blocks.0.up.weight"]["residual"].abs().sum()) > 0
            _check_close(state["codec"]["residuals"], kept)
            if domain == "update":
                for key in ("shared", "optimizers"):
                    _check_close(state["updates"][key], before[domain]["updates"][key])


def through_one(rank: int, domain: str, directory: str) -> dict[str, list[dict[str, Any]]]:
    """The gathered states of two replicas, of one that continues them, of that two steps later, and of two again."""
    found: dict[str, list[dict[str, Any]]] = {}
    for way in WAYS:
        states: list[dict[str, Any]] = []
        for index, replicas in enumerate((2, 1, 2)):
            model, optimizer, link = _attach(domain, mesh_of(4, replicas))
            before = f"{directory}/{way}-{index - 1}"
            if way == "checkpoint" and index:
                load({"link": link.sharded(before)}, checkpoint_id=before)
            elif index:
                parts = [torch.load(f"{before}-{r}.pt", weights_only=True) for r in range(4)]
                link.load_state_dict(parts if way == "list" else states[-1])
            states += [link.state_dict(gather=True)] if index else []
            if index < 2:
                sharded.train(model, optimizer, rank, range(5, 7) if index else range(5))
                states.append(link.state_dict(gather=True))
                save({"link": link.sharded()}, checkpoint_id=f"{directory}/{way}-{index}")
                torch.save(link.state_dict(), f"{directory}/{way}-{index}-{rank}.pt")
            link.detach()
            torch.distributed.barrier()
        found[way] = states
    return found


@pytest.mark.parametrize("domain", CODECS)
def test_one_replica_continues_several_and_is_continued_by_several(
    cluster: Cluster, tmp_path: Path, domain: str
) -> None:
    for found in cluster.run(through_one, 4, domain, str(tmp_path)):
        for two, one, later, again in found.values():
            if domain == "gradient":
                _check_close(one["codec"]["residuals"], two["codec"]["residuals"])
                _check_close(later["codec"]["residuals"], two["codec"]["residuals"])
            else:  # what the replicas had not sent yet is applied
                for name, shared in two["updates"]["shared"].items():
                    residual = two["codec"]["residuals"][name]["residual"].view_as(shared)
                    _check_close(one["updates"]["shared"][name], shared - residual)
                _check_close(one["updates"]["optimizers"], two["updates"]["optimizers"])
                moments = later["updates"]["optimizers"][0]["blocks.0.up.weight"]
                assert float(moments["step"]) > 5.0
                _check_close(again["updates"]["shared"], later["updates"]["shared"])
                _check_close(again["updates"]["optimizers"], later["updates"]["optimizers"])
            _check_close(again["codec"]["residuals"], later["codec"]["residuals"])


def _check_close(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found.reshape(-1), expected.reshape(-1), rtol=1e-5, atol=1e-7)
    elif isinstance(expected, list):
        for each, other in zip(found, expected, strict=True):
            _check_close(each, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _check_close(found[key], value)
    else:
        assert found == expected
