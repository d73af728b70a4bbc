"""Plain torchrun: one line compresses the gradients of DDP.

torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import thinwire
from task import make_data, make_net, report


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = thinwire.attach(model, 0.01, optimizer=optimizer)  # the one line
    sampler = DistributedSampler(make_data())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(make_data(), batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    report(model.module, link.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
