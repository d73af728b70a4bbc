"""One rank that trains with "auto" in the lab and tells after every step what it does."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.link.autotune import Autotuner
from thinwire.tune.forecast import TuningPolicy


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(300, 340))
    link = tw.attach(model, "auto")
    tuner = link.tuner
    assert isinstance(tuner, Autotuner)
    # So small a model is as fast dense as compressed on a fast link: which of them wins must not depend on the machine.
    tuner._policy = TuningPolicy(compress_from=0.75)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            bandwidth = tuner.decisions[-1].network.bandwidth if tuner.decisions else 0.0
            print(f"STEP {step} {bandwidth:.0f} {int(tuner.setting.compressed)} {tuner.setting}", flush=True)
    link.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
