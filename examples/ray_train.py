"""Ray Train: restore and report keep each worker's residual in Ray's checkpoints; a worker that dies is replaced.

python examples/ray_train.py /tmp/ray
"""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import thinwire
from task import make_data, make_net, report
from thinwire.integrations import ray as thinwire_ray


def train(config: dict[str, Any]) -> None:
    model = prepare_model(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = thinwire.attach(model, 0.01, optimizer=optimizer)
    saved = thinwire_ray.restore(link, model=model, optimizer=optimizer)
    x, y = make_data().tensors
    mine = slice(get_context().get_world_rank(), None, 2)
    for epoch in range(saved.get("epoch", 0), 4):
        for inputs, labels in zip(x[mine].split(16), y[mine].split(16), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        thinwire_ray.report({"epoch": epoch}, link, model=model, optimizer=optimizer, epoch=epoch + 1)
    report(model.module, link.step)


def main(directory: str) -> None:
    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}})
    run = RunConfig(storage_path=directory, failure_config=FailureConfig(max_failures=1))
    TorchTrainer(
        train, torch_config=TorchConfig("gloo"), scaling_config=ScalingConfig(num_workers=2), run_config=run
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
