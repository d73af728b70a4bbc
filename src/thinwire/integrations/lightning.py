"""Lightning: a callback for the Trainer, and `attach` for Fabric. Each rank's link is saved beside the checkpoints."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from thinwire.integrations.rank_files import (
    AttachedLinks,
    load_ranks,
    local_folder,
    remove_ranks,
    save_ranks,
)
from thinwire.integrations.wrapped import attach_wrapped
from thinwire.link.link import Link


class ThinwireCallback(Callback):
    """Compresses what the ranks of a Trainer exchange: `Trainer(callbacks=[ThinwireCallback(0.01)])`.

    The link's figures go to the Trainer's loggers. Each rank writes its link into the folder `NAME.ckpt.thinwire`
    beside a checkpoint `NAME.ckpt`, and a resumed run continues where the saved one was, bit for bit.

    Args:
        codec: a density, a selection, a `Codec`, or the name of a preset, as `thinwire.attach` takes it.
        options: further options of `thinwire.attach`. The optimizers are the Trainer's.
    """

    def __init__(self, codec: Any = None, **options: Any) -> None:
        self._codec, self._options = codec, options
        self.link: Link | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model that the strategy has wrapped."""
        optimizers = self._options.get("optimizer", trainer.optimizers)
        options = {**self._options, "optimizer": optimizers}
        strategy = 'give the Trainer strategy="ddp"'
        self.link = attach_wrapped(trainer.strategy.model, self._codec, strategy, **options)
        _watch_trainer(trainer.strategy, self._saved)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load this rank's link, after the Trainer has loaded rank 0's optimizers on all ranks."""
        if trainer.ckpt_path is not None and self.link is not None:
            load_ranks(self.link, _folder(trainer.ckpt_path))

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """Log the link's figures as often as the Trainer logs."""
        due = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        if due and trainer.loggers and trainer.is_global_zero and self.link is not None:
            figures = self.link.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach; the link's state can still be saved."""
        if self.link is not None:
            self.link.detach()

    def _saved(self, path: Any) -> None:
        if self.link is not None:
            save_ranks(self.link, _folder(path))


def attach(
    fabric: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    codec: Any = None,
    **options: Any,
) -> Link:
    """Compress what the ranks of Fabric exchange. Call it after `fabric.setup`, on all ranks.

    From then on `fabric.save` also writes each rank's link, into the folder `PATH.thinwire`, and `fabric.load` with a
    state to restore reads it. Of several models attach all in the same order before loading.

    Args:
        fabric: the Fabric that has set up the model.
        model: the model as `fabric.setup` returned it.
        optimizer: the optimizer, or several, as `fabric.setup` returned them.
        codec: a density, a selection, a `Codec`, or the name of a preset, as `thinwire.attach` takes it.
        options: further options of `thinwire.attach`.
    """
    link = attach_wrapped(model, codec, "call fabric.setup first", optimizer=optimizer, **options)
    links: AttachedLinks | None = getattr(fabric.strategy, "_thinwire_links", None)
    if links is None:
        links = fabric.strategy._thinwire_links = AttachedLinks()
        _watch_fabric(fabric.strategy, links)
    links.add(link)
    return link


def _watch_fabric(strategy: Any, links: AttachedLinks) -> None:
    """Let a strategy of Fabric save and load links."""
    save, load = strategy.save_checkpoint, strategy.load_checkpoint

    @functools.wraps(save)
    def saving(path: Any, *rest: Any, **others: Any) -> Any:
        result = save(path, *rest, **others)
        links.save(_folder(path))
        return result

    @functools.wraps(load)
    def loading(path: Any, state: Any = None, *rest: Any, **others: Any) -> Any:
        result = load(path, state, *rest, **others)
        if state:
            links.load(_folder(path))
        return result

    strategy.save_checkpoint, strategy.load_checkpoint = saving, loading


def _folder(checkpoint: Any) -> Path:
    """Where the ranks' files of a checkpoint are; Lightning's `last.ckpt` may be a symbolic link to another one."""
    path = local_folder(checkpoint).resolve()
    return path.with_name(f"{path.name}.thinwire")


def _watch_trainer(strategy: Any, saved: Callable[[Any], None]) -> None:
    """Let a strategy save and remove the ranks' files with each checkpoint: callbacks are not told its path."""
    kind = type(strategy)

    def saving(checkpoint: Any, filepath: Any, *rest: Any, **others: Any) -> Any:
        result = kind.save_checkpoint(strategy, checkpoint, filepath, *rest, **others)
        saved(filepath)
        return result

    def removing(filepath: Any) -> Any:
        folder = _folder(filepath)  # before a symbolic link is removed
        result = kind.remove_checkpoint(strategy, filepath)
        remove_ranks(folder)
        return result

    strategy.save_checkpoint, strategy.remove_checkpoint = saving, removing
