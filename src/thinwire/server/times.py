"""Times of layers, given by hand or from a profile: how long each one computes and travels.

A profile is JSON, {"layers": [{"name", "forward", "backward", "transfer"}, ...]}, in seconds, first layer first.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import LogError


@dataclass(frozen=True)
class LayerTimes:
    """One layer's seconds: its forward and its backward pass, and its way over one worker's link, one way."""

    name: str
    forward: float
    backward: float
    transfer: float

    def __post_init__(self) -> None:
        for what in ("forward", "backward", "transfer"):
            seconds = getattr(self, what)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"the {what} time of the layer '{self.name}' must be 0 or more, not {seconds}.")


def write_profile(path: Path, layers: Sequence[LayerTimes]) -> None:
    """Write what a worker measured, in the order in which the forward pass uses the layers."""
    text = json.dumps({"layers": [asdict(layer) for layer in layers]}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise LogError(f"cannot write the profile {path} ({error.strerror}): choose another place.") from error


def read_profile(path: Path) -> tuple[LayerTimes, ...]:
    """Read a profile; whatever is wrong with it is one sentence that names the layer."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LogError(f"cannot read the profile {path}: {reason}.") from error
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise LogError(f"the profile {path} is not JSON ({error.msg} at line {error.lineno}).") from error
    layers = record.get("layers") if isinstance(record, dict) else None
    if not isinstance(layers, list) or not layers:
        raise LogError(f'the profile {path} has no layers: it must be {{"layers": [...]}} with one entry or more.')
    return tuple(_layer(entry, number, path) for number, entry in enumerate(layers))


def _layer(entry: Any, number: int, path: Path) -> LayerTimes:
    if not isinstance(entry, dict):
        raise LogError(f"the profile {path} is wrong at layer {number}: it is not an object.")
    times = {}
    for what in ("forward", "backward", "transfer"):
        value = entry.get(what)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise LogError(f"the profile {path} is wrong at layer {number}: '{what}' must be a number of seconds.")
        times[what] = float(value)
    try:
        return LayerTimes(str(entry.get("name", number)), **times)
    except ValueError as error:
        raise LogError(f"the profile {path} is wrong at layer {number}: {error}") from error
