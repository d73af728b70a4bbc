"""Noise correction of Adam: the step that the mean of all ranks' gradients would have taken.

In the update domain each rank's second moments hold the noise of its own batch. The mean of W such updates is up to
sqrt(W) shorter than Adam's update on the mean gradient. With m and v the bias-corrected moments, m^2 estimates the
signal and v - m^2 the noise of one batch, so that the mean gradient has the second moment m^2 + (v - m^2) / W. The
correction moves the parameters to where that second moment would have led.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire import _native


def corrects(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one whose updates can be corrected: Adam or AdamW of PyTorch."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


@torch.no_grad()
def correct_noise(optimizer: torch.optim.Optimizer, workers: int) -> None:
    """Correct the step that Adam or AdamW has just taken on this rank's gradient."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if p.grad is not None and "exp_avg_sq" in state and float(state["step"]) > 0:
                _correct(p, state, group, workers)


def _correct(p: Tensor, state: dict[str, Any], group: dict[str, Any], workers: int) -> None:
    step, (beta1, beta2) = float(state["step"]), (float(beta) for beta in group["betas"])
    mean, square = state["exp_avg"], state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    sign = -1.0 if group.get("maximize") else 1.0
    lr, corrections = sign * float(group["lr"]), (1.0 - beta1**step, 1.0 - beta2**step)
    plain = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in (p, mean, square))
    if plain:
        _native.correct_adam(
            p.data_ptr(), mean.data_ptr(), square.data_ptr(), p.numel(), lr, *corrections, group["eps"], workers
        )
    else:
        correct_adam(p, mean, square, lr, corrections, group["eps"], workers)


def correct_adam(
    p: Tensor, mean: Tensor, square: Tensor, lr: float, corrections: tuple[float, float], eps: float, workers: int
) -> None:
    """The kernel `correct_adam` in torch operations, for any device and type."""
    m, v = mean.float() / corrections[0], square.float() / corrections[1]
    signal = torch.minimum(m * m, v)
    wanted = m / ((signal + (v - signal) / workers).sqrt() + eps)
    made = m / (v.sqrt() + eps)
    p -= (lr * (wanted - made)).to(p.dtype)
