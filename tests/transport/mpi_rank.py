"""Run a scenario as one rank of an MPI job: `mpirun -n N python -m mpi4py -m tests.transport.mpi_rank NAME`."""

import sys

from mpi4py import MPI

from tests.transport.mpi_scenarios import MPI_SCENARIOS
from tests.transport.scenarios import SCENARIOS
from thinwire.transport import connect, listen


def main(name: str) -> None:
    scenario = {**SCENARIOS, **MPI_SCENARIOS}[name]
    rank = MPI.COMM_WORLD.Get_rank()
    assert MPI.COMM_WORLD.Get_size() == 1 + scenario.workers
    if rank == 0:
        listener = listen("mpi://")
        scenario.server(listener, scenario.workers)
        listener.close()
    else:
        scenario.worker(lambda: connect("mpi://"), rank - 1)


if __name__ == "__main__":
    main(sys.argv[1])
