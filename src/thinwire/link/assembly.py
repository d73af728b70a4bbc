"""Assembly: builds a link between the ranks of a process group, for any hook.

All ranks compare version, codec, exchange and parameters before anything is exchanged, and raise if they differ.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import DTYPES
from thinwire.codec.low_rank import LowRank
from thinwire.codec.selection import Selection
from thinwire.exchange.base import Dense, Exchange
from thinwire.exchange.channel import Channel, LocalChannel, OwnGroups, agreed
from thinwire.exchange.choose import NAMES, choose_doubling, choose_exchange
from thinwire.exchange.gather import Gather
from thinwire.exchange.hierarchical import Hierarchical
from thinwire.exchange.low_rank import LowRankMean
from thinwire.exchange.scatter_reduce import ScatterReduce
from thinwire.link.autotune import FIRST, QUICK, AdaptiveAgreement, Autotuner, probe_network
from thinwire.link.link import Link
from thinwire.link.rescale import ResidualUnits
from thinwire.link.rounds import Rounds
from thinwire.tune.adaptive import Adaptive
from thinwire.tune.cost import Measured
from thinwire.tune.presets import resolve_codec

T = TypeVar("T")
CodecLike = Codec | Selection | float | str


@dataclass(frozen=True)
class LinkOptions:
    """The options of a link that do not depend on the hook; `thinwire.attach` explains them."""

    codec: CodecLike = 0.01
    exchange: Exchange | str | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    scaler: Any = None
    check_every: int = 0
    timeout: float | None = None
    domain: str = "gradient"
    rounds: Rounds = field(default_factory=Rounds)
    tune_updates: bool = False  # "auto" for updates: `codec` is that of the first steps

    def __post_init__(self) -> None:
        if self.check_every < 0 or (self.timeout is not None and self.timeout <= 0):
            raise ValueError("check_every counts steps from 0 (never) and timeout is a number of seconds above 0")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(f"optimizer is a torch.optim.Optimizer or a list of them, not {optimizer!r}")
        if self.scaler is not None and not hasattr(self.scaler, "get_scale"):
            raise ValueError(f"scaler is a GradScaler, not {self.scaler!r}")
        if self.auto and self.exchange is not None:
            raise ValueError('"auto" chooses the exchange itself: leave exchange out, or name a codec')

    @property
    def auto(self) -> bool:
        """Whether an autotuner chooses the setting."""
        return isinstance(self.codec, str) and self.codec == "auto"


@dataclass(frozen=True)
class _Parts:
    """What a rank would build a link from."""

    codec: Codec
    exchange: Exchange
    why: str


def open_link(
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    options: LinkOptions,
    prepare: Callable[[], T],
    owned: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
) -> tuple[Link, T]:
    """Build a link between the ranks of a group. Call it on all of them.

    parameters: those whose changes will be submitted, by name. prepare: what the hook does to get ready, such as
    checking the model; if it raises on one rank, all ranks raise. Its result is returned besides the link. owned: the
    parameters as optimizers hold them, where those are other tensors. device: where the changes are, by default where
    the parameters are.
    """
    owned = parameters if owned is None else owned
    there = device if device is not None else next((p.device for p in parameters.values()), torch.device("cpu"))
    groups = OwnGroups(group, there, options.timeout)
    channel = groups.all
    sizes = {name: p.numel() for name, p in parameters.items()}

    def plan() -> tuple[_Parts, T]:
        return _parts(parameters, options, sizes, channel), prepare()

    try:
        parts, prepared = agreed(channel, plan, lambda made: _description(made[0], parameters, options, owned))
        messages = choose_doubling(channel) if not isinstance(parts.exchange, Dense | Hierarchical) else ""
        agreement = _agreement(parts, channel, sizes)
        parts.exchange.setup(channel, parts.codec, sizes, groups)
    except BaseException:
        groups.close()
        raise
    link = Link(
        parameters,
        parts.codec,
        parts.exchange,
        channel,
        why=f"{parts.why}; {messages}" if messages else parts.why,
        check_every=options.check_every,
        units=ResidualUnits(owned, options.optimizers, options.scaler),
        on_step=agreement.end_step if agreement is not None else None,
        groups=groups,
    )
    if options.auto:
        width = max((p.element_size() for p in parameters.values()), default=4)
        link.tuner = Autotuner(link, channel, sizes, groups, width=width)
    return link, prepared


def dense_is_quick(model: nn.Module, group: dist.ProcessGroup, timeout: float | None) -> tuple[bool, str]:
    """Whether the ranks' network carries all gradients uncompressed in no time; and a clause that says so."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    groups = OwnGroups(group, device, timeout)
    try:
        described = {"version": thinwire.__version__, "parameters": _shapes(parameters), "codec": '"auto"'}
        agreed(groups.all, lambda: None, lambda made: described)
        elements = sum(p.numel() for p in parameters.values())
        network = probe_network(groups.all, elements)
    finally:
        groups.close()
    seconds = network.reduce(float(sum(p.numel() * p.element_size() for p in parameters.values())))
    return seconds < QUICK, f"an all-reduce of all gradients takes {1e3 * seconds:.0f} ms at {network}"


def _shapes(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    return [[name, str(list(p.shape)), str(p.dtype)] for name, p in parameters.items()]


def open_local_link(parameters: Mapping[str, Tensor], options: LinkOptions) -> Link:
    """A link of a single process. It exchanges nothing, and keeps a state that was loaded."""
    check_types(parameters)
    codec = resolve_codec(FIRST.density if options.auto else options.codec)
    exchange, channel = Dense(), LocalChannel()
    exchange.setup(channel, codec, {}, lambda members: [])
    units = ResidualUnits(parameters, options.optimizers, options.scaler)
    why = "there is a single process, so that nothing is exchanged and gradients are left as they are"
    return Link(parameters, codec, exchange, channel, why=why, units=units)


def check_types(parameters: Mapping[str, Tensor]) -> None:
    """ValueError if a parameter has a type that cannot be compressed."""
    for name, p in parameters.items():
        if p.dtype not in DTYPES:
            raise ValueError(f"{name} is {p.dtype}: thinwire takes float32, float16 and bfloat16 parameters")


def _parts(parameters: Mapping[str, Tensor], options: LinkOptions, sizes: dict[str, int], channel: Channel) -> _Parts:
    codec = resolve_codec(FIRST.density if options.auto else options.codec, channel.world)
    if isinstance(selection := codec.selection, Adaptive):
        elements = sum(sizes.values())
        codec = codec.copy(selection=selection.within(bits=codec.values.bits, elements=elements, seed=channel.rank))
    check_types(parameters)
    wanted = FIRST.exchange if options.auto else options.exchange
    if isinstance(codec.selection, LowRank):
        return _low_rank_parts(parameters, codec, wanted, channel.world)
    if options.domain == "update":
        return _update_parts(codec, wanted, sizes, channel.world)
    if wanted is None:
        return _Parts(codec, *choose_exchange(codec, sizes, channel.world))
    if isinstance(wanted, Exchange):
        return _Parts(codec, copy.deepcopy(wanted), "as asked")  # the same object may be given to several links
    if wanted not in NAMES:
        raise ValueError(f"no exchange is called {wanted!r}; there are {', '.join(NAMES)}")
    return _Parts(codec, NAMES[wanted](), "as asked")


def _update_parts(codec: Codec, wanted: Exchange | str | None, sizes: dict[str, int], world: int) -> _Parts:
    """The parts of a link that exchanges updates, whose residuals hold the updates already when they are exchanged."""
    if wanted is None:
        exchange, why = choose_exchange(codec, sizes, world)
        return _Parts(codec, Gather() if isinstance(exchange, Dense) else exchange, why)
    if wanted in ("gather", "scatter-reduce"):
        return _Parts(codec, NAMES[str(wanted)](), "as asked")
    if isinstance(wanted, Gather | ScatterReduce):
        return _Parts(codec, copy.deepcopy(wanted), "as asked")
    raise ValueError(f'updates are exchanged by "gather" or "scatter-reduce", not {wanted!r}')


def _low_rank_parts(
    parameters: Mapping[str, Tensor], codec: Codec, wanted: Exchange | str | None, world: int
) -> _Parts:
    """The parts of a low-rank link. From three ranks on ScatterReduce moves fewer bytes than Gather."""
    if wanted not in (None, "gather", "scatter-reduce"):
        raise ValueError(f'LowRank takes exchange="gather" or "scatter-reduce", not {wanted!r}')
    gathers = wanted == "gather" or (wanted is None and world <= 2)
    inner: Exchange = Gather() if gathers else ScatterReduce()
    numbers = codec.selection.expected(sum(p.numel() for p in parameters.values()), 0)
    kilobytes = numbers * codec.values.bits / 8e3 * (world - 1 if gathers else 2 * (world - 1) / world)
    way = "gather" if gathers else "scatter-reduce"
    why = f"low-rank coordinates by {way}, about {kilobytes:,.0f} kB a step and rank"
    return _Parts(codec, LowRankMean(inner, {name: p.shape for name, p in parameters.items()}), why)


def _owners(parameters: Mapping[str, Tensor], options: LinkOptions) -> list[int]:
    """For each parameter the index of the optimizer that owns it, or -1."""
    owned = {id(p): i for i, o in enumerate(options.optimizers) for group in o.param_groups for p in group["params"]}
    return [owned.get(id(p), -1) for p in parameters.values()]


def _agreement(parts: _Parts, channel: Channel, sizes: dict[str, int]) -> AdaptiveAgreement | None:
    """What an adaptive selection needs to know of the model and of the other ranks; None for other selections."""
    selection = parts.codec.selection
    if not isinstance(selection, Adaptive) or (selection.agree is None and not isinstance(selection.cost, Measured)):
        return None
    return AdaptiveAgreement(selection, channel, sizes, scattered=isinstance(parts.exchange, ScatterReduce))


def _description(
    parts: _Parts, parameters: Mapping[str, Tensor], options: LinkOptions, owned: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What all ranks must have in common."""

    def without_addresses(what: object) -> str:  # addresses of functions differ between processes
        return re.sub(r" at 0x[0-9a-f]+", "", repr(what))

    return {
        "version": thinwire.__version__,
        "parameters": _shapes(parameters),
        "codec": without_addresses(parts.codec),
        "exchange": without_addresses(parts.exchange),
        "check_every": options.check_every,
        "domain": options.domain,
        "rounds": repr(options.rounds),
        "auto": options.auto or options.tune_updates,
        "optimizers": _owners(owned, options) if options.domain == "update" else [],
    }
