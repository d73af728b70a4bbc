"""Real processes for tests of torch.distributed: started once, used by many tests, replaced when they die.

Functions run on every rank of a fresh Gloo process group over loopback; what they return comes back in rank order.
Processes are forked from one that has imported torch already: importing it takes longer than most tests.
"""

import contextlib
import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from thinwire.ddp import link

Task = tuple[Callable[..., Any], int, int, int, float, tuple[Any, ...]]


# What every rank needs; torch imports the second when the first optimizer is made.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.algorithms.join", "thinwire.ddp.attach"]


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
            limit = datetime.timedelta(seconds=timeout)
            store = TCPStore("127.0.0.1", port, timeout=limit)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
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
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
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
        # The store is the test's own: a port that is only looked up first may be somebody else's by then.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = [self._worker(rank) for rank in range(world)]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, rank, world, store.port, timeout, arguments))
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
