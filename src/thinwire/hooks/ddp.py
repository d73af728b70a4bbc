"""The DDP hook: hands the gradient buckets of a DistributedDataParallel model to a link.

DDP takes a communication hook once and for all. The hook is therefore registered once per model, and averages buckets
by DDP's own all-reduce while no link is attached. (No `from __future__ import annotations` here: DDP reads the hook's
annotations. It accepts bound methods, but no partials and no callable objects.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.codec.encode import BucketViews
from thinwire.errors import LinkError
from thinwire.link.assembly import LinkOptions, open_link, open_local_link
from thinwire.link.link import Link
from thinwire.link.thread import Job


def attach_ddp(
    model: DistributedDataParallel, options: LinkOptions, on_last_bucket: Callable[[], None] | None = None
) -> Link:
    """Attach a link to a DDP model; with a single rank, one that exchanges nothing."""
    parameters = _trained(model)
    if dist.get_world_size(model.process_group) == 1:
        return open_local_link(parameters, options)

    def prepare() -> DDPHook:
        _check_model(model, parameters)
        return _hook_of(model, parameters)

    link, hook = open_link(parameters, model.process_group, options, prepare)
    link.set_hook(hook.release, hook.all_reduce)
    hook.link, hook.on_last_bucket = link, on_last_bucket
    return link


class DDPHook:
    """The communication hook that a DDP model holds."""

    def __init__(self, model: DistributedDataParallel, names: dict[int, str]) -> None:
        self.link: Link | None = None
        self.local = False  # whether gradients stay as they are, because the link exchanges updates
        self.on_last_bucket: Callable[[], None] | None = None
        self._group: dist.ProcessGroup = model.process_group
        self._names = names
        self._views: dict[int, tuple[int, BucketViews]] = {}

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a model has no hook: DDP does not copy it either."""

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        if self.link is None:
            return self.all_reduce(buffer, buffer.element_size())
        if self.on_last_bucket is not None and bucket.is_last():
            self.on_last_bucket()
        if self.local:
            kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            kept.set_result(buffer)
            return kept
        gradients = self._gradients(bucket)
        return self.link.submit(Job(buffer, gradients, bucket.index() == 0, bucket.is_last(), when_ready(buffer)))

    def _gradients(self, bucket: dist.GradBucket) -> BucketViews:  # type: ignore[name-defined]
        """The bucket's gradients by parameter name: the same object from step to step while DDP keeps its buckets.

        The views keep the buffer's memory alive, so that no other bucket can get the same address.
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

    def all_reduce(self, buffer: Tensor, width: int) -> torch.futures.Future[torch.Tensor]:
        """Average a buffer as DDP does without a hook, bit for bit; or in 16 bits if `width` is below its type's."""
        world = self._group.size()
        half = width < buffer.element_size()
        # DDP multiplies by the reciprocal; torch's fp16_compress_hook divides.
        sent = buffer.to(torch.float16).div_(world) if half else buffer.mul_(1.0 / world)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda done: buffer.copy_(sent) if half else buffer
        )
        return future

    def release(self, link: Link) -> None:
        """Forget a link, if it is still the attached one."""
        if self.link is link:
            self.link, self.local = None, False
            self._views.clear()


def keep_local(model: DistributedDataParallel) -> DDPHook:
    """The hook of a model whose gradients are to stay local; it does so once its `local` is set."""
    _check_hooks(model)
    return _hook_of(model, _trained(model))


def _trained(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients DDP handles, by name."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    named = model.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ignored}


def _hook_of(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> DDPHook:
    """The hook of a model without a link; registered with DDP the first time."""
    found = getattr(model, "_thinwire_hook", None)
    if isinstance(found, DDPHook):
        if found.link is not None:
            raise LinkError("this model is attached already; call detach() on its link first")
        return found
    hook = DDPHook(model, {id(p): name for name, p in parameters.items()})
    try:
        model.register_comm_hook(None, hook.hook)
    except RuntimeError as error:
        raise LinkError("the model has a communication hook already; DDP takes only one, for ever") from error
    model._thinwire_hook = hook  # type: ignore[assignment]
    return hook


def _check_model(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
    """ValueError says why the gradients of this model cannot be exchanged."""
    wrapped = model._get_ddp_logging_data().get("num_parameter_tensors", len(parameters))
    if wrapped != len(parameters):
        raise ValueError(
            f"DDP was made for {wrapped} parameters and {len(parameters)} require gradients now: "
            "after freezing or unfreezing wrap the model in DDP again, then attach"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"{name} gives sparse gradients, which DDP's hooks cannot take: use sparse=False")
    _check_hooks(model)


def _check_hooks(model: DistributedDataParallel) -> None:
    """ValueError if DDP has a hook of its own, or calls hooks in another way."""
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which calls hooks with single gradients instead of '
            'buckets: set it to True, or to "ddp_optimizer", before the model is wrapped in DDP'
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError("DDP's mixed_precision installs a hook of its own: use torch.autocast instead")


def when_ready(buffer: Tensor) -> Any:
    """A function that returns when a GPU has computed the gradients, for the link's thread to call."""
    if not buffer.is_cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(buffer.device))
    return event.synchronize
