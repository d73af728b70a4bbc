"""Link: one model whose changes are exchanged in compressed form; it owns codec, exchange, counters and a thread.

A hook (`thinwire.hooks`) submits buckets of named tensors. The link's thread exchanges them one after the other, in the
order of submission, which is the same on every rank, while the backward pass goes on. A link knows nothing of DDP.
"""

import atexit
import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.encode import BucketViews
from thinwire.codec.feedback import array_args
from thinwire.codec.selection import Selection
from thinwire.errors import LinkError
from thinwire.exchange.base import Bucket, Exchange, Outcome
from thinwire.exchange.channel import Channel, FailureBoard, OwnGroups, check_replicas, describe_failure
from thinwire.link.diagnosis import Diagnosis
from thinwire.link.diagnostics import Diagnostics, agree_on_every
from thinwire.link.rescale import ResidualUnits
from thinwire.link.state import STATE_VERSION, load_link_state, mean_link_state, without_unknown
from thinwire.link.stats import Counters, Stats
from thinwire.tune import forecast

T = TypeVar("T")
Future = torch.futures.Future[Any]
# Seconds without a job after which the link's thread looks whether other ranks have failed.
_LOOK_EVERY = 1.0
# A thread must not be inside of the store's C++ code when the interpreter ends.
_exiting = threading.Event()
atexit.register(_exiting.set)
# Averages a flat buffer in place without the link: (buffer, bytes per element on the wire) -> future of the buffer.
AllReduce = Callable[[Tensor, int], Future]


@dataclass(frozen=True)
class Job:
    """One bucket that a hook submits. Its tensors are flat views of the buffer, which receives the mean."""

    buffer: Tensor
    tensors: Mapping[str, Tensor]
    first: bool  # whether the step begins with it
    last: bool  # whether the step ends with it
    ready: Callable[[], None] = lambda: None  # returns when a GPU has computed the tensors
    outs: Mapping[str, Tensor] | None = None  # flat float32 CPU tensors for the mean, where it is not for the buffer
    step: int | None = None  # the number of this exchange for its parameters, if it is not the link's step

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def in_place(self) -> bool:
        """Whether exchanges can write the mean directly to the buffer."""
        return self.buffer.device.type == "cpu" and self.buffer.dtype == torch.float32

    def outputs(self) -> Mapping[str, Tensor]:
        """Flat float32 CPU tensors for the mean: the job's own tensors where that is possible."""
        if self.outs is not None:
            return self.outs
        if self.in_place:
            return self.tensors
        sizes = [tensor.numel() for tensor in self.tensors.values()]
        return dict(zip(self.tensors, torch.split(torch.empty(sum(sizes)), sizes), strict=True))

    def finish(self, outputs: Mapping[str, Tensor]) -> bool:
        """Copy the mean to the buffer; whether it overflowed float16, on which all ranks agree."""
        if self.in_place or self.outs is not None:
            return False
        self.buffer.copy_(torch.cat(list(outputs.values())))
        if self.buffer.is_cuda:
            torch.cuda.current_stream(self.buffer.device).synchronize()
        return self.buffer.dtype == torch.float16 and not bool(self.buffer.isfinite().all())


class UpdateState(Protocol):
    """What a link needs of the updates that it exchanges; `thinwire.link.updates` has them."""

    shared: dict[str, Tensor]

    def flush(self, mean: Callable[[Tensor], None]) -> None:
        """Apply the mean of all residuals and clear them."""

    def state_dict(self) -> dict[str, Any]:
        """What belongs into a checkpoint besides the residuals."""

    def check(self, state: Any, strict: bool) -> None:
        """ValueError unless a state fits; if `strict` is false, it may lack parameters."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that was checked."""


class Tuner(Protocol):
    """What a link tells whoever tunes it; `thinwire.link.autotune` has the one that serves "auto"."""

    def begin_step(self) -> None:
        """Called before a step's first bucket, when nothing is under way: settings may change now."""

    def bucket_ready(self, tensors: Mapping[str, Tensor], elements: int) -> None:
        """Called when a bucket is submitted."""

    def end_step(self) -> None:
        """Called when the step's last bucket holds the mean."""


class Link:
    """What `thinwire.attach` returns: use it to save and restore the residual, to watch the exchange, and to detach."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        codec: Codec,
        exchange: Exchange,
        channel: Channel,
        *,
        why: str = "",
        check_every: int = 0,
        units: ResidualUnits | None = None,
        on_step: Callable[[Codec, Counters], None] | None = None,
        groups: OwnGroups | None = None,
    ) -> None:
        self.codec = codec
        self.exchange = exchange
        self.why = why
        self.step = 0
        self.diagnoses: list[Diagnosis] = []
        self.tuner: Tuner | None = None
        self._units = units if units is not None else ResidualUnits(parameters)
        self._parameters = parameters
        self._channel = channel
        self._check_every = check_every
        self._on_step = on_step  # called by the link's thread, which may use the channel
        self._process_groups = groups  # the process groups behind the channels, which detach gives back
        self._on_detach: Callable[[Link], None] = lambda link: None
        self._all_reduce: AllReduce | None = None
        self._updates: UpdateState | None = None  # in the update domain
        self._dense_width = 0  # bytes per element of an all-reduce in place of the exchange; 0: the exchange is used
        self._factors: dict[str, float] = {}  # by which residuals are rescaled before the next step
        self._stats = Stats()
        self._diagnostics: Diagnostics | None = None
        self._outcomes: list[Outcome] = []
        self._clock = 0  # the number of the present exchange for its parameters
        self._skip_step = False  # whether the present step holds a non-finite value, so that every rank skips it
        # Names exchanged together: so far in this step, in the one before, and when a loaded state was saved.
        self._groups_now: list[list[str]] = []
        self._groups_before: list[list[str]] = []
        self._groups_loaded: list[list[str]] | None = None
        self._board: FailureBoard | None = None
        self._thread = LinkThread(self._run, self._describe, self._look)
        weakref.finalize(self, self._thread.end)

    def __repr__(self) -> str:
        total = sum(p.numel() for p in self._parameters.values())
        return (
            f"Link({total:,} parameters, {self.codec!r}, {self.exchange!r}, "
            f"rank {self._channel.rank} of {self._channel.world}, step {self.step})"
        )

    # For hooks

    def set_hook(
        self,
        on_detach: Callable[["Link"], None],
        all_reduce: AllReduce | None = None,
        updates: "UpdateState | None" = None,
    ) -> None:
        """Name the hook that feeds this link: what to call at detach, and its own way to average a buffer.

        updates: what the link saves, compares and flushes where it exchanges updates of parameters.
        """
        self._on_detach, self._all_reduce, self._updates = on_detach, all_reduce, updates

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._channel.world

    def collective(self, function: Callable[[Channel], T]) -> T:
        """Call a function with the channel of all ranks while nothing else uses it. Raises LinkError if it fails."""
        self.wait()
        try:
            return function(self._channel)
        except RuntimeError as error:
            raise self._describe(error) from None

    def exchange_all(self, jobs: Sequence[Job]) -> bool:
        """Exchange a step's jobs and wait for them; returns whether all ranks skip the step. Raises LinkError."""
        futures = [self._thread.submit(job) for job in jobs]
        for future in futures:
            future.wait()
            _value_or_error(future)
        self.wait()
        return self._skip_step

    def submit(self, job: Job) -> Future:
        """Average a bucket. The future's value is the job's buffer with the mean; it raises if the exchange failed."""
        if job.first:
            if self.tuner is not None:
                self.tuner.begin_step()
            factors = self._units.changes()
            self._factors = {} if self._dense_width else factors  # an all-reduce has no residual to rescale
        if self.tuner is not None:
            self.tuner.bucket_ready(job.tensors, job.elements)
        if not self._dense_width or self._all_reduce is None:
            return self._thread.submit(job).then(_value_or_error)
        future = self._all_reduce(job.buffer, self._dense_width)
        return future.then(self._after_all_reduce) if job.last else future

    def _after_all_reduce(self, future: Future) -> Tensor:
        if self.tuner is not None:
            self.tuner.end_step()
        return _value_or_error(future)

    # For tuners

    @property
    def can_all_reduce(self) -> bool:
        """Whether the hook has a way to average buffers without the link."""
        return self._all_reduce is not None

    @property
    def dense_width(self) -> int:
        """Bytes per element of the all-reduce that is used in place of the exchange; 0 if the exchange is used."""
        return self._dense_width

    def use_exchange(self, exchange: Exchange, selection: Selection) -> None:
        """Continue with another exchange, which is set up already, and another selection."""
        self.exchange, self.codec.selection, self._dense_width = exchange, selection, 0

    def use_all_reduce(self, width: int) -> None:
        """Continue with the hook's own all-reduce of `width` bytes per element; the residual must be empty."""
        self._dense_width = width

    def count_dense_step(self, elements: int, volume: int) -> None:
        """Count a step whose buckets were averaged by all-reduce, without the link's thread."""
        self._stats.count_dense(elements, volume)
        self._stats.end_step(self.exchange.channels())
        self.step += 1
        if self._check_every and self.step % self._check_every == 0:
            check_replicas(self._channel, self._replicas, self.step)

    @property
    def _replicas(self) -> Mapping[str, Tensor]:
        """The tensors that are the same on all ranks after every step."""
        return self._parameters if self._updates is None else self._updates.shared

    @property
    def domain(self) -> str:
        """What is exchanged: "gradient", or "update" for changes of the parameters."""
        return "gradient" if self._updates is None else "update"

    @property
    def last_step(self) -> Counters:
        """The counters of the last step."""
        return self._stats.last

    # The work of the link's thread, in the order of the buckets

    def _describe(self, error: Exception) -> LinkError:
        return describe_failure(error, self._channel, self.exchange.channels(), self.step)

    def _look(self) -> LinkError | None:
        """Return the error of an exchange that has failed on other ranks, while this one has nothing to exchange."""
        if self._channel.world == 1:
            return None
        try:
            self._board = self._board or FailureBoard(self._channel)
            failed = self._board.announced()
        except (RuntimeError, ValueError, AttributeError):  # the store or the process group is gone
            return None
        return describe_failure(None, self._channel, self.exchange.channels(), self.step) if failed else None

    def _run(self, jobs: list[Job]) -> None:
        """Exchange one bucket or several small ones; after loading a state a whole step, grouped as it was saved."""
        for job in jobs:
            job.ready()
        began = time.thread_time()
        self._clock = self.step if jobs[0].step is None else jobs[0].step
        if jobs[0].first:
            self._begin_step()
        outputs = [job.outputs() for job in jobs]
        tensors, outs = _joined([job.tensors for job in jobs]), _joined(outputs)
        for names in self._groups(jobs):
            these = tensors if names == list(tensors) else {name: tensors[name] for name in names}
            self._mean(these, [outs[name] for name in names])
        for job, output in zip(jobs, outputs, strict=True):
            self._skip_step |= job.finish(output)
        self._stats.add_cpu(time.thread_time() - began)
        if jobs[-1].last:
            self._end_step()

    def _begin_step(self) -> None:
        self._outcomes.clear()
        self._groups_now.clear()
        self._skip_step = False
        if self._diagnostics is not None:
            self._diagnostics.begin_step(self.step)
        for name, factor in self._factors.items():
            self.codec.rescale(factor, [name])
        if self._check_every and self.step and self.step % self._check_every == 0:
            check_replicas(self._channel, self._replicas, self.step)

    def _groups(self, jobs: list[Job]) -> list[list[str]]:
        """The names that are exchanged together: those of these jobs, or the loaded groups if they hold the same."""
        groups = [[name for job in jobs for name in job.tensors]]
        loaded, self._groups_loaded = self._groups_loaded, None
        self._thread.wait_for_last = False
        if loaded and sorted(chain(*loaded)) == sorted(chain(*groups)):
            groups = loaded
        self._groups_now += groups
        return groups

    def _mean(self, tensors: Mapping[str, Tensor], outs: list[Tensor]) -> None:
        # A parameter whose gradient is zero everywhere took no part in this step: DDP may drop what arrives for it.
        bucket, diagnostics = Bucket(tensors, outs, self._clock, all_zero(tensors)), self._diagnostics
        if diagnostics is not None:
            diagnostics.before(tensors)
        outcome = self.exchange.mean(bucket)
        if diagnostics is not None:
            residuals = {name: self.codec.residuals(name).get("residual") for name in tensors}
            kept = {name: residual for name, residual in residuals.items() if residual is not None}
            diagnostics.after(bucket, self.exchange, outcome, kept)
        if outcome.non_finite:
            self._skip_step = True
            for out in outs:
                out.fill_(torch.nan)
        self._outcomes.append(outcome)
        self._stats.add(outcome, tensors, bucket.hold)

    def _end_step(self) -> None:
        """Finish a step. If a value was not finite, all ranks skip it: what it sent returns to the residual."""
        if self._skip_step:
            for outcome in self._outcomes:
                if outcome.undo is not None:
                    outcome.undo()
            self._stats.skipped += 1
        if self._diagnostics is not None:
            found = self._diagnostics.end_step(self.step, self.exchange.weight(), skipped=self._skip_step)
            self.diagnoses += [found] if found is not None else []
        self._outcomes.clear()
        self._groups_before = list(self._groups_now)
        self.step += 1
        self._stats.end_step(self.exchange.channels())
        if self._on_step is not None:
            self._on_step(self.codec, self._stats.last)
        if self.tuner is not None:
            self.tuner.end_step()

    # For users

    def wait(self) -> None:
        """Return when no bucket is under way."""
        self._thread.wait()

    def stats(self) -> dict[str, Any]:
        """Counters since attach, of the last step, and entries per parameter; keys end in their unit.

        compression_ratio: bytes that a dense 32-bit all-reduce would have sent, divided by the bytes sent.
        residual_norm: the Euclidean norm of this rank's residual over all parameters.
        """
        self.wait()
        kept = [self.codec.residuals(name).get("residual") for name in self._parameters]
        squares = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in kept if t is not None)
        return {**self._stats.report(self._channel.world), "residual_norm": math.sqrt(squares)}

    def diagnose(self, every: int = 100) -> None:
        """Compare the exchange with a dense one every so many steps; 0 ends it. Call it on all ranks.

        The figures go to the log (logger "thinwire", level INFO) and to `diagnoses`.
        """
        self.wait()
        if self._updates is not None:
            raise ValueError("diagnose() compares gradients, but this link exchanges updates of the parameters")
        agree_on_every(self._channel, every)
        self._diagnostics = self.codec.observer = Diagnostics(self._channel, every) if every else None

    def rescale(self, factor: float) -> None:
        """Multiply the residual when the unit of the gradients changes; see `Codec.rescale`."""
        if self._updates is not None:
            raise ValueError("rescale() is for gradients: the residual of updates has the unit of the parameters")
        self.wait()
        self.codec.rescale(factor)

    def flush(self) -> None:
        """Send everything that is left in the residuals of updates, uncompressed. Call it on all ranks.

        After it all ranks' models hold everything that any rank's optimizer did, for example at the end of training.
        """
        if self._updates is None:
            raise ValueError(
                "flush() is for links that exchange updates: a gradient's residual has to pass an optimizer"
            )
        self.collective(self._flush)

    def _flush(self, channel: Channel) -> None:
        def mean(tensor: Tensor) -> None:
            there = tensor.mul_(1.0 / channel.world).to(channel.device)
            channel.all_reduce(there)
            tensor.copy_(there)

        assert self._updates is not None
        self._updates.flush(mean)

    def detach(self) -> None:
        """Return to the uncompressed exchange. `state_dict()` still returns the residual afterwards."""
        self.wait()
        self._on_detach(self)
        self._thread.end()
        if self._process_groups is not None:
            self._process_groups.close()

    def __enter__(self) -> "Link":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def gathered(self) -> "GatheredLink":
        """This link for frameworks that save one file for all ranks: its `state_dict()` is the mean over ranks."""
        return GatheredLink(self)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """This rank's residual by parameter name; with `gather` the mean of all ranks' (call it on all of them).

        In the update domain the state also holds the shared parameters and this rank's optimizer states, because every
        rank has its own. Plain tensors and numbers: save it with torch.save, load it with weights_only=True.
        """
        self.wait()
        state = {
            "version": STATE_VERSION,
            "world_size": self._channel.world,
            "rank": self._channel.rank,
            "weight": self.exchange.weight(),
            "step": self.step,
            "codec": self.codec.state_dict(),
            "exchange": {repr(self.exchange): self.exchange.state_dict()},
            "units": self._units.state_dict(),
            "buckets": self._groups_before,
        }
        if self._updates is not None:
            state["updates"] = self._updates.state_dict()
        if not gather:
            return state
        with self._process_groups.reopened() if self._process_groups is not None else contextlib.nullcontext():
            return mean_link_state(self._channel, state, self._parameters, self.codec.feedback.slots)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], *, strict: bool = True) -> None:
        """Load a saved state: this rank's own, a gathered one, or the list of all ranks'.

        With another number of workers than at saving, give a gathered state or all ranks' states: every rank
        then starts from their mean, which preserves the mean residual. `strict=False` leaves out residuals of
        parameters that are not in training here. Raises ValueError and changes nothing if the state does not fit.
        """
        self.wait()
        channel = self._channel
        known = state if strict else without_unknown(state, self._parameters)
        mine = load_link_state(known, channel.rank, channel.world, self.exchange.weight(), self._parameters)
        before = self.exchange.state_dict(), self._units.state_dict()
        self._check_domain(mine, strict)
        try:
            self.exchange.load_state_dict(mine["exchange"].get(repr(self.exchange), {}))
            self._units.load_state_dict(mine["units"])
            self.codec.load_state_dict(mine["codec"])  # last: it checks everything before it changes anything
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self.exchange.load_state_dict(before[0])
            self._units.load_state_dict(before[1])
            raise ValueError(f"the link's state cannot be loaded: {error}") from error
        self.step = mine["step"]
        if self._updates is not None:
            self._updates.load_state_dict(mine["updates"])
        # DDP regroups its buckets after the first step. Using the saved groups makes the resumed run bitwise equal.
        fixed = self._updates is not None  # the buckets of updates do not change
        self._groups_loaded = None if fixed else [list(names) for names in mine["buckets"]] or None
        self._thread.wait_for_last = self._groups_loaded is not None

    def _check_domain(self, state: Mapping[str, Any], strict: bool) -> None:
        """ValueError unless a state is of this link's domain and fits its parameters."""
        saved = "gradient" if state.get("updates") is None else "update"
        if saved != self.domain:
            raise ValueError(
                f"the state holds residuals of the {saved} domain and this link exchanges {self.domain}s: "
                f'attach with domain="{saved}", or continue without the state'
            )
        if self._updates is not None:
            self._updates.check(state["updates"], strict)


class GatheredLink:
    """A link whose saved state is the same on every rank; `state_dict` is a collective: call it on all ranks."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def state_dict(self) -> dict[str, Any]:
        """The mean of all ranks' states."""
        return self.link.state_dict(gather=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, for any number of ranks."""
        self.link.load_state_dict(state)


class LinkThread:
    """Calls its owner's `run` with jobs in the order of submission, and `describe` with the error if that fails.

    Every second without a job it calls `look`, which returns an error if an exchange has failed on other ranks: they
    wait for this rank's answer to tell whether it is alive. The thread holds its owner weakly, so that a link that
    nobody uses any more is freed; the owner's finalizer calls `end`. After a failure every job gets the same error.
    """

    def __init__(
        self,
        run: Callable[[list[Job]], None],
        describe: Callable[[Exception], LinkError],
        look: Callable[[], LinkError | None],
    ) -> None:
        self._run, self._describe = weakref.WeakMethod(run), weakref.WeakMethod(describe)
        self._look = weakref.WeakMethod(look)
        self.wait_for_last = False  # whether all buckets of a step are exchanged after its last one arrived
        self._waiting: list[tuple[Job, Future]] = []
        self._failure: LinkError | None = None
        self._ended = False
        self._jobs: queue.Queue[tuple[Job, Future] | None] = queue.Queue()
        threading.Thread(target=self._work, name="thinwire-link", daemon=True).start()

    def submit(self, job: Job) -> Future:
        """Queue a job; the future's value is the buffer with the mean, or the error that prevented it."""
        future: Future = torch.futures.Future(devices=[job.buffer.device] if job.buffer.is_cuda else None)
        if self._failure is not None:
            future.set_result(self._failure)
            return future
        self._jobs.put((job, future))
        return future

    def wait(self) -> None:
        """Return when no job is under way."""
        self._jobs.join()

    def end(self) -> None:
        """End the thread after the jobs that are queued."""
        if not self._ended:
            self._ended = True
            self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            run, describe = self._run(), self._describe()
            if run is not None and describe is not None:
                self._take(*item, run, describe)
            del run, describe, item
            self._jobs.task_done()
        self._jobs.task_done()

    def _next(self) -> tuple[Job, Future] | None:
        while True:
            try:
                return self._jobs.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                look = self._look()
                if self._failure is None and look is not None and not _exiting.is_set():
                    self._failure = look()
                del look

    def _take(
        self,
        job: Job,
        future: Future,
        run: Callable[[list[Job]], None],
        describe: Callable[[Exception], LinkError],
    ) -> None:
        """Exchange a job, or let a small one wait for the next. Every future gets a result: backward waits for it."""
        if job.first:
            self._waiting.clear()
        self._waiting.append((job, future))
        small = sum(waiting.elements for waiting, _ in self._waiting) < forecast.JOINED_BELOW
        if (small or self.wait_for_last) and not job.last and self._failure is None:
            return
        jobs = [waiting for waiting, _ in self._waiting]
        error: Exception | None = None
        if self._failure is None:
            try:
                run(jobs)
            except Exception as caught:
                error = caught.with_traceback(None)  # its frames refer to the process group, which must be freed
        if error is not None:
            self._failure = error if isinstance(error, LinkError) else describe(error)
        for waiting, answer in self._waiting:
            answer.set_result(waiting.buffer if self._failure is None else self._failure)
        self._waiting.clear()


def _value_or_error(future: Future) -> Tensor:
    """The value of a job's future. An error raised here, not in the link's thread, surfaces in loss.backward()."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """All parts as one mapping; a single part is returned as it is, because the codec recognises the object."""
    return parts[0] if len(parts) == 1 else {name: t for part in parts for name, t in part.items()}


_NONE: frozenset[str] = frozenset()


def all_zero(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of those tensors that are zero everywhere."""
    arrays = tensors.args if isinstance(tensors, BucketViews) else None
    if arrays is None and all(t.device.type == "cpu" and t.is_contiguous() for t in tensors.values()):
        arrays = [array_args(t) for t in tensors.values()]
    if arrays is None:
        return frozenset(name for name, t in tensors.items() if not t.any())
    empty = _native.all_zero(arrays)
    return frozenset(list(tensors)[i] for i in empty) if empty else _NONE
