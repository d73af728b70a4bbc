"""One process of the scheduling study: rank 0 serves run after run, the others work, one of them slowly.

Started on every emulated host; prints what happened when, by the machine's one monotonic clock, which all share.
"""

import json
from typing import Any

import torch
from torch import nn

from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.race.turns import Slow, take_turns
from thinwire.transport.addresses import listen


def model_of(run: dict[str, Any], slowness: float) -> nn.Module:
    """Equal layers, whose forward passes take their given times."""
    return nn.Sequential(*(Slow(run["width"], slowness * seconds) for seconds in run["forward"]))


def serve(run: dict[str, Any], address: str) -> None:
    """Rank 0: one run to its end."""
    torch.manual_seed(0)
    model = model_of(run, 0.0)

    def on_step(server: Server) -> None:
        told = {"run": run["name"], "step": server.clock.step, "applied": server.applied_at}
        print("APPLIED " + json.dumps(told), flush=True)

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
    """Any other rank: computes and tells how stale the copies were that it used."""
    model = model_of(run, run["slowness"][rank - 1])
    batch = torch.randn(4, run["width"], generator=torch.Generator().manual_seed(rank))
    with Worker(address, model, "dense", slot=rank - 1) as worker:
        while worker.stopped is None:
            model(batch).square().mean().backward()
            worker.step()
            stale = list(worker.last.staleness.values())
            told = {"run": run["name"], "rank": rank, "staleness": stale, "computed": worker.last.computed}
            print("STEP " + json.dumps(told), flush=True)


if __name__ == "__main__":
    take_turns(serve, work)
