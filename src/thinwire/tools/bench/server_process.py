"""One process of `thinwire bench server`: rank 0 serves run after run, the others work.

Prints what happened when, by the machine's one monotonic clock, which all emulated hosts share.
"""

import functools
import json
import random
import time
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.race.turns import Slow, take_turns
from thinwire.tools.recipes.convnet import cuda_convnet
from thinwire.tools.recipes.digits import read_digits
from thinwire.transport.addresses import listen


def convnet() -> nn.Module:
    """SparsifyGradients' network."""
    return cuda_convnet()


def small() -> nn.Module:
    """For runs in which workers wait more than they compute."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def wide() -> nn.Module:
    """For digits, and large enough that a step takes many datagrams: 1.1 million parameters."""
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def slow_first() -> nn.Module:
    """Eight equal layers of 1 MB, the first slow to compute."""
    layers = [Slow(512, 0.5), *(Slow(512, 0.005) for _ in range(7))]
    return nn.Sequential(*layers, nn.Linear(512, 10))


MODELS = {"convnet": convnet, "small": small, "wide": wide, "slow_first": slow_first}


def batches(model: str, size: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """A few batches to go round: random ones where only time counts, digits where accuracy does."""
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(0, 10, (size,), generator=generator)
    if model == "convnet":
        return [(torch.randn(size, 3, 32, 32, generator=generator), labels)]
    if model == "slow_first":
        return [(torch.randn(size, 512, generator=generator), labels)]
    x, y = digits()
    order = torch.randperm(1300, generator=generator)[:640].view(-1, size)
    return [(x[rows], y[rows]) for rows in order]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """All digits that come with scikit-learn; those from 1300 on are kept for testing."""
    pixels, labels = read_digits()
    return pixels / 16.0, labels


def serve(run: dict[str, Any], address: str) -> None:
    """Rank 0: one run to its end."""
    torch.manual_seed(0)
    model = MODELS[run["model"]]()

    def on_step(server: Server) -> None:
        said: dict[str, Any] = {"run": run["name"], "step": server.clock.step, "applied": server.applied_at}
        if run["model"] in ("small", "wide") and server.clock.step % 10 == 0:
            x, y = digits()
            with torch.no_grad():
                said["accuracy"] = float((model(x[1300:]).argmax(1) == y[1300:]).float().mean())
        print("APPLIED " + json.dumps(said), flush=True)
        if run["seconds"] and time.monotonic() - server.started_at > run["seconds"]:
            server.stop("time")

    server = Server(
        model,
        torch.optim.SGD(model.parameters(), lr=run["lr"]),
        mode=run["mode"],
        bound=run["bound"],
        codec=run["pull"],
        policy=run["policy"],
        expect=run["workers"],
        phased=run["phased"],
        on_loss=run["on_loss"],
        cut=0 if run["phased"] else None,
        timeout=60.0,
        on_step=on_step,
    )
    server.run(listen(address, insecure=True), max_steps=run["steps"] or None)


def work(run: dict[str, Any], address: str, rank: int) -> None:
    """Any other rank: computes, and takes longer where the run says so."""
    model = MODELS[run["model"]]()
    data = batches(run["model"], run["batch"], rank)
    chance = random.Random(rank)
    with Worker(address, model, run["push"], slot=rank - 1, overlap=run["overlap"]) as worker:
        while worker.stopped is None:
            clock = worker.clock
            factor = run["slow"].get(str(rank), 1.0)
            if chance.random() < run["chance"]:
                factor *= run["factor"]
            time.sleep(run["pause"] * factor)  # before the backward pass, which pushes already
            x, y = data[clock % len(data)]
            nn.functional.cross_entropy(model(x), y).backward()
            worker.step()
            times = worker.last
            said = {"run": run["name"], "rank": rank, "step": clock, "ready": times.ready, "computed": times.computed}
            said |= {"wait": times.aggregate + times.synchronise, **worker.losses()}
            print("STEP " + json.dumps({**said, "staleness": max(times.staleness.values(), default=0)}), flush=True)


if __name__ == "__main__":
    take_turns(serve, work)
