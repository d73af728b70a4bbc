"""Channel: the few collectives that exchanges use, on one process group, with their bytes and time counted.

Everything is uint8 of a size that all ranks know beforehand: the one thing that every backend moves.
"""

import contextlib
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LinkError

# PyTorch is renaming it; the old name warns where the new one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        self.sent = 0
        self.received = 0
        self.seconds = 0.0
        self.cpu = 0.0  # seconds that this thread computed inside collectives

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LinkError("the link broke before, and its process group with it: attach again")
        return self._group

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Everybody's message, in rank order; all are of one size."""
        size, began = message.numel(), _now()
        out = torch.empty(size * self.world, dtype=torch.uint8, device=self.device)
        if self._direct:
            dist.all_to_all_single(out, message.repeat(self.world), group=self.group)
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
        received = self._exchange(message.repeat(self.world - 1), others, expected)
        received[self.rank] = message
        return received

    def _exchange(self, messages: Tensor, sent: Sequence[int], expected: Sequence[int]) -> list[Tensor]:
        began = _now()
        out = torch.empty(sum(expected), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(out, messages.to(self.device), list(expected), list(sent), group=self.group)
        self._count(sum(sent), sum(expected), began)
        return list(torch.split(out.cpu(), list(expected)))

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
