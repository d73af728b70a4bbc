"""The FSDP hook: compresses what the replicas of a sharded model exchange (FSDP2, hybrid sharding).

`fully_shard(module, mesh=mesh["shard"])` shards a model within a machine or data centre. FSDP then averages gradients
within the shard group, and calls a hook for each unit (each module that was sharded) with one flat buffer: this rank's
parts of the unit's gradients, each padded to the size of the first rank's part. The FSDP hook hands these parts to a
link between the ranks of all replicas that hold the same parts.

The names of parameters, and which of them have a gradient, are known to FSDP's private `FSDPParamGroup` only. A PyTorch
where what thinwire reads of it has another name is refused at attach.
"""

import logging
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codec.encode import BucketViews
from thinwire.errors import LinkError
from thinwire.exchange.channel import Channel, OwnGroups, agreed, checksum
from thinwire.hooks.ddp import when_ready
from thinwire.link.assembly import LinkOptions, open_link, open_local_link
from thinwire.link.autotune import Autotuner
from thinwire.link.link import Link, UpdateState
from thinwire.link.shards import Cut, LocalShards, Shards, local_part
from thinwire.link.thread import Future, Job

_log = logging.getLogger("thinwire")
_PRIVATE_OF_GROUPS = ("fsdp_params", "mesh_info", "device", "post_backward", "all_reduce_grads", "_all_reduce_hook")
_PRIVATE_OF_PARAMETERS = (
    *("sharded_param", "sharded_size", "padded_sharded_param_size"),
    *("unsharded_param", "unsharded_accumulated_grad"),
)
_HOW = 'shard it over one dimension, fully_shard(module, mesh=mesh["shard"]), and give attach the whole mesh'


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP shards a model or one of its modules. FSDP itself is not imported, which takes seconds."""
    names = {"FSDPModule", "FullyShardedDataParallel"}
    return any(kind.__name__ in names for module in model.modules() for kind in type(module).__mro__)


def check_not_replicated(model: nn.Module) -> None:
    """TypeError if PyTorch's composable `replicate()` averages the gradients of a model or of one of its modules."""
    where = "torch.distributed._composable.replicate"  # and replicate_with_fsdp, which is not imported here either
    if any(kind.__module__.startswith(where) for module in model.modules() for kind in type(module).__mro__):
        raise TypeError(
            "replicate() averages gradients uncompressed before any hook runs: wrap the model in "
            "DistributedDataParallel instead, or shard it with fully_shard"
        )


@dataclass(eq=False)
class Unit:
    """One unit of FSDP: a module, or several, whose parameters are communicated together."""

    label: str
    module: Any  # an FSDPModule
    group: Any  # its FSDPParamGroup
    names: Mapping[int, str]  # of the model's parameters in training, by id
    present: list[Any] = field(default_factory=list)  # FSDPParams whose gradients the next buffer holds
    kept: dict[str, Tensor] = field(default_factory=dict)  # gradients that wait for the next all-reduce

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The unit's parameters in training, as the optimizer holds them."""
        return [each.sharded_param for each in self.group.fsdp_params if id(each.sharded_param) in self.names]

    @property
    def hook(self) -> "FSDPHook | None":
        """The hook that is installed on the unit."""
        found: FSDPHook | None = self.group.__dict__.get("_thinwire_hook")
        return found

    def watch(self, hook: "FSDPHook") -> None:
        """Note before each reduction which parameters have a gradient: the others are not in the buffer."""
        self.group._thinwire_hook = hook
        reduce = type(self.group).post_backward

        def post_backward(*unused: Any) -> Any:
            zeros = getattr(self.group, "reduce_scatter_unused_params", False)
            self.present = [each for each in self.group.fsdp_params if _has_gradient(each, zeros)]
            return reduce(self.group, *unused)

        self.group.post_backward = post_backward

    def gradients(self, buffer: Tensor) -> dict[str, Tensor]:
        """This rank's parts of the unit's gradients: flat views of the buffer without its padding, by name."""
        views: dict[str, Tensor] = {}
        at = 0
        for each in self.present:
            if id(each.sharded_param) not in self.names:
                raise LinkError(f"a parameter of {self.label} was frozen at attach: after unfreezing attach again")
            if numel := math.prod(each.sharded_size):
                views[self.names[id(each.sharded_param)]] = buffer[at : at + numel]
            at += math.prod(each.padded_sharded_param_size)
        if at != buffer.numel():
            raise LinkError(
                f"FSDP reduces {buffer.numel()} elements in {self.label} where thinwire expects {at}: "
                f"this PyTorch, {torch.__version__}, is not one that it knows"
            )
        return views

    def all_parts(self, gradients: Mapping[str, Tensor], buffer: Tensor) -> dict[str, Tensor]:
        """Gradients, and zeros for parameters without one, so that all replicas exchange the same tensors."""
        sizes = {self.names[id(p)]: numel for p in self.parameters if (numel := local_part(p).numel())}
        return {name: gradients[name] if name in gradients else buffer.new_zeros(n) for name, n in sizes.items()}

    def is_read_at_once(self, buffer: Tensor) -> bool:
        """Whether FSDP converts, divides, copies or adds up the buffer as soon as the hook returns."""
        if buffer.dtype not in (torch.float32, torch.bfloat16):  # divided once more afterwards
            return True
        if getattr(self.group, "force_sum_reduction_for_comms", False):
            return True
        return any(
            p.dtype != buffer.dtype
            or p.grad is not None
            or p.device != buffer.device
            or getattr(p, "_post_accumulate_grad_hooks", None)
            for p in (each.sharded_param for each in self.present)
        )

    @property
    def is_summed(self) -> bool:
        """Whether the user has set what gradients are divided by, so that native HSDP adds up those of the replicas."""
        return getattr(self.group, "gradient_divide_factor", None) is not None

    def keep(self, buffer: Tensor) -> None:
        """Take gradients that are not exchanged yet out of the buffer, as native HSDP does."""
        for name, part in self.gradients(buffer).items():
            self.kept[name] = self.kept[name] + part if name in self.kept else part.clone()
        buffer.zero_()

    def add_kept(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients that were kept to those that are going to be exchanged."""
        for name in [name for name in self.kept if name in gradients]:
            gradients[name].add_(self.kept.pop(name))


def _has_gradient(each: Any, zeros: bool) -> bool:
    if not hasattr(each, "_unsharded_param"):
        return False
    if each.unsharded_accumulated_grad is not None or each.unsharded_param.grad is not None:
        return True
    return zeros and bool(each.unsharded_param.requires_grad)


class ShardedModel:
    """A model that FSDP2 shards over one dimension of a mesh, and its place among the replicas.

    owned: the ids of the parameters that are exchanged; by default those that require gradients.

    Raises TypeError or ValueError, which say how to shard instead, if the model or the mesh cannot be used.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, owned: Container[int] | None = None) -> None:
        self.modules = _fsdp_modules(model)
        self.reshard()
        self.trained = {
            name: p for name, p in model.named_parameters() if (p.requires_grad if owned is None else id(p) in owned)
        }
        self.units = _units(self.modules, {id(p): name for name, p in self.trained.items()})
        _check_parameters(self.trained, self.units)
        self.local = LocalShards(self.trained)
        self.shard_group: dist.ProcessGroup = self.units[0].group.mesh_info.shard_process_group
        self.replicas = _replica_group(mesh, self.shard_group)

    def reshard(self) -> None:
        """Let FSDP gather the parameters anew: after an evaluation it keeps those of the outermost unit."""
        for module in self.modules.values():
            module.reshard()

    def check_hooks(self) -> None:
        """LinkError if the model has a hook that is in use."""
        for unit in self.units:
            if unit.hook is not None and unit.hook.link is not None:
                raise LinkError("this model is attached already; call detach() on its link first")
            if unit.hook is None and unit.group._all_reduce_hook is not None:
                raise LinkError("the model has an all-reduce hook already, of which FSDP takes one: remove it first")

    def shards(self, groups: OwnGroups) -> Shards:
        """Which parts of the parameters this rank holds."""
        cuts = {name: Cut(tuple(p.shape), _cut_dim(p)) for name, p in self.trained.items()}
        return Shards(groups.all.rank, groups.all.world, cuts, groups, self.trained)


def _fsdp_modules(model: nn.Module) -> dict[str, Any]:
    """All modules that `fully_shard` was called on, by name."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        raise TypeError(
            "sharded models need PyTorch 2.7 or later, whose FSDPModule has set_all_reduce_hook; this is "
            f"{torch.__version__}"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(f"FullyShardedDataParallel (FSDP1) flattens parameters: use FSDP2 instead and {_HOW}")
    found = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not found:
        raise TypeError(f"mesh= is for models that FSDP2 shards, and {type(model).__name__} is not sharded: {_HOW}")
    for module in found.values():
        _param_groups(module)  # refuses a PyTorch that it does not know before anything else is called
    return found


def _units(modules: Mapping[str, Any], names: Mapping[int, str]) -> list[Unit]:
    """The units that have parameters in training. Several modules may form one unit."""
    units: dict[int, Unit] = {}
    for name, module in modules.items():
        groups = _param_groups(module)
        if len(groups) > 1:
            raise ValueError(f"{name or 'the model'} is sharded over several meshes, for which FSDP has no hook")
        for group in groups:
            if type(group.mesh_info).__name__ != "FSDPMeshInfo":
                raise ValueError(
                    "the model is sharded over a mesh with a replica dimension, whose uncompressed all-reduce runs "
                    f"before any hook: {_HOW}"
                )
            if any(id(each.sharded_param) in names for each in group.fsdp_params):
                units.setdefault(id(group), Unit(name or "the model", module, group, names))
    if not units:
        raise ValueError("no sharded parameter of the model requires gradients")
    return list(units.values())


def _param_groups(module: Any) -> Sequence[Any]:
    state = _private(module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    else:
        only = _private(state, "_fsdp_param_group")
        groups = [only] if only is not None else []
    for group in groups:
        for name in _PRIVATE_OF_GROUPS:
            _private(group, name)
        for each in group.fsdp_params:
            for name in _PRIVATE_OF_PARAMETERS:
                _private(each, name, of_class=name == "unsharded_param")  # it has no value before the first use
    return groups


def _private(owner: Any, name: str, *, of_class: bool = False) -> Any:
    """A private attribute of FSDP. TypeError if this PyTorch has none of that name."""
    there = type(owner) if of_class else owner
    if not hasattr(there, name):
        raise TypeError(
            f"FSDP of PyTorch {torch.__version__} has no {type(owner).__name__}.{name}, which thinwire reads: use a "
            "version that thinwire is tested with, such as 2.13"
        )
    return getattr(there, name)


def _check_parameters(trained: Mapping[str, nn.Parameter], units: Sequence[Unit]) -> None:
    sharded = {id(p) for unit in units for p in unit.parameters}
    for name, p in trained.items():
        if id(p) not in sharded:
            raise ValueError(
                f"{name} requires gradients and is not sharded, so that nobody averages its gradient: call fully_shard "
                "on the whole model too, or freeze the parameter"
            )
        if p.device_mesh.ndim != 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"{name} is sharded over {p.device_mesh.ndim} dimensions of a mesh: "  # type: ignore[attr-defined]
                "thinwire takes models that fully_shard alone shards, without tensor parallelism"
            )


def _cut_dim(p: Any) -> int:
    return int(p.placements[0].dim)


def _replica_group(mesh: DeviceMesh | None, shard_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of this rank's counterparts in all replicas: the dimension of the mesh that is not sharded over."""
    if mesh is None:
        raise ValueError("the model is sharded: give attach the mesh that has the replicas too, mesh=mesh")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a DeviceMesh with a dimension for replicas, not {mesh!r}")
    here, shard = dist.get_rank(), dist.get_process_group_ranks(shard_group)
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    found = [group for group, those in zip(groups, ranks, strict=True) if set(those) & set(shard) == {here}]
    if len(shard) == 1 and len(found) == 2:  # one of them is the shards', with a single rank
        found = [max(found, key=dist.ProcessGroup.size)]
    if len(found) != 1 or (shard not in ranks and mesh.ndim > 1):
        names = ", ".join(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
        raise ValueError(
            f"of the mesh's dimensions ({names}) one is to be the shards' and one the replicas': give attach "
            'mesh["replicate", "shard"]'
        )
    return found[0]


def check_owned(parameters: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """ValueError if none of the optimizers, of which there may be none, owns a parameter of the model."""
    owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if optimizers and owned.isdisjoint(map(id, parameters)):
        raise ValueError(
            "the optimizer owns no parameter of the model, because fully_shard replaces them: make the optimizer from "
            "model.parameters() after sharding"
        )


def attach_fsdp(
    model: nn.Module, options: LinkOptions, mesh: DeviceMesh | None, on_last_bucket: Callable[[], None] | None = None
) -> Link:
    """Attach a link for gradients to a sharded model; with a single replica, one that exchanges nothing."""
    sharded = ShardedModel(model, mesh)
    check_owned(sharded.trained.values(), options.optimizers)
    if sharded.replicas.size() == 1:
        return open_single_replica(sharded, options)
    link, hook = open_sharded_link(sharded, options)
    hook.on_last_bucket = on_last_bucket
    link.set_hook(hook.release, hook.all_reduce)
    return link


def open_single_replica(
    sharded: ShardedModel, options: LinkOptions, updates: Callable[[Link], UpdateState | None] = lambda link: None
) -> Link:
    """A link that exchanges nothing, because there is one replica. Its ranks load and save their parts of states.

    updates: makes what the link saves besides the residuals, in the update domain.
    """
    groups = OwnGroups(sharded.shard_group, sharded.units[0].group.device, options.timeout)

    def build() -> Link:
        sharded.check_hooks()
        link = open_local_link(sharded.local, options)
        link.set_hook(lambda _: groups.close(), updates=updates(link))
        return link

    try:
        link = agreed(groups.all, build, lambda _: {})
    except BaseException:
        groups.close()
        raise
    link.set_shards(sharded.shards(groups))
    return link


def open_sharded_link(
    sharded: ShardedModel, options: LinkOptions, prepare: Callable[[], None] = lambda: None
) -> tuple[Link, "FSDPHook"]:
    """Build the link between the replicas of this rank's shard, and set its hook on the model.

    If ranks of one shard disagree, those of all shards raise. Replicas that differ get the first one's parameters.
    """
    device = sharded.units[0].group.device  # where gradients are computed, if parameters are offloaded too
    groups = OwnGroups(sharded.shard_group, device, options.timeout)
    made: list[Link] = []

    def check() -> None:
        sharded.check_hooks()
        prepare()

    def build() -> Link:
        made.append(open_link(sharded.local, sharded.replicas, options, check, sharded.local.whole, device)[0])
        return made[0]

    try:
        link = agreed(groups.all, build, lambda _: {})
    except BaseException:
        for each in made:
            each.detach()
        groups.close()
        raise
    link.set_shards(shards := sharded.shards(groups))
    if isinstance(link.tuner, Autotuner):
        link.tuner.hierarchical = False  # a machine's ranks share a replica, and do not exchange with one another
    if link.collective(lambda channel: copy_from_first(channel, sharded.local)):
        _log.info("the replicas had different parameters, and have those of the first replica now")
    hook = FSDPHook(sharded.units, sharded.replicas, shards)
    hook.install()
    hook.link = link
    return link, hook


@torch.no_grad()
def copy_from_first(channel: Channel, tensors: Mapping[str, Tensor]) -> bool:
    """Copy the first rank's tensors to all ranks unless they are equal; returns whether they were not."""
    mine = torch.tensor([checksum(t) for t in tensors.values()], dtype=torch.int64)
    rows = [m.clone() for m in channel.all_gather(mine.view(torch.uint8))]
    if all(torch.equal(row, rows[0]) for row in rows):
        return False
    first = dist.get_global_rank(channel.group, 0)
    for tensor in tensors.values():
        there = tensor.to(channel.device, copy=True).contiguous()
        dist.broadcast(there, first, group=channel.group)
        tensor.copy_(there)
    return True


class FSDPHook:
    """The hook of all units of one model. Without a link it averages gradients by a plain all-reduce, as DDP's does."""

    def __init__(self, units: Sequence[Unit], group: dist.ProcessGroup, shards: Shards) -> None:
        self.link: Link | None = None
        self.local = False  # whether gradients stay as they are, because the link exchanges updates
        self.on_last_bucket: Callable[[], None] | None = None
        self._units, self._group, self._shards = units, group, shards
        self._backward = -1  # the backward pass that is running
        self._seen: set[Unit] = set()  # units of the present step; empty between steps
        self._under_way: list[tuple[Future, Callable[[], None]]] = []
        self._emptied: list[nn.Parameter] = []  # parameters whose gradients are kept, and had none before
        self._ended = False  # whether a step has ended whose verdict is not known yet
        self._skip = False  # whether all ranks skip a step of the present backward pass

    def install(self) -> None:
        """Set the hook on every unit: FSDP does not pass it on to the units inside."""
        for unit in self._units:
            unit.watch(self)
            unit.module.set_all_reduce_hook(lambda buffer, unit=unit: self._reduced(unit, buffer))

    def release(self, link: Link) -> None:
        """Forget a link, if it is still the attached one."""
        if self.link is link:
            self.link, self.local, self.on_last_bucket = None, False, None
            self._shards.groups.close()

    def all_reduce(self, buffer: Tensor, width: int) -> Future:
        """Average a buffer over the replicas without the link, in 16 bits if `width` is below its type's."""
        sent = buffer.to(torch.float16) if width < buffer.element_size() else buffer
        sent.mul_(1.0 / self._group.size())
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        future: Future = work.get_future().then(lambda done: buffer if sent is buffer else buffer.copy_(sent))
        return future

    def _reduced(self, unit: Unit, buffer: Tensor) -> None:
        """Take a unit's gradients, averaged within the shard group. FSDP calls this during the backward pass."""
        if unit.is_summed:  # the mean of what is multiplied is the sum; so does a local gradient stand for all replicas
            buffer.mul_(self._group.size())
        if self.local:
            return
        self._note_backward()
        if not unit.group.all_reduce_grads:  # gradients are accumulated, and exchanged later
            self._emptied += [p for p in unit.parameters if p.grad is None]
            unit.keep(buffer)
            return
        gradients = unit.gradients(buffer)
        unit.add_kept(gradients)
        if self.link is None:
            self.all_reduce(buffer, buffer.element_size()).wait()
            return
        if unit in self._seen:  # FSDP reduces a unit twice in one backward pass, or the pass before has failed
            self._close_step()
        first, last = not self._seen, len(self._seen) == len(self._units) - 1
        if first:
            self._settle()
        self._seen.add(unit)
        if last:
            self._seen.clear()
            self._ended = True
            if self.on_last_bucket is not None:
                self.on_last_bucket()
        sent, parts, finish = _packed(buffer, unit.all_parts(gradients, buffer), gradients.keys())
        at_once = unit.is_read_at_once(buffer)
        future = self.link.submit(Job(sent, parts, first, last, when_ready(sent), at_once=at_once))
        self._under_way.append((future, finish))
        if at_once:
            self._wait()

    def _note_backward(self) -> None:
        """Ask autograd to call `_end_backward` when the present backward pass has ended, after FSDP's own work."""
        running = torch._C._current_graph_task_id()
        if running != self._backward:
            self._backward = running
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Wait until all gradients hold the mean."""
        self._backward = -1
        for p in self._emptied:
            p.grad = None
        self._emptied.clear()
        self._close_step()  # if some units had no gradients
        self._settle()
        skip, self._skip = self._skip, False
        if skip:
            for p in (p for unit in self._units for p in unit.parameters if p.grad is not None):
                local_part(p.grad).fill_(torch.nan)  # type: ignore[arg-type]

    def _close_step(self) -> None:
        """End a step to which nothing is added any more."""
        if self._seen and self.link is not None:
            self._under_way.append((self.link.submit(Job(torch.empty(0), {}, False, True)), lambda: None))
            self._ended = True
            self._settle()
        self._seen.clear()

    def _settle(self) -> None:
        """Wait until a step has ended, and note whether all ranks skip it.

        The links of all shards agree on that. A link that uses the plain all-reduce takes part by its hook.
        """
        self._wait()
        if self._ended and self.link is not None:
            self._skip |= self._shards.any(False) if self.link.dense_width else self.link.skipped
        self._ended = False

    def _wait(self) -> None:
        """Wait for all exchanges that are under way. Raises LinkError."""
        under_way, self._under_way = self._under_way, []
        for future, finish in under_way:
            try:
                future.wait()
            except RuntimeError as error:
                failure = self.link.failure if self.link is not None else None
                raise failure or error from None
            finish()


def _packed(
    buffer: Tensor, parts: Mapping[str, Tensor], present: Container[str]
) -> tuple[Tensor, BucketViews, Callable[[], None]]:
    """What a link takes of a buffer: a tensor, its parts by name, and what to do when they hold the mean.

    The link's means are written to CPU tensors of float32 one by one, and to all others at once: these must then be
    without padding. present: the parts that are in the buffer.
    """
    absent = {name: part for name, part in parts.items() if name not in present}
    in_place = buffer.device.type == "cpu" and buffer.dtype == torch.float32
    if in_place or (not absent and sum(part.numel() for part in parts.values()) == buffer.numel()):
        return buffer, BucketViews(parts), lambda: _check_absent(absent)
    sent = torch.cat([buffer[:0], *parts.values()])
    views = BucketViews(zip(parts, torch.split(sent, [part.numel() for part in parts.values()]), strict=True))

    def finish() -> None:
        for name, part in parts.items():
            part.copy_(views[name])
        _check_absent(absent)

    return sent, views, finish


def _check_absent(absent: Mapping[str, Tensor]) -> None:
    """LinkError if other replicas have a gradient where this one has none: their parameters would differ."""
    for name, mean in absent.items():
        if bool(mean.any()):
            raise LinkError(
                f"{name} has a gradient in another replica and none in this one: call "
                "model.set_reduce_scatter_unused_params(True), or use the same parameters on all ranks"
            )
