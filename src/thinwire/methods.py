"""Methods: the ways to average gradients that are compared, by name, each one line on a DDP model.

Besides thinwire's own codecs these are DDP's all-reduce, torch's own hooks, and an infinite network, on which every
rank still waits for the slowest but nothing else travels.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.ddp import attach
from thinwire.link import Link
from thinwire.presets import PRESETS, codec_for

BASELINES = {
    "infinite": "an infinite network: one number a bucket is exchanged, the gradients are not",
    "dense": "DDP as it is: 32-bit all-reduce",
    "fp16": "torch's fp16_compress_hook: 16-bit all-reduce",
    "powersgd": "torch's PowerSGD hook at rank 1, in a single bucket",
}


def check_method(name: str) -> None:
    """ValueError if there is no method of this name."""
    if name in BASELINES or name in PRESETS:
        return
    base = name.split("+")[0]
    try:
        codec_for(base)
    except ValueError:
        known = ", ".join([*BASELINES, *PRESETS])
        raise ValueError(f"there is no method {name!r}; there are {known}, or a density such as 0.01") from None


def single_bucket(name: str) -> bool:
    """Whether the method needs all gradients in one bucket (torch's PowerSGD fails with two on Gloo)."""
    return name == "powersgd"


def apply_method(
    model: DistributedDataParallel, name: str, *, optimizer: torch.optim.Optimizer | None = None
) -> Link | None:
    """Install a method on a model; a link if it is one of thinwire's. `name+exchange` picks the exchange."""
    if name in BASELINES:
        _BASELINE[name](model)
        return None
    codec, _, exchange = name.partition("+")
    return attach(model, codec, exchange=exchange or None, optimizer=optimizer)


def _fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)


def _powersgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(
        model.process_group, matrix_approximation_rank=1, start_powerSGD_iter=2, warm_start=True
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


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


def _infinite(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, _one_number)


_BASELINE: dict[str, Callable[[DistributedDataParallel], None]] = {
    "infinite": _infinite,
    "dense": lambda model: None,
    "fp16": _fp16,
    "powersgd": _powersgd,
}
