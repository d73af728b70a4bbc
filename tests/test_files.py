"""Files are replaced as a whole, flushed to the disk, and verified when they are read."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from thinwire.errors import DamagedFileError
from thinwire.files import WriteMonitor, explain, open_checked, replace_file


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    path, done = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr("os.fsync", noted_fsync)
    monkeypatch.setattr("os.replace", noted_replace)
    replace_file(path, lambda out: out.write(b"new"), shared=shared)
    assert done == ["file", "rename", "folder"]
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: BaseException, shared: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(out: BinaryIO) -> None:
        out.write(b"new")
        raise failure

    with pytest.raises(type(failure)):
        replace_file(path, fail, shared=shared)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_the_cause_is_named_even_if_torch_hides_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.with_name("file.partial").symlink_to("/dev/full")
    said: list[str] = []
    monitor, state = WriteMonitor(said.append, "the state"), {"a": torch.ones(100_000)}
    for _ in range(3):
        path.with_name("file.partial").unlink(missing_ok=True)
        path.with_name("file.partial").symlink_to("/dev/full")
        assert not monitor.attempt(path, lambda: replace_file(path, lambda out: torch.save(state, out)))
        assert list(tmp_path.iterdir()) == []
    for _ in range(3):
        assert monitor.attempt(path, lambda: replace_file(path, lambda out: torch.save(state, out)))
    assert len(said) == 2 and said[1] == f"the state {path} can be written again"
    assert said[0].startswith(f"cannot write the state {path} (no space left on device on the disk ")
    assert "the file needs at least 40" in said[0]
    assert explain(path, RuntimeError("two\nlines")) == "two lines"


def test_a_changed_or_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, lambda out: out.write(b"contents"), checksum=True)
    whole = path.read_bytes()
    with open_checked(path) as (file, checked):
        assert checked and file.read().startswith(b"contents\nthinwire sha256 ")
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if at == len(whole) - 1:
            continue  # the last byte only ends the line
        with pytest.raises(DamagedFileError, match=r"file (does not match its|has no) checksum"), open_checked(path):
            pass
    for size in (0, 5, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFileError, match="file has no checksum"), open_checked(path):
            pass
        with open_checked(path, required=False) as (_, checked):
            assert not checked
