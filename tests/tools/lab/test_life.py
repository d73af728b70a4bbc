"""The life of labs: several at once, killed at every stage, without root, and with many hosts."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyroute2
import pytest

import thinwire.tools.lab
from tests.needs import missing, needs
from tests.tools.lab import kills
from thinwire import _native
from thinwire.errors import LabError
from thinwire.tools.lab import Lab, registry
from thinwire.tools.lab.measure import loss

pytestmark = pytest.mark.usefixtures("lab_rights")
Start = Callable[..., "subprocess.Popen[str]"]

_SLEEPING_OWNER = """
from thinwire.tools.lab import Lab
with Lab(1) as lab:
    print(lab.name, flush=True)
    lab.run(["sleep", "600"])
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark every process of the test, and check afterwards that the machine is as it was."""
    before = kills.machine()
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("THINWIRE_KILLS", mark)
    yield mark
    monkeypatch.delenv("THINWIRE_KILLS")
    assert kills.left_over(mark) == []
    assert kills.machine() == before


def _eventually_no_record(name: str) -> None:
    end = time.monotonic() + 20
    while list(registry.directory().glob(f"{name}.*")):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_labs_side_by_side_do_not_collide(mark: str) -> None:
    def one(number: int) -> tuple[str, float]:
        with Lab(2, rate="50mbit") as lab:
            result = lab.run(["sh", "-c", "echo $RANK"])
            assert [host.lines for host in result.hosts] == [("0",), ("1",)]
            return lab.name, loss(lab, 0, 1, count=500)

    with ThreadPoolExecutor(4) as pool:
        names, losses = zip(*pool.map(one, range(4)), strict=True)
    assert len(set(names)) == 4
    assert losses == (0, 0, 0, 0)


def test_an_exception_leaves_nothing(mark: str) -> None:
    with pytest.raises(RuntimeError, match="user's own"), Lab(2, rate="10mbit") as lab:
        words = ["sh", "-c", "setsid sleep 600 & echo up; sleep 600"]
        process = lab.popen(0, words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        raise RuntimeError("the user's own")
    assert process.returncode == -signal.SIGKILL
    assert not list(registry.directory().glob(f"{lab.name}.*"))


def test_killed_labs_leave_nothing(mark: str) -> None:
    needs("loss")
    needs("delay line")
    for number in range(6):
        kills.one_kill(mark, number, 0.15 * number)


@pytest.mark.long
def test_fifty_labs_killed_in_random_states_leave_nothing() -> None:
    """The labs run on an emulated host, where all processes and namespaces but the test's own are theirs."""
    needs("loss")
    with Lab(1) as lab:
        result = lab.run([sys.executable, "-m", "tests.tools.lab.kills", "--runs", "50"], timeout=280)
    said = "\n".join(result.hosts[0].lines)
    assert result.exit_code == 0, said
    assert "50 labs killed: no process, namespace, device or run file is left." in said


def test_a_forked_child_neither_closes_nor_keeps_the_lab(mark: str) -> None:
    with Lab(1) as lab:
        child = os.fork()
        if child == 0:
            lab.close()
            time.sleep(600)
        assert lab.run(["true"]).exit_code == 0
    # The child still has copies of the lab's socket open, but the lab has ended.
    assert not list(registry.directory().glob(f"{lab.name}.*"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_stops_cleanly(thinwire: Start, mark: str, number: int, code: int) -> None:
    words = ["sh", "-c", "trap 'echo told; exit 0' INT TERM; echo up; while :; do sleep 0.05; done"]
    process = thinwire("lab", "--hosts", "3", "--rate", "10mbit", "--", *words)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(3)) == [f"[h{host}] up\n" for host in range(3)]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert {f"[h{host}] told" for host in range(3)} <= set(out.splitlines())
    assert "Traceback" not in err


def test_clean_removes_the_dead_and_spares_the_living(thinwire: Start, mark: str) -> None:
    words = [sys.executable, "-c", _SLEEPING_OWNER]
    dead, living = (subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2))
    assert dead.stdout is not None
    assert living.stdout is not None
    name, other = dead.stdout.readline().strip(), living.stdout.readline().strip()
    holder = int((registry.directory() / f"{name}.json").read_text().split('"holder": [')[1].split(",")[0])
    # A stopped holder cannot notice that its owner was killed.
    os.kill(holder, signal.SIGSTOP)
    os.kill(_child_of(holder), signal.SIGSTOP)
    dead.kill()
    dead.wait()
    process = thinwire("lab", "--clean")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"removed {name}" in out
    assert other in registry.living()
    _eventually_no_record(name)
    living.kill()
    living.wait()
    _eventually_no_record(other)


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_a_lab_whose_holder_was_killed_says_so(mark: str) -> None:
    with Lab(2) as lab:
        record = (registry.directory() / f"{lab.name}.json").read_text()
        os.kill(int(record.split('"holder": [')[1].split(",")[0]), signal.SIGKILL)
        with pytest.raises(LabError, match="has ended"):
            for _ in range(100):
                lab.counters()
                time.sleep(0.05)


def test_sixty_four_hosts_work(mark: str) -> None:
    with Lab(64, rate="100mbit") as lab:
        result = lab.run(["hostname"])
        assert [host.lines for host in result.hosts] == [(f"h{host}",) for host in range(64)]
        assert loss(lab, 0, 63, count=500) == 0


def test_without_root(mark: str) -> None:
    needs("loss")
    needs("delay line")
    if os.geteuid() != 0:
        with Lab(1) as lab:
            assert lab.mode == "user namespace"
        return
    # Some machines keep TAP devices to root: a delay is refused there, and the rest works.
    everybody = os.stat("/dev/net/tun").st_mode & 0o006 == 0o006
    delay = ", delay='5ms', delay_line=True"
    script = (
        "from thinwire.errors import LabError\nfrom thinwire.tools.lab import Lab\n"
        "try:\n"
        f" with Lab(1{delay}) as lab:\n"
        "  print(lab.delay_figures().scheduling)\n"
        "except LabError as error:\n"
        " print(error)\n"
        f"with Lab(2, rate='10mbit', loss='1%'{delay if everybody else ''}) as lab:\n"
        " print(lab.mode, lab.run(['id', '-u']).hosts[1].lines[0])\n"
        " lab.cut(0); lab.kill(1)"
    )
    source = Path(thinwire.tools.lab.__file__ or "").parents[2]
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "thinwire"
        os.chmod(directory, 0o755)
        shutil.copytree(source / "tools" / "lab", package / "tools" / "lab")
        for name in ("__init__.py", "_lazy.py", "errors.py", "tools/__init__.py"):
            shutil.copy(source / name, package / name)
        for program in (Path(_native.__file__), Path(_native.__file__).parent / "delay_line"):
            shutil.copy(program, package / program.name)
        shutil.copytree(Path(pyroute2.__file__).parent, Path(directory) / "pyroute2")
        result = subprocess.run(
            [_python_of_everybody(), "-c", script],
            env={**os.environ, "PYTHONPATH": directory, "XDG_RUNTIME_DIR": ""},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            user=65534,
            group=65534,
            extra_groups=[],
        )
    first, *rest = result.stdout.splitlines()
    assert rest == ["user namespace 65534"], result.stderr
    assert first == "normal priority" if everybody else "/dev/net/tun" in first and "Permission denied" in first


def _python_of_everybody() -> str:
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            version = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
            if subprocess.run(version, user=65534, group=65534, extra_groups=[], cwd="/").returncode == 0:
                return candidate
        except OSError:
            continue
    return missing("there is no Python interpreter that other users may run")
