"""Accelerate: `attach` for prepared models; `save_state` and `load_state` then carry each rank's link too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.hooks.attach import attach as attach_model
from thinwire.integrations.rank_files import load_ranks, save_ranks
from thinwire.link.link import Link


def attach(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    codec: Any = None,
    **options: Any,
) -> Link:
    """Compress what the ranks of an Accelerator exchange. Call it after `accelerator.prepare`, on all ranks.

    From then on `save_state` also writes each rank's link into the folder `thinwire` of the checkpoint, and
    `load_state` reads it.

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: the model as `prepare` returned it.
        optimizer: the optimizer, or several, as `prepare` returned them.
        codec: a density, a selection, a `Codec`, or the name of a preset, as `thinwire.attach` takes it.
        options: further options of `thinwire.attach`.
    """
    link = attach_model(model, codec, optimizer=optimizer, **options)
    checkpoint = AcceleratedLink(link)
    accelerator.register_save_state_pre_hook(checkpoint.saving)
    accelerator.register_load_state_pre_hook(checkpoint.loading)
    accelerator.register_for_checkpointing(checkpoint)
    return link


class AcceleratedLink:
    """A link in the checkpoints of an Accelerator.

    Accelerate tells its hooks the folder, on all ranks, before it saves or loads. Registered objects are loaded last,
    when all ranks have rank 0's optimizer: then each rank reads its own file.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._folder: Path | None = None

    def saving(self, models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
        """Write this rank's link."""
        save_ranks(self._link, Path(folder) / "thinwire")

    def loading(self, models: list[torch.nn.Module], folder: str) -> None:
        """Note where the link will be loaded from."""
        self._folder = Path(folder) / "thinwire"

    def state_dict(self) -> dict[str, int]:
        """What Accelerate saves for all ranks: the step, to look at."""
        return {"step": self._link.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Read this rank's link."""
        assert self._folder is not None
        load_ranks(self._link, self._folder)
