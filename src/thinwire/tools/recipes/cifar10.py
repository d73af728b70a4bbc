"""The recipe cifar10: the set-up of SparsifyGradients, with its cuda-convnet and a batch of 8 per worker.

There is no augmentation. Pixels are scaled as (x - 128) / 255; the optimizer is SGD without momentum.
"""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from thinwire.errors import RecipeError
from thinwire.files import replace_file
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tools.recipes.files import (
    CIFAR_IMAGES,
    Asset,
    Bytes,
    cache_dir,
    cannot_write,
    fetch,
    find_file,
    map_cifar_batch,
)
from thinwire.tools.recipes.recipe import Batch, Defaults, Recipe, Splits

FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
ARCHIVE = Asset(
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    "md5:c32a1d4ab5d03f1284b67883e8d87530",  # the checksum on the publisher's page
)


@dataclass(frozen=True)
class MappedImages:
    """Images in memory-mapped batch files, of which all workers of a machine share one copy."""

    files: tuple[Bytes, ...]

    def __len__(self) -> int:
        return CIFAR_IMAGES * len(self.files)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return images as (x - 128) / 255, and their labels."""
        places = (divmod(int(index), CIFAR_IMAGES) for index in indices)
        records = torch.from_numpy(np.stack([self.files[file][record] for file, record in places]))
        images = records[:, 1:].reshape(-1, 3, 32, 32).float()
        return images.sub_(128).div_(255), records[:, 0].long()


def unpack(archive: Path) -> None:
    """Unpack the six batch files next to the archive; each is complete when it appears."""
    target = archive.parent / FOLDER
    try:
        target.mkdir(exist_ok=True)
        with tarfile.open(archive) as tar:
            for name in (*TRAIN_FILES, TEST_FILE):
                member = tar.extractfile(f"{FOLDER}/{name}")
                if member is None:
                    raise KeyError(name)
                replace_file(target / name, partial(shutil.copyfileobj, member), shared=True)
    except (tarfile.TarError, KeyError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecipeError(f"{archive} is corrupt ({error}): delete it and run again.") from error
    except OSError as error:
        raise cannot_write(target, error) from error


def load(data_dir: Path | None) -> Splits:
    """Map the six binary batch files of a folder, or of the cache, after downloading them if needed."""
    if data_dir is None:
        data_dir = cache_dir("cifar10")
        if not all((data_dir / FOLDER / name).exists() for name in (*TRAIN_FILES, TEST_FILE)):
            unpack(fetch(ARCHIVE, data_dir))

    def mapped(name: str) -> Bytes:
        return map_cifar_batch(find_file(data_dir, name, subfolders=(FOLDER, f"cifar10/{FOLDER}"), zipped=False))

    return Splits(
        train=MappedImages(tuple(mapped(name) for name in TRAIN_FILES)), test=MappedImages((mapped(TEST_FILE),))
    )


def cifar10() -> Recipe:
    """Return the recipe `cifar10`."""
    return Recipe(
        "cifar10",
        description="CIFAR-10 on the exact convnet of SparsifyGradients.",
        data="CIFAR-10 binary version, 50,000 + 10,000 images, 170 MB",
        model=cuda_convnet,
        load=load,
        defaults=Defaults(batch=8, lr=0.05, momentum=0.0, epochs=30, target=0.7),
    )
