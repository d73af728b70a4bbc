"""Elastic restart: a rank is killed, torchrun starts all again, and training resumes bitwise, residual included.

    torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/elastic.py checkpoints --kill-at 12

Each rank saves its own residual. Rank 0 saves model and optimizer last: a folder that has them is complete.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from task import make_data, make_net, report
from thinwire.integrations import load_ranks, save_ranks


def connect() -> None:
    """A new prefix for every attempt: torchrun may keep its store, with the addresses of processes that are gone."""
    host, port, rank, world, attempt = (
        os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kill-at", type=int, help="rank 2 kills itself at this step, the first time")
    arguments = parser.parse_args()
    connect()
    rank = dist.get_rank()
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    link = thinwire.attach(model, 0.01, optimizer=optimizer)
    saved = sorted(arguments.directory.glob("*/shared.pt"))
    dist.barrier()  # no rank writes a new checkpoint before all have looked
    if saved:
        shared = torch.load(saved[-1], weights_only=True)
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        load_ranks(link, saved[-1].parent)
        if rank == 0:
            print(f"resumed at step {link.step}", flush=True)
    x, y = make_data().tensors
    for step in range(link.step, 20):
        if step == arguments.kill_at and rank == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        mine = slice(64 * step + 16 * rank, 64 * step + 16 * rank + 16)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            folder = arguments.directory / f"{step + 1:06}"
            save_ranks(link, folder)
            dist.barrier()
            if rank == 0:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states, folder / "shared.part")
                os.replace(folder / "shared.part", folder / "shared.pt")
    report(model.module, link.step)
    print(f"rank {rank}: residual {link.stats()['residual_norm']!r}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
