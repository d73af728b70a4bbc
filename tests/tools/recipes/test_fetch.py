"""Downloads from a server on loopback: whole, truncated, corrupt and missing files; failures leave no files."""

import errno
import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from thinwire.errors import RecipeError
from thinwire.tools.recipes import cifar10
from thinwire.tools.recipes.files import Asset, cache_dir, fetch

CONTENTS = b"ten thousand digits " * 5000
SUM = "sha256:" + hashlib.sha256(CONTENTS).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves /whole, /short, /corrupt, /other, and counts the requests."""

    requests = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.requests += 1
        body = gzip.compress(CONTENTS)
        if self.path.startswith("/other"):
            body = gzip.compress(CONTENTS + b"!")
        elif self.path.startswith("/corrupt"):
            body = body[:40] + bytes([body[40] ^ 0xFF]) + body[41:]
        elif self.path.startswith("/absent"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path.startswith("/short") else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def asset(server: Server, *pages: str) -> Asset:
    port = server.server_address[1]
    return Asset("digits.gz", tuple(f"http://127.0.0.1:{port}/{page}" for page in pages), SUM)


def test_a_whole_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        path = fetch(asset(server, "whole"), tmp_path / "new" / "cache")
        assert gzip.decompress(path.read_bytes()) == CONTENTS
    assert server.requests == 1
    assert [file.name for file in path.parent.iterdir()] == ["digits.gz"]


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("short", "the connection ended after"),
        ("corrupt", "no complete gzip file|the sha256 sum is"),
        ("other", "the sha256 sum is"),
        ("absent", "HTTP Error 404|Not Found"),
    ],
)
def test_a_bad_file_is_refused_and_leaves_nothing(server: Server, tmp_path: Path, page: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=rf"cannot download digits.gz \(.*({reason})") as caught:
        fetch(asset(server, page), tmp_path)
    assert str(caught.value).endswith("give its folder with --data.")
    assert list(tmp_path.iterdir()) == []


def test_the_next_mirror_is_tried(server: Server, tmp_path: Path) -> None:
    path = fetch(asset(server, "absent", "short", "whole"), tmp_path)
    assert gzip.decompress(path.read_bytes()) == CONTENTS
    assert server.requests == 3


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="refused"):
        fetch(Asset("digits.gz", ("http://127.0.0.1:1/whole",), SUM), tmp_path)


class Full(io.RawIOBase):
    """A file on a full disk."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, mode: str) -> Full:
        os.close(handle)
        return Full()

    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(RecipeError, match=r"cannot write to the cache folder .* \(No space left on device\)"):
        fetch(asset(server, "whole", "whole"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert server.requests == 1  # another mirror would not help


def test_a_folder_without_rights_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")  # root may write anywhere, so the error is simulated

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(RecipeError, match=r"cannot write to the cache folder .* \(Permission denied\)"):
        fetch(Asset("digits.gz", ("http://127.0.0.1:1/whole",), SUM), tmp_path)


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir("mnist") == tmp_path / "thinwire" / "mnist"


def test_unpacking_to_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(RecipeError, match=r"cannot write to .*No space left on device"):
        cifar10.unpack(archive)
    assert list((tmp_path / cifar10.FOLDER).iterdir()) == []


def test_the_cifar_archive_is_unpacked_without_following_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "TRAIN_FILES", ("data_batch_1.bin",))
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-bin/test_batch.bin", "../evil"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"12345"))
    cifar10.unpack(archive)
    assert sorted(file.name for file in (tmp_path / cifar10.FOLDER).iterdir()) == [
        "data_batch_1.bin",
        "test_batch.bin",
    ]
    assert not (tmp_path.parent / "evil").exists()
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(RecipeError, match=r"cifar-10-binary.tar.gz is corrupt"):
        cifar10.unpack(archive)
