"""Downloads the files of datasets and reads them: IDX (MNIST), binary batches (CIFAR-10), and lines of text.

Files are validated. An error names the file and says what to do.
"""

import errno
import gzip
import hashlib
import os
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from itertools import product
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.errors import RecipeError
from thinwire.files import replace_file

CHUNK = 1 << 18
LINE_EVERY = 5.0  # seconds between two lines of progress where there is no terminal
_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True)
class Asset:
    """A published file with its addresses and its checksum.

    The checksum of a `.gz` is that of its contents, because mirrors compress the same contents to different bytes.
    """

    name: str
    urls: tuple[str, ...]  # tried in this order
    checksum: str  # "sha256:..." or, where the publisher gives only that, "md5:..."


def cache_dir(dataset: str) -> Path:
    """Return the cache folder of a dataset, after the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "thinwire" / dataset


def fetch(asset: Asset, folder: Path) -> Path:
    """Return the path of the file in `folder`, after downloading it if it is missing."""
    path = folder / asset.name
    try:
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"cannot make the cache folder {folder} ({error.strerror}): set XDG_CACHE_HOME.") from error
    reasons = []
    for url in asset.urls:
        try:
            write = partial(_download, url, asset.name)
            replace_file(path, write, check=partial(_check, asset), shared=True)
            return path
        except (OSError, HTTPException, RecipeError) as error:
            if isinstance(error, OSError) and error.errno in _DISK:  # another mirror would not help
                raise cannot_write(folder, error) from error
            reasons.append(f"{url}: {error.reason if isinstance(error, urllib.error.URLError) else error}")
    raise RecipeError(
        f"cannot download {asset.name} ({'; '.join(reasons)}): "
        "try again later, or get the file by other means and give its folder with --data."
    )


def cannot_write(folder: Path, error: OSError) -> RecipeError:
    """Return the error about a cache folder that cannot be written."""
    why = error.strerror or error
    return RecipeError(f"cannot write to the cache folder {folder} ({why}): free some space, or set XDG_CACHE_HOME.")


def _download(url: str, name: str, out: BinaryIO) -> None:
    """Download a URL to a file; RecipeError if the answer is shorter than announced."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    request = urllib.request.Request(url, headers={"User-Agent": "thinwire"})
    console, said = Console(stderr=True), time.monotonic()
    with urllib.request.urlopen(request, timeout=30) as answer, Progress(*columns, console=console) as progress:
        announced = int(answer.headers.get("Content-Length") or 0) or None
        task = progress.add_task(f"downloading {name}", total=announced)
        while chunk := answer.read(CHUNK):
            progress.update(task, advance=out.write(chunk))
            if not console.is_terminal and time.monotonic() - said >= LINE_EVERY:
                said, total = time.monotonic(), f" of {announced / 1e6:,.0f}" if announced else ""
                console.print(f"downloading {name}: {out.tell() / 1e6:,.0f}{total} MB", highlight=False, soft_wrap=True)
    if announced is not None and out.tell() != announced:
        raise RecipeError(f"the connection ended after {out.tell():,} of {announced:,} bytes")


def _check(asset: Asset, path: Path) -> None:
    method, _, expected = asset.checksum.partition(":")
    digest = hashlib.new(method)
    packed = asset.name.endswith(".gz") and not asset.name.endswith(".tar.gz")
    try:
        with gzip.open(path) if packed else path.open("rb") as contents:
            while chunk := contents.read(CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"the answer is no complete gzip file ({error})") from error
    if digest.hexdigest() != expected:
        raise RecipeError(f"the {method} sum is {digest.hexdigest()}, it should be {expected}")


Bytes = npt.NDArray[np.uint8]
CIFAR_IMAGES = 10_000  # in each batch file
CIFAR_RECORD = 1 + 3 * 32 * 32


def find_file(data_dir: Path, name: str, *, subfolders: tuple[str, ...] = (), zipped: bool = True) -> Path:
    """Return the path of `name`, or if `zipped` of `name.gz`, in a folder or in one of its usual subfolders.

    If a subfolder has files, only subfolders are searched: files of the same names in the folder itself may belong to
    another dataset.
    """
    if not data_dir.is_dir():
        raise RecipeError(f"the data folder {data_dir} does not exist: give the folder that holds {name}.")
    folders = [data_dir / sub for sub in subfolders if _has_files(data_dir / sub)] or [data_dir]
    for folder, suffix in product(folders, ("", ".gz") if zipped else ("",)):
        if (candidate := folder / f"{name}{suffix}").is_file():
            return candidate
    forms = f" (as it is or as {name}.gz)" if zipped else ""
    raise RecipeError(f"{name} is missing in {folders[0]}: put it there{forms}, or leave out --data to download it.")


def _has_files(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(path.is_file() for path in folder.iterdir())
    except OSError as error:
        raise RecipeError(f"cannot read the data folder {folder} ({error.strerror}): check its permissions.") from error


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file, unpacked if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecipeError(f"{path} is truncated or corrupt ({error}): delete it and get it again.") from error
    except OSError as error:
        raise RecipeError(f"cannot read {path} ({error.strerror}): check its permissions.") from error


def read_idx(path: Path, *, dimensions: int) -> Bytes:
    """Return the array of bytes in an IDX file."""
    raw = read_bytes(path)
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise RecipeError(f"{path} is no IDX file of bytes in {dimensions} dimension(s): delete it and get it again.")
    shape = [int.from_bytes(raw[4 + 4 * d : 8 + 4 * d], "big") for d in range(dimensions)]
    if len(raw) - header != prod(shape):
        raise RecipeError(
            f"{path} holds {len(raw) - header:,} bytes of data where its header announces {prod(shape):,}: "
            "it is truncated or corrupt, delete it and get it again."
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


def read_idx_images(images: Path, labels: Path) -> tuple[Bytes, Bytes]:
    """Return 28 x 28 images and their labels from two IDX files."""
    pixels, targets = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if pixels.shape[1:] != (28, 28):
        raise RecipeError(f"{images} holds images of {pixels.shape[1]} x {pixels.shape[2]}, not 28 x 28.")
    if len(pixels) != len(targets):
        raise RecipeError(f"{images} holds {len(pixels):,} images, but {labels} {len(targets):,} labels.")
    if len(targets) == 0 or targets.max() > 9:
        raise RecipeError(f"{labels} has no labels from 0 to 9: it is corrupt, delete it and get it again.")
    return pixels, targets


def map_cifar_batch(path: Path) -> Bytes:
    """Map the records of one binary batch file into memory, so that many processes share one copy."""
    size = path.stat().st_size
    if size != CIFAR_IMAGES * CIFAR_RECORD:
        raise RecipeError(
            f"{path} has {size:,} bytes, a batch of CIFAR-10's binary version has "
            f"{CIFAR_IMAGES * CIFAR_RECORD:,}: delete it and get it again."
        )
    records: Bytes = np.memmap(path, dtype=np.uint8, mode="r", shape=(CIFAR_IMAGES, CIFAR_RECORD))
    if records[:, 0].max() > 9:
        raise RecipeError(f"{path} has labels above 9: it is corrupt, delete it and get it again.")
    return records


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file without line ends."""
    try:
        lines = read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text (byte {error.start}): get it again.") from error
    return [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
