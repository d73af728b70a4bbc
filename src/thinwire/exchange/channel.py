"""Groups: process groups of a link's own, so that its collectives never meet those of DDP or of the user."""

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LinkError

# PyTorch is renaming it; the old name warns where the new one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Larger messages are rare (a probe of a fast network), and new memory is a small part of what they take.
_MOST_KEPT = 1 << 24


class Channel:
    """A process group of its own, so that nobody else's collectives can come between ours."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self.name = group.group_name
        self.rank = group.rank()
        self.world = group.size()
        # Gloo gathers around a ring, in which every rank waits for all before it: sending to all at once is one hop.
        self._direct = dist.get_backend(group) == "gloo"
        # Backends of GPUs move only GPU memory; frames themselves are made and read on the CPU.
        self.device = device if device is not None and not self._direct else torch.device("cpu")
        self._rooms: dict[str, Tensor] = {}
        self.sent = 0
        self.received = 0
        self.seconds = 0.0
        self.cpu = 0.0  # seconds that this thread computed inside collectives

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LinkError("the link broke before, and its process group with it: attach again")
        return self._group

    # What these three return is overwritten by the next of them: read it, or copy it, before.

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Everybody's message, in rank order; all are of one size."""
        size, began = message.numel(), _now()
        out = self._room("out", size * self.world)
        if self._direct:
            copies = self._room("in", size * self.world)
            copies.view(self.world, size).copy_(message)
            self._all_to_all(out, copies, [], [])
        else:
            _all_gather(out, message.to(self.device), group=self.group)
        self._count(size * (self.world - 1), size * (self.world - 1), began)
        return list(out.cpu().view(self.world, size).unbind()) if size else [message] * self.world

    def all_to_all(self, messages: Tensor, sizes: Sequence[int], size: int) -> list[Tensor]:
        """Each rank gets its stretch of `messages` and sends `size` bytes here; nothing travels to the own rank."""
        return self._exchange(messages, sizes, [0 if r == self.rank else size for r in range(self.world)])

    def all_gather_uneven(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Everybody's message, in rank order; `sizes` are all ranks', the own included."""
        others = [0 if r == self.rank else message.numel() for r in range(self.world)]
        expected = [0 if r == self.rank else size for r, size in enumerate(sizes)]
        copies = self._room("in", message.numel() * (self.world - 1))
        copies.view(self.world - 1, message.numel()).copy_(message)
        received = self._exchange(copies, others, expected)
        received[self.rank] = message
        return received

    def _exchange(self, messages: Tensor, sent: Sequence[int], expected: Sequence[int]) -> list[Tensor]:
        began = _now()
        out = self._room("out", sum(expected))
        self._all_to_all(out, messages.to(self.device), list(expected), list(sent))
        self._count(sum(sent), sum(expected), began)
        return list(torch.split(out.cpu(), list(expected)))

    def _all_to_all(self, out: Tensor, messages: Tensor, expected: list[int], sent: list[int]) -> None:
        # The group's own method: the checks around it take as long as the rest, and ours are of one type and device.
        group: Any = self.group
        work = (getattr(group, "all_to_all_single", None) or group.alltoall_base)(out, messages, expected, sent)
        if work is not None:
            work.wait()

    def _room(self, name: str, size: int) -> Tensor:
        """Bytes that stay where they are from step to step: new memory is slow at first."""
        if size > _MOST_KEPT:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = torch.empty(size + size // 4, dtype=torch.uint8, device=self.device)
        return room[:size]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in place."""
        began = _now()
        dist.all_reduce(tensor, group=self.group)
        volume = 2 * tensor.numel() * tensor.element_size() * (self.world - 1) // self.world
        self._count(volume, volume, began)

    def reduce(self, tensor: Tensor, root: int) -> None:
        """Sum in place on one rank of this group."""
        began = _now()
        dist.reduce(tensor, dist.get_global_rank(self.group, root), group=self.group)
        volume = tensor.numel() * tensor.element_size()
        here = self.rank == root
        self._count(0 if here else volume, volume * (self.world - 1) if here else 0, began)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Everybody gets one rank's tensor."""
        began = _now()
        dist.broadcast(tensor, dist.get_global_rank(self.group, root), group=self.group)
        volume = tensor.numel() * tensor.element_size()
        here = self.rank == root
        self._count(volume * (self.world - 1) if here else 0, 0 if here else volume, began)

    def abort(self) -> None:
        """Break the connections, so that ranks which wait for this one hear of it; nothing can be sent any more."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            group.abort()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(group)  # Gloo closes its sockets with the last reference, which goes here

    def _count(self, sent: int, received: int, began: tuple[float, float]) -> None:
        self.sent += sent
        self.received += received
        now = _now()
        self.seconds += now[0] - began[0]
        self.cpu += now[1] - began[1]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def share(channel: Channel, mine: Sequence[float]) -> list[list[float]]:
    """Everybody's numbers, in rank order."""
    message = torch.tensor(list(mine), dtype=torch.float64).view(torch.uint8)
    return [m.clone().view(torch.float64).tolist() for m in channel.all_gather(message)]


T = TypeVar("T")


def gather_json(channel: Channel, value: Any) -> list[Any]:
    """Everybody's value, in rank order."""
    data = json.dumps(value).encode()
    length = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    lengths = [int(t.clone().view(torch.int64)[0]) for t in channel.all_gather(length)]
    message = torch.zeros(max(lengths), dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = channel.all_gather(message)
    return [json.loads(m[:n].numpy().tobytes()) for m, n in zip(gathered, lengths, strict=True)]


def agreed(channel: Channel, prepare: Callable[[], T], describe: Callable[[T], dict[str, Any]]) -> T:
    """What `prepare` makes, if all ranks can make it and describe it alike; otherwise all ranks raise."""
    try:
        made = prepare()
        description = describe(made)
    except Exception as error:
        gather_json(channel, {"error": f"{error}"})  # the others wait for this rank: let them raise too
        raise
    everybody = gather_json(channel, description)
    for rank, other in enumerate(everybody):
        if "error" in other:
            raise LinkError(f"rank {rank} cannot attach: {other['error']}")
    for rank, other in enumerate(everybody):
        for key, value in everybody[0].items():
            if other.get(key) != value:
                raise LinkError(f"rank {rank} differs from rank 0 in {_difference(key, value, other.get(key))}")
    return made


def _difference(key: str, ours: Any, theirs: Any) -> str:
    if key != "parameters":
        return f"{key}: {theirs} against {ours}; give every rank the same"
    if len(ours) != len(theirs):
        missing = sorted({name for name, *_ in ours} ^ {name for name, *_ in theirs})
        return f"the number of parameters: {len(theirs)} against {len(ours)} ({', '.join(missing[:3])} not on both)"
    first = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
    return f"a parameter: {' '.join(map(str, first[1]))} against {' '.join(map(str, first[0]))}"


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
