"""Link: one attached model; owns its codec, its exchange, its counters and the thread that talks for it."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.encode import BucketViews
from thinwire.codec.vectors import array_args
from thinwire.errors import LinkError
from thinwire.exchange.base import Bucket, Exchange, Outcome
from thinwire.exchange.channel import Channel
from thinwire.link.diagnosis import Diagnosis
from thinwire.link.diagnostics import Examiner, agree_on_every
from thinwire.link.replicas import check_replicas, describe_failure
from thinwire.link.rescale import UnitWatch
from thinwire.link.state import load_link_state, mean_link_state, without_strangers


@dataclass(frozen=True)
class Job:
    """One bucket on its way: its gradients are views of the buffer, which receives the mean."""

    buffer: Tensor
    gradients: dict[str, Tensor]
    last: bool
    begins_step: bool
    factors: dict[str, float] = field(default_factory=dict)  # by which memories are rescaled before the step
    ready: Callable[[], None] = lambda: None


class Opened:
    """A bucket's flat float32 views on the CPU, which receive the mean; its own memory where that is possible."""

    def __init__(self, job: Job) -> None:
        self._buffer = job.buffer
        self._direct = job.buffer.device.type == "cpu" and job.buffer.dtype == torch.float32
        self.outs = job.gradients
        if not self._direct:
            self._flat = torch.empty(job.buffer.numel())
            sizes = [g.numel() for g in job.gradients.values()]
            self.outs = dict(zip(job.gradients, torch.split(self._flat, sizes), strict=True))

    def close(self) -> bool:
        """Hand the mean to DDP; whether it outgrew the bucket's type, on which all ranks agree, bits being the same."""
        if self._direct:
            return False
        self._buffer.copy_(self._flat)
        if self._buffer.is_cuda:
            torch.cuda.current_stream(self._buffer.device).synchronize()
        return self._buffer.dtype == torch.float16 and not bool(self._buffer.isfinite().all())


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All of them together; one alone stays the object that it is."""
    return parts[0] if len(parts) == 1 else {name: t for part in parts for name, t in part.items()}


def without_gradient(gradients: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of those gradients that hold nothing at all."""
    arrays = gradients.args if isinstance(gradients, BucketViews) else None
    if arrays is None and all(g.device.type == "cpu" and g.is_contiguous() for g in gradients.values()):
        arrays = [array_args(g) for g in gradients.values()]
    if arrays is None:
        return frozenset(name for name, g in gradients.items() if not g.any())
    empty = _native.all_zero(arrays)
    return frozenset(list(gradients)[i] for i in empty) if empty else _NOBODY


_NOBODY: frozenset[str] = frozenset()


@dataclass
class Counters:
    """Sums over buckets."""

    bytes_sent: int = 0
    bytes_received: int = 0
    entries: int = 0
    elements: int = 0
    compress: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0
    cpu: float = 0.0  # seconds that the link's thread computed, collectives not counted

    def report(self) -> dict[str, Any]:
        return {**vars(self), "density": self.entries / self.elements if self.elements else 0.0}


@dataclass
class Stats:
    """Counters of the whole run, of the last step and of the step under way."""

    steps: int = 0
    skipped: int = 0
    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    per_parameter: dict[str, int] = field(default_factory=dict)
    _now: Counters = field(default_factory=Counters)
    _seen: dict[Channel, tuple[int, int, float, float]] = field(default_factory=dict)

    def note(self, outcome: Outcome, gradients: Mapping[str, Tensor], hold: frozenset[str]) -> None:
        """One bucket."""
        now = self._now
        now.entries += sum(outcome.counts.values())
        now.elements += sum(g.numel() for name, g in gradients.items() if name not in hold)
        now.compress += outcome.compress
        now.decode += outcome.decode
        self.per_parameter.update(outcome.counts)

    def straight(self, elements: int, volume: int) -> None:
        """A step whose gradients went by all-reduce, past the link."""
        self._now.entries += elements
        self._now.elements += elements
        self._now.bytes_sent += volume
        self._now.bytes_received += volume

    def spent(self, cpu: float) -> None:
        """Seconds that the link's thread computed, collectives included; they are taken off in the end."""
        self._now.cpu += cpu

    def end_step(self, channels: Sequence[Channel]) -> None:
        """The step's buckets are all counted."""
        now = self._now
        for channel in channels:  # another exchange may have others than the last one had
            sent, received, seconds, cpu = self._seen.get(channel, (0, 0, 0.0, 0.0))
            now.bytes_sent += channel.sent - sent
            now.bytes_received += channel.received - received
            now.exchange += channel.seconds - seconds
            now.cpu -= channel.cpu - cpu
            self._seen[channel] = channel.sent, channel.received, channel.seconds, channel.cpu
        for name, value in vars(now).items():
            setattr(self.total, name, getattr(self.total, name) + value)
        self.last, self._now = now, Counters()
        self.steps += 1

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            **self.total.report(),
            "last_step": self.last.report(),
            "per_parameter": dict(self.per_parameter),
        }


Item = tuple[Job, "torch.futures.Future[Any]"]

# Elements below which a bucket waits for the next: a collective costs more than the overlap of so little gains.
SMALL = 1 << 19


class BucketThread:
    """Calls its owner's methods: `run` with buckets, and `describe` if that fails, once and for all.

    It must not keep an owner alive that nobody holds any more: `end` is for the owner's finalizer.
    """

    def __init__(self, run: Callable[[list[Job]], None], describe: Callable[[Exception], LinkError]) -> None:
        self._run, self._describe = weakref.WeakMethod(run), weakref.WeakMethod(describe)
        self.whole_steps = False  # whether all buckets of a step wait for its last
        self._waiting: list[Item] = []
        self._failure: LinkError | None = None
        self._jobs: queue.Queue[Item | None] = queue.Queue()
        threading.Thread(target=self._work, name="thinwire-link", daemon=True).start()

    def submit(self, job: Job) -> torch.futures.Future[Any]:
        """Queue a bucket; the future's value is the buffer with the mean, or the error that stopped it."""
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[job.buffer.device] if job.buffer.is_cuda else None
        )
        if self._failure is not None:
            future.set_result(self._failure)
            return future
        self._jobs.put((job, future))
        return future

    def wait(self) -> None:
        """Return when no bucket is under way."""
        self._jobs.join()

    def end(self) -> None:
        """Let the thread end, after what is queued."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            run, describe = self._run(), self._describe()
            if run is not None and describe is not None:
                self._take(*item, run, describe)
            del run, describe, item
            self._jobs.task_done()

    def _take(
        self,
        job: Job,
        future: "torch.futures.Future[Any]",
        run: Callable[[list[Job]], None],
        describe: Callable[[Exception], LinkError],
    ) -> None:
        """Work on one bucket, or pass on why not; whatever it is, the backward pass that waits must hear of it."""
        if job.begins_step:
            self._waiting.clear()
        self._waiting.append((job, future))
        small = sum(waiting.buffer.numel() for waiting, _ in self._waiting) < SMALL
        if (small or self.whole_steps) and not job.last and self._failure is None:
            return
        jobs = [waiting for waiting, _ in self._waiting]
        error: Exception | None = None
        if self._failure is None:
            try:
                run(jobs)
            except Exception as caught:
                error = caught.with_traceback(None)  # its frames hold the process group, which must be let go
        if error is not None:
            self._failure = error if isinstance(error, LinkError) else describe(error)
        for waiting, answer in self._waiting:
            answer.set_result(waiting.buffer if self._failure is None else self._failure)
        self._waiting.clear()


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
            held = {
                name: slots["residual"] for name in gradients if "residual" in (slots := self.codec.residuals(name))
            }
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
        return mean_link_state(self._channel, state, self._parameters, self.codec.feedback.slots)

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
