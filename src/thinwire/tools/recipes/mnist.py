"""mnist and fashion-mnist: Aji & Heafield's fully connected network, and a small convolutional one.

The fully connected network has 4096, 2048 and 1024 hidden units: nearly all of it is gradient to send.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.tools.recipes.convnet import he_initialise
from thinwire.tools.recipes.files import Asset, cache_dir, fetch, find_file, read_idx_images
from thinwire.tools.recipes.recipe import Defaults, Recipe, Splits, TensorSplit

# The sums are those of the unpacked contents of the original files.
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
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}


def assets(dataset: str) -> dict[str, Asset]:
    """The four published files of a dataset, by their names without .gz."""
    return {
        name: Asset(f"{name}.gz", tuple(f"{base}{name}.gz" for base in _MIRRORS[dataset]), f"sha256:{digest}")
        for name, digest in _SUMS[dataset].items()
    }


def scaled(pixels: Tensor) -> Tensor:
    """Bytes to numbers of about mean 0 and deviation 1."""
    return (pixels.float() - 33.0) / 78.0


def load(dataset: str, data_dir: Path | None) -> Splits:
    """Read the four IDX files from a folder, or download them to the cache."""
    files = assets(dataset)

    def locate(name: str) -> Path:
        if data_dir is None:
            return fetch(files[name], cache_dir(dataset))
        return find_file(data_dir, name, subfolders=(dataset,))

    def split(part: str) -> TensorSplit:
        pixels, labels = read_idx_images(locate(f"{part}-images-idx3-ubyte"), locate(f"{part}-labels-idx1-ubyte"))
        images = torch.tensor(pixels).unsqueeze(1)
        return TensorSplit(images, torch.tensor(labels).long(), scaled)

    return Splits(train=split("train"), test=split("t10k"))


def fully_connected() -> nn.Sequential:
    """784-4096-2048-1024-10 with rectifiers: 13.7 million parameters."""
    sizes = (784, 4096, 2048, 1024)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    he_initialise(model)
    return model


def small_conv() -> nn.Sequential:
    """Two convolutions and two fully connected layers: 0.4 million parameters."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    he_initialise(model)
    return model


def mnist() -> Recipe:
    """Handwritten digits, fully connected."""
    return Recipe(
        "mnist",
        description="Handwritten digits on the fully connected network of Aji and Heafield.",
        data="MNIST, 60,000 + 10,000 images, 11 MB",
        model=fully_connected,
        load=lambda data_dir: load("mnist", data_dir),
        defaults=Defaults(batch=32, lr=0.05, momentum=0.0, epochs=5, target=0.98),
    )


def mnist_conv() -> Recipe:
    """Handwritten digits, convolutional."""
    return Recipe(
        "mnist-conv",
        description="Handwritten digits on a small convolutional network.",
        data="MNIST, 60,000 + 10,000 images, 11 MB",
        model=small_conv,
        load=lambda data_dir: load("mnist", data_dir),
        defaults=Defaults(batch=16, lr=0.05, momentum=0.0, epochs=5, target=0.985),
    )


def fashion_mnist() -> Recipe:
    """Articles of clothing, fully connected."""
    return Recipe(
        "fashion-mnist",
        description="Pictures of clothing on the fully connected network of Aji and Heafield.",
        data="Fashion-MNIST, 60,000 + 10,000 images, 30 MB",
        model=fully_connected,
        load=lambda data_dir: load("fashion-mnist", data_dir),
        defaults=Defaults(batch=32, lr=0.05, momentum=0.0, epochs=10, target=0.88),
    )


def fashion_mnist_conv() -> Recipe:
    """Articles of clothing, convolutional."""
    return Recipe(
        "fashion-mnist-conv",
        description="Pictures of clothing on a small convolutional network.",
        data="Fashion-MNIST, 60,000 + 10,000 images, 30 MB",
        model=small_conv,
        load=lambda data_dir: load("fashion-mnist", data_dir),
        defaults=Defaults(batch=16, lr=0.05, momentum=0.0, epochs=10, target=0.88),
    )
