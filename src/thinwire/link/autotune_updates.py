"""UpdateTuner: "auto" for updates. It measures some steps and the network, then chooses local steps and share together.

The first steps exchange every step with the preset "update". Then all ranks forecast every preset of updates and take
the first that hides the network. The choice is part of the link's state, so that a resumed run continues with it. The
domain is chosen earlier, at attach: gradients or updates are exchanged for the whole run.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from thinwire.exchange.base import Exchange
from thinwire.exchange.channel import Channel, share
from thinwire.exchange.gather import Gather
from thinwire.exchange.low_rank import LowRankMean
from thinwire.exchange.scatter_reduce import ScatterReduce
from thinwire.link.autotune import MEASURED, WARM, probe_network, update_seconds
from thinwire.link.link import Link
from thinwire.link.rounds import Rounds
from thinwire.link.updates import Updates
from thinwire.tune.forecast import (
    EVERY,
    CodecTimes,
    Network,
    Workload,
    decide_update,
    dense_instead,
    update_bytes,
    update_settings,
)
from thinwire.tune.presets import resolve_codec

_log = logging.getLogger("thinwire")

FIRST = "update"  # the preset of the first steps


class UpdateTuner:
    """Tunes one link that exchanges updates. All ranks call it at the same steps, and decide alike."""

    probe: Callable[[Channel, int | None], Network] = staticmethod(probe_network)  # tests replace it

    def __init__(self, link: Link, updates: Updates) -> None:
        updates.use = self.use
        self._link, self._updates = link, updates
        self._settings = update_settings(link.world)
        self._steps = 0
        self._ended: float | None = None
        self._compute: list[float] = []  # seconds of steps without their exchange

    def end_step(self, exchanged: float) -> None:
        """Count a step, of which the exchange took so many seconds; decide after a few. Nothing is under way then."""
        now = time.perf_counter()
        if self._updates.setting:
            return
        if self._ended is not None and self._steps >= WARM:
            self._compute.append(max(now - self._ended - exchanged, 1e-6))
        self._steps += 1
        if len(self._compute) >= MEASURED:
            self._link.collective(self._decide)
        self._ended = time.perf_counter()

    def use(self, name: str) -> None:
        """Continue with a preset, or if none is named, with that of the first steps until enough are measured.

        The residuals stay. Call it on all ranks, when nothing is under way.
        """
        if name not in ("", *EVERY):
            raise ValueError(f'the state was saved with the setting {name!r}, which "auto" does not know')
        before, self._updates.setting = self._updates.setting, name
        self._compute.clear()
        self._steps, self._ended = 0, None
        if (name or FIRST) != (before or FIRST):
            self._apply(name or FIRST)

    def _apply(self, name: str) -> None:
        link, updates, preset = self._link, self._updates, resolve_codec(name, self._link.world)
        inner: Exchange = Gather() if link.world <= 2 else ScatterReduce()
        exchange = LowRankMean(inner, {n: p.shape for n, p in updates.parameters.items()})
        link.codec.selection, link.codec.values = preset.selection, preset.values
        sizes = {n: p.numel() for n, p in updates.parameters.items()}
        link.collective(lambda channel: exchange.setup(channel, link.codec, sizes, lambda members: []))
        link.use_exchange(exchange, preset.selection)
        updates.rounds = Rounds(EVERY[name], updates.rounds.outer, overlap=EVERY[name] > 1)

    def _decide(self, channel: Channel) -> None:
        elements = sum(p.numel() for p in self._updates.parameters.values())
        network = self.probe(channel, elements)
        times = [
            t for s in self._settings for t in update_seconds(resolve_codec(s.name, channel.world), self._tensors())
        ]
        rows = share(channel, [statistics.median(self._compute), *times])
        # Rounds end together: the slowest rank counts.
        compute, *slowest = (max(column) for column in zip(*rows, strict=True))
        work = self._workload(compute, slowest, elements)
        chosen, why = decide_update(work, network, self._settings)
        width = max(p.element_size() for p in self._updates.parameters.values())
        # The domain was chosen before the time of a step was known, and a link keeps it: the user is told.
        if advice := dense_instead(work, network, self._settings, width):
            why = f"{why}; {advice}"
        self._link.why = why
        if channel.rank == 0:
            _log.info("auto, step %d: %s", self._link.step, why)
        self.use(chosen.name)

    def _tensors(self) -> Mapping[str, Tensor]:
        updates = self._updates
        return {name: updates.shared[name].view(p.shape) for name, p in updates.parameters.items()}

    def _workload(self, compute: float, times: list[float], elements: int) -> Workload:
        codecs = {
            setting.name: CodecTimes(times[2 * i], times[2 * i + 1], update_bytes(setting, elements))
            for i, setting in enumerate(self._settings)
        }
        return Workload(compute, (elements,), (0.0,), 0.0, 0.0, codecs=codecs)
