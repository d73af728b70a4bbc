"""attach(): one line that gives a DistributedDataParallel model compressed gradients.

DDP takes a communication hook once and for ever, so that a small dispatcher is registered, which hands buckets to
the link that is attached, or to DDP's own all-reduce. (No `from __future__ import annotations` here: DDP reads the
hook's annotations.)
"""

import copy
import datetime
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.memory import MomentumResidual
from thinwire.codec.vectors import DTYPES
from thinwire.ddp.agreeing import Agreement
from thinwire.ddp.buckets import Job
from thinwire.ddp.link import Link
from thinwire.ddp.pilot import FIRST, Pilot
from thinwire.ddp.units import UnitWatch
from thinwire.errors import LinkError
from thinwire.exchange.agree import agreed
from thinwire.exchange.base import Exchange
from thinwire.exchange.channel import Channel
from thinwire.exchange.choose import NAMES, choose_exchange
from thinwire.exchange.scatter_reduce import ScatterReduce
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured
from thinwire.tune.presets import any_codec_for

_log = logging.getLogger("thinwire")


class _Dispatcher:
    """The hook that DDP holds. Bound methods register; other callables and partials do not."""

    def __init__(self, model: DistributedDataParallel, names: dict[int, str]) -> None:
        self.link: Link | None = None
        self.pilot: Pilot | None = None
        self.on_last_bucket: Callable[[], None] | None = None
        self._group: dist.ProcessGroup = model.process_group
        self._names = names

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

    def _gradients(self, bucket: dist.GradBucket) -> dict[str, Tensor]:  # type: ignore[name-defined]
        return {self._names[id(p)]: g.view(-1) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}

    def _piloted(self, pilot: Pilot, bucket: dist.GradBucket) -> bool:  # type: ignore[name-defined]
        """Let the pilot see a bucket; whether it goes past the link."""
        if bucket.index() == 0:
            pilot.begin_step()
        if pilot.sampling:
            pilot.sample(self._gradients(bucket))
        pilot.filled(bucket.buffer().numel())
        return pilot.width > 0

    def _straight(self, pilot: Pilot, buffer: Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        future = self._all_reduce(buffer) if pilot.width == 4 else self._all_reduce_half(buffer)
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

    def release(self, link: Link) -> None:
        """Forget a link, if it is still the one that is attached."""
        if self.link is link:
            self.link = self.pilot = None


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


def attach(
    model: nn.Module,
    codec: Codec | float | str = 0.01,
    *,
    exchange: Exchange | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    check_every: int = 0,
    timeout: float | None = None,
    on_last_bucket: Callable[[], None] | None = None,
) -> Link:
    """Compress a DDP model's gradients from the next backward pass on. Call it on all ranks.

    codec: a density, a Codec, a preset's name ("percentile90", "dgc", "adaptive", ...), or "auto", which measures
        model and network in the first steps, takes what is fastest, and changes it when the network changes.
    exchange: an Exchange, "dense", "gather" or "scatter-reduce"; by default chosen from sizes and ranks.
    optimizer: keeps the memory consistent when its learning rates change.
    scaler: a GradScaler; keeps the memory consistent when the loss scale changes.
    check_every: compare the replicas' parameters every so many steps.
    timeout: seconds after which a silent peer is an error; default is the process group's.
    on_last_bucket: called when a backward pass has filled its last bucket, to tell computing from waiting.
    """
    ddp = _checked(model)
    if check_every < 0 or (timeout is not None and timeout <= 0):
        raise ValueError("check_every counts steps from 0 (never) and timeout is a number of seconds above 0")
    parameters = _parameters(ddp)
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    limit = datetime.timedelta(seconds=timeout) if timeout is not None else _timeout(ddp.process_group)
    channel = Channel(_new_group(ddp.process_group, None, limit), device)

    auto = codec == "auto"

    def prepare() -> _Plan:
        if auto and exchange is not None:
            raise ValueError('"auto" chooses the exchange itself: leave exchange out, or name a codec')
        made = any_codec_for(FIRST.density if auto else codec)
        _check_model(ddp, parameters)
        _check_momentum(made, optimizer)
        sizes = {name: p.numel() for name, p in parameters.items()}
        chosen, why = _exchange(FIRST.exchange if auto else exchange, made, sizes, channel.world)
        return _Plan(_dispatcher(ddp, parameters), made, chosen, why, sizes)

    def describe(plan: _Plan) -> dict[str, Any]:
        return _description(plan, parameters, check_every)

    def groups(members: list[list[int]]) -> list[Channel]:
        made_groups = [_new_group(ddp.process_group, ranks, limit) for ranks in members]
        return [
            Channel(group, device) if channel.rank in ranks else channel
            for group, ranks in zip(made_groups, members, strict=True)
        ]

    plan = agreed(channel, prepare, describe)
    agreement = _agreement(plan, channel)
    plan.exchange.setup(channel, plan.codec, plan.sizes, groups)
    link = Link(
        parameters,
        plan.codec,
        plan.exchange,
        channel,
        why=plan.why,
        check_every=check_every,
        units=UnitWatch(parameters, optimizer, scaler),
        on_detach=plan.dispatcher.release,
        on_step=agreement.end_step if agreement is not None else None,
    )
    plan.dispatcher.link = link
    plan.dispatcher.pilot = Pilot(link, channel, plan.sizes, groups) if auto else None
    plan.dispatcher.on_last_bucket = on_last_bucket
    if channel.rank == 0:
        _log.info("%r attached; %s", link, plan.why)
    return link


@dataclass(frozen=True)
class _Plan:
    """What a rank would attach."""

    dispatcher: _Dispatcher
    codec: Codec
    exchange: Exchange
    why: str
    sizes: dict[str, int]


def _agreement(plan: _Plan, channel: Channel) -> Agreement | None:
    """What an adaptive selection needs to know of the model and of the other ranks; None for all others."""
    selection = plan.codec.selection
    if not isinstance(selection, Adaptive):
        return None
    selection = selection.within(bits=plan.codec.values.bits, elements=sum(plan.sizes.values()), seed=channel.rank)
    plan.codec.selection = selection
    if selection.agree is None and not isinstance(selection.cost, Measured):
        return None
    return Agreement(selection, channel, plan.sizes, scattered=isinstance(plan.exchange, ScatterReduce))


def _checked(model: nn.Module) -> DistributedDataParallel:
    if isinstance(model, DistributedDataParallel):
        return model
    kind = type(model).__name__
    if "FSDP" in kind or "FullyShardedDataParallel" in kind:
        raise TypeError(
            f"{kind} shards parameters and gradients, which no replica has whole: thinwire takes DDP models"
        )
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach to the DDP model before torch.compile wraps it")
    raise TypeError(f"attach takes a DistributedDataParallel model, not {kind}: wrap it as DDP(model) first")


def _parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    return {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}


def _check_model(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
    wrapped = model._get_ddp_logging_data().get("num_parameter_tensors", len(parameters))
    if wrapped != len(parameters):
        raise ValueError(
            f"DDP was made for {wrapped} parameters and {len(parameters)} require gradients now: "
            "after freezing or unfreezing wrap the model in DDP again, then attach"
        )
    for name, p in parameters.items():
        if p.dtype not in DTYPES:
            raise ValueError(f"{name} is {p.dtype}: thinwire takes float32, float16 and bfloat16 parameters")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"{name} gives sparse gradients, which DDP's hooks cannot take: use sparse=False")
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError("DDP's mixed_precision installs a hook of its own: use torch.autocast instead")


def _check_momentum(codec: Codec, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None or not isinstance(codec.memory, MomentumResidual):
        return
    if any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
        warnings.warn(
            "MomentumResidual applies momentum before sending and the optimizer applies it again: "
            "use SGD with momentum=0, or the memory Residual()",
            stacklevel=3,
        )


def _dispatcher(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> _Dispatcher:
    found = getattr(model, "_thinwire_dispatcher", None)
    if isinstance(found, _Dispatcher):
        if found.link is not None:
            raise LinkError("this model is attached already; call detach() on its link first")
        return found
    dispatcher = _Dispatcher(model, {id(p): name for name, p in parameters.items()})
    try:
        model.register_comm_hook(None, dispatcher.hook)
    except RuntimeError as error:
        raise LinkError("the model has a communication hook already; DDP takes only one, for ever") from error
    model._thinwire_dispatcher = dispatcher  # type: ignore[assignment]
    return dispatcher


def _exchange(what: Exchange | str | None, codec: Codec, sizes: dict[str, int], world: int) -> tuple[Exchange, str]:
    if isinstance(what, Exchange):
        return copy.deepcopy(what), "as asked"  # the user's own may serve several links
    if what is None:
        return choose_exchange(codec, sizes, world)
    if what not in NAMES:
        raise ValueError(f"no exchange is called {what!r}; there are {', '.join(NAMES)}")
    return NAMES[what](), "as asked"


def _description(plan: _Plan, parameters: dict[str, Tensor], check_every: int) -> dict[str, Any]:
    # Addresses of functions differ between processes that run the same program.
    def plain(what: object) -> str:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(what))

    return {
        "version": thinwire.__version__,
        "parameters": [[name, str(list(p.shape)), str(p.dtype)] for name, p in parameters.items()],
        "codec": plain(plan.codec),
        "exchange": plain(plan.exchange),
        "check_every": check_every,
    }


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None) if _is_gloo(group) else None
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, datetime.timedelta) else dist.default_pg_timeout


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend(group))


def _new_group(parent: dist.ProcessGroup, ranks: list[int] | None, limit: datetime.timedelta) -> dist.ProcessGroup:
    """A group of some of the parent's ranks; every rank of the world that has the parent must call it."""
    members = dist.get_process_group_ranks(parent)
    chosen = members if ranks is None else [members[r] for r in ranks]
    backend = dist.get_backend(parent)
    group: dist.ProcessGroup = dist.new_group(
        chosen, timeout=limit, backend=backend, use_local_synchronization=backend != "mpi"
    )
    return group
