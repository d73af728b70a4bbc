"""One process of the scheduling study: rank 0 is the server, the others are workers, one of them slow.

Each process does one run after the other and prints its events with the time of the machine's monotonic clock, which
all emulated hosts share.
"""

import json
from typing import Any

import torch
from torch import nn

from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.bench.server import Slow, take_turns
from thinwire.transport.addresses import listen


def model_of(run: dict[str, Any], slowness: float) -> nn.Module:
    """Return a model of equal layers whose forward passes take the given times."""
    return nn.Sequential(*(Slow(run["width"], slowness * seconds) for seconds in run["forward"]))


def serve(run: dict[str, Any], address: str) -> None:
    """Serve one run until its last step."""
    torch.manual_seed(0)
    model = model_of(run, 0.0)

    def on_step(server: Server) -> None:
        event = {"run": run["name"], "step": server.clock.step, "applied": server.applied_at}
        print("APPLIED " + json.dumps(event), flush=True)

    server = Server(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        mode="bsp" if run["bound"] == 0 else "ssp",
        bound=run["bound"],
        codec="dense",
        policy=run["policy"],
        expect=run["workers"],
        cut=run["cut"],
        timeout=60.0,
        on_step=on_step,
    )
    server.run(listen(address, insecure=True), max_steps=run["steps"])


def work(run: dict[str, Any], address: str, rank: int) -> None:
    """Train as a worker until the server stops, and print the staleness of the parameters that each step used."""
    model = model_of(run, run["slowness"][rank - 1])
    batch = torch.randn(4, run["width"], generator=torch.Generator().manual_seed(rank))
    with Worker(address, model, "dense", slot=rank - 1) as worker:
        while worker.stopped is None:
            model(batch).square().mean().backward()
            worker.step()
            staleness = list(worker.last.staleness.values())
            event = {"run": run["name"], "rank": rank, "staleness": staleness, "computed": worker.last.computed}
            print("STEP " + json.dumps(event), flush=True)


if __name__ == "__main__":
    take_turns(serve, work)
