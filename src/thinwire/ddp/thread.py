"""Thread: works through a link's buckets one after the other, while the backward pass goes on.

Buckets arrive in the same order on every rank; one thread that keeps that order is why collectives can never cross.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thinwire.ddp.buckets import Job
from thinwire.errors import LinkError

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
