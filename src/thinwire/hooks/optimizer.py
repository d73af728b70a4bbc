"""The optimizer hook: exchanges what optimizers change, instead of the gradients that they are given.

Each rank's optimizer steps on its own gradient. After the step, or after the last step of a round, the hook hands the
change to the link, applies the mean of all ranks' changes to the shared parameters, and writes those to the model. It
works with DDP, whose all-reduce is switched off meanwhile, and with plain modules. See `thinwire.link.updates` for the
arithmetic.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.codec.feedback import first_not_finite
from thinwire.errors import LinkError
from thinwire.exchange.channel import Channel, share
from thinwire.hooks import adam
from thinwire.hooks.buffers import BufferMean, without_broadcasts
from thinwire.hooks.ddp import DDPHook, keep_local
from thinwire.hooks.fsdp import ShardedModel, check_owned, open_sharded_link, open_single_replica
from thinwire.link.assembly import LinkOptions, open_link, open_local_link
from thinwire.link.autotune_updates import UpdateTuner
from thinwire.link.link import Link
from thinwire.link.rounds import Pace
from thinwire.link.shards import local_part, shared_like
from thinwire.link.updates import LocalUpdates, Updates

Optimizer = torch.optim.Optimizer


def attach_optimizer(
    model: nn.Module, inner: nn.Module, options: LinkOptions, on_last_bucket: Callable[[], None] | None = None
) -> Link:
    """Attach a link that exchanges updates. `inner` is the model without wrappers of torch.compile and Fabric."""
    ddp = inner if isinstance(inner, DistributedDataParallel) else None
    module: nn.Module = inner if ddp is None else ddp.module
    group = dist.distributed_c10d._get_default_group() if ddp is None else ddp.process_group
    parameters = _owned_parameters(module, options.optimizers)

    def prepare() -> DDPHook | None:
        if attached_hook(module) is not None:
            raise LinkError("this model is attached already; call detach() on its link first")
        _check(module, options.optimizers)
        if options.rounds.seconds:
            _check_uneven(ddp, options.optimizers)
        return None if ddp is None else keep_local(ddp)

    link, local = open_link(parameters, group, options, prepare)
    if ddp is None:  # DDP has made all ranks' models equal already
        link.collective(lambda channel: _broadcast(module, channel))
    hook = OptimizerHook(link, Updates(parameters, options.optimizers, link.codec, options.rounds), module)
    hook.install(model, inner)
    if local is not None:
        hook.on_release(lambda: local.release(link))
        local.link, local.local, local.on_last_bucket = link, True, on_last_bucket
    rounds = not options.rounds.single or options.tune_updates  # of several steps, now or later
    quiet = ddp is not None and ddp.broadcast_buffers and rounds
    if ddp is not None and quiet:
        hook.on_release(without_broadcasts(ddp))
    if ddp is None or quiet:
        hook.buffers = link.collective(lambda channel: BufferMean(module, channel))
    if options.rounds.seconds:
        hook.updates.pace = link.collective(lambda channel: Pace(options.rounds.seconds, channel))
    link.set_hook(lambda _: hook.remove(), updates=hook.updates)
    if options.tune_updates:
        hook.tuner = UpdateTuner(link, hook.updates)
    return link


def attach_single_process(model: nn.Module, options: LinkOptions) -> Link:
    """A link of a single process, which exchanges no updates and can save and load those of several."""
    _check(model, options.optimizers)
    parameters = _owned_parameters(model, options.optimizers)
    link = open_local_link(parameters, options)
    updates = LocalUpdates(parameters, options.optimizers, link.codec, options.rounds)
    link.set_hook(lambda _: None, updates=updates)
    return link


def _owned_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The parameters that these optimizers train."""
    owned = {id(p) for o in optimizers for each in o.param_groups for p in each["params"]}
    return {name: p for name, p in module.named_parameters() if id(p) in owned}


def attach_sharded_optimizer(model: nn.Module, inner: nn.Module, options: LinkOptions, mesh: DeviceMesh | None) -> Link:
    """Attach a link that exchanges updates to a model that FSDP2 shards: each rank those of its shard."""
    if options.rounds.seconds:
        raise ValueError("a sharded model takes the same steps on all ranks: give every as a number of steps")
    owned = {id(p) for o in options.optimizers for each in o.param_groups for p in each["params"]}
    check_owned(inner.parameters(), options.optimizers)
    sharded = ShardedModel(inner, mesh, owned)
    whole = sharded.local.whole
    if sharded.replicas.size() == 1:

        def alone(link: Link) -> LocalUpdates:
            _check(inner, options.optimizers)
            return LocalUpdates(sharded.local, options.optimizers, link.codec, options.rounds, whole, sharded.reshard)

        return open_single_replica(sharded, options, alone)
    link, local = open_sharded_link(sharded, options, lambda: _check(inner, options.optimizers))
    updates = Updates(sharded.local, options.optimizers, link.codec, options.rounds, whole, sharded.reshard)
    hook = OptimizerHook(link, updates, inner)
    hook.install(model, inner)
    hook.on_release(lambda: local.release(link))
    local.local = True
    link.set_hook(lambda _: hook.remove(), updates=hook.updates)
    return link


def _check_uneven(ddp: DistributedDataParallel | None, optimizers: Sequence[Optimizer]) -> None:
    """ValueError unless ranks can take different numbers of steps."""
    if len(optimizers) > 1:
        raise ValueError("a round by time ends at different steps on different ranks, which takes a single optimizer")
    if ddp is not None and getattr(ddp, "find_unused_parameters", False):
        raise ValueError(
            "DDP with find_unused_parameters exchanges something in every backward pass, and a round by time has a "
            "different number of them on every rank: attach to the plain module, or give every as a number of steps"
        )


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
        self.buffers: BufferMean | None = None  # averages buffers, where DDP does not broadcast them
        self.tuner: UpdateTuner | None = None  # chooses the rounds, under "auto"
        self._samples = 0  # that this step's forward passes have seen
        self._link, self._module = link, module
        self._handles: list[Any] = []
        self._release: list[Callable[[], None]] = []
        self._set_aside: dict[Tensor, Tensor | None] = {}  # gradients that were not finite
        self._swapped_by: nn.Module | None = None
        self._known = {id(p) for p in updates.owned.values()}
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
        def before(caller: nn.Module, args: Any, kwargs: Any) -> None:
            if any(caller is known for known in callers):
                self._before_forward(caller)
                if caller is callers[0] and torch.is_grad_enabled():
                    self._samples += _batch_size((*args, *kwargs.values()))

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(caller: nn.Module, args: Any, output: Any) -> None:
            if self._swapped_by is caller:
                self._swapped_by = None
                self.updates.swap(ahead=True)

        def saved(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            if owner is module:
                self._show_shared(state, prefix)

        def loading(owner: nn.Module, *rest: Any) -> None:
            if owner is module:
                self.updates.before_loading()

        def loaded(owner: nn.Module, keys: Any) -> None:
            if owner is module:
                self.updates.adopt()

        for caller in callers:
            # Before FSDP's own hook, which gathers the parameters.
            handles.append(caller.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
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
        try:
            self.updates.absorb()
        except LinkError:  # the exchange under way has failed, which its step reports
            self.updates.show()
        if self.buffers is not None and not self.updates.rounds.single:
            self.buffers.show()
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
                if len(self.updates.ahead) < len(self.updates.parameters):
                    self.updates.before_writing()
                self.updates.look_ahead()
        elif self._swapped_by is None:
            self._finish()
            if self.updates.ahead:
                self._swapped_by = caller
                self.updates.swap(ahead=False)

    # Around an optimizer's step

    def _before_step_of(self, index: int) -> Callable[[Optimizer, Any, Any], tuple[Any, Any] | None]:
        names = [name for bucket in self.updates.buckets[index] for name in bucket]
        owned = [self.updates.owned[name] for name in names]

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

    def _put_aside(self, optimizer: Optimizer, owned: Sequence[Tensor]) -> None:
        """Hide gradients from the optimizer if one of them is not finite: its state must stay finite.

        A GradScaler passes overflows to fused optimizers, which then skip the step on all ranks by themselves.
        """
        gradients = [local_part(p.grad) for p in owned if p.grad is not None and not p.grad.is_sparse]
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
            corrects = self.updates.rounds.corrects and adam.corrects(optimizer)
            if corrects and not aside and not _overflowed(optimizer):
                adam.correct_noise(optimizer, self._link.world, self._known)
            self._count(index, finite=not aside)

        return after_step  # type: ignore[no-any-return]

    def _count(self, index: int, *, finite: bool) -> None:
        """Count a step of an optimizer. If its round ends, exchange what it changed."""
        updates, pace = self.updates, self.updates.pace
        ended = updates.count(index, finite=finite)
        if pace is not None:
            pace.count(max(1, self._samples))
            self._samples = 0
            # While another rank or the network is late, this rank goes on computing. An error ends the round at once:
            # the exchange that has failed cannot tell when the next one is due.
            ended = not updates.waits and (pace.over() or self._link.failure is not None)
        if ended:
            began = time.perf_counter()
            self._finish(index)
            self._exchange(index)
            if self.tuner is not None and index == 0:
                self.tuner.end_step(time.perf_counter() - began)

    def _exchange(self, index: int) -> None:
        """Exchange what an optimizer changed in a round, in the link's thread if that overlaps the next round."""
        updates = self.updates
        jobs = updates.jobs(index)
        if jobs:
            # With overlap the buffers belong to the first optimizer: only one exchange of them can be under way.
            buffers = self.buffers if index == 0 or not updates.rounds.overlap else None
            jobs[0] = replace(jobs[0], ready=_in_turn([p.begin() for p in (updates.pace, buffers) if p is not None]))
        if updates.rounds.overlap:
            updates.begin(index, jobs, self._link.begin_all(jobs))
            return
        with self._keeping_shared([name for job in jobs for name in job.tensors]):
            skipped = self._link.exchange_all(jobs)
        updates.apply(jobs, skipped=skipped)
        if self.buffers is not None:
            self.buffers.finish()

    def _finish(self, index: int | None = None) -> None:
        """Wait for an exchange that overlaps the present round, and apply it."""
        with self._keeping_shared(self.updates.parameters):
            self.updates.finish(index)
        if self.buffers is not None and not self.updates.waits:
            self.buffers.finish()

    @contextlib.contextmanager
    def _keeping_shared(self, names: Iterable[str]) -> Iterator[None]:
        """Leave the shared values in parameters if an exchange fails."""
        try:
            yield
        except BaseException:
            self._link.wait()  # its thread may still write to the parameters
            self.updates.show(list(names))
            raise

    # Around the model's state

    def _show_shared(self, state: dict[str, Any], prefix: str) -> None:
        """Put copies of the parameters into a state dict: the model's own memory changes with every step."""
        self._finish()
        names = {id(p): name for name, p in self.updates.owned.items()}
        copies: dict[int, Tensor] = {}  # tied parameters stay tied
        for key, p in self._module.named_parameters(remove_duplicate=False):
            name = names.get(id(p))
            if name is not None and isinstance(state.get(prefix + key), Tensor):
                if id(p) not in copies:
                    part = local_part(p).detach()
                    shown = self.updates.shared[name].view_as(part) if name in self.updates.ahead else part
                    copies[id(p)] = shared_like(torch.empty_like(part).copy_(shown), p)
                state[prefix + key] = copies[id(p)]

    # Loss scaling

    def _agree_on_overflow(self, optimizer: Optimizer, found: Mapping[Any, Tensor]) -> None:
        """Let all ranks skip a step in which the loss scale was too high for one of them."""
        if not self.updates.rounds.single:
            self._skip_alone(optimizer, found)
            return

        def agree(channel: Channel) -> bool:
            mine = any(float(t) > 0.0 for t in found.values())
            return self._link.any_shard(any(overflow for (overflow,) in share(channel, [float(mine)])))

        try:
            overflowed = self._link.collective(agree)
        except BaseException:
            self.updates.show()
            raise
        for tensor in found.values():
            tensor.fill_(float(overflowed))
        if overflowed:  # no step follows that would show the shared parameters
            self.updates.show()

    def _skip_alone(self, optimizer: Optimizer, found: Mapping[Any, Tensor]) -> None:
        """Count a step that this rank's GradScaler is going to skip: with local steps ranks need not agree on it.

        A fused optimizer is called nevertheless, and its hooks count the step.
        """
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not fused and any(float(t) > 0.0 for t in found.values()):
            self._count(next(i for i, o in enumerate(self.updates.optimizers) if o is optimizer), finite=False)


def _in_turn(functions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """A function that calls these, one after the other."""

    def call() -> None:
        for function in functions:
            function()

    return call


def _batch_size(values: Iterable[Any]) -> int:
    """The first dimension of the first tensor among a forward pass's arguments: its samples, in most models."""
    return next((v.shape[0] for v in values if isinstance(v, Tensor) and v.dim()), 0)


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
            agree(optimizer, found)
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
        if hook is not None and any(p is known for known in hook.updates.owned.values()):
            raise LinkError(
                "an optimizer that attach() was not given steps on parameters of an attached model, whose gradients "
                "are local: give attach() all optimizers, or detach the link first"
            )
