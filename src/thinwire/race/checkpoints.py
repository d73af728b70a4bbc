"""Checkpoints: model, optimizer and every rank's memory, written whole or not at all.

Rank 0 writes the model, each rank its own link; a checkpoint counts when all of them are in place.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.ddp.link import Link
from thinwire.errors import ThinwireError


class CheckpointError(ThinwireError):
    """A checkpoint cannot be read or written."""


def save_whole(value: dict[str, Any], path: Path) -> None:
    """Write a file under another name first, so that a crash leaves the old one."""
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    os.replace(partial, path)


def open_folder(folder: Path) -> None:
    """Make the folder, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise CheckpointError(f"cannot write checkpoints to {folder} ({reason}): choose another folder") from error


class Checkpoint:
    """The files of one training in a folder."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link | None) -> None:
        self.folder, self._model, self._optimizer, self._link = folder, model, optimizer, link
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        open_folder(folder)

    def save(self, step: int, wall: float) -> None:
        """Called on all ranks at the same step; the one before is forgotten when this one is complete."""
        place = self.folder / f"step-{step:08d}"
        place.mkdir(exist_ok=True)
        if self._link is not None:
            save_whole(self._link.state_dict(), place / f"link-{self._rank}.pt")
        dist.barrier()
        if self._rank == 0:
            state = {
                "step": step,
                "wall": wall,
                "world": self._world,
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            }
            save_whole(state, place / "model.pt")
            self._forget(place)

    def _forget(self, newest: Path) -> None:
        for old in self.folder.glob("step-*"):
            if old.name < newest.name:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()

    def _agree(self, step: int) -> None:
        """Ranks that went on from different checkpoints would train different models without knowing."""
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world)]
        dist.all_gather(steps, torch.tensor([step]))
        for rank, other in enumerate(map(int, steps)):
            if other != int(steps[0]):
                raise CheckpointError(
                    f"rank 0 finds step {int(steps[0])} in {self.folder}, rank {rank} step {other}: "
                    "checkpoints need a folder that all machines share"
                )

    def _check_rates(self, saved: dict[str, Any]) -> None:
        """The saved optimizer's settings would silently win over those of the command line."""
        for now, before in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            for name in ("lr", "momentum"):
                if name in now and name in before and now[name] != before[name]:
                    raise CheckpointError(
                        f"the checkpoint in {self.folder} was trained with {name} {before[name]:g}, not {now[name]:g}: "
                        "go on with the same, or start anew in another folder"
                    )

    def load(self) -> tuple[int, float]:
        """Take over the newest complete checkpoint; returns its step and the seconds trained. (0, 0) if none."""
        found = sorted(p.parent for p in self.folder.glob("step-*/model.pt"))
        self._agree(int(found[-1].name.removeprefix("step-")) if found else 0)
        if not found:
            return 0, 0.0
        try:
            state = torch.load(found[-1] / "model.pt", weights_only=True)
            self._model.load_state_dict(state["model"])
            self._check_rates(state["optimizer"])
            self._optimizer.load_state_dict(state["optimizer"])
            if self._link is not None:
                links = [torch.load(found[-1] / f"link-{rank}.pt", weights_only=True) for rank in range(state["world"])]
                self._link.load_state_dict(links)
        except CheckpointError:
            raise
        except Exception as error:  # torch raises many kinds for files that are not its own
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"the checkpoint {found[-1]} cannot be used ({reason}): remove it or start anew"
            ) from error
        return int(state["step"]), float(state["wall"])
