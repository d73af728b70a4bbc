"""Checkpoint: the server's state in one file, which is replaced as a whole or not at all.

The file holds the model, the optimizer, the step, and which pushes of each worker have been accepted. The workers'
replicas are not saved: after a restart every worker pulls the parameters in full.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors import ServerCheckpointError

log = logging.getLogger("thinwire.server")
_VERSION = 3


@dataclass(frozen=True)
class ServerCheckpoint:
    """The checkpoint of a server in a folder."""

    folder: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "server.pt"

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cut: int,
        step: int,
        accepted_steps: dict[str, list[int]],
        extra: dict[str, float],
    ) -> bool:
        """Write the checkpoint and return whether that was possible; if not, log why, and training goes on."""
        partial = self.path.with_suffix(".partial")
        state = {
            "version": _VERSION,
            "cut": cut,
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "accepted_steps": accepted_steps,
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
                "the server cannot write the checkpoint %s (%s) and continues without it: "
                "free some space or choose another folder",
                self.path,
                reason,
            )
            with contextlib.suppress(OSError):  # the folder itself may be missing
                partial.unlink(missing_ok=True)
            return False
        return True

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, cut: int) -> dict[str, Any] | None:
        """Load the model and the optimizer; return step, accepted steps and extra figures, or None without a file."""
        try:
            if not self.path.exists():
                return None
            state = torch.load(self.path, weights_only=True)
            if state["version"] != _VERSION:
                raise ValueError(f"it has version {state['version']}, this thinwire reads version {_VERSION}")
            if state["cut"] != cut:
                raise ValueError("the model was cut in other parts: serve it with the same codec and optimizer")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            figures = {name: dict(state[name]) for name in ("accepted_steps", "extra")}
            return {"step": int(state["step"]), **figures}
        except Exception as error:  # torch raises many kinds for files that are not its own
            reason = " ".join(str(error).split())[:200]
            raise ServerCheckpointError(
                f"the checkpoint {self.path} cannot be used ({reason}): finish this training with the thinwire that "
                "wrote it, or remove the file or choose another folder to start a new training"
            ) from error


def stored_step(folder: Path) -> int:
    """Return the step of the checkpoint in a folder; 0 if there is none, or none that can be read (`load` says why)."""
    try:
        return int(torch.load(folder / "server.pt", weights_only=True)["step"])
    except Exception:
        return 0
