"""One schedule: a seed chooses the server, the workers, the network and the faults, and everything is checked."""

import gc
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.server.simulation.bugs import bug
from tests.server.simulation.events import Events, Violation
from tests.server.simulation.ledger import Ledger, check
from tests.server.simulation.network import Trouble, UdpLink, new_link
from tests.server.simulation.nodes import ServerNode, WorkerNode, server_options

# Virtual seconds of faults; within which workers must make progress after them, and how many steps; and for the end.
_FAULTS, _PROGRESS, _STEPS, _QUIET = 8.0, 90.0, 2, 40.0
_MOST_WORKERS = 4


@dataclass(frozen=True)
class Outcome:
    """What happened in a schedule. The digest covers all messages and events."""

    seed: int
    digest: int
    seconds: float  # virtual
    steps: int
    pushes: int
    joined: int
    crashes: int
    failure: str | None = None


class Schedule:
    """One simulated training with faults."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.events = Events(seed)
        chance = self.events.chance
        self.ledger = Ledger()
        self.trouble = Trouble(delay=chance.choice([0.001, 0.01, 0.05, 0.2]))
        self.workers: list[WorkerNode] = []
        self.crashes = 0
        self._leaving: set[WorkerNode] = set()
        self._paused = False  # whether new workers compute nothing
        count = chance.choice([1, 2, 2, 3, 3, 4])
        self._compute = chance.choice([0.3, 0.6, 1.2])
        self._transport = chance.choice(["tcp", "tcp", "udp"])
        options = server_options(self.events, folder, count, UdpLink.piece_bytes if self._transport == "udp" else None)
        if not self._plan_faults():
            options["save_every"] = 1_000_000  # checkpoints take time and matter to servers that crash
        self.server = ServerNode(self.events, self.ledger, options, {})
        self.server.on_handled = self._check_replica
        for _ in range(count):
            self.start_worker()

    # Faults

    def _plan_faults(self) -> bool:
        """Choose the faults; return whether the server will crash."""
        chance = self.events.chance
        kinds: list[Callable[[], None]] = [
            self.start_worker,
            self._leave,
            self._kill,
            self._stall_worker,
            self._stall_server,
            self._crash_server,
            self._break,
            self._partition,
            self._slow,
            self._jump,
            self._disturb,
        ]
        chosen = [chance.choice(kinds) for _ in range(chance.randint(1, 6))]
        for kind in chosen:
            self.events.after(chance.uniform(0.0, _FAULTS), kind)
        return self._crash_server in chosen

    def live(self) -> list[WorkerNode]:
        return [worker for worker in self.workers if worker.alive and not worker.left]

    def staying(self) -> list[WorkerNode]:
        """Return the live workers that were not told to leave."""
        return [worker for worker in self.live() if worker not in self._leaving]

    def _any(self) -> WorkerNode | None:
        live = self.live()
        return self.events.chance.choice(live) if live else None

    def start_worker(self) -> None:
        if len(self.live()) < _MOST_WORKERS:
            self._add_worker()

    def _add_worker(self) -> None:
        link = new_link(self.events, self.trouble, self._transport)
        worker = WorkerNode(self.events, self.ledger, link, len(self.workers), self._compute)
        worker.paused = self._paused
        self.workers.append(worker)
        self.server.connect(worker.peer, link)

    def _leave(self) -> None:
        if (worker := self._any()) is not None and len(self.staying()) > 1:
            self._leaving.add(worker)
            worker.handle(worker.leave)

    def _kill(self) -> None:
        if (worker := self._any()) is not None:
            worker.kill()
            self.events.after(self.events.chance.uniform(0.0, 3.0), self.start_worker)

    def _stall_worker(self) -> None:
        if (worker := self._any()) is not None:
            worker.stall(self.events.chance.uniform(0.1, 6.0))

    def _stall_server(self) -> None:
        self.server.stall(self.events.chance.uniform(0.1, 5.0))

    def _crash_server(self) -> None:
        self.crashes += 1
        self.server.crash_and_restart(self.events.chance.randint(1, max(1, len(self.live()))))

    def _break(self) -> None:
        if (worker := self._any()) is not None:
            worker.link.break_for(self.events.chance.choice([0.05, 0.5, 4.0]))

    def _partition(self) -> None:
        if (worker := self._any()) is not None:
            up, down = self.events.chance.choice([(True, True), (True, True), (True, False), (False, True)])
            worker.link.partition(self.events.chance.uniform(0.2, 5.0), up=up, down=down)

    def _slow(self) -> None:
        if (worker := self._any()) is not None:
            worker.compute = 8.0 * self._compute
            self.events.after(6.0, self._hurry, worker)

    def _hurry(self, worker: WorkerNode) -> None:
        worker.compute = self._compute

    def _jump(self) -> None:
        node = self.events.chance.choice([self.server, *self.live()])
        node.offset += self.events.chance.choice([0.5, 3.0, 100.0])

    def _disturb(self) -> None:
        """Let the network lose, repeat and reorder messages for a while."""
        chance, trouble = self.events.chance, self.trouble
        trouble.jitter, trouble.loss = chance.choice([0.0, 0.05, 1.0]), chance.choice([0.0, 0.01, 0.1])
        trouble.twice, trouble.reordered = chance.choice([0.0, 0.01, 0.05]), chance.choice([0.0, 0.01, 0.1])
        self.events.after(chance.uniform(0.5, 4.0), self._calm)

    def _calm(self) -> None:
        trouble = self.trouble
        trouble.jitter = trouble.loss = trouble.twice = trouble.reordered = 0.0

    # Checks

    def _check_replica(self, peer: bytes) -> None:
        number = int.from_bytes(peer[4:], "little")
        if self.workers[number].alive:
            self.workers[number].check_replica(self.server.server)

    def run(self) -> Outcome:
        """Run the schedule; Violation if something does not hold that must."""
        events, began = self.events, self.events.now
        events.run(began + _FAULTS)
        self._calm()
        server = self.server.server  # before training has begun, it waits for so many workers
        while len(self.staying()) < (1 if server.membership.started or server.clock.step else server.expect):
            self._add_worker()  # however many are still about to leave
        if events.seed % 4 != 3:  # in the others training ends while sessions may be broken
            self._check_progress()
            self._check_quiet()
        self._check_end()
        pushes, joined = self.ledger.pushes, self.server.server.membership.joined
        return Outcome(events.seed, events.digest, events.now - began, self.ledger.steps, pushes, joined, self.crashes)

    def _check_progress(self) -> None:
        """Once faults have ended, every live worker makes progress within a bound."""
        before = {worker: worker.steps for worker in self.live()}
        step = self.server.server.clock.step

        def progressed() -> bool:
            server = self.server.server
            own = all(worker.steps >= steps + _STEPS for worker, steps in before.items() if not worker.left)
            return own and server.clock.step > step

        done = self.events.run(self.events.now + _PROGRESS, progressed)
        stuck = [(w.token, w.state, w.clock) for w, steps in before.items() if w.steps < steps + _STEPS]
        check(done, "workers make no progress", stuck, self.server.server.clock.lowest)

    def _check_quiet(self) -> None:
        """When workers compute nothing, everything on its way arrives, and all gradients are accounted for."""
        self._paused = True  # of workers that a fault starts later, too
        for worker in self.live():
            worker.paused = True

        def quiet() -> bool:
            active = self.server.server.membership.active
            return all(
                worker.state == "waiting"
                and not worker.client.pushes.busy
                and worker.client.session is not None
                and worker.client.session.number in active
                and not active[worker.client.session.number].pool.in_flight
                for worker in self.live()
            )

        check(self.events.run(self.events.now + _QUIET, quiet), "something is on its way for ever")
        for worker in self.live():
            worker.check_settled()
            worker.check_replica(self.server.server)
        for key, accepted in self.ledger.history.accepted.items():
            waits = key[2] >= self.server.server.clock.lowest[key[1]]
            check(accepted.applied or waits, "an accepted gradient was not applied", key)

    def _check_end(self) -> None:
        """When training ends, every worker learns it."""
        self.server.end("done")

        def ended() -> bool:
            gone = {worker.peer for worker in self.workers if not worker.alive}
            told = all(worker.client.stopped is not None for worker in self.live())
            return told and self.server.server.remaining <= gone

        check(self.events.run(self.events.now + _QUIET, ended), "a worker does not learn of the end")


@contextmanager
def checkpoint_folder() -> Iterator[Path]:
    """A folder for checkpoints, in memory where that is possible."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="thinwire-simulation-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_seed(seed: int, bug_name: str | None = None) -> Outcome:
    """Run the schedule of a seed, with one of the deliberate bugs or none; the outcome names what did not hold."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with checkpoint_folder() as folder, bug(bug_name):
            schedule = Schedule(seed, folder)
            try:
                return schedule.run()
            except Violation as violation:
                failure = str(violation)
            except Exception as error:  # of the code under test
                failure = f"{type(error).__name__}: {error}"
            events = schedule.events
            return Outcome(seed, events.digest, events.now - 1000.0, schedule.ledger.steps, 0, 0, 0, failure)
    finally:
        torch.set_num_threads(threads)
        logging.disable(disabled)


def prepare_process() -> None:
    """Prepare a process of a pool for schedules. Ctrl-C is for the process that started it, which then ends this one.

    This cannot be in `__main__`, which such a process does not import.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what torch has imported stays, so that the collector need not look at it again
