"""Files: replace one completely or not at all, verify it when it is read, and say why one cannot be written.

A new file is written beside the old one, flushed to the disk and renamed; then the folder is flushed, so that a power
failure leaves the old file or the new one. Checked files end with a line that holds the SHA-256 of everything before
it. Readers of ZIP archives, such as `torch.load`, ignore that line.
"""

import contextlib
import errno
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from thinwire.errors import DamagedFileError

# Errors of the disk itself: no space, no quota, too large, read-only, input/output.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# File systems that cannot flush a folder answer with one of these.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_LABEL = b"\nthinwire sha256 "
_TRAILER_BYTES = len(_LABEL) + 64 + 1
_CHUNK = 1 << 20


class _Output(io.RawIOBase):
    """Passes bytes on to a file; computes their digest, counts them, and remembers the error of a failed write.

    Libraries such as torch replace an OSError of the file by an error of their own, which does not name the cause.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.needed, self.error = 0, cast(OSError | None, None)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation("bytes must pass through `write` to be counted")

    def tell(self) -> int:
        return self.needed

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.needed += len(view)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(view)
        return len(view)


def replace_file(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    check: Callable[[Path], object] = lambda written: None,
    checksum: bool = False,
    shared: bool = False,
    mode: int | None = None,
) -> None:
    """Write a file that appears under its name only when it is complete, checked and on the disk.

    An OSError says why that failed; its `needed` is the number of bytes that the file has at least. No partial file
    stays.

    write: is called with the open file. check: is called with the path of the written file, and may raise.
    checksum: append the line that `open_checked` verifies.
    shared: several processes may write this file at the same time. Otherwise the new file has one fixed name, so that
        what a killed process leaves is overwritten the next time.
    mode: permissions, whatever the umask is; None: as the umask says, of shared files 0600.
    """
    partial, file = _open_partial(path, shared)
    output = _Output(file)
    try:
        with file:
            write(cast(BinaryIO, output))
            if checksum:
                file.write(_LABEL + output.digest.hexdigest().encode() + b"\n")
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        check(partial)
        os.replace(partial, path)
    except BaseException as error:  # also Ctrl-C
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        cause = output.error or error
        if isinstance(cause, OSError):
            cause.needed = output.needed  # type: ignore[attr-defined]
        if cause is not error:
            raise cause from error
        raise
    flush_folder(path.parent)


def _open_partial(path: Path, shared: bool) -> tuple[Path, BinaryIO]:
    if shared:
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
        return Path(name), os.fdopen(handle, "wb")
    partial = path.with_name(f"{path.name}.partial")
    return partial, partial.open("wb")


def flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that the names in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def open_checked(path: Path, *, required: bool = True) -> Iterator[tuple[BinaryIO, bool]]:
    """Open a file that was written with a checksum; raise DamagedFileError if its contents have changed since.

    required: raise for a file without a checksum too; otherwise the second value says whether it has one.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - _TRAILER_BYTES
        file.seek(max(0, size))
        trailer = file.read(_TRAILER_BYTES)
        file.seek(0)
        checked = trailer.startswith(_LABEL)
        if checked:
            if _digest(file, size) != trailer[len(_LABEL) : -1].decode(errors="replace"):
                raise DamagedFileError(f"{path.name} does not match its checksum")
        elif required:
            raise DamagedFileError(f"{path.name} has no checksum")
        file.seek(0)
        yield file, checked


def _digest(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            break
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def explain(path: Path, error: Exception) -> str:
    """Return why a file could not be written, as a phrase that names the disk and the bytes."""
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[:1].lower() + error.strerror[1:]
    else:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return reason
    disk = path.absolute().parent
    with contextlib.suppress(OSError):
        while not os.path.ismount(disk) and disk != disk.parent:
            disk = disk.parent
        free = os.statvfs(path.parent)
        needed, room = getattr(error, "needed", 0), free.f_bavail * free.f_frsize
        return f"{reason} on the disk {disk}: the file needs at least {needed:,} bytes, {room:,} are free"
    return f"{reason} on the disk {disk}"


class WriteMonitor:
    """Writes files whose failure must not end a program: it is said once, and so is that it is mended.

    say: is called with each sentence. what: names the file in them, such as "the checkpoint".
    """

    def __init__(self, say: Callable[[str], object], what: str) -> None:
        self._say, self._what = say, what
        self.failing = False

    def attempt(self, path: Path, write: Callable[[], object]) -> bool:
        """Call `write`, which writes the file; return whether that was possible."""
        try:
            write()
        except (OSError, RuntimeError) as error:
            self.failed(path, explain(path, error))
            return False
        self.succeeded(path)
        return True

    def failed(self, path: Path, reason: str) -> None:
        """Note that a file could not be written, and say so unless that is known."""
        if not self.failing:
            advice = "training goes on without it; free some space or choose another folder"
            self._say(f"cannot write {self._what} {path} ({reason}): {advice}")
        self.failing = True

    def succeeded(self, path: Path) -> None:
        """Note that a file was written, and say so if that was not possible before."""
        if self.failing:
            self._say(f"{self._what} {path} can be written again")
        self.failing = False
