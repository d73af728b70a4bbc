"""LinkThread: the thread of a link, which exchanges the jobs that a hook submits, several of them at the same time."""

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.codec.encode import elements_of
from thinwire.errors import LinkError
from thinwire.exchange.base import UnderWay
from thinwire.exchange.rounds import Round
from thinwire.tune import forecast

Future = torch.futures.Future[Any]
# Seconds without a job after which the link's thread looks whether other ranks have failed.
_LOOK_EVERY = 1.0
# A thread must not be inside of the store's C++ code when the interpreter ends.
_exiting = threading.Event()
atexit.register(_exiting.set)


@dataclass
class Job:
    """One bucket that a hook submits. Its tensors are flat views of the buffer, which receives the mean."""

    buffer: Tensor
    tensors: Mapping[str, Tensor]
    first: bool  # whether the step begins with it
    last: bool  # whether the step ends with it
    ready: Callable[[], None] = lambda: None  # returns when a GPU has computed the tensors
    outs: Mapping[str, Tensor] | None = None  # flat float32 CPU tensors for the mean, where it is not for the buffer
    step: int | None = None  # the number of this exchange for its parameters, if it is not the link's step
    at_once: bool = False  # whether the hook waits for it before it submits the next one
    skipped: list[bool] = field(default_factory=list)  # of a step's last job: whether all ranks skip that step

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return elements_of(self.tensors)

    @property
    def in_place(self) -> bool:
        """Whether exchanges can write the mean directly to the buffer."""
        return self.buffer.is_cpu and self.buffer.dtype is torch.float32

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


@dataclass(frozen=True)
class Pending:
    """A step's jobs that are being exchanged."""

    jobs: Sequence[Job]
    futures: Sequence[Future]

    def done(self) -> bool:
        """Return whether all of them are exchanged, or have failed."""
        return all(future.done() for future in self.futures)

    def wait(self) -> bool:
        """Wait for them; returns whether all ranks skip the step. Raises LinkError."""
        for future in self.futures:
            future.wait()
            value_or_error(future)
        return any(chain(*(job.skipped for job in self.jobs)))


F = TypeVar("F", bound=Callable[..., Any])
Run = Callable[[list[Job]], Generator[Round, list[Tensor], None]]


@dataclass
class _Flight:
    """Jobs whose exchange is under way, with the futures of their buffers."""

    jobs: list[tuple[Job, Future]]
    exchange: UnderWay[None]


# The messages of a round, or the error in place of them.
Arrival = list[Tensor] | Exception
_ARRIVED = object()


class LinkThread:
    """Exchanges jobs: begins them in the order of submission, and has all jobs of a step under way at the same time.

    It calls its owner's `run` with jobs, whose stages it runs when their messages arrive; `end_step` when all jobs of a
    step are exchanged; and `describe` with an error. While more jobs of a step are to come, a second thread waits for
    the messages, so that these jobs begin as soon as they are submitted. Rounds of messages are waited for in the order
    in which they were started, so that no two ranks can wait for each other.

    Every second without a job it calls `look`, which returns an error if an exchange has failed on other ranks: they
    wait for this rank's answer to tell whether it is alive. The thread holds its owner weakly, so that a link that
    nobody uses any more is freed; the owner's finalizer calls `end`. After a failure every job gets the same error.
    """

    def __init__(
        self,
        run: Run,
        end_step: Callable[[], None],
        describe: Callable[[Exception], LinkError],
        look: Callable[[], LinkError | None],
    ) -> None:
        self._run, self._end_step = weakref.WeakMethod(run), weakref.WeakMethod(end_step)
        self._describe, self._look = weakref.WeakMethod(describe), weakref.WeakMethod(look)
        self.wait_for_last = False  # whether all buckets of a step are exchanged after its last one arrived
        self._joining: list[tuple[Job, Future]] = []  # small jobs, which are exchanged together with the next
        self._flights: deque[_Flight] = deque()  # in the order in which their messages under way were sent
        self._all_begun = True  # whether all jobs of the present step have begun
        self.failure: LinkError | None = None  # what every job gets from now on
        self._ended = False
        # Queues in C: every step passes several items from thread to thread.
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()  # jobs with their futures, _ARRIVED, None at the end
        self._rounds: queue.SimpleQueue[Round | None] | None = None  # for the second thread, one at a time
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()  # from the second thread
        self._second_waits = False
        self._unfinished = 0  # items of the queue whose work is not done; guarded by the condition
        self._idle = threading.Condition()
        threading.Thread(target=self._work, name="thinwire-link", daemon=True).start()

    def submit(self, job: Job) -> Future:
        """Queue a job; the future's value is the buffer with the mean, or the error that prevented it."""
        future: Future = torch.futures.Future(devices=[job.buffer.device] if job.buffer.is_cuda else None)
        if self.failure is not None:
            future.set_result(self.failure)
            return future
        with self._idle:
            self._unfinished += 1
        self._jobs.put((job, future))
        return future

    def wait(self) -> None:
        """Return when no job is under way."""
        with self._idle:
            while self._unfinished:
                self._idle.wait()

    def end(self) -> None:
        """End the thread after the jobs that are queued."""
        if not self._ended:
            self._ended = True
            self._jobs.put(None)

    def _work(self) -> None:
        # Matrix products in a new thread do not know the number that torch.set_num_threads was given. They would take
        # all cores, and their threads wait actively for each other.
        torch.set_num_threads(torch.get_num_threads())
        while (item := self._next()) is not None:
            owner = self._run()  # keeps it
            if item is _ARRIVED:
                self._arrived()
            # A job that begins an exchange is done when the exchange is.
            elif owner is None or not self._take(*item):
                self._done()
            while self._flights and self._all_begun:
                self._proceed()
            del owner, item
        if self._rounds is not None:
            self._rounds.put(None)

    def _done(self) -> None:
        with self._idle:
            self._unfinished -= 1
            if not self._unfinished:
                self._idle.notify_all()

    def _next(self) -> Any:
        if self._flights and not self._second_waits:
            self._let_second_wait()
        while True:
            try:
                return self._jobs.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                look = self._look()
                if self.failure is None and not self._flights and look is not None and not _exiting.is_set():
                    self.failure = look()
                del look

    def _let_second_wait(self) -> None:
        """Let the second thread wait for the messages of the first flight."""
        if self._rounds is None:
            self._rounds = queue.SimpleQueue()
            queues = self._rounds, self._arrivals, self._jobs
            threading.Thread(target=_wait_for_rounds, args=queues, name="thinwire-wait", daemon=True).start()
        self._second_waits = True
        self._rounds.put(self._flights[0].exchange.round)

    def _arrived(self) -> None:
        """Proceed with what the second thread has waited for, unless that has happened already."""
        if self._second_waits and self._flights:
            self._proceed()

    def _take(self, job: Job, future: Future) -> bool:
        """Begin the exchange of a job, or let a small one wait for the next; returns whether an exchange has begun."""
        if job.first:
            while self._flights:  # of a step that was given up, which has no last job
                self._proceed()
            self._joining.clear()
            self._all_begun = False
        self._joining.append((job, future))
        more = not (job.last or job.at_once) and self.failure is None
        if more and (self.wait_for_last or self._joined_elements() < forecast.JOINED_BELOW):
            return False
        jobs, self._joining = self._joining, []
        self._all_begun |= job.last
        if self.failure is None:
            try:
                self._go_on(_Flight(jobs, UnderWay(_alive(self._run)([job for job, _ in jobs]))))
                return True
            except Exception as error:
                self._fail(error)
        self._answer(jobs)
        return False

    def _joined_elements(self) -> int:
        return sum(job.elements for job, _ in self._joining)

    def _proceed(self) -> None:
        """Run the next stage of the first flight, when its messages have arrived."""
        flight = self._flights.popleft()
        arrival = self._arrivals.get() if self._second_waits else _arrival(flight.exchange.round)
        self._second_waits = False
        try:
            if isinstance(arrival, Exception):
                raise arrival
            flight.exchange.resume(arrival)
            self._go_on(flight)
        except Exception as error:
            self._flights.append(flight)
            self._fail(error)

    def _go_on(self, flight: _Flight) -> None:
        """Let a flight wait for its messages, or finish it."""
        if flight.exchange.round is not None:
            self._flights.append(flight)
            return
        if self._all_begun and not self._flights:
            _alive(self._end_step)()
        self._answer(flight.jobs)
        flight.exchange.release()
        self._done()

    def _fail(self, error: Exception) -> None:
        """Give up all flights."""
        error = error.with_traceback(None)  # its frames refer to the process group, which must be freed
        self.failure = error if isinstance(error, LinkError) else _alive(self._describe)(error)
        while self._flights:
            self._answer(self._flights.popleft().jobs)
            self._done()

    def _answer(self, jobs: list[tuple[Job, Future]]) -> None:
        """Give every future a result: backward waits for it."""
        for job, future in jobs:
            future.set_result(job.buffer if self.failure is None else self.failure)


def _alive(method: "weakref.WeakMethod[F]") -> F:
    """A method of the owner, which is kept while there is work."""
    found = method()
    assert found is not None
    return found


def _arrival(found: Round | None) -> Arrival:
    """Wait for the messages of a round."""
    assert found is not None
    try:
        return found.wait()
    except Exception as error:
        return error.with_traceback(None)


def _wait_for_rounds(
    rounds: "queue.SimpleQueue[Round | None]", arrivals: "queue.SimpleQueue[Arrival]", jobs: "queue.SimpleQueue[Any]"
) -> None:
    """The work of the second thread."""
    while (found := rounds.get()) is not None:
        arrivals.put(_arrival(found))
        jobs.put(_ARRIVED)
        del found


def value_or_error(future: Future) -> Tensor:
    """The value of a job's future. An error raised here, not in the link's thread, surfaces in loss.backward()."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value
