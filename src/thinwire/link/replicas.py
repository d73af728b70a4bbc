"""Replicas: checks that all ranks hold the same parameters, and finds out which rank failed.

Comparing a checksum of every parameter now and then turns silent divergence into an error.
"""

import re
import time
from collections.abc import Iterable, Mapping

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
    rows = torch.stack([m.clone().view(torch.int64) for m in channel.all_gather(mine.view(torch.uint8))])
    usual, _ = rows.mode(dim=0)
    differing = (rows != usual).nonzero().tolist()
    if differing:
        rank, place = differing[0]
        name, count = list(parameters)[place], sum(1 for r, _ in differing if r == rank)
        what = f"{name} and {count - 1} more" if count > 1 else name
        # Two ranks cannot tell which of them is wrong.
        who = f"rank {rank} holds another {what} than the others" if channel.world > 2 else f"ranks differ in {what}"
        raise LinkError(f"step {step}: {who}; the replicas have diverged")


def gather_reasons(channel: Channel, step: int, reason: str, patience: float = 2.0) -> dict[int, str | None]:
    """Every rank's reason for a failure: "" if another rank caused it, None for ranks that do not answer.

    The ranks use the rendezvous store, because the process group is broken. If the store is gone too, nothing is known.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        keys = [f"thinwire/failed/{channel.name}/{step}/{rank}" for rank in range(channel.world)]
        store.set(keys[channel.rank], f"-{reason}")
        until = time.monotonic() + patience
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(0.05)
        return {r: store.get(key).decode()[1:] if store.check([key]) else None for r, key in enumerate(keys)}
    except (RuntimeError, ValueError):  # the rank that hosts the store died
        return {}


def describe_failure(error: Exception, channel: Channel, channels: Iterable[Channel], step: int) -> LinkError:
    """An error that says in one sentence which rank failed, at which step, and why, as far as it can be known."""
    text = re.sub(r"^\[[^\]]*\] *", "", " ".join(str(error).split()))  # remove the backend's source line
    own = "" if isinstance(error, RuntimeError) else text  # collectives raise RuntimeErrors
    where = f"rank {channel.rank}, step {step}"
    for each in {channel, *channels}:
        each.abort()
    reasons = gather_reasons(channel, step, own)
    if own:
        return LinkError(f"{where}: {own}")
    for rank, reason in reasons.items():
        if reason:
            return LinkError(f"{where}: rank {rank} failed: {reason}")
    silent = [str(rank) for rank, reason in reasons.items() if reason is None]
    who = f"; no sign of rank {', '.join(silent)}" if silent else ""
    return LinkError(f"{where}: the exchange failed{who}: {text}")
