"""Chain: hosts pass one vector on from the first to the last, each sending on what it has while the rest still comes.

That is how Open MPI broadcasts a long message. Sockets of its own, not torch.distributed's: fourteen hosts share the
machine's few cores here, and a process that is woken for every packet takes them from the wires.
"""

import ipaddress
import os
import socket
import time

import torch
import torch.distributed as dist
from torch import Tensor

# What arrives meanwhile is taken together, as network cards gather packets before they interrupt a processor.
GATHERED = 1e-3  # seconds


class Chain:
    """This host's place between the one before and the one after it; a collective call."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        with socket.create_server((_own_address(), 0)) as server:
            address, port = server.getsockname()
            mine = torch.tensor([int(ipaddress.ip_address(address)), port])
            places = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(places, mine)
            self._after = _connected(places[rank + 1]) if rank + 1 < world else None
            self._before = server.accept()[0] if rank else None

    def pass_on(self, vector: Tensor) -> None:
        """The first host's vector (contiguous, on the CPU) becomes everybody's."""
        whole, got = vector.numpy().data.cast("B"), 0
        if self._before is None and self._after is not None:
            self._after.sendall(whole)
        while self._before is not None and got < len(whole):
            time.sleep(GATHERED)
            more = self._before.recv_into(whole[got:])
            if not more:
                raise ConnectionError("the host before this one in the chain is gone")
            if self._after is not None:
                self._after.sendall(whole[got : got + more])
            got += more

    def close(self) -> None:
        """Give the connections back."""
        for connection in (self._before, self._after):
            if connection is not None:
                connection.close()


def _own_address() -> str:
    """The address under which the other hosts see this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing, only finds the way
        return str(asking.getsockname()[0])


def _connected(place: Tensor) -> socket.socket:
    address, port = place.tolist()
    connection = socket.create_connection((str(ipaddress.ip_address(address)), port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
