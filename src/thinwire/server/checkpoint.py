"""Checkpoint: the server's state in one file, which is replaced as a whole or not at all.

The file holds the model, the optimizer, the step, and which pushes of each worker have been accepted. The workers'
replicas are not saved: after a restart every worker pulls the parameters in full.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors import ServerCheckpointError

log = logging.getLogger("thinwire.server")
_VERSION, _FILE = 3, "server.pt"


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, figures: dict[str, Any]) -> bool:
    """Write the checkpoint and return whether that was possible; if not, log why, and training goes on.

    figures: cut, step, accepted_steps and extra.
    """
    path, partial = folder / _FILE, folder / "server.partial"
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save({"version": _VERSION, **states, **figures}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        advice = "continues without it: free some space or choose another folder"
        log.warning("the server cannot write the checkpoint %s (%s) and %s", path, reason, advice)
        with contextlib.suppress(OSError):  # the folder itself may be missing
            partial.unlink(missing_ok=True)
        return False
    return True


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, cut: int
) -> dict[str, Any] | None:
    """Load the model and the optimizer; return step, accepted steps and extra figures, or None without a file."""
    path = folder / _FILE
    try:
        if not path.exists():
            return None
        state = torch.load(path, weights_only=True)
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
            f"the checkpoint {path} cannot be used ({reason}): finish this training with the thinwire that "
            "wrote it, or remove the file or choose another folder to start a new training"
        ) from error


def stored_step(folder: Path) -> int:
    """Return the step of the checkpoint in a folder; 0 if there is none, or none that can be read (`load` says why)."""
    try:
        return int(torch.load(folder / _FILE, weights_only=True)["step"])
    except Exception:
        return 0
