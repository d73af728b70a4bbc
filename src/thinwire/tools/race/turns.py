"""Measurements of the parameter server in the lab: several runs in one process per host, with simulated computing.

Emulated hosts share the cores of one machine, so a layer sleeps instead of computing.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Run = dict[str, Any]


class Slow(nn.Module):
    """A linear layer whose forward pass also sleeps for some seconds, without using the processor."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)  # its hook waits for the parameters before the sleep
        time.sleep(self.seconds)
        return torch.relu(y)


def take_turns(serve: Callable[[Run, str], None], work: Callable[[Run, str, int], None]) -> None:
    """Take part in each of the runs that the command line holds as JSON: rank 0 serves, the others work."""
    torch.set_num_threads(1)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    for number, run in enumerate(json.loads(sys.argv[1])):
        address = f"{run.get('transport', 'tcp')}://{os.environ['MASTER_ADDR']}:{port + number}"
        if rank == 0:
            serve(run, address)
        elif rank <= run["workers"]:
            work(run, address, rank)
