"""The path of a push: how many files of the library it passes, from the worker's call to the optimizer's step."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import thinwire
from tests.server.serving import serving
from thinwire.server.server import Server
from thinwire.server.worker import Worker

ROOT = Path(thinwire.__file__).parent
# What docs/architecture.md lists.
PATH = {
    "server/worker.py",
    "server/client.py",
    "server/schedule.py",
    "server/protocol.py",
    "server/server.py",
    "server/membership.py",
    "server/aggregate.py",
    "transport/tcp.py",
    "transport/base.py",
    "codec/codec.py",
    "codec/encode.py",
    "codec/selection.py",
    "codec/feedback.py",
    "codec/frame.py",
}


def test_a_push_over_tcp_passes_few_files() -> None:
    found: set[str] = set()
    tracing = threading.Event()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if tracing.is_set() and event == "call" and ROOT in path.parents:
            found.add(str(path.relative_to(ROOT)))

    model = nn.Linear(60, 30, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: tracing.clear())
    server = Server(model, optimizer, codec=0.1)
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with serving(server) as address, Worker(address, net := nn.Linear(60, 30, bias=False), 0.1) as worker:
            for step in range(8):
                loss = net(torch.ones(2, 60)).sum()
                worker.wait()
                if step == 5:
                    tracing.set()
                loss.backward()
                worker.step()
            worker.wait()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert found <= PATH, found - PATH
    assert len(PATH) <= 14
