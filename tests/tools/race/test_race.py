"""The main job as a user starts it: real processes, emulated hosts, logs, a table, a page."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cluster import Cluster, printed
from tests.needs import needs
from thinwire.tools import cli
from thinwire.tools.events import read_log
from thinwire.tools.race.race import Field, Result, Standing

THINWIRE = Path(sys.executable).with_name("thinwire")
QUICK = ["--max-steps", "12", "--evaluate-every", "6", "--batch", "4"]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([THINWIRE, *words], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_race_in_the_lab_gives_figures_logs_and_a_page(tmp_path: Path) -> None:
    needs("lab")
    words = ["race", "--hosts", "2", "--rate", "200mbit", "--methods", "dense,topk1,dgc", "--json", "race.json"]
    done = run(*words, "--report", "page.html", "--logs", "logs", *QUICK, cwd=tmp_path)
    assert "infinite network" in done.stdout
    figures = json.loads((tmp_path / "race.json").read_text())
    assert (figures["hosts"], figures["rate"], figures["recipe"]) == (2, "200mbit", "digits")
    assert figures["infinite_ms"] > 0
    dense, sparse, _ = figures["methods"]
    keys = "name step_ms tax bytes_per_host_step steps_to_target seconds_to_target speedup train_accuracy test_accuracy"
    assert set(keys.split()) <= set(dense)
    # The kernel's counters: a ring of two hosts sends the gradient once, the largest 1 % a twentieth of it or less.
    assert 7.0e6 < dense["bytes_per_host_step"] < 8.0e6
    assert sparse["bytes_per_host_step"] < dense["bytes_per_host_step"] / 20
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    log = read_log(tmp_path / "logs" / "topk1-0.jsonl")
    assert [step.step for step in log.steps if step.rank == 0] == list(range(1, 13))
    assert all(0.005 < step.density < 0.1 for step in log.steps)
    assert log.histograms and log.end is not None and log.end.reason in ("max_steps", "target")


def test_transports_race_through_lost_packets(tmp_path: Path) -> None:
    """The lab's links lose packets, of TCP and of datagrams alike; what became of it is in the figures and the page."""
    needs("loss")
    words = ["race", "--hosts", "2", "--transport", "tcp,udp", "--loss", "5%", "--json", "race.json"]
    done = run(*words, "--report", "page.html", "--logs", "logs", *QUICK, cwd=tmp_path)
    assert "tcp's wait over udp's" in done.stdout
    tcp, udp = json.loads((tmp_path / "race.json").read_text())["runs"]
    assert (tcp["transport"], tcp["loss"], tcp["datagrams"]) == ("tcp", "5%", 0)
    assert udp["on_loss"] == "restore" and udp["restored"] > 0.0
    assert 0.005 < udp["datagrams_lost"] / udp["datagrams"] < 0.2
    assert len(udp["curve"]) == 2 and tcp["wait_ms"] > 0.0
    run_of = read_log(tmp_path / "logs" / "udp-restore-5.jsonl").run
    assert (run_of.transport, run_of.packet_loss) == ("udp-restore", 0.05)
    assert '"loss":[{"transport":"tcp"' in (tmp_path / "page.html").read_text().replace(" ", "")


def test_without_shaping_a_race_runs_on_loopback(tmp_path: Path) -> None:
    done = run(
        "race", "--hosts", "2", "--rate", "none", "--methods", "fp16,0.02", "--seeds", "1", *QUICK, cwd=tmp_path
    )  # fmt: skip
    assert "fp16" in done.stdout and "0.02" in done.stdout


def as_rank(rank: int, cwd: Path, words: list[str]) -> None:
    """The command in a process that torchrun might have started."""
    os.chdir(cwd)
    assert cli.run(words) == 0


def test_methods_see_the_same_data_and_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    base = ["train", "digits", "--workers", "2", "--compress", "0.02", "--evaluate-every", "4", "--batch", "4"]
    base += ["--diagnose", "3"]
    part = [*base, "--checkpoint", "saved", "--events", "part.jsonl"]
    # Two of the three by ranks that have torch already; the last as a user does it.
    printed(as_rank, 2, tmp_path, [*base, "--max-steps", "8", "--events", "whole.jsonl"])
    printed(as_rank, 2, tmp_path, [*part, "--max-steps", "4"])
    run(*part, "--max-steps", "8", "--resume", cwd=tmp_path)
    for more, hint in ((["--max-steps", "9"], "--resume"), (["--resume", "--lr", "0.001"], "trained with lr")):
        done = subprocess.run([THINWIRE, *part, *more], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and hint in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000008"]
    whole, parts = read_log(tmp_path / "whole.jsonl"), read_log(tmp_path / "part.jsonl")
    assert [s.loss for s in whole.steps] == [s.loss for s in parts.steps]
    assert len(whole.steps) == 8
    assert whole.evals[-1].value == parts.evals[-1].value
    assert [d.step for d in whole.diagnoses] == [d.step for d in parts.diagnoses] == [3, 6]
    assert [d.delta for d in whole.diagnoses] == [d.delta for d in parts.diagnoses]


def separate(rank: int, folder: Path) -> str:
    """Each rank has a folder of its own, as machines without a shared one have; only rank 0's holds a checkpoint."""
    from thinwire.tools.race.training import Checkpoint, CheckpointError

    model = torch.nn.Linear(2, 2)
    place = Checkpoint(folder / str(rank), model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    if rank == 0:
        (folder / "0" / "step-00000004").mkdir()
        (folder / "0" / "step-00000004" / "model.pt").write_bytes(b"")
    try:
        place.load()
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_find_different_checkpoints_do_not_go_on(cluster: Cluster, tmp_path: Path) -> None:
    for told in cluster.run(separate, 2, tmp_path):
        assert "rank 0 finds step 4" in told and "rank 1 step 0" in told and "all machines share" in told


def test_the_verdict_names_a_line_that_works() -> None:
    standing = Standing("dense", 100.0, 0.0, 0.0, 1e6, None, None, None, None, None)
    sparse = replace(standing, name="topk1+gather", step_ms=10.0)
    result = Result(Field(2, "100mbit", ""), "digits", "accuracy", None, 9.0, [standing, sparse], [])
    assert result.verdict().endswith("use thinwire.attach(model, 'topk1', exchange='gather').")


def test_the_same_command_works_under_torchrun(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    train = [str(THINWIRE), "train", "digits", "--events", "run.jsonl", *QUICK]
    done = subprocess.run([*words, *train], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path / "run.jsonl")
    assert log.run.workers == 2 and len(log.steps) == 12


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["race", "nonsense"], "nonsense"),
        (["race", "--methods", "dense,magic"], "magic"),
        (["race", "--methods", "dense,topk1+magic"], "no exchange is called 'magic'"),
        (["race", "--rate", "fast"], "fast"),
        (["race", "--target", "7"], "target"),
        (["race", "--hosts", "1"], "hosts"),
        (["race", "--hosts", "2000"], "workers"),
        (["race", "--transport", "mpi"], "--transport takes tcp and udp"),
        (["race", "--transport", "udp", "--loss", "much"], "is not understood"),
        (["race", "--transport", "udp", "--on-loss", "hope"], "restore"),
        (["race", "--loss", "5%"], "--loss go with --transport"),
        (["race", "--compress", "topk1"], "--compress go with --transport"),
        (["race", "--transport", "udp", "--rate", "none"], "lost in the lab"),
        (["race", "--methods", "infinite"], "no method besides the infinite network"),
        (["race", "--transport", "udp", "--methods", "topk1", "--seeds", "2"], "--methods, --seeds do not go with"),
        (["train", "digits", "--mode", "async", "--pull", "topk1"], "--mode, --pull go with --server"),
        (["train", "digits", "--resume"], "--checkpoint"),
        (["train", "digits", "--resume", "--checkpoint", "nowhere"], "nowhere holds no checkpoint"),
        (["train", "digits", "--server", "--bound", "2"], "--bound goes with --mode ssp"),
        (["train", "digits", "--lr", "nan"], "a learning rate is positive, not nan"),
        (["train", "digits", "--epochs", "-1"], "--epochs is a number above 0, not -1.0"),
        (["race", "--rate", "100Mbps"], "write bits: 100mbit"),
        (["race", "--rate", "100mbit/s"], "in '100mbit/s'"),
        (["serve", "digits", "--bound", "2"], "--bound goes with --mode ssp"),
        (["serve", "digits", "--save-every", "2"], "--save-every goes with --checkpoint"),
        (["simulate", "scale", "--compute", "80"], "--compute '80' is not understood"),
        (["simulate", "scale", "--compute", "80ms", "--cores", "2"], "--cores are of the measurements"),
        (["train", "digits", "--compress", "fp16", "--diagnose", "5"], "--diagnose looks at a link"),
        (["train", "cifar10", "--data", "nowhere"], "nowhere"),
        (["train", "digits", "--workers", "2", "--checkpoint", "/proc/none", "--max-steps", "1"], "/proc/none"),
    ],
)
def test_mistakes_get_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], hint: str) -> None:
    assert cli.run(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("thinwire") and hint in lines[0]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "saved" / "step-00000005").mkdir(parents=True)
    (tmp_path / "saved" / "step-00000005" / "model.pt").write_bytes(b"no model at all")
    words = ["train", "digits", "--workers", "1", "--checkpoint", "saved", "--resume", "--max-steps", "6"]
    done = subprocess.run([THINWIRE, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "the checkpoint saved/step-00000005 cannot be used" in done.stderr


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    needs("lab")
    mark = f"thinwire-test-{os.getpid()}"
    words = ["race", "--hosts", "2", "--rate", "50mbit", "--methods", "dense", "--logs", mark, "--max-steps", "500"]
    process = subprocess.Popen(
        [THINWIRE, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    log = tmp_path / mark / "dense-0.jsonl"
    until = time.monotonic() + 180
    while time.monotonic() < until and (not log.exists() or log.read_text().count("\n") < 3):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    workers = subprocess.run(
        ["pgrep", "-f", "thinwire.tools.race.worker"], capture_output=True, text=True
    ).stdout.split()
    mine = [pid for pid in workers if str(tmp_path) in os.readlink(f"/proc/{pid}/cwd")]
    assert not mine
    end = read_log(log).end
    assert end is not None and end.reason == "interrupted"
