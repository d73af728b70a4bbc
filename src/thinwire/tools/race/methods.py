"""Methods: named ways to average gradients, which can be installed on a DDP model.

Besides thinwire's codecs these are DDP's all-reduce (`dense`), torch's hooks (`fp16`, and `powersgd` at rank 1), and
`infinite`, an infinitely fast network: ranks wait for each other, but gradients are not exchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import MomentumCorrection
from thinwire.codec.low_rank import LowRank
from thinwire.codec.values import Bits
from thinwire.exchange.choose import NAMES
from thinwire.hooks.attach import attach, has_second_moments
from thinwire.link.link import Link
from thinwire.link.rounds import SGD, Nesterov, Rounds
from thinwire.tune.presets import LOCAL, PRESETS, resolve_codec

BASELINES = ("infinite", "dense", "fp16", "powersgd")
UPDATES = ("update", "rotate", *LOCAL)  # presets that compress updates of parameters instead of gradients


def check_method(name: str) -> None:
    """Raise ValueError if there is no method of this name."""
    if name in BASELINES or name in PRESETS or name == "auto":
        return
    base, plus, exchange = name.partition("+")
    if plus and exchange not in NAMES:
        raise ValueError(f"no exchange is called {exchange!r} in {name!r}; there are {', '.join(NAMES)}")
    try:
        resolve_codec(base)
    except ValueError:
        known = ", ".join(dict.fromkeys([*BASELINES, *PRESETS, "auto"]))
        raise ValueError(f"there is no method {name!r}; there are {known}, or a density such as 0.01") from None


def single_bucket(name: str) -> bool:
    """Return whether the method needs all gradients in one bucket: torch's PowerSGD hook fails with two on Gloo."""
    return name == "powersgd"


def applies_momentum(name: str) -> bool:
    """Return whether the codec applies momentum before sending, so that the optimizer must not."""
    if name in BASELINES or name == "auto":
        return False
    return isinstance(resolve_codec(name.split("+")[0]).feedback, MomentumCorrection)


def _timed(hook: Callable[..., Any], state: Any, on_last_bucket: Callable[[], None]) -> Callable[..., Any]:
    def timed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            on_last_bucket()
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return future

    return timed


def apply_method(
    model: DistributedDataParallel,
    name: str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    on_last_bucket: Callable[[], None] | None = None,
) -> Link | None:
    """Install a method on a model and return its link, if it is one of thinwire's; `name+exchange` sets the exchange.

    `on_last_bucket` is called when a backward pass has filled its last bucket. Codecs compress gradients, whatever the
    optimizer is, except for those in UPDATES, which compress what the optimizer changes, and for `auto`, which does so
    with optimizers that divide by second moments.
    """
    if name in BASELINES:
        hook, state = _baseline(model, name)
        if on_last_bucket is not None:
            model.register_comm_hook(None, _timed(hook, state, on_last_bucket))
        elif name != "dense":
            model.register_comm_hook(state, hook)
        return None
    codec, _, exchange = name.partition("+")
    options: dict[str, Any] = {"exchange": exchange or None, "on_last_bucket": on_last_bucket}
    adaptive = codec == "auto" and optimizer is not None and has_second_moments(optimizer)
    if adaptive:  # it chooses between uncompressed gradients and updates
        return attach(model, codec, optimizer=optimizer, **options)
    if codec not in UPDATES:
        return attach(model, codec, **options)
    if optimizer is None:
        raise ValueError(f"the method {name} exchanges an optimizer's updates, and there is no optimizer here")
    return attach(model, codec, optimizer=optimizer, domain="update", **options)


def _baseline(model: DistributedDataParallel, name: str) -> tuple[Callable[..., Any], Any]:
    if name == "infinite":
        return _one_number, None
    if name == "fp16":
        return default_hooks.fp16_compress_hook, model.process_group
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(model.process_group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        return powerSGD_hook.powerSGD_hook, state
    return default_hooks.allreduce_hook, model.process_group


def _one_number(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    buffer: torch.Tensor = bucket.buffer()
    number = buffer.new_zeros(1)
    work = dist.all_reduce(number, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: buffer)
    return future


# Methods of `thinwire bench fidelity` that exchange updates


def update_codec(name: str) -> Codec:
    """Return the codec of a preset, a density, or lowrank=DENSITY:BITS:MAX_RANK with defaults for the last two."""
    kind, _, numbers = name.partition("=")
    if kind != "lowrank":
        return resolve_codec(name)
    density, bits, rank, *_ = [*numbers.split(":"), "", ""]
    return Codec(LowRank(float(density), max_rank=int(rank or 64)), Bits(int(bits or 2)))


def update_method(method: str) -> tuple[Codec, Rounds] | None:
    """Return codec and rounds of a method that exchanges updates; None for other methods."""
    kind, _, what = method.partition(":")
    if kind == "update":
        return update_codec(what.partition("+")[0]), Rounds()
    if not kind.startswith("local"):
        return None
    return update_codec((what or kind).partition("+")[0]), local_rounds(kind, what)


def local_rounds(kind: str, codec: str) -> Rounds:
    """Return the rounds of local16+overlap+nesterov, or of a part of that name; a preset without a codec overlaps."""
    name, *options = (kind if codec else f"{kind}+overlap").split("+")
    overlap = "overlap" in options
    return Rounds(int(name.removeprefix("local")), Nesterov() if "nesterov" in options else SGD(), overlap)
