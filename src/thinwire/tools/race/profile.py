"""Layer times of a worker: computing and transfer; the input of `thinwire simulate schedule`.

Forward times are measured around the modules, backward times between gradients that become ready, and transfer times
from the first byte of a push to the acknowledgement of its last byte.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import LogError
from thinwire.server.worker import Worker


@dataclass(frozen=True)
class LayerTimes:
    """One layer's times in seconds: forward pass, backward pass, and transfer over one worker's link, one way."""

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
    """Write layer times, in the order in which the forward pass uses the layers."""
    text = json.dumps({"layers": [asdict(layer) for layer in layers]}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise LogError(f"cannot write the profile {path} ({error.strerror}): choose another file.") from error


def read_profile(path: Path) -> tuple[LayerTimes, ...]:
    """Read a profile; LogError names the layer that is wrong."""
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
    try:
        if not isinstance(entry, dict):
            raise ValueError("it is not an object.")
        times: dict[str, Any] = {what: entry.get(what) for what in ("forward", "backward", "transfer")}
        for what, value in times.items():
            if type(value) not in (int, float):
                raise ValueError(f"'{what}' must be a number of seconds.")
        return LayerTimes(str(entry.get("name", number)), **{what: float(value) for what, value in times.items()})
    except ValueError as error:
        raise LogError(f"the profile {path} is wrong at layer {number}: {error}") from error


class Profiler:
    """Measures a worker's steps; `write` saves the medians of all but the first two steps."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._timings = worker, worker.timings
        self._timings.keep = True
        self._forward: list[dict[int, float]] = [{} for _ in worker.layers]  # by step
        self._begun = [0.0] * len(worker.layers)
        self._inside = [0] * len(worker.layers)  # nested modules of a layer that are being computed
        self._handles: list[Any] = []
        for i, name in ((i, name) for i, names in enumerate(worker.modules) for name in names):
            module = worker.model.get_submodule(name)
            # Registered after the worker's own hook, so that waiting for parameters is not counted as computing.
            self._handles.append(module.register_forward_pre_hook(lambda *_, i=i: self._begin(i)))
            self._handles.append(module.register_forward_hook(lambda *_, i=i: self._end(i)))

    def _begin(self, layer: int) -> None:
        if not self._inside[layer]:
            self._begun[layer] = time.monotonic()
        self._inside[layer] += 1

    def _end(self, layer: int) -> None:
        self._inside[layer] -= 1
        if self._inside[layer] == 0 and self._worker.model.training:  # evaluations are not part of a step
            step, spent = self._worker.clock, time.monotonic() - self._begun[layer]
            self._forward[layer][step] = self._forward[layer].get(step, 0.0) + spent

    def layers(self) -> list[LayerTimes]:
        """Return the times of all layers, in their order."""
        backward, transfer = self._backward(), self._transfer()
        return [
            LayerTimes(name, _median(list(self._forward[i].values())), _median(backward[i]), _median(transfer[i]))
            for i, name in enumerate(self._worker.layers)
        ]

    def write(self, path: Path) -> None:
        """Write the file that `thinwire simulate schedule --from` reads."""
        write_profile(path, self.layers())

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._timings.keep = False

    def _backward(self) -> list[list[float]]:
        """Return by layer the times from the gradient before to this one, in the order in which they became ready."""
        found: list[list[float]] = [[] for _ in self._forward]
        before: dict[int, float] = {}  # by step
        for when, layer, clock in self._timings.ready:
            if clock in before:
                found[layer].append(when - before[clock])
            before[clock] = when
        # The begin of the first backward pass is unknown, so its layer gets the mean of the others.
        known = [_median(times) for times in found if times]
        return [times or [statistics.mean(known)] for times in found] if known else found

    def _transfer(self) -> list[list[float]]:
        first = {(layer, clock): when for when, layer, clock in reversed(self._timings.pushes)}
        last = {(layer, clock): when for when, layer, clock in self._timings.acks}
        found: list[list[float]] = [[] for _ in self._forward]
        for (layer, clock), when in last.items():
            if (layer, clock) in first:
                found[layer].append(when - first[layer, clock])
        return found


def _median(times: list[float]) -> float:
    settled = times[2:] or times
    return statistics.median(settled) if settled else 0.0
