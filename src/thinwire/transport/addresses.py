"""Addresses: open the transport that an address such as "tcp://host:port" names.

This is the only module that knows all transports. A transport's library is imported when an address asks for it.
"""

import importlib
import ipaddress
import os
import re
import socket

from thinwire.errors import ThinwireError, TransportError
from thinwire.transport.base import Connection, Listener, check_mtu
from thinwire.transport.keys import worker_keys

KeyPath = str | os.PathLike[str] | None

# The module of each transport, below thinwire.transport.
_MODULES = {"tcp": "tcp", "udp": "udp.endpoints", "mpi": "mpi"}


def split(address: str) -> tuple[str, int]:
    """Return the host and the port of "tcp://host:port" or "udp://host:port"; raise ValueError for anything else."""
    match = re.fullmatch(r"(?:tcp|udp)://(\[[0-9A-Fa-f:.%\w]+\]|[\w.*-]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{address!r} is not an address; write tcp://host:port, with a port from 0 to 65535")
    return match[1], int(match[2])


def resolve(host: str) -> str:
    """Return the numeric address to listen on; ZeroMQ does not bind to host names."""
    if host == "*":
        return "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # a name means IPv4, as when ZeroMQ connects
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, family)[0][4][0])
    except OSError:
        raise TransportError(f"cannot listen on {host!r}: no such host or address") from None


def demand_keys(address: str, host: str, *, keys: KeyPath, insecure: bool) -> None:
    """Raise TransportError for a listener that other machines can reach but that has neither keys nor `insecure`."""
    if not (keys is not None or insecure or ipaddress.ip_address(host.partition("%")[0]).is_loopback):
        raise TransportError(
            f"{address} can be reached from other machines: make keys with `thinwire keys new`, "
            "or pass --insecure if you trust the whole network"
        )


def require(scheme: str) -> None:
    """Import the module of a transport; raise ThinwireError that says what to install if its library is missing."""
    extra = "mpi" if scheme == "mpi" else "server"
    try:
        importlib.import_module(f"thinwire.transport.{_MODULES[scheme]}")
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no MPI library
        raise ThinwireError(
            f"the transport {scheme}:// needs more packages ({error}): pip install 'PATH_OF_THE_CLONE[{extra}]'"
        ) from None


def _scheme(address: str, keys: KeyPath) -> str:
    """Return the transport that an address names."""
    scheme, found, _ = address.partition("://")
    if not found or scheme not in _MODULES:
        known = ", ".join(f"{name}://" for name in _MODULES)
        raise ValueError(f"{address!r} is not the address of a server; addresses begin with {known}")
    if scheme == "mpi" and address != "mpi://":
        raise ValueError(f"{address!r} is not an address; write mpi:// alone, because the MPI job knows its ranks")
    if scheme == "mpi" and keys is not None:
        raise ValueError("mpi:// takes no keys: mpirun decides who is in the job")
    return scheme


def listen(address: str, *, keys: KeyPath = None, insecure: bool = False, mtu: int | None = None) -> Listener:
    """Listen on an address; port 0 takes any free port.

    keys: the folder that `thinwire keys new` made. Needed on addresses that other machines can reach.
    insecure: listen on such an address without keys.
    mtu: for udp, the largest size of a packet in bytes; the server tells its workers.
    """
    scheme = _scheme(address, keys)
    if mtu is not None:
        if scheme != "udp":
            raise ValueError(f"{scheme}:// does not send UDP packets: --mtu goes with udp")
        check_mtu(mtu)
    if scheme == "mpi":
        require(scheme)
        from thinwire.transport.mpi import MpiListener

        return MpiListener()
    name, port = split(address)
    host = resolve(name)
    demand_keys(address, host, keys=keys, insecure=insecure)
    require(scheme)
    from thinwire.transport.tcp import TcpListener

    anywhere = ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    listener = TcpListener(endpoint, keys=keys, shown_host=socket.gethostname() if anywhere else None)
    if scheme == "tcp":
        return listener
    from thinwire.transport.udp.endpoints import UdpListener

    return UdpListener(listener, host, mtu=mtu)


def connect(address: str, *, keys: KeyPath = None) -> Connection:
    """Connect to a server, which need not be running yet; `keys` is the secret file of this worker."""
    scheme = _scheme(address, keys)
    if scheme == "mpi":
        require(scheme)
        from thinwire.transport.mpi import MpiConnection

        return MpiConnection()
    host, port = split(address)
    if not port or host == "*":
        raise ValueError(f"{address!r} is not an address to connect to: it needs a host and a port")
    require(scheme)
    from thinwire.transport.tcp import TcpConnection

    connection = TcpConnection(f"tcp://{host}:{port}", keys=worker_keys(keys) if keys is not None else None)
    if scheme == "tcp":
        return connection
    from thinwire.transport.udp.endpoints import UdpConnection

    return UdpConnection(connection, host)
