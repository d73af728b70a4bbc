"""The cuda-convnet that SparsifyGradients trained: two convolutions, three fully connected layers.

Its 1,756,426 parameters make a gradient of 7.03 MB.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS = 1_756_426


class _Normalise(torch.autograd.Function):
    """y = x * d^-0.75 with d = 1 + scale * (sum of x^2 over the neighbouring channels, the last dimension)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, band: Tensor) -> Tensor:
        d = torch.mm(x * x, band).add_(1.0)
        root = d.rsqrt()
        power = root.sqrt().mul_(root)  # d^-0.75 without pow(), which is slow on CPUs
        ctx.save_for_backward(x, d, power, band)
        return x * power

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, d, power, band = ctx.saved_tensors
        through = gradients[0] * power
        # The band is symmetric, so the same product carries the gradient back to the neighbours.
        spread = torch.mm((through * x).div_(d), band)
        return through.addcmul_(x, spread, value=-1.5), None


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
        samples, channels, height, width = x.shape
        flat = x.permute(0, 2, 3, 1).reshape(-1, channels)  # a view, if the channels lie side by side
        result: Tensor = _Normalise.apply(flat, self.band)  # type: ignore[no-untyped-call]
        return result.view(samples, height, width, channels).permute(0, 3, 1, 2)


class _Layout(nn.Module):
    """The same images with another order in memory: each layer gets the one in which it is fastest on CPUs."""

    def __init__(self, order: torch.memory_format) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self.order)


def cuda_convnet(*, strides: tuple[int, int] = (2, 2), classes: int = 10) -> nn.Sequential:
    """The network for 32 x 32 images; other pooling strides serve smaller images with the same parameters.

    Whatever the input, the two poolings must leave 8 x 8: 32 x 32 with strides (2, 2), 16 x 16 with (2, 1).
    """
    layers: dict[str, nn.Module] = {
        "channels_last": _Layout(torch.channels_last),
        "conv1": nn.Conv2d(3, 64, 5, padding=2),
        "pool1": _pool(strides[0]),
        "relu1": nn.ReLU(),  # of the maximum: the same as the maximum of rectified values, on a quarter of them
        "norm1": LocalResponseNorm(64),
        "channels_first": _Layout(torch.contiguous_format),
        "conv2": nn.Conv2d(64, 64, 5, padding=2),
        "relu2": nn.ReLU(),
        "channels_last_again": _Layout(torch.channels_last),
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
