"""Link: one attached model; owns its codec, its exchange, its counters and the thread that talks for it.

Buckets arrive in the same order on every rank and are worked through in that order by one thread, so that
collectives can never cross; the backward pass goes on meanwhile.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.vectors import DTYPES
from thinwire.errors import LinkError
from thinwire.exchange.base import Bucket, Exchange, Outcome
from thinwire.exchange.channel import Channel
from thinwire.replicas import check_replicas, gather_reasons
from thinwire.states import load_link_state, mean_link_state, without_strangers
from thinwire.stats import Stats
from thinwire.units import UnitWatch


@dataclass(frozen=True)
class Job:
    """One bucket on its way: its gradients are views of the buffer, which receives the mean."""

    buffer: Tensor
    gradients: dict[str, Tensor]
    last: bool
    begins_step: bool
    factors: dict[str, float] = field(default_factory=dict)  # by which memories are rescaled before the step
    ready: Callable[[], None] = lambda: None


Item = tuple[Job, "torch.futures.Future[Any]"]


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
    ) -> None:
        self.codec = codec
        self.exchange = exchange
        self.why = why
        self.step = 0
        self.units = units if units is not None else UnitWatch(parameters)
        self._parameters = parameters
        self._channel = channel
        self._check_every = check_every
        self._on_detach = on_detach
        self._stats = Stats()
        self._outcomes: list[Outcome] = []
        self._failure: LinkError | None = None
        self._jobs: queue.Queue[Item | None] = queue.Queue()
        # The thread must not keep a link alive that nobody holds any more: it ends when the link is collected.
        weakref.finalize(self, self._jobs.put, None)
        threading.Thread(target=_work, args=(self._jobs, weakref.ref(self)), name="thinwire-link", daemon=True).start()

    def __repr__(self) -> str:
        total = sum(p.numel() for p in self._parameters.values())
        return (
            f"Link({total:,} parameters, {self.codec!r}, {self.exchange!r}, "
            f"rank {self._channel.rank} of {self._channel.world}, step {self.step})"
        )

    # The work, in the order of the buckets

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

    def _take(self, job: Job, future: "torch.futures.Future[Any]") -> None:
        """Work on one bucket, or pass on why not; whatever it is, the backward pass that waits must hear of it."""
        try:
            if self._failure is not None:
                raise self._failure
            self._run(job)
            future.set_result(job.buffer)
        except Exception as error:
            self._failure = error if isinstance(error, LinkError) else self._describe(error)
            future.set_result(self._failure)

    def _describe(self, error: Exception) -> LinkError:
        """One sentence: who, when, and whose fault it is as far as the ranks that are left can tell."""
        text = " ".join(str(error).split())
        own = "" if isinstance(error, RuntimeError) else text  # collectives raise RuntimeErrors
        where = f"rank {self._channel.rank}, step {self.step}"
        reasons = gather_reasons(self._channel, self.step, own)
        if own:
            return LinkError(f"{where}: {own}")
        for rank, reason in reasons.items():
            if reason:
                return LinkError(f"{where}: rank {rank} failed: {reason}")
        silent = [str(rank) for rank, reason in reasons.items() if reason is None]
        who = f"; no sign of rank {', '.join(silent)}" if silent else ""
        return LinkError(f"{where}: the exchange failed{who}: {text}")

    def _run(self, job: Job) -> None:
        job.ready()
        if job.begins_step:
            self._outcomes.clear()
            for name, factor in job.factors.items():
                self.codec.rescale(factor, [name])
            if self._check_every and self.step and self.step % self._check_every == 0:
                check_replicas(self._channel, self._parameters, self.step)
        direct = job.buffer.device.type == "cpu" and job.buffer.dtype == torch.float32
        flat = job.buffer if direct else torch.empty(job.buffer.numel())
        outs = list(torch.split(flat, [g.numel() for g in job.gradients.values()]))
        # A parameter without a gradient took no part here: DDP may drop what we would send for it.
        hold = frozenset(name for name, g in job.gradients.items() if _all_zero(g))
        outcome = self.exchange.mean(Bucket(job.gradients, outs, self.step, hold))
        if outcome.non_finite:
            flat.fill_(torch.nan)
        if not direct:
            job.buffer.copy_(flat)
            # What waited in the memory can exceed a narrow type: the same bits, so the same verdict, everywhere.
            if job.buffer.dtype == torch.float16 and not bool(job.buffer.isfinite().all()):
                outcome.non_finite = outcome.non_finite or list(range(self._channel.world))
            if job.buffer.is_cuda:
                torch.cuda.current_stream(job.buffer.device).synchronize()
        self._outcomes.append(outcome)
        self._stats.note(outcome, job.gradients, hold)
        if job.last:
            self._end_step()

    def _end_step(self) -> None:
        """A step with a non-finite gradient will be skipped by everybody: take back what it made known."""
        if any(outcome.non_finite for outcome in self._outcomes):
            for outcome in self._outcomes:
                if outcome.undo is not None:
                    outcome.undo()
            self._stats.skipped += 1
        self._outcomes.clear()
        self.step += 1
        self._stats.end_step(self.exchange.channels())

    def wait(self) -> None:
        """Return when no bucket is under way."""
        self._jobs.join()

    # For users

    def stats(self) -> dict[str, Any]:
        """Counters since attach and of the last step: bytes, entries, density, seconds; entries per parameter."""
        self.wait()
        return self._stats.report()

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


@dataclass(frozen=True)
class GatheredLink:
    """A link whose saved state is the same on every rank; `state_dict` is a collective: call it on all ranks."""

    link: Link

    def state_dict(self) -> dict[str, Any]:
        return self.link.state_dict(gather=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.link.load_state_dict(state)


def _work(jobs: "queue.Queue[Item | None]", link: "weakref.ref[Link]") -> None:
    while (item := jobs.get()) is not None:
        owner = link()
        if owner is not None:
            owner._take(*item)
        del owner, item
        jobs.task_done()


def _all_zero(gradient: Tensor) -> bool:
    if gradient.device.type != "cpu":
        return not bool(gradient.any())
    return gradient.is_contiguous() and _native.all_zero(gradient.data_ptr(), DTYPES[gradient.dtype], gradient.numel())
