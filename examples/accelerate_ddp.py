"""Accelerate: one line attaches, and save_state and load_state carry each rank's residual.

torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py /tmp/accelerate
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from task import make_data, make_net, report
from thinwire.integrations.accelerate import attach


def main(directory: str) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD((net := make_net()).parameters(), lr=0.1)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    link = attach(accelerator, model, optimizer, 0.01)  # the one line
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if epoch == 1:
            accelerator.save_state(directory)
            accelerator.wait_for_everyone()  # rank 0 writes the model, and every rank loads it
            accelerator.load_state(directory)
    report(net, link.step)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
