"""The recipes digits, mnist and fashion-mnist: small grey images of ten classes.

`digits` needs no download and little computing per step, so that one machine can emulate several hosts. `mnist` and
`fashion-mnist` train the fully connected network of Aji and Heafield, or a small convolutional one.
"""

from functools import partial
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import RecipeError
from thinwire.tools.recipes.convnet import cuda_convnet, he_initialised
from thinwire.tools.recipes.files import Asset, cache_dir, fetch, find_file, read_idx_images
from thinwire.tools.recipes.recipe import Defaults, Recipe, Splits, TensorSplit

TRAIN = 1297  # the other 500 are for testing: with fewer, one image would change the accuracy too much


def read_digits() -> tuple[Tensor, Tensor]:
    """Return pixels from 0 to 16 and labels from the file that comes with scikit-learn.

    The file is read without importing scikit-learn, which would take seconds in every worker.
    """
    found = find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file is not None and file.exists():
        table = np.loadtxt(file, delimiter=",")
        pixels, labels = table[:, :-1], table[:, -1]
    else:
        from sklearn import datasets

        pixels, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def load_digits(data_dir: Path | None) -> Splits:
    """Read the digits from the installed scikit-learn; a data folder must exist but is not used."""
    if data_dir is not None and not data_dir.is_dir():
        raise RecipeError(f"the data folder {data_dir} does not exist: leave out --data, which the digits do not need.")
    pixels, labels = read_digits()
    # The file is sorted by writer; a fixed shuffle puts every writer into both splits.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = nn.functional.interpolate(pixels.view(-1, 1, 8, 8), size=16, mode="bilinear", align_corners=False)
    images = images.expand(-1, 3, -1, -1)[order].contiguous()
    # Centred images train in fewer and smoother steps.
    images -= images[:TRAIN].mean(0)
    images /= images[:TRAIN].std()
    targets = labels[order]
    return Splits(train=TensorSplit(images[:TRAIN], targets[:TRAIN]), test=TensorSplit(images[TRAIN:], targets[TRAIN:]))


def digits() -> Recipe:
    """Return the recipe `digits`; with stride 1 in the second pooling the network takes images of 16 x 16."""
    return Recipe(
        "digits",
        description="Small handwritten digits on the convnet of SparsifyGradients.",
        data="1,297 + 500 images that come with scikit-learn",
        model=lambda: cuda_convnet(strides=(2, 1)),
        load=load_digits,
        defaults=Defaults(batch=16, lr=0.02, momentum=0.5, epochs=20, target=0.97),
    )


# SHA-256 of the unpacked contents of the original files.
_SUMS = {
    "mnist": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}
_MIRRORS = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}


def scaled(pixels: Tensor) -> Tensor:
    """Scale bytes to a mean of about 0 and a standard deviation of about 1."""
    return (pixels.float() - 33.0) / 78.0


def load_mnist(dataset: str, data_dir: Path | None) -> Splits:
    """Read the four IDX files from a folder, or download them to the cache."""

    def locate(name: str) -> Path:
        if data_dir is not None:
            return find_file(data_dir, name, subfolders=(dataset,))
        urls = tuple(f"{base}{name}.gz" for base in _MIRRORS[dataset])
        return fetch(Asset(f"{name}.gz", urls, f"sha256:{_SUMS[dataset][name]}"), cache_dir(dataset))

    def split(part: str) -> TensorSplit:
        pixels, labels = read_idx_images(locate(f"{part}-images-idx3-ubyte"), locate(f"{part}-labels-idx1-ubyte"))
        return TensorSplit(torch.tensor(pixels).unsqueeze(1), torch.tensor(labels).long(), scaled)

    return Splits(train=split("train"), test=split("t10k"))


def fully_connected() -> nn.Sequential:
    """Return the network 784-4096-2048-1024-10 with ReLU, which has 13.7 million parameters."""
    hidden = [(nn.Linear(*sizes), nn.ReLU()) for sizes in pairwise((784, 4096, 2048, 1024))]
    return he_initialised(nn.Sequential(nn.Flatten(), *chain(*hidden), nn.Linear(1024, 10)))


def small_conv() -> nn.Sequential:
    """Return a network of two convolutions and two fully connected layers with 0.4 million parameters."""
    layers = (
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, 10)),
    )
    return he_initialised(nn.Sequential(*layers))


def _recipe(name: str, pictures: str, data: str, *, convolutional: bool, epochs: int, target: float) -> Recipe:
    dataset = name.removesuffix("-conv")
    network = "a small convolutional network" if convolutional else "the fully connected network of Aji and Heafield"
    return Recipe(
        name,
        description=f"{pictures} on {network}.",
        data=data,
        model=small_conv if convolutional else fully_connected,
        load=lambda data_dir: load_mnist(dataset, data_dir),
        defaults=Defaults(batch=16 if convolutional else 32, lr=0.05, momentum=0.0, epochs=epochs, target=target),
    )


_MNIST = ("Handwritten digits", "MNIST, 60,000 + 10,000 images, 11 MB")
_FASHION = ("Pictures of clothing", "Fashion-MNIST, 60,000 + 10,000 images, 30 MB")
# Functions that return the recipes.
mnist = partial(_recipe, "mnist", *_MNIST, convolutional=False, epochs=5, target=0.98)
mnist_conv = partial(_recipe, "mnist-conv", *_MNIST, convolutional=True, epochs=5, target=0.985)
fashion_mnist = partial(_recipe, "fashion-mnist", *_FASHION, convolutional=False, epochs=10, target=0.88)
fashion_mnist_conv = partial(_recipe, "fashion-mnist-conv", *_FASHION, convolutional=True, epochs=10, target=0.88)
