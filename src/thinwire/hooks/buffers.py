"""Buffers: averages the buffers that training changes, such as running means of batch normalisation.

The changes of floating-point buffers are averaged, so that buffers that are equal stay as they are. Which of them
change is agreed on at the first exchange, so that tables of constants are not sent; those of normalisation layers
always count.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchange.channel import Channel, gather_json


class BufferMean:
    """Averages the buffers of one module's ranks in two parts, between which training may go on."""

    def __init__(self, module: nn.Module, channel: Channel) -> None:
        self.names: list[str] | None = None if _float_buffers(module) else []  # None before the first exchange
        self._module, self._channel = module, channel
        self._before = {name: b.clone() for name, b in _float_buffers(module).items()}
        self._sent: dict[str, Tensor] = {}  # what this rank's buffers held when the exchange began
        self._mean: Tensor | None = None

    def begin(self) -> Callable[[], None]:
        """Note what changed since the last exchange; returns the function that exchanges it with the other ranks."""
        now = _float_buffers(self._module)
        wanted = self._before if self.names is None else self.names
        found = [name for name in wanted if name in now and now[name].shape == self._before[name].shape]
        self._sent = {name: now[name].clone() for name in found}

        def reduce() -> None:
            changes = {name: b - self._before[name] for name, b in self._sent.items()}
            if self.names is None:
                changed = [name for name, change in changes.items() if bool(change.any())]
                all_changed = {name for names in gather_json(self._channel, changed) for name in names}
                self.names = [n for n in changes if n in all_changed or n in _norm_buffers(self._module)]
            if self.names:
                parts = [changes[name].reshape(-1).float() for name in self.names]
                mean = torch.cat(parts).mul_(1.0 / self._channel.world).to(self._channel.device)
                self._channel.all_reduce(mean)
                self._mean = torch.where(mean.isfinite(), mean, 0.0)  # a rank's infinite input leaves no trace

        return reduce

    def finish(self) -> None:
        """Replace what this rank changed by the mean; what it changed after `begin` stays until the next exchange."""
        mean, self._mean = self._mean, None
        if mean is None or not self.names:
            return
        now = _float_buffers(self._module)
        sizes = [self._before[name].numel() for name in self.names]
        for name, piece in zip(self.names, torch.split(mean, sizes), strict=True):
            before, later = self._before[name], now[name] - self._sent[name]
            before += piece.view_as(before).to(before)
            now[name].copy_(before + torch.where(later.isfinite(), later, 0.0))

    def show(self) -> None:
        """Write what all ranks have agreed on to the buffers."""
        now = _float_buffers(self._module)
        for name in self.names or ():
            if name in now:
                now[name].copy_(self._before[name])


def without_broadcasts(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Keep DDP from broadcasting rank 0's buffers in every forward pass; returns the function that allows it again.

    With local steps most forward passes must not wait for other ranks, and in a round by time ranks have different
    numbers of them.
    """
    ddp.broadcast_buffers = False

    def allow() -> None:
        ddp.broadcast_buffers = True

    return allow


def _norm_buffers(module: nn.Module) -> set[str]:
    """The names of running statistics of normalisation layers."""
    layers = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.modules.batchnorm._NormBase)]
    return {f"{name}.{key}" if name else key for name, each in layers for key, _ in each.named_buffers(recurse=False)}


def _float_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach() for name, b in module.named_buffers() if b.is_floating_point()}
