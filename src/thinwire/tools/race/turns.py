"""Turns: one process of several runs in the lab, in which rank 0 serves one run after the other and the rest work.

For measurements of the parameter server whose hosts share their cores: computing that is mostly waiting.
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
    """A layer whose forward pass takes its time without using the processor."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)  # waits for its parameters: no computing before they are there
        time.sleep(self.seconds)
        return torch.relu(y)


def take_turns(serve: Callable[[Run, str], None], work: Callable[[Run, str, int], None]) -> None:
    """Play this process's part in the runs that the command line holds as JSON, each at an address of its own."""
    torch.set_num_threads(1)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    for number, run in enumerate(json.loads(sys.argv[1])):
        address = f"{run.get('transport', 'tcp')}://{os.environ['MASTER_ADDR']}:{port + number}"
        if rank == 0:
            serve(run, address)
        elif rank <= run["workers"]:
            work(run, address, rank)
