"""Real processes for tests of torch.distributed: started once, used by many tests, replaced when they die.

Functions run on every rank of a fresh Gloo process group over loopback; what they return comes back in rank order.
"""

import contextlib
import datetime
import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from thinwire.ddp import link

Task = tuple[Callable[..., Any], int, int, int, float, tuple[Any, ...]]


class RankFailed(AssertionError):
    """A rank raised or died; the message carries its traceback."""


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    link.SMALL = 0  # the tests' models are small, and several collectives a step are what must be right
    while True:
        try:
            task: Task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        function, rank, world, port, timeout, arguments = task
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
            answer: tuple[bool, Any] = (True, function(rank, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        pipe.send(answer)


class Cluster:
    """Up to as many ranks as a test asks for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def _worker(self, rank: int) -> tuple[BaseProcess, Connection]:
        while len(self._workers) <= rank:
            self._workers.append(self._start())
        process, pipe = self._workers[rank]
        if not process.is_alive():
            self._workers[rank] = process, pipe = self._start()
        return process, pipe

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(
        self, function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 30.0, died: bool = False
    ) -> list[Any]:
        """function(rank, *arguments) on every rank; with `died` dead ranks give None instead of failing the test."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        workers = [self._worker(rank) for rank in range(world)]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, rank, world, port, timeout, arguments))
        results: list[Any] = []
        failures: list[str] = []
        for rank, (process, pipe) in enumerate(workers):
            try:
                if not pipe.poll(100.0):
                    process.kill()
                    failures.append(f"rank {rank} hung")
                    continue
                good, value = pipe.recv()
            except EOFError:
                process.join()
                good, value = died, None if died else f"rank {rank} died with exit code {process.exitcode}"
            if good:
                results.append(value)
            else:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
