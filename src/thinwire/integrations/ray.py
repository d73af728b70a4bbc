"""Ray Train: `report` and `restore` keep each worker's link in Ray's checkpoints.

A training function of `TorchTrainer` attaches to the model that `prepare_model` returned, restores what an earlier
attempt has saved, and reports after some steps. When a worker dies, Ray starts all of them again.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import DamagedFileError
from thinwire.integrations.rank_files import load_ranks, load_state, save_ranks, save_state
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
            save_state(Path(folder) / _SHARED, {name: _state(value) for name, value in saved.items()})
        save_ranks(link, folder)  # Ray puts the files of all workers into one checkpoint
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({**metrics, **link.metrics()}, checkpoint=checkpoint)


def restore(link: Link, **objects: Any) -> dict[str, Any]:
    """Load the newest checkpoint, if there is one. Call it on all workers, with the names that `report` was given.

    Returns:
        The numbers and texts of the checkpoint, by name; {} at the first attempt.

    Raises:
        ValueError: the checkpoint is damaged, or lacks an object or a worker's link.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as folder:
        try:
            states = load_state(Path(folder) / _SHARED)
        except DamagedFileError as error:
            advice = "restore it from a copy, or resume from an earlier one"
            raise DamagedFileError(f"Ray's checkpoint {checkpoint.path} is damaged ({error}): {advice}") from error
        if missing := objects.keys() - states.keys():
            raise ValueError(
                f"the checkpoint has no {', '.join(sorted(missing))}: give restore the names that report was given, "
                f"which were {', '.join(sorted(states)) or 'none'}"
            )
        for name, value in objects.items():
            value.load_state_dict(states.pop(name))
        load_ranks(link, folder)
    return states


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
