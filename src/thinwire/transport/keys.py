"""Keys: which workers may connect to a server, kept in small text files that `thinwire keys new` makes.

The server's folder holds `server.secret` and one `workers/NAME.public` for each worker that may connect. A worker gets
one file, `NAME.secret`, which also holds the server's public key. Each line of a file is a field name and a Z85 key.
Folders that are made here belong to their owner alone. A folder that other users can write is refused, because they
could replace its files.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import ThinwireError, TransportError

_LINE = re.compile(r"(public|secret|server)\s+([0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})")


@dataclass(frozen=True)
class Keys:
    """The key pair of one side and, for a worker, the server's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""


def server_keys(folder: str | os.PathLike[str]) -> Keys:
    """Read the server's key pair from its folder."""
    return Keys(**_read(Path(folder) / "server.secret", {"public", "secret"}, secret=True))


def worker_keys(path: str | os.PathLike[str]) -> Keys:
    """Read a worker's keys from its secret file, or from a folder that holds one worker's secret file."""
    file = Path(path)
    if file.is_dir():
        found = sorted(each for each in file.glob("*.secret") if each.name != "server.secret")
        if len(found) != 1:
            raise TransportError(
                f"{file} holds the secret files of {len(found)} workers; name the file of this worker instead"
            )
        file = found[0]
    return Keys(**_read(file, {"public", "secret", "server"}, secret=True))


def allowed_keys(folder: str | os.PathLike[str]) -> dict[bytes, str]:
    """Return the public keys that a server accepts, with the names of their workers."""
    files = sorted((Path(folder) / "workers").glob("*.public"))
    check_folders(Path(folder), Path(folder) / "workers")
    return {_read(file, {"public"}, secret=False)["public"]: file.stem for file in files}


def create_keys(folder: str | os.PathLike[str], names: Iterable[str]) -> list[Path]:
    """Create keys for the server, unless it has some, and for each worker; return the workers' secret files."""
    try:
        import zmq
    except ImportError:
        raise ThinwireError("keys need pyzmq: pip install 'PATH_OF_THE_CLONE[server]'") from None
    home, made = Path(folder), []
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name == "server" or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(f"{name!r} cannot name a worker; use letters, digits, '.', '_' and '-', and not 'server'")
        for path in (home / f"{name}.secret", home / "workers" / f"{name}.public"):
            if path.exists():
                raise TransportError(f"{path} exists already; choose another name, or remove both files of {name!r}")
    try:
        make_private(home / "workers")
        check_folders(home, home / "workers")
        if not (home / "server.secret").exists():
            public, secret = zmq.curve_keypair()
            _write(home / "server.secret", "the server's secret", public=public, secret=secret)
        server = server_keys(home).public
        for name in wanted:
            public, secret = zmq.curve_keypair()
            made.append(home / f"{name}.secret")
            _write(made[-1], f"the secret of worker {name}", public=public, secret=secret, server=server)
            _write(home / "workers" / f"{name}.public", f"the public key of worker {name}", public=public)
    except OSError as error:
        raise TransportError(f"cannot write keys to {home}: {(error.strerror or str(error)).lower()}") from None
    return made


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents so that only their owner may enter them, whatever the umask is."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)  # the umask may have removed bits that the owner needs


def check_folders(*folders: Path) -> None:
    """Raise TransportError for a folder that other users can write; one that is missing is not checked."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise TransportError(f"{folder} holds keys and can be written by other users; run chmod go-w {folder}")


def _write(path: Path, title: str, **fields: bytes) -> None:
    text = f"# thinwire: {title}\n" + "".join(f"{name} {key.decode()}\n" for name, key in fields.items())
    mode = 0o600 if "secret" in fields else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        file.write(text)


def _read(path: Path, wanted: set[str], *, secret: bool) -> dict[str, bytes]:
    """Read a file that must hold exactly the wanted fields. Errors never quote the contents."""
    check_folders(path.parent)
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096)
    except (OSError, UnicodeDecodeError):
        raise TransportError(f"cannot read keys from {path}; make them with `thinwire keys new`") from None
    if secret and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TransportError(f"{path} is a secret file that other users may read; run chmod 600 {path}")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("# ")]
    matches = [_LINE.fullmatch(line) for line in lines]
    fields = {match[1]: match[2].encode() for match in matches if match}
    if len(fields) != len(lines) or set(fields) != wanted:
        raise TransportError(f"{path} is not a file of keys with the fields {', '.join(sorted(wanted))}")
    return fields
