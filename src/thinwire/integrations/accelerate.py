"""Accelerate: `attach` for prepared models; `save_state` and `load_state` then carry each rank's link too."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.integrations.rank_files import AttachedLinks
from thinwire.integrations.wrapped import attach_wrapped
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
    `load_state` reads it. Of several models attach all in the same order before loading.

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: the model as `prepare` returned it.
        optimizer: the optimizer, or several, as `prepare` returned them.
        codec: a density, a selection, a `Codec`, or the name of a preset, as `thinwire.attach` takes it.
        options: further options of `thinwire.attach`.
    """
    link = attach_wrapped(model, codec, "call accelerator.prepare first", optimizer=optimizer, **options)
    links: AttachedLinks | None = getattr(accelerator, "_thinwire_links", None)
    if links is None:
        links = accelerator._thinwire_links = AttachedLinks()
        _watch(accelerator, links)
    links.add(link)
    return link


def _watch(accelerator: Any, links: AttachedLinks) -> None:
    """Let an Accelerator save and load links.

    It tells its hooks the folder, on all ranks, before it saves or loads. Links are loaded after everything else, when
    all ranks have rank 0's optimizer. They are no registered objects: Accelerate refuses checkpoints without these.
    """
    found: list[Path] = []
    load = accelerator.load_state

    def saving(models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
        links.save(Path(folder) / "thinwire")

    def finding(models: list[torch.nn.Module], folder: str) -> None:
        found[:] = [Path(folder) / "thinwire"]

    @functools.wraps(load)
    def loading(*arguments: Any, **options: Any) -> Any:
        result = load(*arguments, **options)
        links.load(found[0])
        return result

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(finding)
    accelerator.load_state = loading
