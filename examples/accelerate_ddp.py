"""Accelerate: attach to the prepared model, register the link, and save_state and load_state carry the residual.

torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py /tmp/accelerate
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import thinwire
from task import accuracy, checksum, make_data, make_net


def main(directory: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD((net := make_net()).parameters(), lr=0.1)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    link = thinwire.attach(model, 0.01)
    # Accelerate writes one file for all ranks: `gathered` gives it the mean residual of all ranks.
    accelerator.register_for_checkpointing(link.gathered)
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if epoch == 1:
            accelerator.save_state(directory)
            accelerator.load_state(directory)
    print(
        f"rank {accelerator.process_index}: accuracy {accuracy(net):.3f}, checksum {checksum(net)}, step {link.step}\n",
        end="",
        flush=True,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
