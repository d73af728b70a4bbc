"""The cuda-convnet of SparsifyGradients: two convolutions and three fully connected layers.

It has 1,756,426 parameters, so that a gradient has 7.03 MB.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn


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
        # The band is symmetric, so the same product propagates the gradient to the neighbouring channels.
        spread = torch.mm((through * x).div_(d), band)
        return through.addcmul_(x, spread, value=-1.5), None


class LocalResponseNorm(nn.Module):
    """A faster torch.nn.LocalResponseNorm(2 * radius + 1, alpha, 0.75, 1.0) for CPUs.

    The sum over neighbouring channels is one small matrix product instead of a three-dimensional pooling.
    """

    def __init__(self, channels: int, *, radius: int = 4, alpha: float = 0.001) -> None:
        super().__init__()
        place = torch.arange(channels)
        near = (place[:, None] - place[None, :]).abs() <= radius
        # torch divides alpha by the window size; the paper's alpha of 0.001 / 9 is that quotient.
        # No buffer: DDP would broadcast it in every forward pass, which takes a round trip.
        self._band = near.to(torch.get_default_dtype()) * (alpha / (2 * radius + 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch of images, shape (samples, channels, height, width)."""
        samples, channels, height, width = x.shape
        flat = x.permute(0, 2, 3, 1).reshape(-1, channels)  # a view if the memory format is channels_last
        result: Tensor = _Normalise.apply(flat, self._band.to(flat))  # type: ignore[no-untyped-call]
        return result.view(samples, height, width, channels).permute(0, 3, 1, 2)


class _Layout(nn.Module):
    """Changes the memory format of images to the one in which the next layer is fastest on CPUs."""

    def __init__(self, order: torch.memory_format) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self.order)


def cuda_convnet(*, strides: tuple[int, int] = (2, 2), classes: int = 10) -> nn.Sequential:
    """Return the network for 32 x 32 images, or with other pooling strides for smaller images.

    The output of the second pooling must be 8 x 8: images of 32 x 32 need strides (2, 2), images of 16 x 16 (2, 1).
    """
    layers: dict[str, nn.Module] = {
        "channels_last": _Layout(torch.channels_last),
        "conv1": nn.Conv2d(3, 64, 5, padding=2),
        "pool1": _pool(strides[0]),
        "relu1": nn.ReLU(),  # after the pooling: the result is the same, on a quarter of the values
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
    return he_initialised(nn.Sequential(OrderedDict(layers)))


def _pool(stride: int) -> nn.MaxPool2d:
    """Return a 3 x 3 max pooling with TensorFlow's "same" padding: the output is the input size / stride."""
    return nn.MaxPool2d(3, stride, padding=1 if stride == 1 else 0, ceil_mode=True)


def he_initialised(model: nn.Sequential) -> nn.Sequential:
    """Initialise for ReLU after He, with a small last layer, so that the first loss is about ln(classes)."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    nn.init.normal_(layers[-1].weight, std=0.01)
    return model
