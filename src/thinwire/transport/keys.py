"""Keys: who may talk to a server, as small text files that `thinwire keys new` makes.

A server's folder holds `server.secret` and one `workers/NAME.public` for each key that it lets in; a worker gets one
file, `NAME.secret`, which also holds the server's public key. Files are lines of `word key`, the keys Z85.
"""

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
    """One side's own pair of keys and, for a worker, the server's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""


def server_keys(folder: str | os.PathLike[str]) -> Keys:
    """The server's own keys from its folder."""
    path = Path(folder) / "server.secret"
    words = _read(path, {"public", "secret"}, secret=True)
    return Keys(words["public"], words["secret"])


def worker_keys(path: str | os.PathLike[str]) -> Keys:
    """A worker's keys from its file; of a folder, from the only worker's file in it."""
    file = Path(path)
    if file.is_dir():
        found = sorted(each for each in file.glob("*.secret") if each.name != "server.secret")
        if len(found) != 1:
            raise TransportError(f"{file} holds {len(found)} workers' secrets; name the file of this worker")
        file = found[0]
    words = _read(file, {"public", "secret", "server"}, secret=True)
    return Keys(words["public"], words["secret"], words["server"])


def allowed(folder: str | os.PathLike[str]) -> dict[bytes, str]:
    """Public keys that a server lets in, with the names of their workers."""
    files = sorted((Path(folder) / "workers").glob("*.public"))
    return {_read(file, {"public"}, secret=False)["public"]: file.stem for file in files}


def new(folder: str | os.PathLike[str], names: Iterable[str]) -> list[Path]:
    """Make the server's keys, unless it has some, and a new pair for each worker; returns the workers' files."""
    try:
        import zmq
    except ImportError:
        raise ThinwireError("keys need pyzmq: pip install 'thinwire[server]'") from None
    home, made = Path(folder), []
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name == "server" or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(f"{name!r} cannot name a worker; use letters, digits, '.', '_' and '-', and not 'server'")
        for path in (home / f"{name}.secret", home / "workers" / f"{name}.public"):
            if path.exists():
                raise TransportError(f"{path} is there already; choose another name, or remove both files of {name!r}")
    try:
        (home / "workers").mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _write(path: Path, title: str, **words: bytes) -> None:
    text = f"# thinwire: {title}\n" + "".join(f"{word} {key.decode()}\n" for word, key in words.items())
    mode = 0o600 if "secret" in words else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def _read(path: Path, wanted: set[str], *, secret: bool) -> dict[str, bytes]:
    """The keys of a file, which must hold those that are wanted and nothing else; no error quotes what it holds."""
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096)
    except (OSError, UnicodeDecodeError):
        raise TransportError(f"cannot read keys from {path}; make them with `thinwire keys new`") from None
    if secret and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TransportError(f"{path} is a secret that others may read; say chmod 600 {path}")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("# ")]
    matches = [_LINE.fullmatch(line) for line in lines]
    words = {match[1]: match[2].encode() for match in matches if match}
    if len(words) != len(lines) or set(words) != wanted:
        raise TransportError(f"{path} is not a file of keys with the words {', '.join(sorted(wanted))}")
    return words
