"""Commands on emulated hosts: environment variables, output, exit codes and failures."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs
from thinwire.errors import LabError
from thinwire.tools.lab import Lab

pytestmark = pytest.mark.usefixtures("lab_rights")
Start = Callable[..., "subprocess.Popen[str]"]


def test_ranks_and_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("loss")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = "import os, json; print(json.dumps(dict(os.environ)))"
    with Lab(2, rate="100mbit", loss="1%", host_rates={1: "5mbit"}) as lab:
        result = lab.run([sys.executable, "-c", script], per_host=2, env={"EXTRA": "yes"})
        address = lab.address(0)
    assert result.exit_code == 0
    seen = sorted((json.loads(line) for host in result.hosts for line in host.lines), key=lambda e: e["RANK"])
    for rank, env in enumerate(seen):
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "4")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == (address, "eth0")
        assert (env["OMP_NUM_THREADS"], env["EXTRA"]) == ("1", "yes")
        assert env["MASTER_PORT"].isdigit()
        about = json.loads(env["THINWIRE_LAB"])
        assert (about["hosts"], about["host"], about["loss"]) == (2, rank // 2, 0.01)
        assert about["rate"] == ("100mbit" if rank < 2 else "5mbit")


def test_output_arrives_line_by_line_with_its_host() -> None:
    lines: list[tuple[int, str]] = []
    with Lab(2) as lab:
        lab.run(
            ["sh", "-c", "echo out $RANK; echo err $RANK >&2; printf 'no newline'"],
            output=lambda *line: lines.append(line),
        )
    for host in range(2):
        assert [line for at, line in lines if at == host] == [f"out {host}", f"err {host}", "no newline"]


def test_output_without_line_breaks_is_divided() -> None:
    with Lab(1) as lab:
        result = lab.run(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"])
    *long, last = result.hosts[0].lines
    assert last == "end" and "".join(long) == "x" * 3_000_000
    assert len(long) > 1 and max(map(len, long)) < 2_000_000


def test_the_first_failure_decides_and_the_others_are_ended() -> None:
    with Lab(3) as lab:
        result = lab.run(["sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 600"], grace=0.2)
    assert result.exit_code == 7
    assert result.failure == "host h1 failed with exit code 7"
    assert [host.code for host in result.hosts] == [-signal.SIGTERM, 7, -signal.SIGTERM]


def test_others_may_end_by_themselves_in_the_grace_period() -> None:
    with Lab(2) as lab:
        result = lab.run(["sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 0.3; exit 0"], grace=30)
    assert [host.code for host in result.hosts] == [0, 7]


def test_a_host_that_dies_is_named() -> None:
    with Lab(2) as lab:
        result = lab.run(["sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 600"], grace=0)
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.failure == "host h1 died: killed by SIGKILL"


def test_a_real_time_signal_is_named_too() -> None:
    with Lab(1) as lab:
        result = lab.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 36)"])
    assert result.exit_code == 128 + 36
    assert result.failure == "host h0 died: killed by SIGRTMIN+2"


def test_characters_that_stdout_cannot_encode_and_the_rate_of_each_host(thinwire: Start, tmp_path: Path) -> None:
    file = tmp_path / "lab.json"
    arguments = ["--rate", "100mbit", "--host-rate", "1=5mbit", "--json", str(file), "--quiet"]
    command = ["printf", r"caf\303\251 \377\nnext\n"]
    process = thinwire("lab", *arguments, "--", *command, env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["[h0] caf? ?", "[h0] next", "[h1] caf? ?", "[h1] next"]
    assert [host["rate"] for host in json.loads(file.read_text())["per_host"]] == ["100mbit", "5mbit"]


def test_a_command_that_ignores_sigterm_is_killed_and_a_timeout_is_reported() -> None:
    with Lab(2) as lab:
        result = lab.run(["sh", "-c", "[ $RANK = 0 ] || { trap '' TERM; sleep 600; }"], timeout=0.5)
    assert result.exit_code == 124
    assert result.failure == "the command did not end within 0.5 s on h1"
    assert result.hosts[1].code == -signal.SIGKILL


def test_cpu_time_covers_the_process_tree() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    tree = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with Lab(2) as lab:
        result = lab.run([sys.executable, "-c", f"import os\nif os.environ['RANK'] == '1':\n {tree}"])
    idle, busy = result.hosts
    assert busy.cpu > 0.4 > idle.cpu
    assert busy.wall >= 0.4


def test_the_cores_are_shared_fairly() -> None:
    cores = len(os.sched_getaffinity(0))
    for hosts in (1, 2, 3, cores, 2 * cores, 2 * cores + 1):
        shares = [Lab(hosts).cores(host) for host in range(hosts)]
        assert len({len(share) for share in shares}) == 1
        counts = [sum(core in share for share in shares) for core in set().union(*shares)]
        assert len(set(counts)) == 1
    with Lab(cores) as lab:
        result = lab.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"])
        for host in result.hosts:
            assert json.loads(host.lines[0]) == lab.cores(host.host)


def test_popen_passes_signals_options_and_exit_codes(tmp_path: Path) -> None:
    with Lab(1) as lab:
        process = lab.popen(0, ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.communicate("through\n", timeout=20)[0] == "through\n"
        assert lab.popen(0, ["pwd"], cwd=tmp_path, stdout=subprocess.DEVNULL).wait(timeout=20) == 0
        assert lab.popen(0, ["sh", "-c", "exit 3"]).wait(timeout=20) == 3
        missing = lab.popen(0, ["no-such-command"], stderr=subprocess.PIPE, text=True)
        assert "cannot run 'no-such-command'" in missing.communicate(timeout=20)[1]
        assert missing.returncode == 127
        script = "trap 'echo caught; exit 4' USR1; echo ready; while :; do sleep 0.05; done"
        trapper = lab.popen(0, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert trapper.stdout is not None
        trapper.stdout.readline()
        trapper.send_signal(signal.SIGUSR1)
        assert trapper.stdout.readline() == "caught\n"
        assert trapper.wait(timeout=20) == 4


def test_kill_takes_every_process_of_one_host_only() -> None:
    with Lab(2) as lab:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        daemons = ["sh", "-c", "(setsid sleep 600 &) ; echo up; sleep 600"]
        first, second = (lab.popen(host, daemons, **options) for host in range(2))
        for process in (first, second):
            assert process.stdout is not None
            process.stdout.readline()
        lab.kill(0)
        assert first.wait(timeout=20) == -signal.SIGKILL
        assert first.stdout is not None
        assert first.stdout.read() == ""  # the daemon had the pipe open too, so it has ended
        assert second.poll() is None
        assert lab.popen(0, ["true"]).wait(timeout=20) == 0  # the host can be used again


def test_a_lab_is_used_inside_its_with_block() -> None:
    lab = Lab(1)
    with pytest.raises(LabError, match="not running"):
        lab.counters()
    with lab:
        with pytest.raises(ValueError, match="no host 1"):
            lab.cut(1)
        with pytest.raises(ValueError, match="per_host"):
            lab.run(["true"], per_host=0)
    with pytest.raises(LabError, match="not running"):
        lab.kill(0)


def test_the_command_prefixes_lines_and_writes_json(thinwire: Start, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = [
        "lab",
        "--hosts",
        "2",
        "--rate",
        "20mbit",
        "--json",
        str(file),
        "sh",
        "-c",
        "echo at $RANK; exit 3",
    ]
    process = thinwire(*words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert sorted(out.splitlines()) == ["[h0] at 0", "[h1] at 1"]
    assert "failed with exit code 3" in err
    figures = json.loads(file.read_text())
    assert (figures["hosts"], figures["rate"], figures["exit_code"]) == (2, "20mbit", 3)
    assert figures["command"] == ["sh", "-c", "echo at $RANK; exit 3"]
    for host, each in enumerate(figures["per_host"]):
        assert each["host"] == host
        assert each["wall_seconds"] > 0
        assert each["cpu_seconds"] > 0
        assert {"sent_bytes", "sent_packets", "received_bytes", "received_packets"} <= set(each)


def test_python_is_the_one_that_thinwire_is_installed_in(thinwire: Start, tmp_path: Path) -> None:
    for name in ("python", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\necho another python\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code = ["-c", "import sys; print(sys.executable)"]
    for name, expected in (
        ("python", sys.executable),
        ("python3", sys.executable),
        (str(tmp_path / "python"), "another python"),
    ):
        process = thinwire("lab", "--hosts", "1", "--quiet", "--", name, *code, env=path)
        out, err = process.communicate(timeout=60)
        assert (out, err) == (f"[h0] {expected}\n", "")


def test_json_goes_to_stdout_and_the_rest_to_stderr(thinwire: Start) -> None:
    process = thinwire("lab", "--hosts", "1", "--json", "-", "--", "echo", "a line")
    out, err = process.communicate(timeout=60)
    assert json.loads(out)["hosts"] == 1
    assert "[h0] a line" in err and "packets out" in err


def test_check_says_what_works(thinwire: Start, tmp_path: Path) -> None:
    process = thinwire("lab", "--check", "--json", str(tmp_path / "check.json"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "A lab with a rate can be built here." in out
    names = {each["name"] for each in json.loads((tmp_path / "check.json").read_text())}
    assert {"namespaces", "rate (tbf)", "loss (nftables)", "delay (netem)"} <= names
