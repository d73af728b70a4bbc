"""FSDP2: shard within a machine, compress between machines. Here a mesh of two replicas with two shards each.

torchrun --standalone --nproc-per-node 4 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import thinwire
from task import make_data, make_net, report


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_net()
    for layer in (*model[:-1], model):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])  # not over the whole mesh: that would add an uncompressed all-reduce
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = thinwire.attach(model, 0.01, mesh=mesh, optimizer=optimizer)  # the one line
    sampler = DistributedSampler(make_data())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(make_data(), batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    whole = make_net()
    whole.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    report(whole, link.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
