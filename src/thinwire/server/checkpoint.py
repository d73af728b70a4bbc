"""Store: the server's checkpoint, written whole or not at all.

It holds what cannot be had again: model, optimizer, clocks, and which pushes have been counted. What the server holds
back for its workers need not be saved: they come back for the full parameters, which leaves nothing held back.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors import ThinwireError

log = logging.getLogger("thinwire.server")
_VERSION = 2


class StoreError(ThinwireError):
    """A checkpoint cannot be used."""


@dataclass(frozen=True)
class Store:
    """One file in a folder."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "server.pt"

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cut: int,
        step: int,
        counted: dict[str, list[int]],
        extra: dict[str, float],
    ) -> bool:
        """Write a checkpoint; a full disk or the like is reported, and training goes on."""
        partial = self.path.with_suffix(".partial")
        state = {
            "version": _VERSION,
            "cut": cut,
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "counted": counted,
            "extra": extra,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            log.warning(
                "cannot write the checkpoint %s (%s): training goes on without it; make room or choose another folder",
                self.path,
                reason,
            )
            with contextlib.suppress(OSError):  # nor may there be a way to it
                partial.unlink(missing_ok=True)
            return False
        return True

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, cut: int) -> dict[str, Any] | None:
        """Take over the checkpoint if there is one; returns its step, counted pushes and extra figures."""
        try:
            if not self.path.exists():
                return None
            state = torch.load(self.path, weights_only=True)
            if state["version"] != _VERSION:
                raise ValueError(f"it has version {state['version']}, this thinwire reads {_VERSION}")
            if state["cut"] != cut:
                raise ValueError("the model was cut in other parts: serve it with the same codec and optimizer")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return {"step": int(state["step"]), "counted": dict(state["counted"]), "extra": dict(state["extra"])}
        except Exception as error:  # torch raises many kinds for files that are not its own
            reason = " ".join(str(error).split())[:200]
            raise StoreError(
                f"the checkpoint {self.path} cannot be used ({reason}): remove it or choose another folder"
            ) from error


def stored_step(folder: Path) -> int:
    """The step of the checkpoint in a folder; 0 if there is none, or none that can be read (`load` says why)."""
    try:
        return int(torch.load(folder / "server.pt", weights_only=True)["step"])
    except Exception:
        return 0
