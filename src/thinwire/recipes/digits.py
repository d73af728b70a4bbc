"""digits: the 1,797 small handwritten digits that come with scikit-learn, on the 1.76 million parameter convnet.

No download, and a step costs little computing, so one machine can emulate several hosts: the default of a race.
"""

from pathlib import Path

import torch
from torch import nn

from thinwire.recipes.convnet import cuda_convnet
from thinwire.recipes.recipe import Defaults, Recipe, Splits, TensorSplit

TRAIN = 1437  # four fifths, as in most uses of this data


def load(data_dir: Path | None) -> Splits:
    """Read the digits from the installed scikit-learn; there is nothing to read from a folder."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16 - 0.5
    # The writers follow one another in the file: a fixed shuffle puts all of them into both splits.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = nn.functional.interpolate(images, size=16, mode="bilinear", align_corners=False)
    images = images.expand(-1, 3, -1, -1)[order].contiguous()
    targets = torch.from_numpy(labels).long()[order]
    return Splits(
        train=TensorSplit(images[:TRAIN], targets[:TRAIN]), test=TensorSplit(images[TRAIN:], targets[TRAIN:])
    )


def digits() -> Recipe:
    """The recipe; its second pooling has stride 1, so 16 x 16 images give the layers of the 32 x 32 network."""
    return Recipe(
        "digits",
        description="Small handwritten digits on the convnet of SparsifyGradients.",
        data="1,437 + 360 images that come with scikit-learn",
        model=lambda: cuda_convnet(strides=(2, 1)),
        load=load,
        defaults=Defaults(batch=8, lr=0.02, momentum=0.9, epochs=20, target=0.98),
    )
