"""One host of SparsifyGradients as in the paper: broadcast the model, compute, send the gradients to the master.

Rank 0 is the master and computes no gradient. The model is broadcast dense along a chain of hosts. Gradients are sent
whole, or as 8 bytes per selected value (int32, float32). The master prints the times of every step by the machine's
monotonic clock, and how long a gradient takes on a host that has all cores for itself.
"""

import ipaddress
import json
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import NoFeedback
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import Percentile
from thinwire.codec.values import Float32
from thinwire.tools.recipes.convnet import cuda_convnet

# Data that arrives within this time is received at once, as network cards coalesce interrupts.
COALESCE_SECONDS = 1e-3
# The learning rate for the sum of the gradients. Only the time counts here: at a rate that trains well, these random
# images make the network diverge or its gradients vanish, and zeros need not be sent.
RATE = 1e-3 / 13
ALONE_ROUNDS = 5  # how often every host computes a gradient alone
# The paper's threshold is exact, not estimated from a sample.
PAPER = {"percentile90": Codec(Percentile(90, exact=True), Float32(), NoFeedback())}


class Chain:
    """This host's connections to its neighbours in the chain; making one is a collective operation."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        with socket.create_server((_own_address(), 0)) as server:
            address, port = server.getsockname()
            mine = torch.tensor([int(ipaddress.ip_address(address)), port])
            places = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(places, mine)
            self._after = _connected(places[rank + 1]) if rank + 1 < world else None
            self._before = server.accept()[0] if rank else None

    def broadcast(self, vector: Tensor) -> None:
        """Broadcast the first host's vector (contiguous, on the CPU) to all hosts."""
        whole, got = vector.numpy().data.cast("B"), 0
        if self._before is None and self._after is not None:
            self._after.sendall(whole)
        while self._before is not None and got < len(whole):
            time.sleep(COALESCE_SECONDS)
            more = self._before.recv_into(whole[got:])
            if not more:
                raise ConnectionError("the previous host of the chain closed its connection")
            if self._after is not None:
                self._after.sendall(whole[got : got + more])
            got += more

    def close(self) -> None:
        """Close the connections."""
        for connection in filter(None, (self._before, self._after)):
            connection.close()


def _own_address() -> str:
    """Return the address under which the other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing, only selects the interface
        return str(probe.getsockname()[0])


def _connected(place: Tensor) -> socket.socket:
    address, port = place.tolist()
    connection = socket.create_connection((str(ipaddress.ip_address(address)), port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Host:
    """One host: the model as a vector, and the phases of a step."""

    def __init__(self, method: str, batch: int, chain: Chain) -> None:
        torch.manual_seed(0)
        self.model = cuda_convnet()
        self.codec: Codec | None = None if method == "dense" else PAPER[method].copy()
        self.names = [name for name, _ in self.model.named_parameters()]
        self.numels = [p.numel() for p in self.model.parameters()]
        self.master, self.world = dist.get_rank() == 0, dist.get_world_size()
        self.vector = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.batch, self.generator = batch, torch.Generator().manual_seed(dist.get_rank())
        self.chain = chain
        self.sent = 0  # bytes of the last gradient

    def synchronise(self) -> None:
        """Receive the master's model."""
        self.chain.broadcast(self.vector)
        nn.utils.vector_to_parameters(self.vector, self.model.parameters())

    def compute(self) -> Tensor:
        """Return this host's gradient as the message to send; the master's is empty.

        A message has one row, the dense gradient; or two, the selected indices (as float32 bits) and their values.
        """
        if self.master:
            return torch.empty(1 if self.codec is None else 2, 0)
        images = torch.randn(self.batch, 3, 32, 32, generator=self.generator)
        labels = torch.randint(0, 10, (self.batch,), generator=self.generator)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        if self.codec is None:
            return torch.cat([gradient.reshape(-1) for gradient in gradients]).view(1, -1)
        reader = FrameReader(self.codec.encode(dict(zip(self.names, gradients, strict=True))), self.numels)
        starts = [sum(self.numels[:i]) for i in range(len(self.numels))]
        entries = [(section.id, *reader.entries(section)) for section in reader.sections]
        places = torch.cat([(where + starts[i]).int() for i, where, _ in entries])
        return torch.stack([places.view(torch.float32), torch.cat([values for _, _, values in entries])])

    def aggregate(self, message: Tensor) -> None:
        """Send all gradients to the master, which applies them one after the other."""
        longest = torch.tensor([message.shape[1]])
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # gather needs messages of equal size
        self.sent = 4 * message.shape[0] * int(longest)
        padded = torch.zeros(message.shape[0], int(longest))  # a zero at index zero changes nothing
        padded[:, : message.shape[1]] = message
        received = [torch.empty_like(padded) for _ in range(self.world)] if self.master else None
        dist.gather(padded, received, dst=0)
        for rows in (received or [])[1:]:
            if self.codec is None:
                self.vector[: rows.shape[1]].add_(rows[0], alpha=-RATE)
            else:
                self.vector.index_add_(0, rows[0].view(torch.int32), rows[1], alpha=-RATE)


def run_step(host: Host) -> dict[str, float]:
    """Run one step and return the times at which its phases ended; barriers separate the phases."""
    times = {"began": time.monotonic()}
    host.synchronise()
    dist.barrier()
    times["synchronised"] = time.monotonic()
    message = host.compute()
    dist.barrier()
    times["computed"] = time.monotonic()
    host.aggregate(message)
    times["ended"] = time.monotonic()
    return times


def time_alone(host: Host) -> float:
    """Return the seconds of the slowest host's gradient when the hosts compute one after the other."""
    spent = torch.zeros(1, dtype=torch.float64)
    for rank in range(1, host.world):
        dist.barrier()
        if rank == dist.get_rank():
            began = time.monotonic()
            host.compute()
            spent[0] = time.monotonic() - began
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def main() -> None:
    """Run all methods on this host, one after the other; the master prints the times."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chain = Chain()
    for method in options["methods"]:
        host = Host(method, options["batch"], chain)
        initial = host.vector.clone()
        for _ in range(options["steps"]):
            times = run_step(host)
            if host.master:
                moved = float((host.vector - initial).norm())
                print("STEP " + json.dumps({"method": method, "moved": moved, "sent": host.sent, **times}), flush=True)
        for _ in range(ALONE_ROUNDS):
            slowest = time_alone(host)
            if host.master:
                print("ALONE " + json.dumps({"method": method, "seconds": slowest}), flush=True)
    chain.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
