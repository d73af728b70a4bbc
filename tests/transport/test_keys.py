"""Keys: which workers are accepted, what refused workers are told, and the files of keys."""

import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.scenarios import PATIENCE, arriving, replies
from thinwire.errors import TransportError
from thinwire.tools.cli import run
from thinwire.transport import Connection, connect, listen
from thinwire.transport.keys import allowed_keys, create_keys, server_keys, worker_keys
from thinwire.transport.tcp import TcpListener


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys", ["left", "right"])
    return tmp_path / "keys"


@pytest.fixture
def listener(folder: Path) -> Iterator[TcpListener]:
    made = listen("tcp://127.0.0.1:0", keys=folder)
    assert isinstance(made, TcpListener)
    yield made
    made.close()


def error_of(listener: TcpListener, connection: Connection) -> str:
    """Return the error of a worker that the server refuses; check that none of its messages arrives."""
    connection.send([b"let me in"])
    deadline = time.monotonic() + PATIENCE
    try:
        with pytest.raises(TransportError) as caught:
            while time.monotonic() < deadline:
                assert connection.poll(0.02) == []
                assert listener.poll(0.02) == []
        with pytest.raises(TransportError):  # and again
            connection.poll(0.0)
    finally:
        connection.close()
    while not listener.refused and time.monotonic() < deadline:
        assert listener.poll(0.02) == []
    assert listener.refused
    return str(caught.value)


def test_workers_with_keys_are_accepted(listener: TcpListener, folder: Path) -> None:
    for name in ("left", "right"):
        connection = connect(listener.address, keys=folder / f"{name}.secret")
        connection.send([b"hello", b"", bytes(1_000_000)])
        peer, parts = next(arriving(listener))
        assert [len(part) for part in parts] == [5, 0, 1_000_000]
        assert listener.send(peer, [name.encode()])
        assert next(replies(connection)) == [name.encode()]
        connection.close()
    assert listener.refused == 0


def test_unknown_keys_are_refused_and_logged(
    listener: TcpListener, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "workers" / "left.public").unlink()  # removed while the server runs
    with caplog.at_level(logging.WARNING, "thinwire.transport"):
        message = error_of(listener, connect(listener.address, keys=folder / "left.secret"))
    assert "does not know this worker's key" in message and listener.address in message
    keys = worker_keys(folder / "left.secret")
    assert keys.public.decode() in caplog.text
    assert keys.secret.decode() not in caplog.text + message + repr(keys)
    create_keys(folder, ["late"])  # and one added
    connection = connect(listener.address, keys=folder / "late.secret")
    connection.send([b"hello"])
    assert next(arriving(listener))[1] == [b"hello"]
    connection.close()


def test_unknown_keys_do_not_fill_the_log(listener: TcpListener, caplog: pytest.LogCaptureFixture) -> None:
    assert listener._authenticator is not None
    with caplog.at_level(logging.INFO, "thinwire.transport"):
        for i in range(300):
            assert not listener._authenticator.callback("thinwire", b"%040d" % i)
    assert caplog.text.count("Refused a worker: its public key") == 10


def test_a_worker_refuses_a_server_with_another_key(listener: TcpListener, tmp_path: Path) -> None:
    (other,) = create_keys(tmp_path / "other", ["left"])
    assert "its key is not the one" in error_of(listener, connect(listener.address, keys=other))


def test_a_worker_without_keys_gets_an_error(listener: TcpListener) -> None:
    assert "with keys, and this worker has none" in error_of(listener, connect(listener.address))


def test_a_worker_with_keys_refuses_a_server_without_keys(folder: Path) -> None:
    listener = listen("tcp://127.0.0.1:0")
    assert isinstance(listener, TcpListener)
    try:
        message = error_of(listener, connect(listener.address, keys=folder / "left.secret"))
        assert "runs without keys" in message  # or "or it runs without keys", if it closed the connection first
    finally:
        listener.close()


def test_files_of_keys(folder: Path) -> None:
    for file in folder.glob("*.secret"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(allowed_keys(folder).values()) == ["left", "right"]
    left, right, server = worker_keys(folder / "left.secret"), worker_keys(folder / "right.secret"), server_keys(folder)
    assert left.server == right.server == server.public
    assert len({left.public, left.secret, right.public, right.secret, server.public, server.secret}) == 6
    create_keys(folder, ["third"])
    assert server_keys(folder) == server  # not replaced
    with pytest.raises(TransportError, match="exists already"):
        create_keys(folder, ["left"])
    with pytest.raises(ValueError, match="cannot name a worker"):
        create_keys(folder, ["../left"])
    with pytest.raises(TransportError, match="name the file of this worker"):
        worker_keys(folder)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o777])
def test_folders_of_keys_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        create_keys(tmp_path / "new" / "keys", ["left"])
    finally:
        os.umask(before)
    for folder in ("new", "new/keys", "new/keys/workers"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    assert worker_keys(tmp_path / "new" / "keys").server


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
@pytest.mark.parametrize("name", ["", "workers"])
def test_a_folder_that_others_can_write_is_refused(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    with pytest.raises(TransportError, match=r"can be written by other users; run chmod go-w .*"):
        listen("tcp://127.0.0.1:0", keys=folder)
    with pytest.raises(TransportError, match="can be written by other users"):
        create_keys(folder, ["third"])
    if not name:
        with pytest.raises(TransportError, match="can be written by other users"):
            connect("tcp://127.0.0.1:1", keys=folder / "left.secret")
    (folder / name).chmod(0o755)  # others may read it: secret files are 0600
    listen("tcp://127.0.0.1:0", keys=folder).close()


def test_errors_name_the_bad_file(folder: Path) -> None:
    file = folder / "left.secret"
    file.chmod(0o640)
    with pytest.raises(TransportError, match=r"left\.secret is a secret file that other users may read"):
        connect("tcp://127.0.0.1:1", keys=file)
    file.chmod(0o600)
    secret = worker_keys(file).secret.decode()
    file.write_text(file.read_text().replace("secret", "secrets"))
    with pytest.raises(TransportError, match=r"left\.secret is not a file of keys") as caught:
        connect("tcp://127.0.0.1:1", keys=file)
    assert secret not in str(caught.value)
    with pytest.raises(TransportError, match="`thinwire keys new`"):
        listen("tcp://127.0.0.1:0", keys=folder / "nowhere")
    (folder / "workers" / "right.public").write_bytes(b"\xff\xfe")
    with pytest.raises(TransportError, match=r"cannot read keys from .*right\.public"):
        listen("tcp://127.0.0.1:0", keys=folder)


def test_the_command_makes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["keys", "new", str(tmp_path / "keys"), "--name", "gpu-3"]
    assert run(command) == 0
    output = capsys.readouterr()
    assert "gpu-3.secret" in output.out and not output.err
    assert worker_keys(tmp_path / "keys").secret.decode() not in output.out
    assert run(command) == 2
    output = capsys.readouterr()
    assert "exists already" in output.err and len(output.err.splitlines()) == 1
