"""Links in checkpoints of PyTorch, under a manager that saves and loads with the same objects, as torchtitan's does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as of
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks import sharded
from tests.hooks.sharded import CASES, mesh_of
from tests.link import jobs
from thinwire.link.shards import local_part

# Gradients; updates by low-rank coordinates; local steps, whose round of three the checkpoint after five steps breaks.
SETTINGS: dict[str, dict[str, Any]] = {
    "gradients": {"codec": 0.05},
    "updates": {},
    "rounds": {"codec": 0.05, "every": 3},
    "overlap": {"codec": 0.05, "every": 3, "overlap": True},
}


class ModelState:
    """torchtitan's ModelWrapper. Some versions of it read the model's state dict once and keep the tensors."""

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        self.model, self.keeps = model, keeps
        self.kept = self.read()

    def read(self) -> dict[str, Any]:
        return of.get_model_state_dict(self.model)

    def state_dict(self) -> dict[str, Any]:
        return self.kept if self.keeps else self.read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of.set_model_state_dict(self.model, state, options=of.StateDictOptions(strict=False))
        self.kept = self.read()


class OptimizerState:
    """torchtitan's OptimizersContainer, as a checkpoint sees it. Of all replicas' states DCP writes one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = of.StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return of.get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of.set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


class Run:
    """A model in training, and torchtitan's CheckpointManager with the lines of docs/guides/fsdp.md."""

    def __init__(self, setting: str, mesh: Any, *, seed: int = 0, keeps: bool = False) -> None:
        self.model = sharded.build(CASES["plain"], mesh["shard"], seed)
        made = torch.optim.SGD if setting == "gradients" else torch.optim.AdamW
        self.optimizer = made(self.model.parameters(), lr=0.01)
        self.link = tw.attach(self.model, mesh=mesh, optimizer=self.optimizer, **SETTINGS[setting])
        self.of_model, self.of_link = ModelState(self.model, keeps=keeps), self.link.sharded()
        self.others = {"optimizer": OptimizerState(self.model, self.optimizer), "thinwire": self.of_link}

    def train(self, rank: int, steps: range) -> dict[str, Tensor]:
        """Train, and return this rank's parameters and residuals."""
        sharded.train(self.model, self.optimizer, rank, steps)
        residuals = self.link.state_dict()["codec"]["residuals"]
        return {**sharded.parts_of(self.model), **{f"of {name}": t["residual"] for name, t in residuals.items()}}

    def save(self, path: str) -> None:
        save({**self.others, **self.of_model.state_dict()}, checkpoint_id=path)

    def load(self, path: str, *, named: bool = True) -> None:
        if named:
            self.of_link.load_from(path)
        load(state := {**self.others, **self.of_model.state_dict()}, checkpoint_id=path)
        self.of_model.load_state_dict(state)


def resumed(rank: int, setting: str, directory: str) -> dict[str, dict[str, Tensor]]:
    """Ten steps without a break, and from a checkpoint after five with the same objects and with new ones."""
    mesh, found = mesh_of(4), {}
    run = Run(setting, mesh)
    run.train(rank, range(5))
    run.save(f"{directory}/5")
    found["unbroken"] = run.train(rank, range(5, 10))
    run.load(f"{directory}/5")
    assert run.link.exchanges == (5 if setting in ("gradients", "updates") else 1)
    run.save(f"{directory}/again")
    found["the same objects"] = run.train(rank, range(5, 10))
    for name in ("again", "5") if setting in ("gradients", "updates") else ("again",):
        run.link.detach()
        run = Run(setting, mesh, seed=1)
        run.load(f"{directory}/{name}", named=name == "again")
        found[f"new objects, {name}"] = run.train(rank, range(5, 10))
    run.link.detach()
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_checkpoint_manager_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path, setting: str) -> None:
    for found in cluster.run(resumed, 4, setting, str(tmp_path)):
        unbroken = found.pop("unbroken")
        for way, others in found.items():
            assert others.keys() == unbroken.keys()
            assert not [name for name, tensor in unbroken.items() if not torch.equal(tensor, others[name])], way


def kept(rank: int) -> dict[str, bool]:
    """Whether a state dict that was read after attach shows the parameters of now."""
    mesh, found = mesh_of(4), {}
    for setting in ("gradients", "updates"):
        run = Run(setting, mesh, keeps=True)
        run.train(rank, range(2))
        shown = {name: local_part(t) for name, t in run.of_model.state_dict().items()}
        found[setting] = all(torch.equal(t, shown[name]) for name, t in sharded.parts_of(run.model).items())
        run.link.detach()
    return found


def test_in_the_update_domain_a_state_dict_is_a_copy_that_is_read_anew_to_save(cluster: Cluster) -> None:
    assert cluster.run(kept, 4) == [{"gradients": True, "updates": False}] * 4


def unmade(rank: int, directory: str) -> str:
    """Load an optimizer's state without the path into a link whose optimizer has none yet."""
    mesh = mesh_of(4)
    run = Run("updates", mesh)
    run.train(rank, range(2))
    save({"link": run.of_link}, checkpoint_id=directory)
    run.link.detach()
    run = Run("updates", mesh, seed=1)
    before = run.link.state_dict()["updates"]["shared"]
    with pytest.raises(ValueError) as caught:
        load({"link": run.of_link}, checkpoint_id=directory)
    assert all(torch.equal(t, before[name]) for name, t in run.link.state_dict()["updates"]["shared"].items())
    run.of_link.load_from(directory)
    load({"link": run.of_link}, checkpoint_id=directory)
    assert run.link.step == 2
    run.link.detach()
    return str(caught.value)


def test_what_a_new_link_cannot_ask_for_is_named(cluster: Cluster, tmp_path: Path) -> None:
    for message in cluster.run(unmade, 4, str(tmp_path)):
        assert "'optimizers', 0, " in message and "link.sharded(path), or load_from(path)" in message


def of_ddp(rank: int, directory: str) -> list[list[int]]:
    """What ten steps of DDP reach: without a break, and from a checkpoint after five, whose path is given or not."""
    reached = []
    for way in ("unbroken", "without the path", "with the path"):
        model = jobs.make(seed=int(way != "unbroken"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        link = tw.attach(model, 0.05, optimizer=optimizer)
        weights = model.state_dict()
        state = {"model": weights, "link": link.sharded(directory if way == "with the path" else None)}
        if way == "unbroken":
            jobs.train(model, rank, range(5), optimizer)
            save(state, checkpoint_id=directory)
        else:
            load(state, checkpoint_id=directory)
            model.load_state_dict(weights)
        assert link.step == 5
        jobs.train(model, rank, range(5, 10), optimizer)
        reached.append(jobs.digest(model))
    return reached


def test_ddp_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    for unbroken, *others in cluster.run(of_ddp, 2, str(tmp_path)):
        assert others == [unbroken] * 2
