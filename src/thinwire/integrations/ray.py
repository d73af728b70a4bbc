"""Ray Train: `report` and `restore` keep each worker's link in Ray's checkpoints.

A training function of `TorchTrainer` attaches to the model that `prepare_model` returned, restores what an earlier
attempt has saved, and reports after some steps. When a worker dies, Ray starts all of them again.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thinwire.files import replace_file
from thinwire.integrations.rank_files import load_ranks, save_ranks
from thinwire.link.link import Link

_SHARED = "shared.pt"


def report(metrics: Mapping[str, Any], link: Link, **saved: Any) -> None:
    """Report metrics and a checkpoint to Ray. Call it on all workers.

    Args:
        metrics: figures of this step; the link's own are added.
        link: what `thinwire.attach` returned; every worker's is saved.
        saved: what rank 0 saves for all workers: objects with `state_dict`, and plain numbers or texts.
    """
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        if ray.train.get_context().get_world_rank() == 0:
            states = {name: _state(value) for name, value in saved.items()}
            replace_file(Path(folder) / _SHARED, lambda file: torch.save(states, file))
        save_ranks(link, folder)  # Ray puts the files of all workers into one checkpoint
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({**metrics, **link.metrics()}, checkpoint=checkpoint)


def restore(link: Link, **objects: Any) -> dict[str, Any]:
    """Load the newest checkpoint, if there is one. Call it on all workers, with the names that `report` was given.

    Returns:
        The numbers and texts of the checkpoint, by name; {} at the first attempt.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as folder:
        states = torch.load(Path(folder) / _SHARED, map_location="cpu", weights_only=True)
        for name, value in objects.items():
            value.load_state_dict(states.pop(name))
        load_ranks(link, folder)
    return dict(states)


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
