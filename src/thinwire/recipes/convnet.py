"""The cuda-convnet that SparsifyGradients trained: two convolutions, three fully connected layers.

Its 1,756,426 parameters make a gradient of 7.03 MB.
"""

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
    """Equals torch.nn.LocalResponseNorm(2 * radius + 1, alpha, 0.75, 1.0), several times faster on CPUs.

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
    model = nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, strides[0], padding=int(strides[0] == 1), ceil_mode=True),
        LocalResponseNorm(64),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        LocalResponseNorm(64),
        nn.MaxPool2d(3, strides[1], padding=int(strides[1] == 1), ceil_mode=True),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )
    he_initialise(model)
    return model


def he_initialise(model: nn.Module) -> None:
    """He's initialisation for rectified layers; a small last layer, so training starts at ln(classes)."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    nn.init.normal_(layers[-1].weight, std=0.01)
