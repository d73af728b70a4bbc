"""Link: one model whose changes are exchanged in compressed form; it owns codec, exchange, counters and a thread.

A hook (`thinwire.hooks`) submits buckets of named tensors. The link's thread begins to exchange them in the order of
submission, which is the same on every rank, while the backward pass goes on; the messages of all buckets of a step are
under way at the same time. A link knows nothing of DDP.
"""

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
from thinwire.exchange.rounds import Round
from thinwire.link.diagnostics import Diagnostics, agree_on_every
from thinwire.link.rescale import ResidualUnits
from thinwire.link.shards import ShardedLink, Shards
from thinwire.link.state import STATE_VERSION, fit_shards, load_link_state, mean_link_state, without_unknown
from thinwire.link.stats import Counters, Diagnosis, Stats
from thinwire.link.thread import Future, Job, LinkThread, Pending, value_or_error

T = TypeVar("T")
# Averages a flat buffer in place without the link: (buffer, bytes per element on the wire) -> future of the buffer.
AllReduce = Callable[[Tensor, int], Future]


class UpdateState(Protocol):
    """What a link needs of the updates that it exchanges; `thinwire.link.updates` has them."""

    @property
    def shared(self) -> dict[str, Tensor]:
        """The parameters that all ranks agree on, flat."""

    @property
    def exchanges(self) -> int:
        """The number of exchanges that this rank has begun."""

    def flush(self, mean: Callable[[Tensor], None]) -> None:
        """Apply the mean of all residuals and clear them."""

    def state_dict(self) -> dict[str, Any]:
        """What belongs into a checkpoint besides the residuals."""

    def check(self, state: Any, strict: bool) -> None:
        """ValueError unless a state fits; if `strict` is false, it may lack parameters."""

    def adopt_setting(self, state: Mapping[str, Any]) -> None:
        """Continue with the setting that a tuner had chosen when the state was saved."""

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
        self._attached = True
        self._process_groups = groups  # the process groups behind the channels, which detach gives back
        self._on_detach: Callable[[Link], None] = lambda link: None
        self._all_reduce: AllReduce | None = None
        self._updates: UpdateState | None = None  # in the update domain
        self._shards: Shards | None = None  # where every rank holds a part of each parameter
        self._dense_width = 0  # bytes per element of an all-reduce in place of the exchange; 0: the exchange is used
        self._factors: dict[str, float] = {}  # by which residuals are rescaled before the next step
        self._stats = Stats()
        self._diagnostics: Diagnostics | None = None
        self._outcomes: list[Outcome] = []
        self._skip_step = False  # whether the present step holds a non-finite value, so that every rank skips it
        # Names exchanged together: so far in this step, in the one before, and when a loaded state was saved.
        self._groups_now: list[list[str]] = []
        self._groups_before: list[list[str]] = []
        self._groups_loaded: list[list[str]] | None = None
        # Tensors of jobs that are exchanged together, by the identities of the jobs' own: so far, and a step before.
        self._joined_now: dict[tuple[int, ...], _JoinedViews] = {}
        self._joined_before: dict[tuple[int, ...], _JoinedViews] = {}
        self._board: FailureBoard | None = None
        self._last_job: Job | None = None  # of the present step, once it has begun
        self._begun: list[Pending] = []  # exchanges that overlap the caller's next steps, as far as they may go on
        self._overlaps = False  # whether there are or were any
        self._squares: dict[str, float] = {}  # then: of the residuals' norms, at the end of their last exchange
        self._thread = LinkThread(self._run, self._end_step, self._describe, self._look)
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

    def set_shards(self, shards: Shards) -> None:
        """Say which part of every parameter this rank holds: all parts' links skip the same steps."""
        self._shards = shards

    def any_shard(self, mine: bool) -> bool:
        """Whether something is true for any part of the parameters. Call it on all ranks that share a replica."""
        return mine if self._shards is None else self._shards.any(mine)

    @property
    def attached(self) -> bool:
        """Whether `detach` has not been called yet."""
        return self._attached

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._channel.world

    @property
    def rank(self) -> int:
        """The number of this rank among those that exchange."""
        return self._channel.rank

    @property
    def failure(self) -> LinkError | None:
        """The error that ended all exchanges."""
        return self._thread.failure

    @property
    def skipped(self) -> bool:
        """Whether all ranks skip the step that was exchanged last, because a value was not finite."""
        return self._skip_step

    def collective(self, function: Callable[[Channel], T]) -> T:
        """Call a function with the channel of all ranks while nothing else uses it. Raises LinkError if it fails."""
        self.wait()
        try:
            return function(self._channel)
        except RuntimeError as error:
            raise self._describe(error) from None

    def exchange_all(self, jobs: Sequence[Job]) -> bool:
        """Exchange a step's jobs and wait for them; returns whether all ranks skip the step. Raises LinkError."""
        skipped = self._submit_all(jobs).wait()
        self.wait()
        return skipped

    def begin_all(self, jobs: Sequence[Job]) -> "Pending":
        """Begin to exchange a step's jobs, while the caller goes on."""
        self._overlaps = True
        self._begun = [*self._under_way(), self._submit_all(jobs)]
        return self._begun[-1]

    def _submit_all(self, jobs: Sequence[Job]) -> "Pending":
        return Pending(jobs, [self._thread.submit(job) for job in jobs])

    def _under_way(self) -> list["Pending"]:
        """The exchanges that overlap the caller's steps and are not finished."""
        return [pending for pending in self._begun if not pending.done()]

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
            return self._thread.submit(job).then(value_or_error)
        future = self._all_reduce(job.buffer, self._dense_width)
        return future.then(self._after_all_reduce) if job.last else future

    def _after_all_reduce(self, future: Future) -> Tensor:
        if self.tuner is not None:
            self.tuner.end_step()
        return value_or_error(future)

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
        self._stats.count_dense(elements, volume, float(self.world - 1))
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
    def exchanges(self) -> int:
        """The number of exchanges that this rank has begun: steps, or with local steps rounds of all optimizers."""
        return self.step if self._updates is None else self._updates.exchanges

    @property
    def last_step(self) -> Counters:
        """The counters of the last step."""
        return self._stats.last

    @property
    def totals(self) -> Counters:
        """The counters since attach, as far as exchanges have ended: unlike `stats` it does not wait for any."""
        return self._stats.total

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

    def _run(self, jobs: list[Job]) -> Generator[Round, list[Tensor], None]:
        """Exchange one bucket or several small ones; after loading a state a whole step, grouped as it was saved."""
        for job in jobs:
            job.ready()
        if jobs[0].first:
            self._begin_step()
        yield from self._counted(self._exchange_jobs(jobs))

    def _exchange_jobs(self, jobs: list[Job]) -> Generator[Round, list[Tensor], None]:
        self._last_job = jobs[-1] if jobs[-1].last else None
        outputs = [job.outputs() for job in jobs]
        tensors = self._together([job.tensors for job in jobs])
        in_place = all(output is job.tensors for output, job in zip(outputs, jobs, strict=True))
        outs = tensors if in_place else _joined(outputs)
        step = self.step if jobs[0].step is None else jobs[0].step
        names = tensors.names if isinstance(tensors, BucketViews) else list(tensors)
        first, groups = len(self._groups_now), self._groups(names)
        for index, group in enumerate(groups, start=first):
            if not group:  # of a unit none of whose parameters has elements on this rank
                continue
            these = tensors if group == names else {name: tensors[name] for name in group}
            # Objects that are the same in every step spare the exchange some work.
            found = these.outs if isinstance(these, BucketViews) and in_place else [outs[name] for name in group]
            # A parameter whose gradient is zero everywhere took no part in this step: DDP may drop what arrives for it.
            yield from self._mean(Bucket(these, found, step, all_zero(these), index))
        for job, output in zip(jobs, outputs, strict=True):
            self._skip_step |= job.finish(output)

    def _together(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors of joined jobs; the same object in every step if the hook submits the same objects.

        The codec encodes tensors that it recognises in a single call.
        """
        if len(parts) == 1 or not all(isinstance(part, BucketViews) for part in parts):
            return _joined(parts)
        key = tuple(map(id, parts))  # of objects that the views keep, so that no other object gets the same identity
        found = self._joined_before.get(key) or _JoinedViews(parts)
        self._joined_now[key] = found
        return found.views

    def _counted(self, stages: Generator[Round, list[Tensor], None]) -> Generator[Round, list[Tensor], None]:
        """The same stages, whose processor time and round trips are counted."""
        messages: list[Tensor] | None = None
        trips, together = 0.0, False
        while True:
            began = time.thread_time()
            try:
                found = next(stages) if messages is None else stages.send(messages)
            except StopIteration:
                self._stats.add_trips(trips, together=together)
                return
            finally:
                self._stats.add_cpu(time.thread_time() - began)
            trips += found.trips
            together |= not found.done
            messages = yield found

    def _begin_step(self) -> None:
        self._outcomes.clear()
        self._groups_now.clear()
        self._joined_before, self._joined_now = self._joined_now, {}
        self._skip_step = False
        if self._diagnostics is not None:
            self._diagnostics.begin_step(self.step)
        for name, factor in self._factors.items():
            self.codec.rescale(factor, [name])
        if self._check_every and self.step and self.step % self._check_every == 0:
            check_replicas(self._channel, self._replicas, self.step)

    def _groups(self, names: list[str]) -> list[list[str]]:
        """The names that are exchanged together: these, or the loaded groups if they hold the same."""
        groups = [names]
        loaded, self._groups_loaded = self._groups_loaded, None
        self._thread.wait_for_last = False
        if loaded and sorted(chain(*loaded)) == sorted(chain(*groups)):
            groups = loaded
        self._groups_now += groups
        return groups

    def _mean(self, bucket: Bucket) -> Generator[Round, list[Tensor], None]:
        diagnostics = self._diagnostics
        if diagnostics is None:
            outcome = yield from self.exchange.stages(bucket)
        else:  # one bucket after the other: the diagnosis has collectives of its own
            diagnostics.before(bucket.tensors)
            outcome = self.exchange.mean(bucket)
            residuals = {name: self.codec.residuals(name).get("residual") for name in bucket.tensors}
            kept = {name: residual for name, residual in residuals.items() if residual is not None}
            diagnostics.after(bucket, self.exchange, outcome, kept)
        if outcome.non_finite:
            self._skip_step = True
            for out in bucket.outs:
                out.fill_(torch.nan)
        self._outcomes.append(outcome)
        self._stats.add(outcome, bucket.tensors, bucket.hold)

    def _end_step(self) -> None:
        """Finish a step. If a value was not finite, all ranks skip it: what it sent returns to the residual."""
        self._skip_step = self.any_shard(self._skip_step)
        if self._skip_step:
            for outcome in self._outcomes:
                if outcome.undo is not None:
                    outcome.undo()
            self._stats.skipped += 1
        if self._last_job is not None:
            self._last_job.skipped.append(self._skip_step)
            self._last_job = None
        if self._overlaps:  # a new object, because `metrics` may read the present one meanwhile
            self._squares = {**self._squares, **self._residual_squares(chain(*self._groups_now))}
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
        squares = self._residual_squares(self._parameters)
        return {**self._stats.report(self._channel.world), "residual_norm": math.sqrt(sum(squares.values()))}

    def _residual_squares(self, names: Iterable[str]) -> dict[str, float]:
        """The squared norms of residuals by name."""
        kept = {name: self.codec.residuals(name).get("residual") for name in names}
        return {name: _square(tensor) for name, tensor in kept.items() if tensor is not None}

    def metrics(self, prefix: str = "thinwire/") -> dict[str, float]:
        """Figures for a logger such as W&B or TensorBoard: floats by name, those of the last step unless they say so.

        Bytes and seconds are this rank's; compression_ratio and residual_norm are explained at `stats`. Unlike `stats`
        this does not wait for an exchange that overlaps local steps: figures are as of the end of the one before.
        """
        if self._under_way():
            norm = math.sqrt(sum(self._squares.values()))
            stats = {**self._stats.report(self._channel.world), "residual_norm": norm}
        else:
            stats = self.stats()
        last = stats["last_step"]
        seconds = ("compress_seconds", "exchange_seconds", "decode_seconds", "cpu_seconds")
        chosen = ("bytes_sent", "bytes_received", "density", "compression_ratio", *seconds)
        figures = {name: last[name] for name in chosen}
        figures |= {f"total_{name}": stats[name] for name in ("bytes_sent", "bytes_received")}
        figures |= {"steps": stats["steps"], "skipped_steps": stats["skipped"], "residual_norm": stats["residual_norm"]}
        return {f"{prefix}{name}": float(value) for name, value in figures.items()}

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
        self._joined_before, self._joined_now = {}, {}
        self._on_detach(self)
        self._attached = False
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

    def sharded(self, saved: Any = None) -> ShardedLink:
        """This link for `torch.distributed.checkpoint`: each rank saves its own part, and loads it bit for bit.

        saved: at loading the checkpoint, a path or a storage reader. It may come from another number of replicas, whose
        mean residual is then preserved, or from another sharding. Without it the object saves, and loads again what it
        has saved; its `load_from(saved)` names a checkpoint later.
        """
        whole = {name: p.shape for name, p in self._parameters.items()}
        return ShardedLink(self, self._shards, whole if self._shards is None else self._shards.shapes(), saved)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """This rank's residual by parameter name; with `gather` the mean of all ranks' (call it on all of them).

        In the update domain the state also holds the shared parameters and this rank's optimizer states, because every
        rank has its own. Plain tensors and numbers: save it with torch.save, load it with weights_only=True.
        """
        self.wait()
        updates = self._updates.state_dict() if self._updates is not None else None
        state = {
            "version": STATE_VERSION,
            "world_size": self._channel.world,
            "rank": self._channel.rank,
            "weight": self.exchange.weight(),
            "step": self.step,
            "codec": self.codec.state_dict(),
            "exchange": {repr(self.exchange): self.exchange.state_dict()},
            "units": self._units.state_dict(),
            "buckets": [list(names) for names in self._groups_before],
        }
        if updates is not None:
            state["updates"] = updates
        if self._shards is not None:
            state["shard"] = self._shards.describe()
        if not gather:
            return state
        with self._process_groups.reopened() if self._process_groups is not None else contextlib.nullcontext():
            mean = mean_link_state(self._channel, state, self._parameters, self.codec.feedback.slots)
        return mean if self._shards is None else self._shards.gathered(mean)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], *, strict: bool = True) -> None:
        """Load a saved state: this rank's own, a gathered one, or the list of all ranks'.

        With another number of workers than at saving, give a gathered state or all ranks' states: every rank
        then starts from their mean, which preserves the mean residual. `strict=False` leaves out residuals of
        parameters that are not in training here. Raises ValueError and changes nothing if the state does not fit.
        """
        self.wait()
        channel = self._channel
        fitting = fit_shards(state, self._shards)
        known = fitting if strict else without_unknown(fitting, self._parameters)
        mine = load_link_state(known, channel.rank, channel.world, self.exchange.weight(), self._parameters)
        self._check_domain(mine, strict)
        if self._updates is not None:
            self._updates.adopt_setting(mine["updates"])
        before = self.exchange.state_dict(), self._units.state_dict()
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
            self._squares = self._residual_squares(self._parameters)
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


class _JoinedViews:
    """The tensors of several jobs as one mapping, and the jobs' own mappings."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.parts, self.views = list(parts), BucketViews(_joined(parts))


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """All parts as one mapping; a single part is returned as it is, because the codec recognises the object."""
    return parts[0] if len(parts) == 1 else {name: t for part in parts for name, t in part.items()}


# Elements whose squares are summed in float32: float64 would take 60 times as long, more elements would lose digits.
_SUMMED = 1 << 16


def _square(tensor: Tensor) -> float:
    """The squared Euclidean norm of a flat tensor."""
    norms = [torch.linalg.vector_norm(part) for part in tensor.split(_SUMMED)]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


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
