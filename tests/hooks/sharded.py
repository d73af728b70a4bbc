"""Small sharded models and their training, for tests of FSDP2 on every rank of a cluster."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire as tw
from tests.link import jobs
from thinwire.link.shards import local_part

FULL = tw.Codec(tw.TopK(1.0), tw.Float32())


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Block(nn.Module):
    """Two layers and a residual connection; one of its parameters can go unused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.uses_scale = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out * self.scale if self.uses_scale else out


class Stack(nn.Module):
    """Units of several sizes. 33 rows make shards of 17 and 16, and the bias of one element an empty shard."""

    def __init__(self, width: int = 33, *, tied: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.last = nn.Linear(width, 20 if tied else 4)
        self.shift = nn.Parameter(torch.zeros(1))
        self.twice = twice
        self.factor = 1.0  # of the gradient of `shift`, which the first rank of a shard group holds
        if tied:
            self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
            self.first.weight = nn.Parameter(torch.randn(width, 20) * 0.1)
            self.last = nn.Linear(20, width)
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        for block in [*self.blocks, *self.blocks] if self.twice else self.blocks:
            hidden = block(hidden)
        last = self.last
        out: Tensor = hidden @ last.weight if last.weight is self.first.weight else last(hidden)
        shift: Tensor = Scaled.apply(self.shift, self.factor)  # type: ignore[no-untyped-call]
        return out[:, :4] + shift


def mesh_of(world: int, replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    nested: bool = False,
    together: bool = False,
    grouped: bool = False,
    **options: Any,
) -> Any:
    """Shard a `Stack`: a unit for each block, or inside of it for each layer too, and one for the rest.

    together: make a single unit of the whole model instead.
    grouped: make a unit of the last block and the last layer.
    """
    from torch.distributed.fsdp import fully_shard

    blocks: list[Any] = [] if together else list(model.blocks)  # type: ignore[arg-type]
    if grouped:
        fully_shard([blocks.pop(), model.last], mesh=mesh, **options)  # type: ignore[list-item]
    for block in blocks:
        if nested:
            fully_shard(block.up, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@dataclass
class Case:
    """A way to use FSDP2."""

    options: Callable[[], dict[str, Any]] = dict  # of fully_shard; made on the rank, where FSDP is imported
    stack: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    together: bool = False  # whether the model is a single unit
    grouped: bool = False  # whether one unit has two modules
    micro: int = 1  # backward passes per step
    accumulate: str = ""  # what those without an exchange leave out: "reduce", "all-reduce", or nothing
    clip: bool = False
    frozen: str = ""
    unused: bool = False
    dtype: torch.dtype = torch.float32
    divide_by: float = 0.0  # what the sum of all ranks' gradients is divided by, if that is not their number
    checkpointed: bool = False  # whether the backward pass computes the blocks' activations again


def _precision(param: torch.dtype | None, reduce: torch.dtype | None) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}

    return made


def _offload() -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def _columns() -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    return {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None}


CASES = {
    "plain": Case(),
    "nested units": Case(nested=True),
    "a single unit": Case(together=True),
    "several modules in a unit": Case(grouped=True),
    "bf16 parameters": Case(_precision(torch.bfloat16, torch.float32)),
    "bf16 reduction": Case(_precision(torch.bfloat16, torch.bfloat16)),
    "bf16 model": Case(_precision(None, torch.float32), dtype=torch.bfloat16),
    "fp16 reduction": Case(_precision(None, torch.float16)),
    "no reshard": Case(lambda: {"reshard_after_forward": False}),
    "offload": Case(_offload),
    "columns": Case(_columns, {"width": 32}),
    "accumulation": Case(micro=3, accumulate="reduce"),
    "accumulation of shards": Case(micro=3, accumulate="all-reduce"),
    "every backward": Case(micro=2),
    "clipping": Case(clip=True),
    "frozen": Case(frozen="blocks.0.up.weight"),
    "unused": Case(unused=True),
    "tied": Case(stack={"tied": True}),
    "used twice": Case(stack={"twice": True}),
    "divided by 3": Case(divide_by=3.0),
    "activation checkpoints": Case(checkpointed=True),
}


def build(case: Case, mesh: DeviceMesh, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Stack(**case.stack).to(case.dtype)
    if case.frozen:
        model.get_parameter(case.frozen).requires_grad_(False)
    model.blocks[0].uses_scale = not case.unused  # type: ignore[assignment]
    if case.checkpointed:
        for block in model.blocks:
            checkpoint(block)
    made = shard(model, mesh, nested=case.nested, together=case.together, grouped=case.grouped, **case.options())
    if case.divide_by:
        for unit in (*made.blocks, made):
            unit.set_gradient_divide_factor(case.divide_by)
            unit.set_force_sum_reduction_for_comms(True)  # Gloo has no other way to divide
    return made


def train(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range, case: Case | None = None
) -> list[float]:
    """Train, and return this rank's losses."""
    case = case or CASES["plain"]
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(case.micro):
            last = part == case.micro - 1
            if case.accumulate == "reduce":
                model.set_requires_gradient_sync(last)
            elif case.accumulate:
                model.set_requires_all_reduce(last)
            x, y = jobs.batch(rank, 10 * step + part)
            loss = nn.functional.cross_entropy(model(x.to(case.dtype)).float(), y)
            loss.backward()
            losses.append(float(loss))
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's parts of the parameters."""
    return {name: local_part(p).clone() for name, p in model.named_parameters()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full parameters."""
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
