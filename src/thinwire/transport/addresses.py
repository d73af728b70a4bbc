"""Addresses: which transport carries messages to "tcp://host:port", and how its two sides are opened.

The only place that knows all transports; their libraries are imported when they are asked for.
"""

import contextlib
import importlib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from thinwire.errors import ThinwireError, TransportError
from thinwire.transport.base import Connection, Listener
from thinwire.transport.keys import worker_keys
from thinwire.transport.limits import check_mtu

if TYPE_CHECKING:
    from thinwire.transport.tcp import TcpConnection, TcpListener


Keys = str | os.PathLike[str] | None


def split(address: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port" or "udp://host:port"; a ValueError for anything else."""
    match = re.fullmatch(r"(?:tcp|udp)://(\[[0-9A-Fa-f:.%\w]+\]|[\w.*-]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{address!r} is not an address; write tcp://host:port, with a port from 0 to 65535")
    return match[1], int(match[2])


def resolve(host: str) -> str:
    """The numeric address to listen on: ZeroMQ takes no names there."""
    if host == "*":
        return "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as ZeroMQ does for those who connect
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, family)[0][4][0])
    except OSError:
        raise TransportError(f"cannot listen on {host!r}: no such host or address") from None


def demand_keys(address: str, host: str, *, keys: Keys, insecure: bool) -> None:
    """Refuse to listen where others can reach it unless it has keys, or was told aloud to do without."""
    if not (keys is not None or insecure or ipaddress.ip_address(host.partition("%")[0]).is_loopback):
        raise TransportError(
            f"{address} can be reached from other machines: make keys with `thinwire keys new`, "
            "or say --insecure if you trust the whole network"
        )


@contextlib.contextmanager
def _from_extra(extra: str) -> Iterator[None]:
    """Around the import of a transport: says how to get its library where that is missing."""
    try:
        yield
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter where it finds no MPI
        raise ThinwireError(f"this transport needs more ({error}): pip install 'thinwire[{extra}]'") from None


def _listen_tcp(address: str, keys: Keys, insecure: bool) -> "TcpListener":
    name, port = split(address)
    host = resolve(name)
    demand_keys(address, host, keys=keys, insecure=insecure)
    with _from_extra("server"):
        from thinwire.transport import tcp
    anywhere = ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return tcp.TcpListener(endpoint, keys=keys, shown_host=socket.gethostname() if anywhere else None)


def _connect_tcp(address: str, keys: Keys) -> "TcpConnection":
    host, port = split(address)
    if not port or host == "*":
        raise ValueError(f"{address!r} is not an address to connect to: it needs a host and a port")
    with _from_extra("server"):
        from thinwire.transport import tcp
    return tcp.TcpConnection(f"tcp://{host}:{port}", keys=worker_keys(keys) if keys is not None else None)


def _listen_udp(address: str, keys: Keys, insecure: bool, mtu: int | None = None) -> Listener:
    with _from_extra("server"):
        from thinwire.transport.udp.endpoints import UdpListener
    if mtu is not None:
        check_mtu(mtu)
    host = resolve(split(address)[0])
    return UdpListener(_listen_tcp(address, keys, insecure), host, mtu=mtu)


def _connect_udp(address: str, keys: Keys) -> Connection:
    with _from_extra("server"):
        from thinwire.transport.udp.endpoints import UdpConnection
    return UdpConnection(_connect_tcp(address, keys), split(address)[0])


def _listen_mpi(address: str, keys: Keys, insecure: bool) -> Listener:
    _only_mpi(address, keys)
    with _from_extra("mpi"):
        from thinwire.transport import mpi
    return mpi.MpiListener()


def _connect_mpi(address: str, keys: Keys) -> Connection:
    _only_mpi(address, keys)
    with _from_extra("mpi"):
        from thinwire.transport import mpi
    return mpi.MpiConnection()


def _only_mpi(address: str, keys: Keys) -> None:
    if address != "mpi://":
        raise ValueError(f"{address!r} is not an address; write mpi:// alone, the job knows its ranks")
    if keys is not None:
        raise ValueError("mpi:// takes no keys: who is in the job is decided by mpirun")


SCHEMES: dict[str, tuple[Callable[[str, Keys, bool], Listener], Callable[[str, Keys], Connection]]] = {
    "tcp": (_listen_tcp, _connect_tcp),
    "udp": (_listen_udp, _connect_udp),
    "mpi": (_listen_mpi, _connect_mpi),
}


def require(scheme: str) -> None:
    """Say what to install if a transport lacks its library: before hosts and processes are made that would fail."""
    module = {"tcp": "tcp", "udp": "udp.endpoints", "mpi": "mpi"}[scheme]
    with _from_extra("mpi" if scheme == "mpi" else "server"):
        importlib.import_module(f"thinwire.transport.{module}")


def _scheme(address: str) -> str:
    scheme, found, _ = address.partition("://")
    if not found or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{address!r} is not the address of a server; addresses begin with {known}")
    return scheme


def listen(address: str, *, keys: Keys = None, insecure: bool = False, mtu: int | None = None) -> Listener:
    """Listen on an address; port 0 takes any free one, and `keys` is the folder that `thinwire keys new` made.

    mtu: with udp, bytes of a datagram at the most; workers are told.
    """
    scheme = _scheme(address)
    if scheme == "udp":
        return _listen_udp(address, keys, insecure, mtu)
    if mtu is not None:
        raise ValueError(f"{scheme}:// sends no datagrams: --mtu goes with udp")
    return SCHEMES[scheme][0](address, keys, insecure)


def connect(address: str, *, keys: Keys = None) -> Connection:
    """Connect to a listening server, which need not be there yet; `keys` is this worker's secret file."""
    return SCHEMES[_scheme(address)][1](address, keys)
