"""Hook: what DDP calls with every bucket.

DDP takes a communication hook once and for ever, so that a small dispatcher is registered, which hands buckets to
the link that is attached, or to DDP's own all-reduce. (No `from __future__ import annotations` here: DDP reads the
hook's annotations.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.codec.encode import BucketViews
from thinwire.errors import LinkError
from thinwire.link.autotune import Pilot
from thinwire.link.link import Job, Link


class Dispatcher:
    """The hook that DDP holds. Bound methods register; other callables and partials do not."""

    def __init__(self, model: DistributedDataParallel, names: dict[int, str]) -> None:
        self.link: Link | None = None
        self.pilot: Pilot | None = None
        self.on_last_bucket: Callable[[], None] | None = None
        self._group: dist.ProcessGroup = model.process_group
        self._names = names
        self._views: dict[int, tuple[int, BucketViews]] = {}

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        link, buffer, begins = self.link, bucket.buffer(), bucket.index() == 0
        if link is None:
            return self._all_reduce(buffer)
        if self.on_last_bucket is not None and bucket.is_last():
            self.on_last_bucket()
        if self.pilot is not None and self._piloted(self.pilot, bucket):
            if begins:
                link.units.factors()  # nothing is held back that would have to follow
            return self._straight(self.pilot, buffer, bucket.is_last())
        factors = link.units.factors() if begins else {}
        job = Job(buffer, self._gradients(bucket), bucket.is_last(), begins, factors, _ready(buffer))
        ends = self.pilot is not None and bucket.is_last()
        return link.submit(job).then(self._ended if ends else _unwrap)

    def _gradients(self, bucket: dist.GradBucket) -> BucketViews:  # type: ignore[name-defined]
        """The bucket's gradients by name: the same objects from step to step, while DDP keeps its buckets.

        What is known here holds on to the memory, so that no other bucket can be found at the same address.
        """
        index, address = bucket.index(), bucket.buffer().data_ptr()
        known = self._views.get(index)
        if known is not None and known[0] == address:
            return known[1]
        if known is not None:
            self._views.clear()  # DDP has regrouped its buckets
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        views = BucketViews({self._names[id(p)]: g.view(-1) for p, g in pairs})
        self._views[index] = address, views
        return views

    def _piloted(self, pilot: Pilot, bucket: dist.GradBucket) -> bool:  # type: ignore[name-defined]
        """Let the pilot see a bucket; whether it goes past the link."""
        if bucket.index() == 0:
            pilot.begin_step()
        if pilot.sampling:
            pilot.sample(self._gradients(bucket))
        pilot.filled(bucket.buffer().numel())
        return pilot.width > 0

    def _straight(self, pilot: Pilot, buffer: Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        narrower = pilot.width < buffer.element_size()
        future = self._all_reduce_half(buffer) if narrower else self._all_reduce(buffer)
        return future.then(self._ended) if last else future

    def _ended(self, future: torch.futures.Future[Any]) -> Tensor:
        if self.pilot is not None:
            self.pilot.ended()
        return _unwrap(future)

    def _all_reduce_half(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        """The same in 16 bits, as torch's fp16_compress_hook has it."""
        half = buffer.to(torch.float16).div_(self._group.size())
        work = dist.all_reduce(half, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: buffer.copy_(half))
        return future

    def _all_reduce(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        """What DDP does without a hook, to the bit: multiplied, not divided."""
        buffer.mul_(1.0 / self._group.size())
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: buffer)
        return future

    def take(self, link: Link, pilot: Pilot | None, on_last_bucket: Callable[[], None] | None) -> None:
        """From now on buckets go to this link."""
        self.link, self.pilot, self.on_last_bucket = link, pilot, on_last_bucket

    def release(self, link: Link) -> None:
        """Forget a link, if it is still the one that is attached."""
        if self.link is link:
            self.link = self.pilot = None
            self._views.clear()


def dispatcher_of(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> Dispatcher:
    """The dispatcher of a model to which no link is attached; registered with DDP the first time."""
    found = getattr(model, "_thinwire_dispatcher", None)
    if isinstance(found, Dispatcher):
        if found.link is not None:
            raise LinkError("this model is attached already; call detach() on its link first")
        return found
    dispatcher = Dispatcher(model, {id(p): name for name, p in parameters.items()})
    try:
        model.register_comm_hook(None, dispatcher.hook)
    except RuntimeError as error:
        raise LinkError("the model has a communication hook already; DDP takes only one, for ever") from error
    model._thinwire_dispatcher = dispatcher  # type: ignore[assignment]
    return dispatcher


def _unwrap(future: torch.futures.Future[Any]) -> Tensor:
    """Raising here, and not in the link's thread, is what lets the error surface in loss.backward()."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value


def _ready(buffer: Tensor) -> Any:
    """What the link's thread must wait for before it may read a GPU's gradients."""
    if not buffer.is_cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(buffer.device))
    return event.synchronize
