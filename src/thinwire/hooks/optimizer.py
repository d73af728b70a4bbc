"""The optimizer hook: exchanges what optimizers change, instead of the gradients that they are given.

Each rank's optimizer steps on its own gradient. After the step the hook hands the change to the link, applies the mean
of all ranks' changes to the shared parameters, and writes those to the model. It works with DDP, whose all-reduce is
switched off meanwhile, and with plain modules. See `thinwire.link.updates` for the arithmetic.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.codec.feedback import first_not_finite
from thinwire.errors import LinkError
from thinwire.exchange.channel import Channel, gather_json
from thinwire.hooks import adam
from thinwire.hooks.ddp import DDPHook, keep_local
from thinwire.link.assembly import LinkOptions, open_link
from thinwire.link.link import Link
from thinwire.link.updates import Updates

Optimizer = torch.optim.Optimizer


def attach_optimizer(
    model: nn.Module, inner: nn.Module, options: LinkOptions, on_last_bucket: Callable[[], None] | None = None
) -> Link:
    """Attach a link that exchanges updates. `inner` is the model without wrappers of torch.compile and Fabric."""
    ddp = inner if isinstance(inner, DistributedDataParallel) else None
    module: nn.Module = inner if ddp is None else ddp.module
    group = dist.distributed_c10d._get_default_group() if ddp is None else ddp.process_group
    parameters = _parameters(module, options.optimizers)

    def prepare() -> DDPHook | None:
        reference = getattr(module, "_thinwire_hook", None)
        found = reference() if isinstance(reference, weakref.ref) else None
        if found is not None and found.serves(module):
            raise LinkError("this model is attached already; call detach() on its link first")
        return None if ddp is None else keep_local(ddp)

    link, local = open_link(parameters, group, options, prepare)
    channel = link.exchange.channels()[0]
    if ddp is None:  # DDP has made all ranks' models equal already
        _broadcast(module, channel)
    hook = OptimizerHook(link, channel, Updates(parameters, options.optimizers, link.codec), module)
    hook.install(model, inner)
    if local is not None:
        hook.on_release(lambda: local.release(link))
        local.link, local.local, local.on_last_bucket = link, True, on_last_bucket
    else:
        hook.average_buffers = True
    link.set_hook(lambda _: hook.remove(), updates=hook.updates)
    return link


def _parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The model's parameters that an optimizer owns, by name; ValueError if there are none, or one has two owners."""
    owners = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    found = {name: p for name, p in module.named_parameters() if any(id(p) in owned for owned in owners)}
    if not found:
        raise ValueError("the optimizer owns no parameter of the model: make it from model.parameters()")
    for name, p in found.items():
        if sum(id(p) in owned for owned in owners) > 1:
            raise ValueError(f"two optimizers own {name}: give each parameter to one optimizer")
    return found


def _broadcast(module: nn.Module, channel: Channel) -> None:
    """Copy rank 0's parameters and buffers to all ranks, which no step's counters are to show."""
    first = dist.get_global_rank(channel.group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        there = tensor.detach().to(channel.device).contiguous()
        dist.broadcast(there, first, group=channel.group)
        tensor.data.copy_(there)


class OptimizerHook:
    """Connects a model and its optimizers to a link."""

    def __init__(self, link: Link, channel: Channel, updates: Updates, module: nn.Module) -> None:
        self.updates = updates
        self.average_buffers = False
        self._link, self._channel, self._module = link, channel, module
        self._handles: list[Any] = []
        self._release: list[Callable[[], None]] = []
        self._set_aside: dict[nn.Parameter, Tensor | None] = {}  # gradients that were not finite
        self._swapped_by: nn.Module | None = None
        self._buffers: list[str] | None = None  # names of buffers that training changes; None before the first step
        self._buffers_before = _float_buffers(module)
        self._known = {id(p) for p in updates.parameters.values()}

    def on_release(self, release: Callable[[], None]) -> None:
        """Call a function when the hook is removed."""
        self._release.append(release)

    def serves(self, module: nn.Module) -> bool:
        """Whether this hook is installed on a module. On a deep copy of the module the same hooks do nothing."""
        return bool(self._handles) and module is self._module

    def install(self, model: nn.Module, inner: nn.Module) -> None:
        """Register all hooks. Those of a compiled model stay outside of the compiled code.

        They are functions, because a deep copy of a model, for example of averaged weights, shares functions.
        """
        module, handles = self._module, self._handles
        callers = [model] if model is not inner else list(dict.fromkeys([inner, module]))

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(caller: nn.Module, args: Any) -> None:
            if any(caller is known for known in callers):
                self._before_forward(caller)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(caller: nn.Module, args: Any, output: Any) -> None:
            if self._swapped_by is caller:
                self._swapped_by = None
                self.updates.swap(ahead=True)

        def saved(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            if owner is module:
                self._show_shared(state, prefix)

        def loaded(owner: nn.Module, keys: Any) -> None:
            if owner is module:
                self.updates.adopt()

        for caller in callers:
            handles.append(caller.register_forward_pre_hook(before))
            handles.append(caller.register_forward_hook(after, always_call=True))
        handles.append(module.register_state_dict_post_hook(saved))
        handles.append(module.register_load_state_dict_post_hook(loaded))
        for index, optimizer in enumerate(self.updates.optimizers):
            handles.append(optimizer.register_step_pre_hook(self._before_step))
            handles.append(optimizer.register_step_post_hook(self._after_step_of(index)))
            optimizer._thinwire_agree = self._agree_on_overflow  # type: ignore[attr-defined]
        _watch_scalers()
        module._thinwire_hook = weakref.ref(self)  # type: ignore[assignment]

    def remove(self) -> None:
        """Remove all hooks; the model keeps the shared parameters."""
        if self.updates.ahead:
            self.updates.show()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in self.updates.optimizers:
            del optimizer._thinwire_agree  # type: ignore[attr-defined]
        for release in self._release:
            release()

    def _before_forward(self, caller: nn.Module) -> None:
        """Let a training step look ahead, and an evaluation see the shared parameters."""
        if caller.training and torch.is_grad_enabled():
            if not self.updates.ahead:
                self.updates.look_ahead()
        elif self.updates.ahead and self._swapped_by is None:
            self._swapped_by = caller
            self.updates.swap(ahead=False)

    # Around an optimizer's step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.updates.ahead:
            self.updates.look_ahead()
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {id(p) for p in self._module.parameters()}
        if any(id(p) in mine and id(p) not in self._known for p in owned):
            raise LinkError("parameters were added to the optimizer after attach: detach the link and attach again")
        # A GradScaler passes overflows to fused optimizers, which then skip the step on all ranks.
        gradients = [p.grad for p in owned if p.grad is not None and not p.grad.is_sparse]
        if getattr(optimizer, "found_inf", None) is None and first_not_finite([g.contiguous() for g in gradients]) >= 0:
            self._set_aside = {p: p.grad for p in owned}
            for p in owned:
                p.grad = None

    def _after_step_of(self, index: int) -> Callable[[Optimizer, Any, Any], None]:
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            aside, self._set_aside = self._set_aside, {}
            for p, gradient in aside.items():
                p.grad = gradient
            if adam.corrects(optimizer) and not aside and not _overflowed(optimizer):
                adam.correct_noise(optimizer, self._channel.world)
            self._exchange(index, finite=not aside)

        return after_step

    def _exchange(self, index: int, *, finite: bool) -> None:
        """Exchange what an optimizer changed. If that fails, the model keeps the shared parameters."""
        updates = self.updates
        jobs = updates.jobs(index, finite=finite)
        try:
            skipped = self._link.exchange_all(jobs)
        except BaseException:
            updates.show()
            raise
        updates.apply(jobs, skipped=skipped)
        if self.average_buffers:
            self._average_buffers()

    def _average_buffers(self) -> None:
        """Average the floating-point buffers that training changes, such as running means of batch normalisation.

        Their changes are averaged, so that buffers that are equal stay as they are. Which buffers change is agreed on
        after the first step: tables of constants are not sent.
        """
        now = _float_buffers(self._module, copy=False)
        if self._buffers is None:
            changed = [name for name, b in now.items() if not torch.equal(b, self._buffers_before[name])]
            found = {name for names in gather_json(self._channel, changed) for name in names}
            self._buffers = [name for name in now if name in found]
            self._buffers_before = {name: self._buffers_before[name] for name in self._buffers}
        if not self._buffers:
            return
        before = self._buffers_before
        parts = [(now[name] - before[name]).reshape(-1).float() for name in self._buffers]
        change = torch.cat(parts).mul_(1.0 / self._channel.world).to(self._channel.device)
        self._channel.all_reduce(change)
        pieces = torch.split(change, [part.numel() for part in parts])
        for name, piece in zip(self._buffers, pieces, strict=True):
            before[name] += piece.view_as(before[name]).to(before[name])
            now[name].copy_(before[name])

    # Around the model's state

    def _show_shared(self, state: dict[str, Any], prefix: str) -> None:
        """Put copies of the shared parameters into a state dict: the model's own memory changes with every step."""
        names = {id(p): name for name, p in self.updates.parameters.items()}
        for key, p in self._module.named_parameters(remove_duplicate=False):
            if id(p) in names and isinstance(state.get(prefix + key), Tensor):
                shared = self.updates.shared[names[id(p)]]
                state[prefix + key] = shared.view_as(p).to(p.dtype, copy=True)

    # Loss scaling

    def _agree_on_overflow(self, found: Mapping[Any, Tensor]) -> None:
        """Let all ranks skip a step in which the loss scale was too high for one of them."""
        mine = torch.tensor([float(sum(float(t) for t in found.values()) > 0.0)])
        there = mine.to(self._channel.device)
        self._channel.all_reduce(there)
        for tensor in found.values():
            tensor.fill_(float(float(there) > 0.0))


def _float_buffers(module: nn.Module, *, copy: bool = True) -> dict[str, Tensor]:
    found = {name: b.detach() for name, b in module.named_buffers() if b.is_floating_point()}
    return {name: b.clone() for name, b in found.items()} if copy else found


def _overflowed(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer was told by a GradScaler to skip this step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0.0


def _watch_scalers() -> None:
    """Make GradScaler ask the ranks of an attached optimizer about overflows.

    Gradients are local in the update domain. Without this one rank would skip a step alone, and the others would wait
    for it. GradScaler offers no hook: both its ways to look for overflows pass this private method.
    """
    scaler: Any = torch.amp.GradScaler
    check = getattr(scaler, "_unscale_grads_", None)
    if check is None or hasattr(check, "_thinwire"):
        return

    def agreed(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = check(self, optimizer, *args, **kwargs)
        agree = getattr(optimizer, "_thinwire_agree", None)
        if agree is not None:
            agree(found)
        return found

    agreed._thinwire = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = agreed
