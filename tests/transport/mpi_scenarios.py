"""Scenarios of the mpi transport alone: malformed messages, and how jobs end."""

from collections.abc import Callable

from mpi4py import MPI

from tests.transport.scenarios import END, Scenario, arriving, echo, raises, replies
from thinwire.errors import TransportError
from thinwire.transport import Connection, Listener, connect, listen, mpi
from thinwire.transport.mpi import MpiConnection, MpiListener


def opened(connection: Connection) -> MPI.Intracomm:
    """Return the communicator of a connection, after the messages that waited for it were sent."""
    while (comm := mpi.communicator()) is None:
        connection.poll(0.01)
    connection.poll(0.0)
    return comm


def hostile_server(listener: Listener, workers: int) -> None:
    """Messages that are too large or malformed are discarded and counted, ten are logged, and the next one arrives."""
    assert isinstance(listener, MpiListener)
    vars(mpi)["MOST_BYTES"] = 1 << 20
    MPI.COMM_WORLD.Barrier()
    echo(listener, workers)
    assert listener.discarded == 24 and listener._warnings.omitted == 12


def hostile_worker(connect: Callable[[], Connection], number: int) -> None:
    MPI.COMM_WORLD.Barrier()
    connection = connect()
    comm = opened(connection)
    bad = (bytes(10 << 20), b"", b"\7" * 100, bytes((1 << 20) + 1), *[b"short"] * 20)
    requests = [comm.Isend([data, MPI.BYTE], 0, mpi.TAG) for data in bad]
    connection.send([END])
    assert next(replies(connection)) == [END]
    MPI.Request.Waitall(requests)
    connection.close()


def unread_server(listener: Listener, workers: int) -> None:
    """The queue of a peer that does not read is bounded, and both sides end although messages never arrive."""
    peer, _ = next(arriving(listener))
    sent = 0
    while listener.send(peer, [bytes(10_000)]):
        sent += 1
        assert sent < 10_000
    assert sent >= 1000
    MPI.COMM_WORLD.Barrier()


def unread_worker(connect: Callable[[], Connection], number: int) -> None:
    connection = connect()
    connection.send([b"here"])
    opened(connection)
    MPI.COMM_WORLD.Barrier()
    connection.send([bytes(50 << 20)])
    # It ends without a goodbye and without reading what was sent to it.


def ended_server(listener: Listener, workers: int) -> None:
    """Workers learn that the server has ended after they have received all its messages."""
    for _, (peer, _) in zip(range(workers), arriving(listener), strict=False):
        assert listener.send(peer, [b"last message"])


def ended_worker(connect: Callable[[], Connection], number: int) -> None:
    connection = connect()
    connection.send([b"here"])
    assert next(replies(connection)) == [b"last message"]
    for _ in range(2):
        with raises(TransportError, "rank 0 of this MPI job, has ended"):
            next(replies(connection))
        connection.send([bytes(10 << 20)])  # has no effect
    connection.close()


def rules_server(listener: Listener, workers: int) -> None:
    """Only rank 0 can listen, only other ranks can connect, and each only once at a time."""
    with raises(TransportError, "already"):
        listen("mpi://")
    with raises(TransportError, "rank 0 cannot be a worker"):
        connect("mpi://")
    echo(listener, workers)


def rules_worker(connect: Callable[[], Connection], number: int) -> None:
    with raises(TransportError, "rank 1 cannot be a server"):
        listen("mpi://")
    connection = connect()
    assert isinstance(connection, MpiConnection)
    with raises(TransportError, "already"):
        connect()
    connection.send([END])
    assert next(replies(connection)) == [END]
    connection.close()


MPI_SCENARIOS = {
    "hostile": Scenario(hostile_server, hostile_worker, 1),
    "unread": Scenario(unread_server, unread_worker, 1),
    "ended": Scenario(ended_server, ended_worker, 2),
    "rules": Scenario(rules_server, rules_worker, 1),
}
