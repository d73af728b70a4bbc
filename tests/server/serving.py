"""A server and workers as threads of one process, over real sockets."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.server.protocol import MessageKind, parse
from thinwire.server.replicas import LossyReplicas, LostEntries, Replicas
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.transport.addresses import connect, listen
from thinwire.transport.base import Buffer, Connection, Parts


def small_net(seed: int = 0) -> nn.Sequential:
    """Three layers with parameters, one of them large enough to be selected from and to be cut."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 4))


def batch(step: int, slot: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Samples that depend on step and slot alone; the label can be learned."""
    generator = torch.Generator().manual_seed(step * 1000 + slot)
    x = torch.randn(size, 20, generator=generator)
    return x, x[:, :4].argmax(1)


def gradients(model: nn.Module, step: int, slot: int) -> Tensor:
    x, y = batch(step, slot)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def accuracy(model: nn.Module) -> float:
    x, y = batch(10**6, 0, 500)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


class Threads:
    """Threads whose errors `join` raises in the test."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[..., Any], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self, timeout: float = 60.0) -> None:
        for thread in self._threads:
            thread.join(timeout)
            assert not thread.is_alive(), "a thread hangs"
        if self.errors:
            raise self.errors[0]


@contextmanager
def serving(server: Server, max_steps: int | None = None, transport: str = "tcp") -> Iterator[str]:
    """Run a server in a thread; yield its address, and stop it at the end."""
    listener = listen(f"{transport}://127.0.0.1:0")
    threads = Threads()
    threads.start(lambda: server.run(listener, max_steps=max_steps))
    try:
        yield listener.address
        if max_steps is None:
            server.stop("test")
        threads.join()
    finally:
        server.stop("test")


def train(
    address: str,
    slot: int,
    *,
    codec: Any = 0.1,
    steps: int = 10**9,
    each: Callable[[Worker], None] = lambda worker: None,
    **options: Any,
) -> Worker:
    """Train with one worker until the server stops it, or for so many steps; return the closed worker."""
    model = small_net(seed=slot + 100)  # other values than the server's, which must replace them
    with Worker(address, model, codec, slot=slot, **options) as worker:
        for _ in range(steps):
            if worker.stopped is not None:
                break
            gradients(model, worker.clock, worker.slot)
            worker.step()
            each(worker)
    return worker


class Ones(nn.Module):
    """A model whose gradient is one everywhere: with lr 1 and a sum, its parameters count accepted pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(60, 30, bias=False) for _ in range(2))
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self) -> Tensor:
        return sum((layer(torch.eye(60)).sum() for layer in (self.a, self.b)), torch.zeros(()))


class Leaky(Connection):
    """A real connection that loses chosen messages: the n-th of a kind in a direction."""

    def __init__(self, address: str, *losses: tuple[str, MessageKind, int]) -> None:
        self._inner, self._losses = connect(address), set(losses)
        self._seen: dict[tuple[str, MessageKind], int] = {}
        self.lost = 0

    def _passes(self, way: str, parts: Sequence[Buffer]) -> bool:
        kind = parse(parts).kind
        self._seen[way, kind] = self._seen.get((way, kind), 0) + 1
        lost = (way, kind, self._seen[way, kind]) in self._losses
        self.lost += lost
        return not lost

    def poll(self, timeout: float) -> list[Parts]:
        return [parts for parts in self._inner.poll(timeout) if self._passes("in", parts)]

    def send(self, parts: Sequence[Buffer]) -> None:
        if self._passes("out", parts):
            self._inner.send(parts)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def residual(replicas: Replicas, session: int, layer: int, part: int) -> list[Tensor]:
    """Return what a worker has not received yet: the server's parameters minus the worker's."""
    ours, replica = replicas._values[layer][part], replicas._at[layer, part].get(session)
    return [mine - theirs for mine, theirs in zip(ours, ours if replica is None else replica.values, strict=True)]


def lost_entries(replicas: LossyReplicas, session: int, layer: int, part: int) -> LostEntries:
    """Return the entries of a part in which a worker differs from its replica, until its next delta."""
    return replicas._lost.get((session, (layer, part)), {})
