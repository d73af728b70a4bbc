"""Addresses: which are understood, which are refused, and which need keys."""

import subprocess
import sys

import pytest

from thinwire.errors import TransportError
from thinwire.transport import connect, listen
from thinwire.transport.addresses import demand_keys, resolve, split


@pytest.mark.parametrize(
    "address", ["", "localhost:7077", "ipc://host:1", "tcp://host", "tcp://:7077", "tcp://host:65536", "tcp://a b:1"]
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        listen(address)
    with pytest.raises(ValueError, match="address"):
        connect(address)


@pytest.mark.parametrize("address", ["tcp://host:0", "tcp://*:7077"])
def test_connect_needs_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="needs a host and a port"):
        connect(address)


def test_split_and_resolve() -> None:
    assert split("tcp://localhost:7077") == ("localhost", 7077)
    assert split("tcp://[::1]:0") == ("[::1]", 0)
    assert resolve("127.0.0.1") == "127.0.0.1" and resolve("*") == "0.0.0.0" and resolve("[::1]") == "::1"
    with pytest.raises(TransportError, match="no such host"):
        listen("tcp://nowhere.invalid:7077")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fe80::1%eth0", "192.168.1.7", "8.8.8.8"])
def test_keys_are_needed_beyond_loopback(host: str) -> None:
    with pytest.raises(TransportError, match=r"`thinwire keys new`.* --insecure"):
        demand_keys("tcp://there:1", host, keys=None, insecure=False)
    demand_keys("tcp://there:1", host, keys="keys", insecure=False)
    demand_keys("tcp://there:1", host, keys=None, insecure=True)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_listen_needs_keys_beyond_loopback(address: str) -> None:
    with pytest.raises(TransportError, match="--insecure"):
        listen(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://127.1.2.3:0"])
def test_loopback_needs_no_keys(address: str) -> None:
    listener = listen(address)
    try:
        host, port = split(listener.address)
        assert port > 0 and resolve(host) == host
    finally:
        listener.close()


@pytest.mark.parametrize("address", ["mpi://host", "mpi://host:7077", "mpi:///"])
def test_mpi_has_a_single_address(address: str) -> None:
    with pytest.raises(ValueError, match="write mpi:// alone"):
        listen(address)
    with pytest.raises(ValueError, match="write mpi:// alone"):
        connect(address)
    with pytest.raises(ValueError, match="takes no keys"):
        listen("mpi://", keys="keys")


@pytest.mark.parametrize(
    ("missing", "address", "sentence"),
    [
        ("zmq", "tcp://127.0.0.1:0", "pip install 'PATH_OF_THE_CLONE[server]'"),
        ("mpi4py", "mpi://", "pip install 'PATH_OF_THE_CLONE[mpi]'"),
        ("nothing", "mpi://", "start it with mpirun"),  # a process outside of mpirun is alone
    ],
)
def test_the_error_says_what_to_install(missing: str, address: str, sentence: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\nfrom thinwire.transport import listen; listen({address!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and sentence in done.stderr.splitlines()[-1]


def test_a_race_without_zeromq_builds_no_lab() -> None:
    """It ends at once with an error that says what to install."""
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "import thinwire.tools.race.train as trained\n"
        "trained.launch = lambda *a, **k: sys.exit('a lab was built')\n"
        "from thinwire.tools.cli import main; sys.argv = ['thinwire', 'race', 'digits', '--transport', 'udp']; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "pip install 'PATH_OF_THE_CLONE[server]'" in done.stderr
    assert "Traceback" not in done.stderr and "a lab was built" not in done.stderr
