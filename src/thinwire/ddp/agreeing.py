"""Agreeing: lets `Adaptive` know what exchanges cost and what the other ranks would send.

Every few steps the ranks of a link share a handful of numbers; in between nothing is added to a step.
"""

import statistics
import time
from collections.abc import Mapping

import numpy as np

from thinwire.codec.codec import Codec
from thinwire.ddp.probe import probe_network, share
from thinwire.ddp.stats import Counters
from thinwire.exchange.channel import Channel
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured

EVERY = 8  # steps between two agreements
_PROBES = (1e4, 1e5, 1e6)  # bytes of frames whose cost the first probe stands for


class Agreement:
    """Feeds one link's selection. All ranks have one, or none has."""

    def __init__(self, selection: Adaptive, channel: Channel, sizes: Mapping[str, int], *, scattered: bool) -> None:
        self._selection, self._channel, self._sizes = selection, channel, sizes
        self._elements = sum(sizes.values())
        self._seen: list[tuple[float, float, float]] = []  # period, exchange, entries
        self._ended: float | None = None
        if isinstance(selection.cost, Measured):
            network = probe_network(channel)
            for size in _PROBES:
                seconds = network.scatter(size) if scattered else network.gather(size)
                selection.cost.observe(8.0 * size, seconds)

    def end_step(self, codec: Codec, last: Counters) -> None:
        """Called when a step's last bucket is done, by the thread that talks for the link."""
        now = time.perf_counter()
        if self._ended is not None:
            self._seen.append((now - self._ended, last.exchange, float(last.entries)))
        if len(self._seen) >= EVERY:
            self._agree(codec)
        self._ended = time.perf_counter()

    def _agree(self, codec: Codec) -> None:
        medians = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        self._seen.clear()
        # A parameter's place is everybody's, whoever used it; who has no wish for it says 0.
        wishes = [codec.learned.get(name, {}).get("wish", 0.0) for name in self._sizes]
        everybody = share(self._channel, [*medians, *wishes])
        selection = self._selection
        if isinstance(selection.cost, Measured):
            # Who comes last waits for nobody: the shortest exchange is the network's own time.
            exchange = min(row[1] for row in everybody)
            entries = statistics.mean(row[2] for row in everybody)
            bits = float(selection.frame_bits(np.array([entries]), self._elements)[0])
            beside = max(max(row[0] for row in everybody) - exchange, 1e-6)
            selection.cost.observe(bits, exchange, beside=beside)
        if selection.agree is None:
            return
        for place, name in enumerate(self._sizes, start=3):
            wished = [row[place] for row in everybody if row[place] > 0.0]
            if wished and name in codec.learned:
                codec.learned[name]["agreed"] = selection.agreed(wished)
