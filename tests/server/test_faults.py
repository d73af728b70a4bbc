"""Faults at exact steps, with real processes: training goes on, and nothing is counted twice."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.needs import needs, small_disk
from tests.server.processes import Processes, processes, serve, trouble, work
from tests.server.serving import Ones, Threads, serving
from tests.server.test_sessions import train_ones
from thinwire.server.server import Server
from thinwire.tools.events import EventLog, Step, read_log
from thinwire.tools.lab import Lab
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.race.launch import ClusterSpec, make_plan
from thinwire.tools.race.served import ServerSettings, Serving
from thinwire.tools.race.served import work as work_served
from thinwire.tools.race.train import describe_served
from thinwire.tools.recipes import get_recipe
from thinwire.transport.addresses import listen

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def running() -> Iterator[Processes]:
    with processes() as made:
        yield made


def check_counts(end: dict[str, Any], start: float = 0.0, *, bounded: bool = True) -> None:
    """Check that every part counts each accepted push once; with a bound, only those of complete steps."""
    pushes = [tuple(push) for push in end["accepted"]]
    assert len(set(pushes)) == len(pushes)
    for part, values in enumerate(end["counts"]):
        counted = sum(1 for _, _, p, clock in pushes if p == part and (clock < end["lowest"][part] or not bounded))
        assert values == [start + counted], f"part {part}"


def check_acks(end: dict[str, Any], worker: dict[str, Any], apart: int = 1) -> None:
    """Check that every push that the server acknowledged was accepted."""
    accepted = Counter((p, clock) for token, _, p, clock in end["accepted"] if token == worker["token"])
    assert set(map(tuple, worker["acked"])) <= set(accepted)
    # When training ends, parts differ by at most one step, and by the workers that a fault kept from pushing some.
    assert max(worker["seen"]) - min(worker["seen"]) <= 3 * (1 + apart)
    assert max(worker["seen"]) <= max(max(values) for values in end["counts"])


@pytest.mark.parametrize(
    ("mode", "where"), [("bsp", "backward"), ("ssp", "backward"), ("async", "step")], ids=["bsp", "ssp", "async"]
)
def test_training_continues_when_a_worker_is_killed(running: Processes, mode: str, where: str) -> None:
    server = running.start(serve, address=LOOPBACK, stop=(12, 3), expect=3, mode=mode)
    address = server.wait_for(lambda said: "address" in said)["address"]
    victim = running.start(work, address=address, slot=0, fault=(where, 3, signal.SIGKILL))
    others = [running.start(work, address=address, slot=slot) for slot in (1, 2)]
    end = server.end()
    victim.process.join(30)
    assert victim.process.exitcode == -signal.SIGKILL
    assert end["end"] == "target"
    check_counts(end, bounded=mode != "async")
    for other in others:
        check_acks(end, other.end(), apart=1 if mode == "bsp" else 99)


def test_a_worker_that_hangs_is_evicted_and_rejoins(running: Processes) -> None:
    server = running.start(serve, address=LOOPBACK, stop=(10, 3), expect=2)
    address = server.wait_for(lambda said: "address" in said)["address"]
    hung = running.start(work, address=address, slot=0, fault=("step", 3, signal.SIGSTOP))
    other = running.start(work, address=address, slot=1)
    server.wait_for(lambda said: said["left"] >= 1 and said["step"] >= 6)  # the others go on
    assert hung.process.pid is not None
    os.kill(hung.process.pid, signal.SIGCONT)
    end = server.end()
    assert end["joined"] >= 3
    check_counts(end)
    check_acks(end, hung.end())
    check_acks(end, other.end())


def test_a_server_that_is_killed_resumes_from_its_checkpoint(running: Processes, tmp_path: Path) -> None:
    options: dict[str, Any] = {"expect": 2, "checkpoint": str(tmp_path), "save_every": 3}
    server = running.start(serve, address=LOOPBACK, stop=(20, 2), kill=8, **options)
    address = server.wait_for(lambda said: "address" in said)["address"]
    workers = [running.start(work, address=address, slot=slot) for slot in range(2)]
    server.process.join(60)
    assert server.process.exitcode == -signal.SIGKILL
    again = running.start(serve, address=address, stop=(20, 2), **options)
    begun = again.wait_for(lambda said: "address" in said)
    assert 8 - 3 <= begun["resumed"] <= 8
    assert begun["start"] == [[2.0 * begun["resumed"]]] * len(begun["start"])
    end = again.end()
    check_counts(end, start=2.0 * begun["resumed"])
    for worker in workers:
        assert worker.end()["stopped"] == "target"


def test_random_bytes_another_recipe_and_twenty_joins_do_not_disturb_training(running: Processes) -> None:
    # Two workers train throughout; the one that sends random bytes joins once, and twenty join and leave.
    server = running.start(serve, address=LOOPBACK, stop=(20, 2 + 1 + 20), expect=2, recipe="ones")
    address = server.wait_for(lambda said: "address" in said)["address"]
    workers = [running.start(work, address=address, slot=slot, recipe="ones") for slot in range(2)]
    said = running.start(trouble, address=address, recipe="ones").end()
    assert said["heard"] == "REFUSED"
    assert "'another'" in said["refused"] and "'ones'" in said["refused"]
    end = server.end()
    assert end["end"] == "target" and end["joined"] == 2 + 1 + 20
    check_counts(end)
    for worker in workers:
        check_acks(end, worker.end(), apart=99)


def test_training_survives_a_network_that_is_cut_for_ten_seconds() -> None:
    needs("lab")
    lines: list[dict[str, Any]] = []
    changed = threading.Condition()

    def read(process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with changed:
                lines.append(json.loads(line))
                changed.notify_all()

    def wait(wanted: Any) -> dict[str, Any]:
        with changed:
            assert changed.wait_for(lambda: any(map(wanted, lines)), 90), lines[-1:]
            return next(line for line in lines if wanted(line))

    def command(role: str, **spec: Any) -> list[str]:
        return [sys.executable, "-m", "tests.server.processes", role, json.dumps(spec)]

    with Lab(3) as lab:
        address = f"tcp://{lab.address(0)}:7077"
        # Training ends when the worker that was cut off is back.
        argv = command("serve", address=address, stop=(10, 3), expect=2)
        server = lab.popen(0, argv, stdout=subprocess.PIPE, text=True)
        reader = threading.Thread(target=read, args=(server,), daemon=True)
        reader.start()
        workers = [lab.popen(i, command("work", address=address, slot=i), stdout=subprocess.DEVNULL) for i in (1, 2)]
        wait(lambda said: said.get("step", 0) >= 3)
        lab.cut(1)
        healing = time.monotonic() + 10
        wait(lambda said: "step" in said and said["left"] >= 1)
        before = len(lines)
        wait(lambda said: len(lines) >= before + 3)  # the others go on
        time.sleep(max(0.0, healing - time.monotonic()))
        lab.heal(1)
        end = wait(lambda said: "end" in said)
        assert server.wait(30) == 0
        reader.join(30)
        assert [worker.wait(60) for worker in workers] == [0, 0]
    assert end["joined"] >= 3
    check_counts(end)


def test_a_checkpoint_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    model = Ones()
    server = Server(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        reduce="sum",
        codec=None,
        checkpoint=tmp_path / "file" / "folder",
        save_every=2,
    )
    with serving(server, max_steps=5) as address:
        train_ones(address)
    assert {-float(v) for p in model.parameters() for v in p.detach().view(-1)} == {5.0}
    assert caplog.text.count("cannot write the server's checkpoint") == 1  # at 2, and not again at 4 and in the end


@pytest.mark.parametrize("mended", [False, True], ids=["stays full", "is mended"])
def test_a_full_disk_is_reported_once_and_the_last_checkpoint_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mended: bool
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        model = Ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def fill(server: Server) -> None:
            if server.clock.step == 3:
                (disk / "filler").write_bytes(bytes(40_000))
            elif mended and server.clock.step == 7:
                (disk / "filler").unlink()

        options: dict[str, Any] = {"reduce": "sum", "codec": None, "checkpoint": disk, "save_every": 2}
        server = Server(model, optimizer, on_step=fill, **options)
        with serving(server, max_steps=9) as address:
            train_ones(address)
        assert server.clock.step == 9
        said = [record.getMessage() for record in caplog.records if record.name == "thinwire.server.checkpoint"]
        wanted = rf"cannot write .*server\.pt \(no space left on device on the disk {disk}: the file needs at least "
        assert re.match(wanted + r"[\d,]+ bytes, [\d,]+ are free\): training goes on", said[0])
        assert said[1:] == ([f"the server's checkpoint {disk / 'server.pt'} can be written again"] if mended else [])
        left = {path.name for path in disk.iterdir()}
        assert left == ({"server.pt"} if mended else {"filler", "server.pt"})
        fresh = Ones()
        resumed = Server(fresh, torch.optim.SGD(fresh.parameters(), lr=1.0), **options)
        assert resumed.clock.step == (9 if mended else 2)
        assert {-float(v) for p in fresh.parameters() for v in p.detach().view(-1)} == {float(resumed.clock.step)}


def test_serve_writes_a_checkpoint_on_sigterm(tmp_path: Path) -> None:
    main = [sys.executable, "-c", "from thinwire.tools.cli import main; main()"]
    log = tmp_path / "log.jsonl"
    config = tmp_path / "run.toml"
    config.write_text(f'[training]\nevaluate_every = 100000\n[output]\nevents = "{log}"\n')
    options = ["--json", "-", "--port", "0", "--max-steps", "100000", "--config", str(config)]
    argv = [*main, "serve", "digits", *options, "--checkpoint", str(tmp_path / "saved")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["listening"]
        worker = subprocess.Popen([*main, "work", "digits", "--server", address])
        for line in server.stdout:
            if json.loads(line)["step"] >= 3:
                break
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors
        assert worker.wait(60) == 0
    state = torch.load(tmp_path / "saved" / "server.pt", weights_only=True)
    assert state["step"] >= 3
    end = read_log(log).end
    assert end is not None
    assert end.reason == "interrupted"


def test_ssp_keeps_its_bound_with_one_worker_five_times_slower(tmp_path: Path) -> None:
    recipe, slow = get_recipe("digits"), threading.Event()
    plan = make_plan(recipe, workers=3, max_steps=15, target=1.0, evaluate_every=1000)
    terms = ServerSettings(plan, workers=3, mode="ssp", bound=2, method="0.1", pull_method="0.1", timeout=30.0)
    log = EventLog(tmp_path / "log.jsonl", describe_served(recipe, terms, ClusterSpec(3, LinkSettings(), "test")))
    threads, begun = Threads(), listen(LOOPBACK)
    model_sleep = {0: 0.1, 1: 0.02, 2: 0.02}

    def slowed(slot: int) -> Any:
        def loss(model: Any, batch: Any) -> Any:
            slow.wait(model_sleep[slot])  # it is never set, so this sleeps
            return recipe.loss(model, batch)

        return loss

    with log:
        serving = Serving(recipe, None, terms, log.write)
        threads.start(lambda: log.end(serving.run(begun)))
        for slot in range(3):
            own = type(recipe)(**{**recipe.__dict__, "loss": slowed(slot)})
            threads.start(lambda slot=slot, own=own: work_served(own, None, begun.address, slot=slot))
        threads.join()
    steps: list[Step] = read_log(tmp_path / "log.jsonl").steps
    assert {step.rank for step in steps} == {0, 1, 2}
    assert max(max(step.staleness) for step in steps) == 2  # it is reached, and never exceeded
    assert all(0 <= stale <= 2 for step in steps for stale in step.staleness)
