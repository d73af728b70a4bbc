"""The files in the guide to clusters: the script for Slurm runs with commands that stand in for Slurm's."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).parent.parent
GUIDE = (PROJECT / "docs" / "guides" / "clusters.md").read_text()
# Of the first of four machines, n1 with the address 10.0.0.1 at eth7. `ip` answers as iproute2 does there.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then echo n1; echo n2; else echo "scontrol $*" >> "$CALLS"; fi',
    "srun": 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $OMP_NUM_THREADS srun $*" >> "$CALLS"; sleep $SLEEP; exit 3',
    "getent": 'echo "10.0.0.1 STREAM $2"',
    "ip": """case "$*" in
        "-o route get 10.0.0.1") echo "local 10.0.0.1 dev lo src 10.0.0.1 uid 0 \\    cache <local>" ;;
        "-o -4 addr show") echo "1: lo    inet 127.0.0.1/8 scope host lo"; echo "2: eth7    inet 10.0.0.1/24" ;;
        *) exit 1 ;;
    esac""",
}


def block(kind: str, what: str) -> str:
    found = [text for text in re.findall(rf"^```{kind}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) if what in text]
    assert len(found) == 1
    return str(found[0])


def start(folder: Path, seconds: str) -> tuple["subprocess.Popen[bytes]", Path]:
    """Run the script for Slurm; its `srun` takes so many seconds and fails."""
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(block("bash", "#SBATCH"))
    job = {"JOB_NODELIST": "n[1-4]", "CPUS_PER_TASK": "32", "NNODES": "4", "JOB_ID": "7", "RESTART_COUNT": "1"}
    job["SUBMIT_DIR"] = "/home/me"
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    calls = folder / "calls"
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "SLEEP": seconds}
    environment = {**os.environ, **variables, **paths}
    return subprocess.Popen(["bash", str(folder / "job.sh")], env=environment, start_new_session=True), calls


def until(calls: Path, text: str) -> str:
    for _ in range(600):
        if calls.exists() and text in (found := calls.read_text()):
            return found
        time.sleep(0.05)
    raise AssertionError(f"no call of {text}")


def test_a_job_fails_if_its_training_fails(tmp_path: Path) -> None:
    job, calls = start(tmp_path, "0")
    assert job.wait(60) == 3
    assert calls.read_text().split("\n")[0] == (
        "eth7 eth7 4 srun --cpus-per-task 32 torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 7-1 "
        "--rdzv-endpoint n1:29500 train.py /home/me/checkpoints"
    )


def test_a_job_goes_back_to_the_queue_before_its_time_is_over(tmp_path: Path) -> None:
    job, calls = start(tmp_path, "30")
    until(calls, "srun")
    job.send_signal(signal.SIGUSR1)
    try:
        assert "scontrol requeue 7" in until(calls, "requeue")
        assert job.wait(60) != 0
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # `srun` too, which Slurm ends


def test_the_manifest_mounts_the_volume_that_it_claims() -> None:
    claim, job = yaml.safe_load_all(block("yaml", "TrainJob"))
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
    (volume,), (mount,) = pod["volumes"], pod["containers"][0]["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mount["name"] == volume["name"] and mount["mountPath"] in job["spec"]["trainer"]["command"]


def test_the_image_has_the_script_that_the_manifest_runs() -> None:
    (copied, target) = re.findall(r"^COPY (.*) (\S+)$", block("dockerfile", "FROM"), re.MULTILINE)[-1]
    _, job = yaml.safe_load_all(block("yaml", "TrainJob"))
    assert all((PROJECT / path).is_file() for path in copied.split())
    assert job["spec"]["trainer"]["command"][1] in [target + Path(path).name for path in copied.split()]
