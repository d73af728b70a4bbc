"""Replicas: whether all ranks hold the same parameters, and which ranks are still there.

A checksum of every parameter is a few bytes; comparing them now and then turns silent divergence into an error.
"""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _native
from thinwire.errors import LinkError
from thinwire.exchange.channel import Channel


def checksum(tensor: Tensor) -> int:
    """CRC-32C of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous()
    return _native.crc32c(data.data_ptr(), data.numel() * data.element_size())


def check_replicas(channel: Channel, parameters: Mapping[str, Tensor], step: int) -> None:
    """Raise on all ranks if any parameter differs between them, naming the rank and the parameter."""
    mine = torch.tensor([checksum(p) for p in parameters.values()], dtype=torch.int64)
    everybody = torch.stack([m.clone().view(torch.int64) for m in channel.all_gather(mine.view(torch.uint8))])
    usual = everybody.mode(dim=0).values
    differing = (everybody != usual).nonzero().tolist()
    if differing:
        rank, place = differing[0]
        name = list(parameters)[place]
        raise LinkError(f"step {step}: rank {rank} holds another {name} than the others; the replicas have diverged")


def silent_ranks(channel: Channel, step: int, patience: float = 2.0) -> list[int]:
    """After a failure: the ranks that do not report it too within a moment, by the rendezvous store."""
    try:
        store = dist.distributed_c10d._get_default_store()
        key = f"thinwire/failed/{channel.group.group_name}/{step}/"
        store.set(f"{key}{channel.rank}", "here")
        missing = set(range(channel.world))
        until = time.monotonic() + patience
        while missing and time.monotonic() < until:
            missing = {rank for rank in missing if not store.check([f"{key}{rank}"])}
            time.sleep(0.05)
        return sorted(missing)
    except (RuntimeError, ValueError):  # the store died with its rank: nobody can be named
        return []
