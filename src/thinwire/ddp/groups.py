"""Groups: process groups of a link's own, so that its collectives never meet those of DDP or of the user."""

import datetime

import torch
import torch.distributed as dist

from thinwire.exchange.channel import Channel


class OwnGroups:
    """Makes channels on groups of some of the parent's ranks."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, timeout: float | None) -> None:
        self._parent, self._device = parent, device
        self._limit = datetime.timedelta(seconds=timeout) if timeout is not None else _timeout(parent)
        self.all = Channel(self._new_group(None), device)

    def __call__(self, members: list[list[int]]) -> list[Channel]:
        """A channel for each list of ranks; where this rank is not in one, the channel of all stands for it."""
        made = [self._new_group(ranks) for ranks in members]
        return [
            Channel(group, self._device) if self.all.rank in ranks else self.all
            for group, ranks in zip(made, members, strict=True)
        ]

    def _new_group(self, ranks: list[int] | None) -> dist.ProcessGroup:
        """A group of some of the parent's ranks; every rank of the world that has the parent must call it."""
        members = dist.get_process_group_ranks(self._parent)
        chosen = members if ranks is None else [members[r] for r in ranks]
        backend = dist.get_backend(self._parent)
        group: dist.ProcessGroup = dist.new_group(
            chosen, timeout=self._limit, backend=backend, use_local_synchronization=backend != "mpi"
        )
        return group


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None) if _is_gloo(group) else None
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, datetime.timedelta) else dist.default_pg_timeout


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend(group))
