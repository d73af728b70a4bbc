"""Models that a framework wraps: `attach_wrapped` refuses one that is not wrapped yet."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.hooks.attach import attach, unwrapped
from thinwire.hooks.fsdp import is_sharded
from thinwire.link.link import Link


def attach_wrapped(model: torch.nn.Module, codec: Any, wrapper: str, **options: Any) -> Link:
    """Attach to a model that a framework has wrapped.

    Raises ValueError if it has not: wrapped later, a model's gradients would be averaged uncompressed, too.
    """
    if isinstance(model, torch.nn.Module) and dist.is_initialized() and dist.get_world_size() > 1:
        inner = unwrapped(model)
        if not isinstance(inner, DistributedDataParallel) and not is_sharded(inner):
            raise ValueError(
                f"{type(inner).__name__} is neither wrapped in DistributedDataParallel nor sharded by FSDP2: {wrapper}"
            )
    return attach(model, codec, **options)
