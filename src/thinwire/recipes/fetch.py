"""Fetch a published file once: download with a progress bar, check its sum, keep it in the user's cache.

Nothing half-done is ever left under the final name: a file appears there by one rename, after its check.
"""

import errno
import gzip
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.errors import RecipeError

CHUNK = 1 << 18
_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True)
class Asset:
    """A published file: where it is and what sum it must have.

    The sum of a `.gz` is that of the contents: mirrors compress the same contents to different bytes.
    """

    name: str
    urls: tuple[str, ...]  # tried in this order
    checksum: str  # "sha256:..." or, where the publisher gives only that, "md5:..."


def cache_dir(dataset: str) -> Path:
    """The folder that keeps a dataset's files between runs, by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "thinwire" / dataset


def fetch(asset: Asset, folder: Path) -> Path:
    """Return the file's path in `folder`, downloading it first if it is not there."""
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
            _fetch_from(url, asset, path)
            return path
        except (OSError, HTTPException, RecipeError) as error:
            if isinstance(error, OSError) and error.errno in _DISK:  # no other mirror would help
                raise cannot_write(folder, error) from error
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            reasons.append(f"{url}: {reason}")
    raise RecipeError(
        f"cannot download {asset.name} ({'; '.join(reasons)}): "
        "try again later, or get the file by other means and give its folder with --data."
    )


def cannot_write(folder: Path, error: OSError) -> RecipeError:
    """The sentence about a cache folder that takes no files."""
    why = error.strerror or error
    return RecipeError(
        f"cannot write to the cache folder {folder} ({why}): make room or rights, or set XDG_CACHE_HOME."
    )


def _fetch_from(url: str, asset: Asset, path: Path) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f"{asset.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            _download(url, out, asset.name)
        _check(Path(temporary), asset)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _download(url: str, out: BinaryIO, name: str) -> None:
    """Copy a URL to a file; an answer shorter than announced is an error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    request = urllib.request.Request(url, headers={"User-Agent": "thinwire"})
    with urllib.request.urlopen(request, timeout=30) as answer, Progress(*columns) as progress:
        announced = int(answer.headers.get("Content-Length") or 0) or None
        task = progress.add_task(f"downloading {name}", total=announced)
        received = 0
        while chunk := answer.read(CHUNK):
            out.write(chunk)
            received += len(chunk)
            progress.update(task, completed=received)
    if announced is not None and received != announced:
        raise RecipeError(f"the connection ended after {received:,} of {announced:,} bytes")


def _check(path: Path, asset: Asset) -> None:
    """Compare the sum of the downloaded contents with the published one."""
    method, _, expected = asset.checksum.partition(":")
    digest = hashlib.new(method)
    try:
        with gzip.open(path) if _packed(asset) else path.open("rb") as contents:
            while chunk := contents.read(CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"the answer is no complete gzip file ({error})") from error
    if digest.hexdigest() != expected:
        raise RecipeError(f"the {method} sum is {digest.hexdigest()}, it should be {expected}")


def _packed(asset: Asset) -> bool:
    return asset.name.endswith(".gz") and not asset.name.endswith(".tar.gz")
