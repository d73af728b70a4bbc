"""A training with Ray Train, run as a program: a worker may be killed by `ray.kill`, and Ray starts all again.

python -m tests.integrations.ray_run FOLDER sgd|adamw KILL_AT
"""

import json
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]


def start() -> None:
    """Start Ray's processes on the loopback interface, with few resources."""
    import ray

    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=80 << 20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'examples'}", "OMP_NUM_THREADS": "1"}},
    )


def train(config: dict[str, Any]) -> None:
    """64 steps with a checkpoint after every 16; each worker writes what it has reached."""
    import ray
    import torch
    from ray.train import get_context
    from ray.train.torch import prepare_model
    from torch import nn

    import thinwire
    from tests.integrations.frameworks import data, make, net, reached
    from thinwire.integrations import ray as thinwire_ray

    made, rank = net(), get_context().get_world_rank()
    optimizer = make(config["optimizer"], made)
    model = prepare_model(made)
    link = thinwire.attach(model, 0.05, optimizer=optimizer)
    saved = thinwire_ray.restore(link, model=model, optimizer=optimizer)
    x, y = (tensor[rank::2].split(16) for tensor in data().tensors)
    for epoch in range(saved.get("epoch", 0), 4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).tolist()
        for batch in order:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if link.step == config["kill_at"] and rank == 1 and not Path(config["folder"], "killed").exists():
                Path(config["folder"], "killed").touch()
                ray.kill(ray.get_runtime_context().current_actor)
        thinwire_ray.report({"epoch": epoch}, link, model=model, optimizer=optimizer, epoch=epoch + 1)
    Path(config["folder"], f"{rank}.json").write_text(json.dumps([reached(made, link), saved.get("epoch", 0)]))


def main(folder: str, optimizer: str, kill_at: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tests.integrations.frameworks import FIGURES

    start()
    config = {"folder": folder, "optimizer": optimizer, "kill_at": int(kill_at)}
    run = RunConfig(storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=1))
    result = TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig("gloo", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    ).fit()
    assert result.metrics is not None and result.metrics.keys() >= FIGURES
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
