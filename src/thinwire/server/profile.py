"""Profile: how long a worker's layers take to compute and to travel; the input of `thinwire simulate schedule`.

Forward times are taken around the modules, backward times between gradients that become ready, and transfer times
from the first byte of a push to the acknowledgement of its last.
"""

import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.server.times import LayerTimes, write_profile
from thinwire.server.worker import Worker


class Profiler:
    """Watches a worker's steps; `write` saves the medians of all but the first two."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pace = worker.pace
        self._pace.keep = True
        self._forward: list[dict[int, float]] = [{} for _ in worker.layers]  # by step
        self._begun = [0.0] * len(worker.layers)
        self._inside = [0] * len(worker.layers)  # modules of a layer that are at work, one in the other
        self._handles: list[Any] = []
        for i, name in ((i, name) for i, names in enumerate(worker.modules) for name in names):
            module = worker.model.get_submodule(name)
            # Registered after the worker's own hook, so that waiting for parameters is not computing.
            self._handles.append(module.register_forward_pre_hook(lambda *_, i=i: self._begin(i)))
            self._handles.append(module.register_forward_hook(lambda *_, i=i: self._end(i)))

    def _begin(self, layer: int) -> None:
        if not self._inside[layer]:
            self._begun[layer] = time.monotonic()
        self._inside[layer] += 1

    def _end(self, layer: int) -> None:
        self._inside[layer] -= 1
        if self._inside[layer] == 0 and self._worker.model.training:  # evaluations are no part of a step
            step, spent = self._worker.clock, time.monotonic() - self._begun[layer]
            self._forward[layer][step] = self._forward[layer].get(step, 0.0) + spent

    def layers(self) -> list[LayerTimes]:
        """In the order of the layers."""
        backward, transfer = self._backward(), self._transfer()
        return [
            LayerTimes(name, _median(list(self._forward[i].values())), _median(backward[i]), _median(transfer[i]))
            for i, name in enumerate(self._worker.layers)
        ]

    def write(self, path: Path) -> None:
        """As JSON that `thinwire simulate schedule --from` reads."""
        write_profile(path, self.layers())

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._pace.keep = False

    def _backward(self) -> list[list[float]]:
        """From one layer's gradient to the next's, in the order in which they became ready."""
        found: list[list[float]] = [[] for _ in self._forward]
        steps: dict[int, list[tuple[float, int]]] = {}
        for when, layer, clock in self._pace.ready:
            steps.setdefault(clock, []).append((when, layer))
        for events in steps.values():
            for (before, _), (after, layer) in pairwise(events):
                found[layer].append(after - before)
        # Nothing tells when the backward pass of the last layer began: take the mean of the others.
        known = [_median(times) for times in found if times]
        for times in found:
            if not times and known:
                times.append(statistics.mean(known))
        return found

    def _transfer(self) -> list[list[float]]:
        first: dict[tuple[int, int], float] = {}
        for when, layer, clock in self._pace.pushes:
            first.setdefault((layer, clock), when)
        last = {(layer, clock): when for when, layer, clock in self._pace.acks}
        found: list[list[float]] = [[] for _ in self._forward]
        for (layer, clock), when in last.items():
            if (layer, clock) in first:
                found[layer].append(when - first[layer, clock])
        return found


def _median(times: list[float]) -> float:
    settled = times[2:] or times
    return statistics.median(settled) if settled else 0.0
