"""The thread of a link: exchanges the buckets that a hook submits, one after the other.

Buckets are submitted in the same order on every rank. A single thread that keeps this order is why the collectives of
different buckets can never interleave.
"""

import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LinkError
from thinwire.exchange.channel import Channel
from thinwire.tune import forecast

Future = torch.futures.Future[Any]


@dataclass(frozen=True)
class Job:
    """One bucket that a hook submits. Its tensors are flat views of the buffer, which receives the mean."""

    buffer: Tensor
    tensors: Mapping[str, Tensor]
    first: bool  # whether the step begins with it
    last: bool  # whether the step ends with it
    ready: Callable[[], None] = lambda: None  # returns when a GPU has computed the tensors

    @property
    def in_place(self) -> bool:
        """Whether exchanges can write the mean directly to the buffer."""
        return self.buffer.device.type == "cpu" and self.buffer.dtype == torch.float32

    def outputs(self) -> Mapping[str, Tensor]:
        """Flat float32 CPU tensors for the mean: the job's own tensors where that is possible."""
        if self.in_place:
            return self.tensors
        sizes = [tensor.numel() for tensor in self.tensors.values()]
        return dict(zip(self.tensors, torch.split(torch.empty(sum(sizes)), sizes), strict=True))

    def finish(self, outputs: Mapping[str, Tensor]) -> bool:
        """Copy the mean to the buffer; whether it overflowed float16, on which all ranks agree."""
        if self.in_place:
            return False
        self.buffer.copy_(torch.cat(list(outputs.values())))
        if self.buffer.is_cuda:
            torch.cuda.current_stream(self.buffer.device).synchronize()
        return self.buffer.dtype == torch.float16 and not bool(self.buffer.isfinite().all())


class LinkThread:
    """Calls its owner's `run` with jobs in the order of submission, and `describe` with the error if that fails.

    The thread holds its owner weakly, so that a link that nobody uses any more is freed; the owner's finalizer
    calls `end`. After a failure every job gets the same error.
    """

    def __init__(self, run: Callable[[list[Job]], None], describe: Callable[[Exception], LinkError]) -> None:
        self._run, self._describe = weakref.WeakMethod(run), weakref.WeakMethod(describe)
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
        while (item := self._jobs.get()) is not None:
            run, describe = self._run(), self._describe()
            if run is not None and describe is not None:
                self._take(*item, run, describe)
            del run, describe, item
            self._jobs.task_done()
        self._jobs.task_done()

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
        small = sum(waiting.buffer.numel() for waiting, _ in self._waiting) < forecast.JOINED_BELOW
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


def value_or_error(future: Future) -> Tensor:
    """The value of a job's future. An error raised here, not in the link's thread, surfaces in loss.backward()."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value


def gather_reasons(channel: Channel, step: int, reason: str, patience: float = 2.0) -> dict[int, str | None]:
    """Every rank's reason for a failure: "" if another rank caused it, None for ranks that do not answer.

    The ranks use the rendezvous store, because the process group is broken. If the store is gone too, nothing is known.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        keys = [f"thinwire/failed/{channel.name}/{step}/{rank}" for rank in range(channel.world)]
        store.set(keys[channel.rank], f"-{reason}")
        until = time.monotonic() + patience
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(0.05)
        return {r: store.get(key).decode()[1:] if store.check([key]) else None for r, key in enumerate(keys)}
    except (RuntimeError, ValueError):  # the rank that hosts the store died
        return {}


def describe_failure(error: Exception, channel: Channel, channels: Iterable[Channel], step: int) -> LinkError:
    """An error that says in one sentence which rank failed, at which step, and why, as far as it can be known."""
    text = re.sub(r"^\[[^\]]*\] *", "", " ".join(str(error).split()))  # remove the backend's source line
    own = "" if isinstance(error, RuntimeError) else text  # collectives raise RuntimeErrors
    where = f"rank {channel.rank}, step {step}"
    for each in {channel, *channels}:
        each.abort()
    reasons = gather_reasons(channel, step, own)
    if own:
        return LinkError(f"{where}: {own}")
    for rank, reason in reasons.items():
        if reason:
            return LinkError(f"{where}: rank {rank} failed: {reason}")
    silent = [str(rank) for rank, reason in reasons.items() if reason is None]
    who = f"; no sign of rank {', '.join(silent)}" if silent else ""
    return LinkError(f"{where}: the exchange failed{who}: {text}")
