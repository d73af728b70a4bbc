"""Transformers: a callback for the Trainer, which saves each rank's link in the Trainer's checkpoints."""

import functools
import gc
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from thinwire.integrations.rank_files import load_ranks, save_ranks
from thinwire.integrations.wrapped import attach_wrapped
from thinwire.link.link import Link


class ThinwireCallback(TrainerCallback):
    """Compresses what the ranks of a Trainer exchange: `Trainer(callbacks=[ThinwireCallback(0.01)])`.

    The link's figures are logged with the loss. Each rank writes its link into the folder `thinwire` of a checkpoint,
    and `resume_from_checkpoint` continues where the saved run was, bit for bit.

    Args:
        codec: a density, a selection, a `Codec`, or the name of a preset, as `thinwire.attach` takes it.
        options: further options of `thinwire.attach`. The optimizer is the Trainer's.
    """

    def __init__(self, codec: Any = None, **options: Any) -> None:
        self._codec, self._options = codec, options
        self._trainer: Any = None
        self._resumed: str | None = None
        self.link: Link | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Find the Trainer, and note from which checkpoint it is going to resume."""
        self._find_trainer()
        train, get_last = self._trainer.train, cast(Any, get_last_checkpoint)

        @functools.wraps(train)
        def training(resume_from_checkpoint: Any = None, *rest: Any, **others: Any) -> Any:
            newest = resume_from_checkpoint is True
            self._resumed = (get_last(args.output_dir) if newest else resume_from_checkpoint) or None
            return train(resume_from_checkpoint, *rest, **others)

        self._trainer.train = training

    def _find_trainer(self) -> None:
        """A Trainer gives its callbacks the model without DDP's wrapper, and no other way to find that."""
        owners = (o for o in gc.get_objects() if issubclass(type(o), Trainer))
        self._trainer = next(o for o in owners if self in o.callback_handler.callbacks)
        callbacks = self._trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))  # before those that write logs

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Attach to the wrapped model, and load this rank's link if the Trainer has resumed."""
        if self._trainer is None:  # added to a Trainer that existed before
            self._find_trainer()
            self._resumed = f"{args.output_dir}/checkpoint-{state.global_step}" if state.global_step else None
        model, options = self._trainer.model_wrapped, {"optimizer": optimizer, **self._options}
        self.link = attach_wrapped(model, self._codec, "let the Trainer use DDP", **options)
        if self._resumed is not None:
            load_ranks(self.link, Path(self._resumed) / "thinwire")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save this rank's link."""
        if self.link is not None:
            save_ranks(self.link, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "thinwire")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the link's figures to what is logged with the loss."""
        if self.link is not None and logs is not None and "loss" in logs and state.is_world_process_zero:
            logs.update(self.link.metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach."""
        if self.link is not None:
            self.link.detach()
