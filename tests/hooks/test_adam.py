"""Noise correction: the mean of all ranks' Adam updates is as long as Adam's update on the mean gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.hooks import adam

WORKERS = 4


def moved(gradients: list[list[Tensor]], corrected: bool, **options: Any) -> Tensor:
    """The mean position of ranks that each step on their own gradients, by step and rank."""
    ends = []
    for rank in range(len(gradients[0])):
        p = nn.Parameter(torch.zeros(gradients[0][0].numel(), dtype=options.get("dtype")))
        optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.99), amsgrad=options.get("amsgrad", False))
        for step in gradients:
            p.grad = step[rank].to(p.dtype)
            optimizer.step()
            if corrected:
                adam.correct_noise(optimizer, WORKERS)
        ends.append(p.detach().float())
    return torch.stack(ends).mean(0)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"dtype": torch.bfloat16}], ids=str)
def test_the_mean_update_is_that_of_the_mean_gradient(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    signal = 0.3 * torch.randn(4000, generator=generator)
    noisy = [[signal + torch.randn(4000, generator=generator) for _ in range(WORKERS)] for _ in range(200)]
    dense = moved([[torch.stack(step).mean(0)] for step in noisy], corrected=False)
    plain, corrected = moved(noisy, corrected=False, **options), moved(noisy, corrected=True, **options)
    assert float(plain.norm() / dense.norm()) < 0.7
    assert 0.85 < float(corrected.norm() / dense.norm()) < 1.1
    assert float(torch.cosine_similarity(corrected, dense, dim=0)) > 0.97


def test_without_noise_nothing_is_corrected() -> None:
    steady = [[torch.full((100,), 0.5)] * WORKERS for _ in range(50)]
    assert torch.allclose(moved(steady, corrected=True), moved(steady, corrected=False), rtol=1e-3)


def test_the_kernel_and_torch_operations_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, square = torch.randn(1003, generator=generator), torch.rand(1003, generator=generator)
    square[:10] = mean[:10] ** 2  # no noise at all
    square[10:20] = 0.0
    state = {"step": torch.tensor(3.0), "exp_avg": mean, "exp_avg_sq": square}
    one, other = torch.zeros(1003), torch.zeros(1003)
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    adam.correct_all([(one, state, group)], WORKERS)
    adam.correct_adam(other, mean, square, 1e-2, 1.0 - 0.9**3, 1.0 - 0.99**3, 1e-8, WORKERS)
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-9)
    assert bool(one.isfinite().all())


def test_maximising_is_minimising_the_negative() -> None:
    generator = torch.Generator().manual_seed(2)
    noisy = [[torch.randn(50, generator=generator)] for _ in range(20)]
    ends = []
    for sign in (1.0, -1.0):
        p = nn.Parameter(torch.zeros(50))
        optimizer = torch.optim.Adam([p], lr=1e-3, maximize=sign < 0)
        for (gradient,) in noisy:
            p.grad = sign * gradient
            optimizer.step()
            adam.correct_noise(optimizer, WORKERS)
        ends.append(p.detach().clone())
    assert torch.allclose(ends[0], ends[1])


def test_which_optimizers_are_corrected() -> None:
    p = [nn.Parameter(torch.zeros(3))]
    assert adam.corrects(torch.optim.Adam(p)) and adam.corrects(torch.optim.AdamW(p))
    assert not adam.corrects(torch.optim.SGD(p, lr=0.1)) and not adam.corrects(torch.optim.NAdam(p))
