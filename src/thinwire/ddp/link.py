"""Link: one attached model; owns its codec, its exchange, its counters and the thread that talks for it."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.ddp.buckets import Job, Opened, joined, without_gradient
from thinwire.ddp.diagnose import Examiner, agree_on_every
from thinwire.ddp.replicas import check_replicas, describe_failure
from thinwire.ddp.states import load_link_state, mean_link_state, without_strangers
from thinwire.ddp.stats import Counters, Stats
from thinwire.ddp.thread import BucketThread
from thinwire.ddp.units import UnitWatch
from thinwire.errors import LinkError
from thinwire.events import Diagnosis
from thinwire.exchange.base import Bucket, Exchange, Outcome
from thinwire.exchange.channel import Channel


class Link:
    """What `thinwire.attach` returns. Use it to save and restore the memory, to watch, and to detach."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        codec: Codec,
        exchange: Exchange,
        channel: Channel,
        *,
        why: str = "",
        check_every: int = 0,
        units: UnitWatch | None = None,
        on_detach: Callable[["Link"], None] = lambda link: None,
        on_step: Callable[[Codec, Counters], None] | None = None,
    ) -> None:
        self.codec = codec
        self.exchange = exchange
        self.why = why
        self.step = 0
        self.diagnoses: list[Diagnosis] = []
        self.units = units if units is not None else UnitWatch(parameters)
        self._parameters = parameters
        self._channel = channel
        self._check_every = check_every
        self._on_detach = on_detach
        self._on_step = on_step  # called by the link's thread, which may use the channel
        self._stats = Stats()
        self._examiner: Examiner | None = None
        self._outcomes: list[Outcome] = []
        self._spoiled = False  # whether the step under way will be skipped
        # Names exchanged together: so far in this step, in the one before, and when a loaded state was saved.
        self._groups_now: list[list[str]] = []
        self._groups_before: list[list[str]] = []
        self._resumed: list[list[str]] | None = None
        self._thread = BucketThread(self._run, self._describe)
        weakref.finalize(self, self._thread.end)

    def __repr__(self) -> str:
        total = sum(p.numel() for p in self._parameters.values())
        return (
            f"Link({total:,} parameters, {self.codec!r}, {self.exchange!r}, "
            f"rank {self._channel.rank} of {self._channel.world}, step {self.step})"
        )

    # The work, in the order of the buckets

    def submit(self, job: Job) -> torch.futures.Future[Any]:
        """Queue a bucket; the future's value is the buffer with the mean, or the error that stopped it."""
        return self._thread.submit(job)

    def _describe(self, error: Exception) -> LinkError:
        return describe_failure(error, self._channel, self.exchange.channels(), self.step)

    def _run(self, jobs: list[Job]) -> None:
        """One bucket, or small ones together; after a resumption a whole step, regrouped as it was when saved."""
        for job in jobs:
            job.ready()
        began = time.thread_time()
        if jobs[0].begins_step:
            self._begin_step(jobs[0])
        opened = [Opened(job) for job in jobs]
        gradients = joined([job.gradients for job in jobs])
        outs = joined([one.outs for one in opened])
        for names in self._groups(jobs):
            these = gradients if names == list(gradients) else {name: gradients[name] for name in names}
            self._mean(these, [outs[name] for name in names])
        for one in opened:
            self._spoiled |= one.close()
        self._stats.spent(time.thread_time() - began)
        if jobs[-1].last:
            self._end_step()

    def _begin_step(self, job: Job) -> None:
        self._outcomes.clear()
        self._groups_now.clear()
        self._spoiled = False
        if self._examiner is not None:
            self._examiner.begin_step(self.step)
        for name, factor in job.factors.items():
            self.codec.rescale(factor, [name])
        if self._check_every and self.step and self.step % self._check_every == 0:
            check_replicas(self._channel, self._parameters, self.step)

    def _groups(self, jobs: list[Job]) -> list[list[str]]:
        """The names that are exchanged together: all that are here, or the saved groups if they hold the same names."""
        groups = [[name for job in jobs for name in job.gradients]]
        saved, self._resumed = self._resumed, None
        self._thread.whole_steps = False
        if saved and sorted(chain(*saved)) == sorted(chain(*groups)):
            groups = saved
        self._groups_now += groups
        return groups

    def _mean(self, gradients: dict[str, Tensor], outs: list[Tensor]) -> None:
        # A parameter without a gradient took no part here: DDP may drop what we would send for it.
        hold = without_gradient(gradients)
        bucket, examiner = Bucket(gradients, outs, self.step, hold), self._examiner
        if examiner is not None:
            examiner.before(gradients)
        outcome = self.exchange.mean(bucket)
        if examiner is not None:
            held = {name: slots["residual"] for name in gradients if "residual" in (slots := self.codec.held(name))}
            examiner.after(bucket, self.exchange, outcome, held)
        if outcome.non_finite:
            self._spoiled = True
            for out in outs:
                out.fill_(torch.nan)
        self._outcomes.append(outcome)
        self._stats.note(outcome, gradients, hold)

    def _end_step(self) -> None:
        """A step with a non-finite gradient will be skipped by everybody: take back what it made known."""
        if self._spoiled:
            for outcome in self._outcomes:
                if outcome.undo is not None:
                    outcome.undo()
            self._stats.skipped += 1
        if self._examiner is not None:
            found = self._examiner.end_step(self.step, self.exchange.weight(), spoiled=self._spoiled)
            self.diagnoses += [found] if found is not None else []
        self._outcomes.clear()
        self._groups_before = list(self._groups_now)
        self.step += 1
        self._stats.end_step(self.exchange.channels())
        if self._on_step is not None:
            self._on_step(self.codec, self._stats.last)

    def passed(self, elements: int, volume: int) -> None:
        """Count a step whose gradients went by all-reduce, past the link; nothing is held back meanwhile."""
        self._stats.straight(elements, volume)
        self._stats.end_step(self.exchange.channels())
        self.step += 1
        if self._check_every and self.step % self._check_every == 0:
            check_replicas(self._channel, self._parameters, self.step)

    @property
    def last_step(self) -> Counters:
        """What the last step counted."""
        return self._stats.last

    def wait(self) -> None:
        """Return when no bucket is under way."""
        self._thread.wait()

    # For users

    def stats(self) -> dict[str, Any]:
        """Counters since attach and of the last step: bytes, entries, density, seconds; entries per parameter."""
        self.wait()
        return self._stats.report()

    def diagnose(self, every: int = 100) -> None:
        """Compare what travels with a dense exchange every so many steps; 0 ends it. Call it on all ranks.

        Figures go to the log (logger "thinwire", level INFO) and to `diagnoses`; docs/convergence.md explains them.
        """
        self.wait()
        agree_on_every(self._channel, every)
        self._examiner = self.codec.observer = Examiner(self._channel, every) if every else None

    def rescale(self, factor: float) -> None:
        """Multiply the memory when the unit of the gradients changes; see Codec.rescale."""
        self.wait()
        self.codec.rescale(factor)

    def detach(self) -> None:
        """Give the model back to DDP's own all-reduce. The memory stays readable through `state_dict`."""
        self.wait()
        self._on_detach(self)

    def __enter__(self) -> "Link":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def gathered(self) -> "GatheredLink":
        """The link as frameworks want it that save one file: `state_dict()` is the mean of all ranks'."""
        return GatheredLink(self)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """This rank's memory by parameter name; with `gather` the mean of all ranks' (call it on all of them).

        Plain tensors and numbers: save it with torch.save, load it with weights_only=True.
        """
        self.wait()
        state = {
            "version": 1,
            "world_size": self._channel.world,
            "rank": self._channel.rank,
            "weight": self.exchange.weight(),
            "step": self.step,
            "codec": self.codec.state_dict(),
            "exchange": {repr(self.exchange): self.exchange.state_dict()},
            "units": self.units.state_dict(),
            "buckets": self._groups_before,
        }
        if not gather:
            return state
        return mean_link_state(self._channel, state, self._parameters, self.codec.memory.slots)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], *, strict: bool = True) -> None:
        """Take over a saved state: this rank's own, a gathered one, or the list of all ranks'.

        With another number of workers than at saving, give a gathered state or all ranks' states: every rank
        then starts from their mean, so the mean residual is what it was. `strict=False` leaves out memories of
        parameters that are not in training here. Raises ValueError and changes nothing if the state does not fit.
        """
        self.wait()
        channel = self._channel
        known = state if strict else without_strangers(state, self._parameters)
        mine = load_link_state(known, channel.rank, channel.world, self.exchange.weight(), self._parameters)
        self.codec.load_state_dict(mine["codec"])
        self.exchange.load_state_dict(mine["exchange"].get(repr(self.exchange), {}))
        self.units.load_state_dict(mine["units"])
        self.step = int(mine["step"])
        # DDP begins with other buckets than it had: regrouping its first step makes it that of an unbroken run.
        self._resumed = [list(names) for names in mine["buckets"]] or None
        self._thread.whole_steps = self._resumed is not None


@dataclass(frozen=True)
class GatheredLink:
    """A link whose saved state is the same on every rank; `state_dict` is a collective: call it on all ranks."""

    link: Link

    def state_dict(self) -> dict[str, Any]:
        return self.link.state_dict(gather=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.link.load_state_dict(state)
