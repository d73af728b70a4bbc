"""The cuda-convnet: its size, and its fast normalisation against torch's."""

import pytest
import torch
from torch import nn

from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.convnet import LocalResponseNorm, cuda_convnet


def test_the_parameters_are_those_of_the_paper() -> None:
    assert get_recipe("cifar10").parameter_count() == 1_756_426
    assert get_recipe("digits").parameter_count() == 1_756_426
    shapes = [tuple(p.shape) for p in cuda_convnet().parameters() if p.dim() > 1]
    assert shapes == [(64, 3, 5, 5), (64, 64, 5, 5), (384, 4096), (192, 384), (10, 192)]


@pytest.mark.parametrize(("strides", "size"), [((2, 2), 32), ((2, 1), 16), ((1, 1), 8)])
def test_other_strides_serve_smaller_images(strides: tuple[int, int], size: int) -> None:
    assert cuda_convnet(strides=strides)(torch.randn(2, 3, size, size)).shape == (2, 10)


def test_pooling_is_the_same_padding_of_tensorflow() -> None:
    pool = cuda_convnet().get_submodule("pool1")
    x = torch.randn(1, 2, 32, 32)
    padded = nn.functional.pad(x, (0, 1, 0, 1), value=float("-inf"))
    assert torch.equal(pool(x), nn.functional.max_pool2d(padded, 3, 2))


@pytest.mark.parametrize(("channels", "radius", "alpha"), [(64, 4, 0.001), (5, 4, 0.5), (3, 1, 2.0)])
def test_normalisation_equals_torch(channels: int, radius: int, alpha: float) -> None:
    torch.manual_seed(0)
    ours = LocalResponseNorm(channels, radius=radius, alpha=alpha).double()
    theirs = nn.LocalResponseNorm(2 * radius + 1, alpha=alpha, beta=0.75, k=1.0)
    x = (10 * torch.randn(2, channels, 3, 4, dtype=torch.double)).requires_grad_()
    weights = torch.randn_like(x)
    expected, found = theirs(x), ours(x)
    # The band was made in single precision: its constant differs by one rounding.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), x)
    (found_gradient,) = torch.autograd.grad((found * weights).sum(), x)
    torch.testing.assert_close(found_gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_normalisation_is_exact() -> None:
    layer = LocalResponseNorm(6, radius=2, alpha=0.7).double()
    x = torch.randn(2, 6, 2, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_the_order_of_layers_equals_the_papers() -> None:
    """Rectifying after pooling, and memory laid out otherwise, give the same values and the same gradients.

    In double precision: in single, sums in another order differ by more on some processors than on others.
    """
    torch.manual_seed(0)
    ours = cuda_convnet().double()
    part = ours.get_submodule
    order = ("conv1", "relu1", "pool1", "norm1", "conv2", "relu2", "norm2", "pool2", "flat")
    theirs = nn.Sequential(*(part(name) for name in (*order, "fc1", "relu3", "fc2", "relu4", "fc3")))
    x, weights = torch.randn(3, 3, 32, 32).double(), torch.randn(3, 10).double()
    (theirs(x) * weights).sum().backward()
    expected = [p.grad for p in ours.parameters()]
    ours.zero_grad()
    (ours(x) * weights).sum().backward()
    for parameter, gradient in zip(ours.parameters(), expected, strict=True):
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-11)
