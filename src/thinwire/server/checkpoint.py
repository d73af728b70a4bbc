"""Checkpoint: the server's state in one file, which is replaced as a whole or not at all.

The file holds the model, the optimizer, the step, which pushes of each worker have been accepted, and those of them
that wait for their steps. The workers' replicas are not saved: after a restart every worker pulls the parameters in
full.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors import DamagedFileError, ServerCheckpointError
from thinwire.files import WriteMonitor, open_checked, replace_file
from thinwire.server.protocol import AcceptedPushes

log = logging.getLogger("thinwire.server.checkpoint")
_VERSION, _FILE = 4, "server.pt"
# Version 3, of thinwire 0.2.0, has the same contents and no checksum.
_UNCHECKED = 3


class CheckpointWriter:
    """Writes the checkpoints of one server to a folder; if that fails, training goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._monitor = WriteMonitor(log.warning, "the server's checkpoint")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, figures: dict[str, Any]) -> bool:
        """Write a checkpoint and return whether that was possible; a failure is logged once, until it is mended.

        figures: cut, step, accepted, pending, lossy and extra.
        """
        path = self._folder / _FILE
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        def write() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda out: torch.save({"version": _VERSION, **states, **figures}, out), checksum=True)

        return self._monitor.attempt(path, write)


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint and check that it is as it was written; DamagedFileError if it is not."""
    with open_checked(path, required=False) as (file, checked):
        state: dict[str, Any] = torch.load(file, weights_only=True)
    if not checked and state["version"] > _UNCHECKED:
        raise DamagedFileError(f"it has lost the checksum that version {state['version']} has")
    return state


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, cut: int
) -> dict[str, Any] | None:
    """Load the model and the optimizer; return step, accepted steps and extra figures, or None without a file."""
    path = folder / _FILE
    try:
        if not path.exists():
            return None
        state = read_state(path)
        if state["version"] == _UNCHECKED:
            log.warning("the checkpoint %s has no checksum, because thinwire 0.2.0 wrote it: it is not verified", path)
        elif state["version"] != _VERSION:
            raise ValueError(f"it has version {state['version']}, this thinwire reads version {_VERSION}")
        if state["cut"] != cut:
            raise ValueError("the model was cut in other parts: serve it with the same codec and optimizer")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        figures = {"accepted": _accepted(state), "extra": dict(state["extra"])}
        pending = {"pending": state.get("pending", []), "lossy": bool(state.get("lossy"))}  # 0.2.0 saved none
        return {"step": int(state["step"]), **figures, **pending}
    except Exception as error:  # torch raises many kinds for files that are not its own
        reason, otherwise = " ".join(str(error).split())[:200], "choose another folder to start a new training"
        found, what = "cannot be used", "finish this training with the thinwire that wrote it"
        if isinstance(error, DamagedFileError):
            found, what = "is damaged", "restore it from a copy"
        text = f"the checkpoint {path} {found} ({reason}): {what}, or remove the file or {otherwise}"
        raise ServerCheckpointError(text) from error


def _accepted(state: dict[str, Any]) -> dict[str, AcceptedPushes]:
    """Return which pushes are accepted, by token. Version 0.2.0 saved steps without their sessions."""
    if "accepted" not in state:
        return {token: AcceptedPushes(0, list(steps), {}) for token, steps in state["accepted_steps"].items()}
    found = {token: AcceptedPushes.read(each) for token, each in state["accepted"].items()}
    return {token: each for token, each in found.items() if each is not None}


def stored_step(folder: Path) -> int:
    """Return the step of the checkpoint in a folder; 0 if there is none, or none that can be read (`load` says why)."""
    try:
        return int(read_state(folder / _FILE)["step"])
    except Exception:
        return 0
