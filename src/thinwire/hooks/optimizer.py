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
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
    owned = {id(p) for o in options.optimizers for each in o.param_groups for p in each["params"]}
    parameters = {name: p for name, p in module.named_parameters() if id(p) in owned}

    def prepare() -> DDPHook | None:
        if attached_hook(module) is not None:
            raise LinkError("this model is attached already; call detach() on its link first")
        _check(module, options.optimizers)
        return None if ddp is None else keep_local(ddp)

    link, local = open_link(parameters, group, options, prepare)
    if ddp is None:  # DDP has made all ranks' models equal already
        link.collective(lambda channel: _broadcast(module, channel))
    hook = OptimizerHook(link, Updates(parameters, options.optimizers, link.codec), module)
    hook.install(model, inner)
    if local is not None:
        hook.on_release(lambda: local.release(link))
        local.link, local.local, local.on_last_bucket = link, True, on_last_bucket
    else:
        hook.average_buffers = True
    link.set_hook(lambda _: hook.remove(), updates=hook.updates)
    return link


def _check(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """ValueError unless every parameter in training has one owner; LinkError if an optimizer has a link already."""
    owners = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    counts = {name: sum(id(p) in owned for owned in owners) for name, p in module.named_parameters()}
    if not any(counts.values()):
        raise ValueError("the optimizer owns no parameter of the model: make it from model.parameters()")
    for name, p in module.named_parameters():
        if counts[name] > 1:
            raise ValueError(f"two optimizers own {name}: give each parameter to one optimizer")
        if not counts[name] and p.requires_grad:
            raise ValueError(
                f"{name} requires gradients and no optimizer that was given owns it, so that ranks would differ in it: "
                "give all optimizers as a list, or freeze it"
            )
    if any(hasattr(optimizer, "_thinwire_agree") for optimizer in optimizers):
        raise LinkError(
            "the optimizer is attached already, with this model or another: call detach() on its link first"
        )


def _broadcast(module: nn.Module, channel: Channel) -> None:
    """Copy rank 0's parameters and buffers to all ranks, which no step's counters are to show."""
    first = dist.get_global_rank(channel.group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        there = tensor.detach().to(channel.device).contiguous()
        dist.broadcast(there, first, group=channel.group)
        tensor.data.copy_(there)


# The hooks of attached modules. A module does not refer to its hook, so that it can be saved and copied.
_hooks: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[OptimizerHook]]" = weakref.WeakKeyDictionary()
# Attached parameters by id, to notice steps of optimizers that are not attached.
_owners: dict[int, "weakref.ref[OptimizerHook]"] = {}


def attached_hook(module: nn.Module) -> "OptimizerHook | None":
    """The hook that is installed on a module."""
    reference = _hooks.get(module)
    return reference() if reference is not None else None


class OptimizerHook:
    """Connects a model and its optimizers to a link."""

    def __init__(self, link: Link, updates: Updates, module: nn.Module) -> None:
        self.updates = updates
        self.average_buffers = False
        self._link, self._module = link, module
        self._handles: list[Any] = []
        self._release: list[Callable[[], None]] = []
        self._set_aside: dict[nn.Parameter, Tensor | None] = {}  # gradients that were not finite
        self._swapped_by: nn.Module | None = None
        self._buffers: list[str] | None = None  # names of buffers that training changes; None before the first step
        self._buffers_before = _float_buffers(module)
        self._known = {id(p) for p in updates.parameters.values()}
        self._owned = [sum(len(group["params"]) for group in o.param_groups) for o in updates.optimizers]

    def on_release(self, release: Callable[[], None]) -> None:
        """Call a function when the hook is removed."""
        self._release.append(release)

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

        def loading(owner: nn.Module, *rest: Any) -> None:
            if owner is module:  # what is not loaded must not stay at the look-ahead
                self.updates.show()

        def loaded(owner: nn.Module, keys: Any) -> None:
            if owner is module:
                self.updates.adopt()

        for caller in callers:
            handles.append(caller.register_forward_pre_hook(before))
            handles.append(caller.register_forward_hook(after, always_call=True))
        handles.append(module.register_state_dict_post_hook(saved))
        handles.append(module.register_load_state_dict_pre_hook(loading))
        handles.append(module.register_load_state_dict_post_hook(loaded))
        for index, optimizer in enumerate(self.updates.optimizers):
            handles.append(optimizer.register_step_pre_hook(self._before_step_of(index)))
            handles.append(optimizer.register_step_post_hook(self._after_step_of(index)))
            optimizer._thinwire_agree = self._agree_on_overflow  # type: ignore[attr-defined]
        _watch_scalers()
        _watch_optimizers()
        _hooks[module] = weakref.ref(self)
        _owners.update(dict.fromkeys(self._known, weakref.ref(self)))

    def remove(self) -> None:
        """Remove all hooks; the model keeps the shared parameters."""
        if not self._handles:
            return
        self.updates.show()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in self.updates.optimizers:
            del optimizer._thinwire_agree  # type: ignore[attr-defined]
        for ident in self._known:
            _owners.pop(ident, None)
        _hooks.pop(self._module, None)
        for release in self._release:
            release()

    def _before_forward(self, caller: nn.Module) -> None:
        """Let a training step look ahead, and an evaluation see the shared parameters."""
        if torch.is_grad_enabled():
            # Outside of training mode gradients are those of what the parameters hold: autograd must find it unchanged.
            if caller.training:
                self.updates.look_ahead()
        elif self.updates.ahead and self._swapped_by is None:
            self._swapped_by = caller
            self.updates.swap(ahead=False)

    # Around an optimizer's step

    def _before_step_of(self, index: int) -> Callable[[Optimizer, Any, Any], tuple[Any, Any] | None]:
        names = [name for bucket in self.updates.buckets[index] for name in bucket]
        owned = [self.updates.parameters[name] for name in names]

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self._set_aside = {}
            if sum(len(group["params"]) for group in optimizer.param_groups) != self._owned[index]:
                raise LinkError("parameters were added to the optimizer after attach: detach the link and attach again")
            self.updates.look_ahead(names)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._put_aside(optimizer, owned)
                return None

            def checked() -> Any:  # the closure computes the gradients
                result = closure()
                self._put_aside(optimizer, owned)
                return result

            return (args[0], checked, *args[2:]) if len(args) > 1 else args, (
                kwargs if len(args) > 1 else {**kwargs, "closure": checked}
            )

        return before_step  # type: ignore[no-any-return]

    def _put_aside(self, optimizer: Optimizer, owned: Sequence[nn.Parameter]) -> None:
        """Hide gradients from the optimizer if one of them is not finite: its state must stay finite.

        A GradScaler passes overflows to fused optimizers, which then skip the step on all ranks by themselves.
        """
        gradients = [p.grad for p in owned if p.grad is not None and not p.grad.is_sparse]
        if getattr(optimizer, "found_inf", None) is None and first_not_finite([g.contiguous() for g in gradients]) >= 0:
            self._set_aside = {p: p.grad for p in owned}
            for p in owned:
                p.grad = None

    def _after_step_of(self, index: int) -> Callable[[Optimizer, Any, Any], None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            aside, self._set_aside = self._set_aside, {}
            for p, gradient in aside.items():
                p.grad = gradient
            if adam.corrects(optimizer) and not aside and not _overflowed(optimizer):
                adam.correct_noise(optimizer, self._link.world, self._known)
            self._exchange(index, finite=not aside)

        return after_step  # type: ignore[no-any-return]

    def _exchange(self, index: int, *, finite: bool) -> None:
        """Exchange what an optimizer changed. If that fails, the model keeps the shared parameters."""
        updates = self.updates
        jobs = updates.jobs(index, finite=finite)
        try:
            skipped = self._link.exchange_all(jobs)
        except BaseException:
            self._link.wait()  # its thread may still write to the parameters
            updates.show([name for job in jobs for name in job.tensors])
            raise
        updates.apply(jobs, skipped=skipped)
        if self.average_buffers and self._buffers_before:
            self._link.collective(self._average_buffers)

    def _average_buffers(self, channel: Channel) -> None:
        """Average the floating-point buffers that training changes, such as running means of batch normalisation.

        Their changes are averaged, so that buffers that are equal stay as they are. Which buffers change is agreed on
        after the first step, so that tables of constants are not sent; those of normalisation layers always count.
        """
        before = self._buffers_before
        now = {n: b for n, b in _float_buffers(self._module, copy=False).items() if n in before}
        if self._buffers is None:
            changed = [n for n, b in now.items() if b.shape != before[n].shape or not torch.equal(b, before[n])]
            found = {name for names in gather_json(channel, changed) for name in names} | _norm_buffers(self._module)
            self._buffers = [name for name in now if name in found and now[name].shape == before[name].shape]
            self._buffers_before = before = {name: before[name] for name in self._buffers}
        if not self._buffers:
            return
        parts = [(now[name] - before[name]).reshape(-1).float() for name in self._buffers]
        change = torch.cat(parts).mul_(1.0 / channel.world).to(channel.device)
        channel.all_reduce(change)
        change = torch.where(change.isfinite(), change, 0.0)  # a rank's infinite input leaves no trace
        pieces = torch.split(change, [part.numel() for part in parts])
        for name, piece in zip(self._buffers, pieces, strict=True):
            before[name] += piece.view_as(before[name]).to(before[name])
            now[name].copy_(before[name])

    # Around the model's state

    def _show_shared(self, state: dict[str, Any], prefix: str) -> None:
        """Put copies of the parameters into a state dict: the model's own memory changes with every step."""
        names = {id(p): name for name, p in self.updates.parameters.items()}
        copies: dict[int, Tensor] = {}  # tied parameters stay tied
        for key, p in self._module.named_parameters(remove_duplicate=False):
            name = names.get(id(p))
            if name is not None and isinstance(state.get(prefix + key), Tensor):
                if id(p) not in copies:
                    shown = self.updates.shared[name].view_as(p) if name in self.updates.ahead else p.detach()
                    copies[id(p)] = torch.empty_like(p, requires_grad=False).copy_(shown)
                state[prefix + key] = copies[id(p)]

    # Loss scaling

    def _agree_on_overflow(self, found: Mapping[Any, Tensor]) -> None:
        """Let all ranks skip a step in which the loss scale was too high for one of them."""

        def agree(channel: Channel) -> bool:
            mine = torch.tensor([float(sum(float(t) for t in found.values()) > 0.0)]).to(channel.device)
            channel.all_reduce(mine)
            return float(mine) > 0.0

        try:
            overflowed = self._link.collective(agree)
        except BaseException:
            self.updates.show()
            raise
        for tensor in found.values():
            tensor.fill_(float(overflowed))
        if overflowed:  # no step follows that would show the shared parameters
            self.updates.show()


def _norm_buffers(module: nn.Module) -> set[str]:
    """The names of running statistics of normalisation layers."""
    layers = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.modules.batchnorm._NormBase)]
    return {f"{name}.{key}" if name else key for name, each in layers for key, _ in each.named_buffers(recurse=False)}


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


_watching = False


def _watch_optimizers() -> None:
    """Raise when an optimizer that is not attached steps on attached parameters: ranks would differ from then on."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_check_owner)
        _watching = True


def _check_owner(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _owners or hasattr(optimizer, "_thinwire_agree"):
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        hook = reference() if (reference := _owners.get(id(p))) is not None else None
        if hook is not None and any(p is known for known in hook.updates.parameters.values()):
            raise LinkError(
                "an optimizer that attach() was not given steps on parameters of an attached model, whose gradients "
                "are local: give attach() all optimizers, or detach the link first"
            )
