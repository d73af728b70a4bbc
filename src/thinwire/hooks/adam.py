"""Noise correction of Adam: the step that the mean of all ranks' gradients would have taken.

In the update domain each rank's second moments hold the noise of its own batch. The mean of W such updates is up to
sqrt(W) shorter than Adam's update on the mean gradient. With m and v the bias-corrected moments, m^2 estimates the
signal and v - m^2 the noise of one batch, so that the mean gradient has the second moment m^2 + (v - m^2) / W. The
correction moves the parameters to where that second moment would have led.
"""

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire import _native
from thinwire.link.shards import local_part


def corrects(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one whose updates can be corrected: Adam or AdamW of PyTorch."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


@torch.no_grad()
def correct_noise(optimizer: torch.optim.Optimizer, workers: int, only: Container[int] | None = None) -> None:
    """Correct the step that Adam or AdamW has just taken on this rank's gradient.

    only: the ids of the parameters that are exchanged; by default all.
    """
    stepped = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and (only is None or id(p) in only):
                state = optimizer.state.get(p)
                if state is not None and "exp_avg_sq" in state:
                    stepped.append((p, state, group))
    correct_all(stepped, workers)


def correct_all(stepped: Iterable[tuple[Tensor, dict[str, Any], dict[str, Any]]], workers: int) -> None:
    """Correct parameters, given with their states and groups; the kernel takes those it can in one call."""
    together = []
    known: tuple[object, float, tuple[float, float, float, float]] = (None, 0.0, (0.0, 0.0, 0.0, 0.0))
    for p, state, group in stepped:
        step = float(state["step"])
        if step <= 0.0:
            continue
        if known[0] is not group or known[1] != step:  # the same for most parameters
            beta1, beta2 = map(float, group["betas"])
            known = group, step, (float(group["lr"]), 1.0 - beta1**step, 1.0 - beta2**step, group["eps"])
        rest = known[2]
        mean, square = state["exp_avg"], state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        p, mean, square = local_part(p), local_part(mean), local_part(square)
        if _in_kernel(p) and _in_kernel(mean) and _in_kernel(square):
            together.append((p.data_ptr(), mean.data_ptr(), square.data_ptr(), p.numel(), *rest))
        else:
            correct_adam(p, mean, square, *rest, workers)
    _native.correct_adam(together, workers)


def _in_kernel(t: Tensor) -> bool:
    return t.is_cpu and t.dtype is torch.float32 and t.is_contiguous()


def correct_adam(
    p: Tensor,
    mean: Tensor,
    square: Tensor,
    lr: float,
    mean_correction: float,
    square_correction: float,
    eps: float,
    workers: int,
) -> None:
    """The kernel `correct_adam` in torch operations, for any device and type."""
    m, v = mean.float() / mean_correction, square.float() / square_correction
    signal = torch.minimum(m * m, v)
    wanted = m / ((signal + (v - signal) / workers).sqrt() + eps)
    made = m / (v.sqrt() + eps)
    p -= (lr * (wanted - made)).to(p.dtype)
