"""Real processes for tests of torch.distributed: started once, used by many tests, replaced when they die.

Functions run on every rank of a fresh Gloo process group over loopback; what they return comes back in rank order.
Processes are forked from one that has imported torch already: importing it takes longer than most tests.
"""

import contextlib
import datetime
import io
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from thinwire.link import updates
from thinwire.tune import forecast

Task = tuple[Callable[..., Any], int, int, int, float, tuple[Any, ...]]


# What every rank needs; torch imports the second when the first optimizer is made.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.algorithms.join", "thinwire.hooks.attach"]

# Constants that tests change on their ranks. Ranks serve many tests, in an order that differs from run to run, so every
# test starts from these. The tests' models are small, and several collectives a step are what must be right.
_CONSTANTS: list[tuple[ModuleType, str, Any]] = [
    (forecast, "JOINED_BELOW", 0),
    (updates, "BUCKET_ELEMENTS", updates.BUCKET_ELEMENTS),
    (updates, "LOOK_AHEAD", updates.LOOK_AHEAD),
]

PATIENCE = 240.0  # seconds after which a rank counts as hung; machines are busy


class RankFailed(AssertionError):
    """A rank raised or died; the message carries its traceback."""


def _variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets: a script that makes its own process group finds the test's store by them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _end_with_the_tests() -> None:
    """A rank may wait for others in a collective for half an hour; not when nobody is left to ask."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)


def _serve(pipe: Connection) -> None:
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            task: Task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        function, rank, world, port, timeout, arguments = task
        os.environ.update(_variables(rank, world, port))
        for module, name, value in _CONSTANTS:
            setattr(module, name, value)
        try:
            if timeout:
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
        """function(rank, *arguments) on every rank; with `died` dead ranks give None instead of failing the test.

        A timeout of 0 leaves it to the function to make its process group.
        """
        # The store is the test's own: a port that is only looked up first may be somebody else's by then.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = [self._worker(rank) for rank in range(world)]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, rank, world, store.port, timeout, arguments))
        until = time.monotonic() + max(PATIENCE, timeout)
        results: list[Any] = []
        failures: list[str] = []
        for rank, (process, pipe) in enumerate(workers):
            try:
                if not pipe.poll(max(0.0, until - time.monotonic())):
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


def printed(function: Callable[..., Any], world: int, *arguments: Any) -> str:
    """function(rank, *arguments) on new ranks, which make their own process group; what they wrote to stdout."""
    with contextlib.closing(Cluster()) as fresh:
        return "".join(fresh.run(_captured, world, function, arguments, timeout=0))


def _captured(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(rank, *arguments)
    return out.getvalue()
