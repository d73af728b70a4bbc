"""The adapters of Accelerate and Fabric with several models, with checkpoints of others, and used in a wrong order."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cluster import Cluster
from tests.integrations.frameworks import make, net
from tests.link import jobs


class Accelerated:
    """What a test does with Accelerate; a new object forgets models and links."""

    wrapped = "accelerator.prepare"

    def __init__(self) -> None:
        from accelerate import Accelerator

        from thinwire.integrations.accelerate import attach

        os.environ.update({"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
        self.owner: Any = Accelerator(cpu=True)
        self._attach: Any = attach

    def attach(self, *arguments: Any, **options: Any) -> Any:
        return self._attach(self.owner, *arguments, **options)

    def wrap(self, made: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return self.owner.prepare(made, optimizer)

    def save(self, path: str, models: list[Any]) -> None:
        self.owner.save_state(path)
        self.owner.wait_for_everyone()

    def load(self, path: str, models: list[Any]) -> None:
        self.owner.load_state(path)


class Fabricated(Accelerated):
    """What a test does with Fabric."""

    wrapped = "fabric.setup"

    def __init__(self) -> None:
        from lightning.fabric import Fabric

        from thinwire.integrations.lightning import attach

        self.owner = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        self.owner.launch()
        self._attach = attach

    def wrap(self, made: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return self.owner.setup(made, optimizer)

    def save(self, path: str, models: list[Any]) -> None:
        self.owner.save(path, {str(i): model for i, model in enumerate(models)})
        self.owner.barrier()

    def load(self, path: str, models: list[Any]) -> None:
        self.owner.load(path, {str(i): model for i, model in enumerate(models)})


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 4))


def step(framework: Accelerated, rank: int, model: Any, optimizer: Any) -> None:
    for index in range(3):
        x, y = jobs.batch(rank, index)
        optimizer.zero_grad()
        framework.owner.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def norm(link: Any) -> float:
    return float(link.stats()["residual_norm"])


def used(rank: int, kind: type[Accelerated], folder: str) -> dict[str, Any]:
    """Use the adapter in ways that a training script may."""
    found: dict[str, Any] = {}
    framework = kind()

    def refused(what: str, *arguments: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            framework.attach(*arguments)
        found[what] = str(caught.value)

    for name in ("sgd", "adamw"):
        made = net()
        refused(f"{name} too early", made, make(name, made), 0.05)
    refused("without the model", make("sgd", net()), 0.05)

    models = [framework.wrap(made, make("sgd", made)) for made in (net(), small())]
    framework.save(f"{folder}/plain", [model for model, _ in models])
    links = [framework.attach(*each, 0.05) for each in models]
    for each in models:
        step(framework, rank, *each)
    framework.save(f"{folder}/two", [model for model, _ in models])
    before = [norm(link) for link in links]
    framework.load(f"{folder}/plain", [model for model, _ in models])  # saved without thinwire, which the log says
    for each in models:
        step(framework, rank, *each)
    framework.load(f"{folder}/two", [model for model, _ in models])
    found["two"] = before == [norm(link) for link in links] and all(link.step == 3 for link in links)

    links[0].detach()
    again = framework.attach(*models[0], 0.05)
    framework.save(f"{folder}/again", [model for model, _ in models])
    framework.load(f"{folder}/again", [model for model, _ in models])
    for link in (again, links[1]):
        link.detach()
    framework.save(f"{folder}/detached", [model for model, _ in models])
    framework.load(f"{folder}/detached", [model for model, _ in models])
    return found


@pytest.mark.parametrize("kind", [Accelerated, Fabricated])
def test_an_adapter(tmp_path: Path, kind: type[Accelerated]) -> None:
    with contextlib.closing(Cluster()) as fresh:
        results = fresh.run(used, 2, kind, str(tmp_path), timeout=0)
    for found in results:
        for name in ("sgd", "adamw"):
            assert f"call {kind.wrapped} first" in found[f"{name} too early"]
        assert "a model is a torch.nn.Module, not" in found["without the model"]
        assert found["two"]
