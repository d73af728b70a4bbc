"""Small modules that are sent with the layer before them are used and timed correctly."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.server.serving import Threads, serving
from thinwire.errors import ServerCheckpointError
from thinwire.server.checkpoint import CheckpointWriter, load_checkpoint, stored_step
from thinwire.server.layout import Layout
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.race.profile import Profiler
from thinwire.transport.addresses import connect
from thinwire.transport.base import Buffer, Connection, Parts


class Functional(nn.Module):
    """Uses a small module's weight without calling it, before the large one that it is joined to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.gain = nn.Linear(100, 100), nn.Linear(4, 10)
        self.steady: list[bool] = []  # whether the weight was still the same after the large module had been called

    def forward(self, x: Tensor) -> Tensor:
        before = self.gain.weight.detach().clone()
        y = self.body(x * self.gain.weight.sum())
        self.steady.append(torch.equal(before, self.gain.weight.detach()))
        loss: Tensor = y.pow(2).mean()
        return loss


class Late(Connection):
    """A connection that delivers every message 0.1 s late."""

    def __init__(self, address: str) -> None:
        self._inner, self._held = connect(address), list[tuple[float, Parts]]()

    def poll(self, timeout: float) -> list[Parts]:
        found, now = self._inner.poll(min(timeout, 0.02)), time.monotonic()
        self._held += [(now + 0.1, parts) for parts in found]
        due = [parts for when, parts in self._held if when <= now]
        self._held = [(when, parts) for when, parts in self._held if when > now]
        return due

    def send(self, parts: Any) -> None:
        held: list[Buffer] = list(parts)
        self._inner.send(held)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def test_a_module_that_is_not_called_has_its_parameters_when_they_are_used() -> None:
    model = Functional()
    server = Server(model, torch.optim.SGD(model.parameters(), lr=0.1), expect=1, codec=None)
    assert [layer.modules for layer in server.layout.layers] == [("body", "gain")]
    net = Functional()

    def work(address: str) -> None:
        with Worker(Late(address), net, "dense") as worker:
            for _ in range(5):
                net(torch.randn(3, 100)).backward()
                worker.step()

    threads = Threads()
    with serving(server, max_steps=5) as address:
        threads.start(work, address)
        threads.join()
    assert net.steady == [True] * 5


class Nested(nn.Module):
    """Owns a parameter, and small modules that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.a, self.b = nn.Parameter(torch.zeros(100, 100)), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        x = self.b(self.a(x))
        time.sleep(0.02)
        return x + self.own.sum()


def test_modules_within_modules_are_timed_once() -> None:
    net = Nested()
    server = Server(net, torch.optim.SGD(net.parameters(), lr=0.1), expect=1, codec=None)
    assert [layer.modules for layer in server.layout.layers] == [("", "a", "b")]
    worked = Nested()
    done = threading.Event()

    def work(address: str) -> None:
        with Worker(address, worked, "dense") as worker:
            profiler = Profiler(worker)
            for _ in range(4):
                began = time.monotonic()
                worked(torch.randn(3, 4)).pow(2).mean().backward()
                worked.eval()
                worked(torch.randn(3, 4))  # is not part of the step
                worked.train()
                worker.step()
                took = time.monotonic() - began
                (layer,) = profiler._forward
                assert 0.04 <= layer[worker.clock - 1] < took - 0.03
            profiler.close()
            done.set()

    threads = Threads()
    with serving(server, max_steps=4) as address:
        threads.start(work, address)
        threads.join()
    assert done.is_set()


def test_a_checkpoint_of_an_earlier_version_is_refused_with_advice(tmp_path: Path) -> None:
    """Version 1 had a layer for every module and version 2 other keys: neither can be read."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    path, cut = tmp_path / "server.pt", Layout.of(net, 0).cut
    assert CheckpointWriter(tmp_path).save(net, optimizer, {"cut": cut, "step": 3, "accepted": {}, "extra": {}})
    found = load_checkpoint(tmp_path, net, optimizer, cut)
    assert found is not None and found["step"] == 3
    state = torch.load(path, weights_only=True)
    for version in (1, 2):
        torch.save({**state, "version": version}, path)
        advice = f"it has version {version}, this thinwire reads version 4\\): finish this training with the thinwire"
        with pytest.raises(ServerCheckpointError, match=advice):
            load_checkpoint(tmp_path, net, optimizer, cut)


def test_a_checkpoint_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    """Any bit: of the weights, which torch does not verify, of the archive's directory, or of the checksum itself."""
    net = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    path = tmp_path / "server.pt"
    assert CheckpointWriter(tmp_path).save(net, optimizer, {"cut": 0, "step": 3, "accepted": {}, "extra": {}})
    whole, weights = path.read_bytes(), net.weight.detach().clone()
    middle = whole.index(weights.numpy().tobytes()) + 3000
    for at in (middle, 100, len(whole) - 300, len(whole) - 40, len(whole) - 75):
        changed = bytearray(whole)
        changed[at] ^= 4
        path.write_bytes(changed)
        with pytest.raises(ServerCheckpointError, match=r"server\.pt is damaged|server\.pt cannot be used"):
            load_checkpoint(tmp_path, net, optimizer, 0)
        assert torch.equal(net.weight, weights)
        assert stored_step(tmp_path) == 0
    path.write_bytes(whole[:-90])
    with pytest.raises(ServerCheckpointError, match=r"server\.pt is damaged|server\.pt cannot be used"):
        load_checkpoint(tmp_path, net, optimizer, 0)


def test_a_checkpoint_of_0_2_0_without_a_checksum_loads_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert CheckpointWriter(tmp_path).save(net, optimizer, {"cut": 0, "step": 3, "accepted": {}, "extra": {}})
    state = torch.load(tmp_path / "server.pt", weights_only=True)
    torch.save({**state, "version": 3}, tmp_path / "server.pt")
    found = load_checkpoint(tmp_path, net, optimizer, 0)
    assert found is not None and found["step"] == 3
    assert "has no checksum, because thinwire 0.2.0 wrote it" in caplog.text
    torch.save(state, tmp_path / "server.pt")
    with pytest.raises(ServerCheckpointError, match=r"is damaged \(it has lost the checksum that version 4 has"):
        load_checkpoint(tmp_path, net, optimizer, 0)
