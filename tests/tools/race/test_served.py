"""Training with a parameter server by one command: local processes, emulated hosts, MPI."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs
from thinwire.tools.events import read_log

_ENDS = ["--max-steps", "12", "--batch", "4"]


def thinwire(*arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, str(Path(sys.executable).with_name("thinwire")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def config(log: Path, evaluate_every: int = 6, **settings: str) -> list[str]:
    """Options that log to a file and evaluate so often, with further tables of the configuration."""
    tables = {"training": f"evaluate_every = {evaluate_every}", "output": f'events = "{log}"', **settings}
    path = log.with_suffix(".toml")
    path.write_text("".join(f"[{table}]\n{lines}\n" for table, lines in tables.items()))
    return ["--config", str(path)]


def check(log: Path, mode: str) -> None:
    """Every worker's steps and the master's evaluations are in the log, with the phases of a server."""
    found = read_log(log)
    assert found.run.method == f"{mode}:topk1/topk1"
    assert found.end is not None and found.end.reason == "max_steps"
    assert {step.rank for step in found.steps} == {0, 1}
    assert max(step.step for step in found.steps) >= 11  # figures of the last step may come after the end
    assert {eval_.step for eval_ in found.evals if eval_.split == "test"} >= {6, 12}
    late = [step for step in found.steps if step.step > 3]
    # Of the five modules the last, which is small, is in the layer of the one before it.
    assert all(len(step.waits) == len(step.staleness) == 4 for step in late)
    assert all(0.0 <= step.aggregate + step.synchronise <= step.exchange + 1e-6 for step in late)
    assert all(0.005 < step.density < 0.05 for step in late)


def test_local_processes(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = thinwire("train", "digits", "--server", "--workers", "2", *config(log), *_ENDS)
    assert done.returncode == 0, done.stderr
    check(log, "bsp")


def test_a_served_training_goes_on_only_if_it_is_asked_to(tmp_path: Path) -> None:
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    words = ["train", "digits", "--server", "--workers", "2", *config(log, 3), "--checkpoint", str(saved)]
    words += ["--batch", "4"]
    done = thinwire(*words, "--max-steps", "6")
    assert done.returncode == 0, done.stderr
    done = thinwire(*words, "--max-steps", "9")
    assert done.returncode == 2 and "--resume" in done.stderr
    done = thinwire(*words, "--max-steps", "9", "--resume")
    assert done.returncode == 0, done.stderr
    found = read_log(log)
    # Both runs end with a step, 6 and 9, whose figures may come after the end.
    assert set(range(1, 10)) - {6, 9} <= {s.step for s in found.steps} <= set(range(1, 10))
    assert [e.step for e in found.evals if e.split == "test"] == [3, 6, 9]


def test_emulated_hosts_with_bounded_staleness(tmp_path: Path) -> None:
    needs("lab")
    log = tmp_path / "log.jsonl"
    options = ["--rate", "100mbit", *config(log, server='mode = "ssp"\nbound = 2\npolicy = "stalest"')]
    done = thinwire("train", "digits", "--server", "--workers", "2", *options, *_ENDS)
    assert done.returncode == 0, done.stderr
    check(log, "ssp")
    assert max(max(step.staleness) for step in read_log(log).steps) <= 2


def test_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = Path(sys.executable).parent / "mpirun"
    log = tmp_path / "log.jsonl"
    options = ["--server", "--workers", "2", *config(log, network='transport = "mpi"'), *_ENDS]
    done = thinwire("train", "digits", *options, prefix=(str(mpirun), "-n", "3"))
    assert done.returncode == 0, done.stderr
    check(log, "bsp")


@pytest.mark.parametrize(
    ("options", "tables", "sentence"),
    [
        (["--server"], {"server": "mode = 'slow'"}, "mode is one of bsp, ssp, async"),
        (["--server"], {"server": "policy = 'best'"}, "the policy 'best' is unknown"),
        (["--server"], {"server": "pull_method = 'nothing'"}, "no preset is called 'nothing'"),
        ([], {"network": "transport = 'mpi'"}, "the last two go with --server"),
    ],
)
def test_impossible_settings_are_one_sentence(
    tmp_path: Path, options: list[str], tables: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from thinwire.tools.cli import run

    assert run(["train", "digits", *options, *config(tmp_path / "log.jsonl", 6, **tables)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error
