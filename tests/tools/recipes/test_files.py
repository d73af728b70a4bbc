"""Reading of dataset files; bad files are refused with a sentence that names the file and says what to do."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import RecipeError
from thinwire.tools.recipes import files as formats
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.cifar10 import TEST_FILE, TRAIN_FILES
from thinwire.tools.recipes.files import CIFAR_IMAGES, CIFAR_RECORD


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """A small MNIST, half of it gzipped."""
    random = np.random.default_rng(0)
    for part, count in (("train", 50), ("t10k", 20)):
        images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = random.integers(0, 10, count).astype(np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


@pytest.mark.parametrize("name", ["mnist", "mnist-conv", "fashion-mnist", "fashion-mnist-conv"])
def test_mnist_loads_and_trains(mnist_folder: Path, name: str) -> None:
    recipe = get_recipe(name)
    splits = recipe.load(mnist_folder)
    assert (len(splits.train), len(splits.test)) == (50, 20)
    loss = recipe.loss(recipe.build(0), splits.train.batch([0, 5]))
    assert abs(loss.item() - np.log(10)) < 0.5  # the loss of a guess


def test_a_subfolder_of_the_dataset_is_found(mnist_folder: Path) -> None:
    inner = mnist_folder / "fashion-mnist"
    inner.mkdir()
    for file in mnist_folder.glob("*ubyte*"):
        file.rename(inner / file.name)
    assert len(get_recipe("fashion-mnist").load(mnist_folder).test) == 20


def test_a_subfolder_wins_over_files_of_another_dataset(mnist_folder: Path) -> None:
    inner = mnist_folder / "fashion-mnist"
    inner.mkdir()
    assert len(get_recipe("fashion-mnist").load(mnist_folder).test) == 20  # an empty one is ignored
    for part, count in (("train", 30), ("t10k", 10)):
        (inner / f"{part}-images-idx3-ubyte").write_bytes(idx(np.zeros((count, 28, 28), dtype=np.uint8)))
        (inner / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.zeros(count, dtype=np.uint8)))
    assert len(get_recipe("fashion-mnist").load(mnist_folder).test) == 10
    assert len(get_recipe("mnist").load(mnist_folder).test) == 20
    (inner / "t10k-images-idx3-ubyte").unlink()
    assert f"is missing in {inner}" in refusal(mnist_folder, "fashion-mnist")


def refusal(folder: Path, recipe: str = "mnist") -> str:
    with pytest.raises(RecipeError) as caught:
        get_recipe(recipe).load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_folder_and_a_missing_file(mnist_folder: Path) -> None:
    assert "does not exist" in refusal(mnist_folder / "nowhere")
    (mnist_folder / "t10k-labels-idx1-ubyte").unlink()
    assert "t10k-labels-idx1-ubyte is missing in" in refusal(mnist_folder)


def test_truncated_files(mnist_folder: Path) -> None:
    packed = mnist_folder / "train-images-idx3-ubyte.gz"
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    assert "train-images-idx3-ubyte.gz is truncated or corrupt" in refusal(mnist_folder)
    packed.write_bytes(gzip.compress(gzip.decompress(whole)[:-100]))
    assert "is truncated or corrupt, delete it and get it again" in refusal(mnist_folder)


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (b"", "is no IDX file"),
        (b"<html>not found</html>", "is no IDX file"),
        (idx(np.array([1, 2], dtype=np.uint8)), "50 images, but"),
        (idx(np.full(50, 10, dtype=np.uint8)), "has no labels from 0 to 9"),
    ],
)
def test_corrupt_labels(mnist_folder: Path, contents: bytes, complaint: str) -> None:
    (mnist_folder / "train-labels-idx1-ubyte").write_bytes(contents)
    message = refusal(mnist_folder)
    assert complaint in message
    assert "train-labels-idx1-ubyte" in message


def test_corrupt_gzip_and_wrong_size_of_images(mnist_folder: Path) -> None:
    file = mnist_folder / "train-images-idx3-ubyte.gz"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    file.write_bytes(bytes(damaged))
    assert "is truncated or corrupt" in refusal(mnist_folder)
    file.write_bytes(gzip.compress(idx(np.zeros((50, 8, 8), dtype=np.uint8))))
    assert "images of 8 x 8, not 28 x 28" in refusal(mnist_folder)


@pytest.fixture
def cifar_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Binary batches of 20 images instead of 10,000."""
    for module in ("files", "cifar10"):
        monkeypatch.setattr(f"thinwire.tools.recipes.{module}.CIFAR_IMAGES", 20)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        records = np.full((20, CIFAR_RECORD), number * 40, dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (folder / name).write_bytes(records.tobytes())
    return tmp_path


def test_cifar_is_read_as_the_paper_did(cifar_folder: Path) -> None:
    assert CIFAR_IMAGES == 10_000
    assert formats.CIFAR_RECORD == 3073
    splits = get_recipe("cifar10").load(cifar_folder)
    assert (len(splits.train), len(splits.test)) == (100, 20)
    images, labels = splits.train.batch([0, 21, 99])
    assert images.shape == (3, 3, 32, 32)
    assert labels.tolist() == [0, 1, 9]
    assert torch.equal(images[:, 0, 0, 0], (torch.tensor([0.0, 40.0, 160.0]) - 128) / 255)


def test_truncated_and_corrupt_batches(cifar_folder: Path) -> None:
    file = cifar_folder / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "data_batch_3.bin has 61,459 bytes" in refusal(cifar_folder, "cifar10")
    file.write_bytes(b"\x0a" + whole[1:])
    assert "data_batch_3.bin has labels above 9" in refusal(cifar_folder, "cifar10")
    file.unlink()
    assert "data_batch_3.bin is missing" in refusal(cifar_folder, "cifar10")
