"""The cuda-convnet that SparsifyGradients trained: two convolutions, three fully connected layers.

Its 1,756,426 parameters make a gradient of 7.03 MB.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS = 1_756_426


class _Normalise(torch.autograd.Function):
    """y = x * d^-0.75 with d = 1 + scale * (sum of x^2 over the neighbouring channels)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, band: Tensor) -> Tensor:
        flat = x.flatten(2)
        d = torch.matmul(band, flat * flat).add_(1.0)
        root = d.rsqrt()
        power = root * root.sqrt()  # d^-0.75 without pow(), which is slow on CPUs
        ctx.save_for_backward(flat, d, power, band)
        return (flat * power).view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        flat, d, power, band = ctx.saved_tensors
        gradient = gradients[0].flatten(2)
        through = gradient * power
        # The band is symmetric, so the same product carries the gradient back to the neighbours.
        spread = torch.matmul(band, through * flat / d)
        return (through - 1.5 * flat * spread).view_as(gradients[0]), None


class LocalResponseNorm(nn.Module):
    """Equals torch.nn.LocalResponseNorm(2 * radius + 1, alpha, 0.75, 1.0), faster on CPUs.

    The sum over neighbouring channels is one small matrix product instead of a three-dimensional pooling.
    """

    band: Tensor

    def __init__(self, channels: int, *, radius: int = 4, alpha: float = 0.001) -> None:
        super().__init__()
        place = torch.arange(channels)
        near = (place[:, None] - place[None, :]).abs() <= radius
        # torch divides alpha by the size of the window; the paper's alpha of 0.001 / 9 is that quotient.
        band = near.to(torch.get_default_dtype()) * (alpha / (2 * radius + 1))
        self.register_buffer("band", band, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch of images, shape (samples, channels, height, width)."""
        result: Tensor = _Normalise.apply(x, self.band)  # type: ignore[no-untyped-call]
        return result


def cuda_convnet(*, strides: tuple[int, int] = (2, 2), classes: int = 10) -> nn.Sequential:
    """The network for 32 x 32 images; other pooling strides serve smaller images with the same parameters.

    Whatever the input, the two poolings must leave 8 x 8: 32 x 32 with strides (2, 2), 16 x 16 with (2, 1).
    """
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 64, 5, padding=2),
        "relu1": nn.ReLU(),
        "pool1": _pool(strides[0]),
        "norm1": LocalResponseNorm(64),
        "conv2": nn.Conv2d(64, 64, 5, padding=2),
        "relu2": nn.ReLU(),
        "norm2": LocalResponseNorm(64),
        "pool2": _pool(strides[1]),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(64 * 8 * 8, 384),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(384, 192),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(192, classes),
    }
    model = nn.Sequential(OrderedDict(layers))
    he_initialise(model)
    return model


def _pool(stride: int) -> nn.MaxPool2d:
    """A 3 x 3 maximum whose output is the input divided by the stride (TensorFlow calls it "same")."""
    return nn.MaxPool2d(3, stride, padding=1 if stride == 1 else 0, ceil_mode=True)


def he_initialise(model: nn.Module) -> None:
    """He's initialisation for rectified layers; a small last layer, so training starts at ln(classes)."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    nn.init.normal_(layers[-1].weight, std=0.01)
