"""digits: the 1,797 handwritten digits that come with scikit-learn, on a convnet of 1.76 million parameters.

No download, and little computing per step: one machine can emulate several hosts, so a race starts here.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import RecipeError
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tools.recipes.recipe import Defaults, Recipe, Splits, TensorSplit

TRAIN = 1297  # the other 500 test: with fewer, one image would weigh too much in a comparison


def read_digits() -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 16 and labels, from the file that scikit-learn brings.

    Importing all of scikit-learn for that takes seconds, and every worker would.
    """
    found = find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file is not None and file.exists():
        table = np.loadtxt(file, delimiter=",")
        pixels, labels = table[:, :-1], table[:, -1]
    else:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def load(data_dir: Path | None) -> Splits:
    """Read the digits from the installed scikit-learn; there is nothing to read from a folder."""
    if data_dir is not None and not data_dir.is_dir():
        raise RecipeError(f"the data folder {data_dir} does not exist: leave out --data, the digits need none.")
    pixels, labels = read_digits()
    images = pixels.view(-1, 1, 8, 8)
    # The writers follow one another in the file: a fixed shuffle puts all of them into both splits.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = nn.functional.interpolate(images, size=16, mode="bilinear", align_corners=False)
    images = images.expand(-1, 3, -1, -1)[order].contiguous()
    # Centred images train in fewer and smoother steps.
    images -= images[:TRAIN].mean(0)
    images /= images[:TRAIN].std()
    targets = labels[order]
    return Splits(train=TensorSplit(images[:TRAIN], targets[:TRAIN]), test=TensorSplit(images[TRAIN:], targets[TRAIN:]))


def digits() -> Recipe:
    """The recipe; with stride 1 in its second pooling, 16 x 16 images meet the layers made for 32 x 32."""
    return Recipe(
        "digits",
        description="Small handwritten digits on the convnet of SparsifyGradients.",
        data="1,297 + 500 images that come with scikit-learn",
        model=lambda: cuda_convnet(strides=(2, 1)),
        load=load,
        defaults=Defaults(batch=16, lr=0.02, momentum=0.5, epochs=20, target=0.97),
    )
