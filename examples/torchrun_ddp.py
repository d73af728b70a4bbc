"""Plain torchrun: one line makes the gradients thin.

torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import thinwire
from task import accuracy, checksum, make_data, make_net


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = thinwire.attach(model, 0.01, optimizer=optimizer)  # the one line
    data = make_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    stats = link.stats()
    print(
        f"rank {dist.get_rank()}: accuracy {accuracy(model.module):.3f}, checksum {checksum(model.module)}, "
        f"{stats['bytes_sent'] / stats['steps'] / 1e3:.1f} kB sent per step\n",
        end="",
        flush=True,
    )
    link.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
