"""attach(): one line that gives a DistributedDataParallel model compressed gradients."""

import copy
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import MomentumCorrection
from thinwire.codec.selection import Selection
from thinwire.codec.vectors import DTYPES
from thinwire.exchange.base import Exchange
from thinwire.exchange.channel import Channel, OwnGroups, agreed
from thinwire.exchange.choose import NAMES, choose_exchange
from thinwire.exchange.scatter_reduce import ScatterReduce
from thinwire.hooks.ddp import Dispatcher, dispatcher_of
from thinwire.link.autotune import FIRST, Agreement, Pilot
from thinwire.link.link import Link
from thinwire.link.rescale import UnitWatch
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured
from thinwire.tune.presets import resolve_codec


def checked_ddp(model: nn.Module) -> DistributedDataParallel:
    """The model, if it is of DDP; TypeError says what to do otherwise."""
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


def trained_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients DDP averages, by name."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    return {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}


def check_model(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
    """ValueError says why this model's gradients cannot be taken."""
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


def check_momentum(codec: Codec, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn if momentum would be applied twice."""
    if optimizer is None or not isinstance(codec.feedback, MomentumCorrection):
        return
    if any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
        warnings.warn(
            "MomentumCorrection applies momentum before sending and the optimizer applies it again: "
            "use SGD with momentum=0, or the memory ErrorFeedback()",
            stacklevel=6,  # whoever called attach
        )


_log = logging.getLogger("thinwire")


def attach(
    model: nn.Module,
    codec: Codec | Selection | float | str = 0.01,
    *,
    exchange: Exchange | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    check_every: int = 0,
    timeout: float | None = None,
    on_last_bucket: Callable[[], None] | None = None,
) -> Link:
    """Compress a DDP model's gradients from the next backward pass on. Call it on all ranks.

    codec: a density, a selection, a Codec, a preset's name ("percentile90", "dgc", "adaptive", ...), or "auto", which
        measures model and network in the first steps, takes what is fastest, and changes it with the network.
    exchange: an Exchange, "dense", "gather" or "scatter-reduce"; by default chosen from sizes and ranks.
    optimizer: keeps the memory consistent when its learning rates change.
    scaler: a GradScaler; keeps the memory consistent when the loss scale changes.
    check_every: compare the replicas' parameters every so many steps.
    timeout: seconds after which a silent peer is an error; default is the process group's.
    on_last_bucket: called when a backward pass has filled its last bucket, to tell computing from waiting.
    """
    ddp = checked_ddp(model)
    if check_every < 0 or (timeout is not None and timeout <= 0):
        raise ValueError("check_every counts steps from 0 (never) and timeout is a number of seconds above 0")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a torch.optim.Optimizer, not {optimizer!r}")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ValueError(f"scaler is a GradScaler, not {scaler!r}")
    parameters = trained_parameters(ddp)
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    groups = OwnGroups(ddp.process_group, device, timeout)
    channel = groups.all
    plan = agreed(
        channel,
        lambda: _plan(ddp, parameters, codec, exchange, optimizer, channel.world),
        lambda plan: _description(plan, parameters, check_every),
    )
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
    width = max((p.element_size() for p in parameters.values()), default=4)
    pilot = Pilot(link, channel, plan.sizes, groups, width=width) if codec == "auto" else None
    plan.dispatcher.take(link, pilot, on_last_bucket)
    if channel.rank == 0:
        _log.info("%r attached; %s", link, plan.why)
    return link


@dataclass(frozen=True)
class _Plan:
    """What a rank would attach."""

    dispatcher: Dispatcher
    codec: Codec
    exchange: Exchange
    why: str
    sizes: dict[str, int]


def _plan(
    ddp: DistributedDataParallel,
    parameters: dict[str, Tensor],
    codec: Codec | Selection | float | str,
    exchange: Exchange | str | None,
    optimizer: torch.optim.Optimizer | None,
    world: int,
) -> _Plan:
    auto = codec == "auto"
    if auto and exchange is not None:
        raise ValueError('"auto" chooses the exchange itself: leave exchange out, or name a codec')
    made = resolve_codec(FIRST.density if auto else codec)
    check_model(ddp, parameters)
    check_momentum(made, optimizer)
    sizes = {name: p.numel() for name, p in parameters.items()}
    chosen, why = _exchange(FIRST.exchange if auto else exchange, made, sizes, world)
    return _Plan(dispatcher_of(ddp, parameters), made, chosen, why, sizes)


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
