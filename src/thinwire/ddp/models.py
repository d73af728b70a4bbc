"""Models: which models a link can be attached to, and what is said of the others."""

import warnings

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.codec.codec import Codec
from thinwire.codec.memory import MomentumResidual
from thinwire.codec.vectors import DTYPES


def checked_ddp(model: nn.Module) -> DistributedDataParallel:
    """The model, if it is of DDP; TypeError says what to do otherwise."""
    if isinstance(model, DistributedDataParallel):
        return model
    kind = type(model).__name__
    if "FSDP" in kind or "FullyShardedDataParallel" in kind:
        raise TypeError(
            f"{kind} shards parameters and gradients, which no replica has whole: thinwire takes DDP models"
        )
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach to the DDP model before torch.compile wraps it")
    raise TypeError(f"attach takes a DistributedDataParallel model, not {kind}: wrap it as DDP(model) first")


def trained_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients DDP averages, by name."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    return {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}


def check_model(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
    """ValueError says why this model's gradients cannot be taken."""
    wrapped = model._get_ddp_logging_data().get("num_parameter_tensors", len(parameters))
    if wrapped != len(parameters):
        raise ValueError(
            f"DDP was made for {wrapped} parameters and {len(parameters)} require gradients now: "
            "after freezing or unfreezing wrap the model in DDP again, then attach"
        )
    for name, p in parameters.items():
        if p.dtype not in DTYPES:
            raise ValueError(f"{name} is {p.dtype}: thinwire takes float32, float16 and bfloat16 parameters")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"{name} gives sparse gradients, which DDP's hooks cannot take: use sparse=False")
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError("DDP's mixed_precision installs a hook of its own: use torch.autocast instead")


def check_momentum(codec: Codec, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn if momentum would be applied twice."""
    if optimizer is None or not isinstance(codec.memory, MomentumResidual):
        return
    if any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
        warnings.warn(
            "MomentumResidual applies momentum before sending and the optimizer applies it again: "
            "use SGD with momentum=0, or the memory Residual()",
            stacklevel=6,  # whoever called attach
        )
