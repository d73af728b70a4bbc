"""Elastic restart: a rank is killed, torchrun starts all again, and training resumes bitwise, residual included.

    torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/elastic.py checkpoints --kill-at 12

Every rank saves its own residual; rank 0 saves model and optimizer too. A checkpoint counts when all files are there.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from task import checksum, make_data, make_net


def connect() -> None:
    """A new prefix for every attempt: torchrun may keep its store, with the addresses of processes that are gone."""
    host, port, rank, world, attempt = (
        os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))


def save(directory: Path, step: int, states: dict[str, object]) -> None:
    """Complete or not at all: a rank may be killed while it writes."""
    path = directory / f"step-{step}" / f"rank-{dist.get_rank()}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(states, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def newest(directory: Path) -> int | None:
    """The last step of which every rank's file is there."""
    files = [list(d.glob("rank-*.pt")) for d in directory.glob("step-*")]
    return max((int(f[0].parent.name[5:]) for f in files if len(f) == dist.get_world_size()), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kill-at", type=int, help="rank 2 kills itself at this step, the first time")
    arguments = parser.parse_args()
    connect()
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    link = thinwire.attach(model, 0.01, optimizer=optimizer)
    begin = newest(arguments.directory)
    dist.barrier()  # no rank writes a new checkpoint before all have looked
    if begin is not None:
        shared = torch.load(arguments.directory / f"step-{begin}" / "rank-0.pt", weights_only=True)
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        own = torch.load(arguments.directory / f"step-{begin}" / f"rank-{rank}.pt", weights_only=True)
        link.load_state_dict(own["link"])
        if rank == 0:
            print(f"resumed at step {begin}", flush=True)
    x, y = make_data().tensors
    for step in range(begin or 0, 20):
        if step == arguments.kill_at and rank == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        mine = slice(64 * step + 16 * rank, 64 * step + 16 * rank + 16)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()} if rank == 0 else {}
            save(arguments.directory, step + 1, {**whole, "link": link.state_dict()})
    kept = sum(float(s["residual"].abs().sum()) for s in link.state_dict()["codec"]["residuals"].values())
    print(f"rank {rank}: checksum {checksum(model.module)}, residual {kept!r}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
