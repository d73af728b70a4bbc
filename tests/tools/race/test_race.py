"""The main job as a user starts it: real processes, emulated hosts, logs, a table, a page."""

import io
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.cluster import Cluster, printed
from tests.needs import needs, small_disk
from thinwire import attach
from thinwire.tools import cli
from thinwire.tools.events import Step, read_log
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.options import table_of
from thinwire.tools.race import launch
from thinwire.tools.race.config import RunConfig, ServeConfig, TrainConfig, _read, load_config
from thinwire.tools.race.launch import ClusterSpec
from thinwire.tools.race.race import Result
from thinwire.tools.race.train import MethodResult

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

THINWIRE = Path(sys.executable).with_name("thinwire")
QUICK = ["--max-steps", "12", "--evaluate-every", "6", "--batch", "4"]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([THINWIRE, *words], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_race_in_the_lab_gives_figures_logs_and_a_page(tmp_path: Path) -> None:
    needs("delay")
    words = ["race", "--workers", "2", "--preset", "office", "--rate", "200mbit", "--methods", "dense,topk1,dgc"]
    done = run(*words, "--json", "race.json", "--report", "page.html", "--logs", "logs", *QUICK, cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert "2 workers at 200mbit, 2ms one way" in said and "without communication" in said
    assert "infinite, dense, topk1, dgc: starting the workers ..." in done.stderr
    assert re.search(r"^dgc \(run 6 of 6\): ended after 12 steps in \d+ s, loss", done.stderr, re.MULTILINE)
    figures = json.loads((tmp_path / "race.json").read_text())
    assert (figures["workers"], figures["rate"], figures["recipe"]) == (2, "200mbit", "digits")
    assert (figures["delay"], figures["packet_loss"]) == ("2ms", "0%")
    page = (tmp_path / "page.html").read_text()
    assert "digits: 2 workers at 200mbit, 2ms one way" in page and "<dt>delay line</dt>" in page
    if (line := figures["delay_line"]) is None:
        assert "Delays by the kernel's netem" in said
    else:
        assert line["packets"] > 1000 and line["share"] > 0.0 and line["p99_late_ms"] > 0.0
        assert "Delay line: " in said and "of one core, p99 lateness" in said
    assert figures["infinite_ms"] > 0
    dense, sparse, _ = figures["methods"]
    keys = "name step_ms overhead bytes_per_host_step steps_to_target seconds_to_target speedup test_metric"
    assert set(keys.split()) <= set(dense)
    # The kernel's counters: a ring of two hosts sends the gradient once, the largest 1 % a twentieth of it or less.
    assert 7.0e6 < dense["bytes_per_host_step"] < 8.0e6
    assert sparse["bytes_per_host_step"] < dense["bytes_per_host_step"] / 20
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    log = read_log(tmp_path / "logs" / "topk1-0.jsonl")
    assert log.run.delay == "2ms"
    assert [step.step for step in log.steps if step.rank == 0] == list(range(1, 13))
    assert all(0.005 < step.density < 0.1 for step in log.steps)
    assert log.histograms and log.end is not None and log.end.reason in ("max_steps", "target")


def test_transports_race_through_lost_packets(tmp_path: Path) -> None:
    """The lab's links lose packets, of TCP and of datagrams alike; what became of it is in the figures and the page."""
    needs("loss")
    words = ["race", "--workers", "2", "--transport", "tcp,udp", "--loss", "5%", "--json", "race.json"]
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
        "race", "--workers", "2", "--rate", "none", "--methods", "fp16,0.02", "--seeds", "1", *QUICK, cwd=tmp_path
    )  # fmt: skip
    assert "fp16" in done.stdout and "0.02" in done.stdout


def as_rank(rank: int, cwd: Path, words: list[str]) -> None:
    """The command in a process that torchrun might have started."""
    os.chdir(cwd)
    assert cli.run(words) == 0


def test_methods_see_the_same_data_and_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    base = ["train", "digits", "--workers", "2", "--method", "0.02", "--batch", "4"]
    settings = "[training]\nevaluate_every = 4\ndiagnose = 3\n[output]\nevents = '{}.jsonl'\n"
    for name in ("whole", "part"):
        (tmp_path / f"{name}.toml").write_text(settings.format(name))
    part = [*base, "--checkpoint", "saved", "--config", "part.toml"]
    # Two of the three by ranks that have torch already; the last as a user does it.
    printed(as_rank, 2, tmp_path, [*base, "--max-steps", "8", "--config", "whole.toml"])
    printed(as_rank, 2, tmp_path, [*part, "--max-steps", "4"])
    resumed = run(*part, "--max-steps", "8", "--resume", cwd=tmp_path)
    assert "0.02: starting the workers ..." in resumed.stderr and "0.02: ended after 8 steps" in resumed.stderr
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


def saving(rank: int, folder: Path, filler: Path) -> tuple[list[str], list[list[str]]]:
    """Save four checkpoints, the second and third of them on a full disk; return what was said and what was there."""
    from thinwire.tools.race import training

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire.checkpoint").addHandler(handler)
    model = DistributedDataParallel(torch.nn.Linear(80, 80))
    link = attach(model, 0.5, exchange="gather")
    checkpoint = training.Checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), link)
    there = []
    for step in range(1, 5):
        model(torch.ones(2, 80)).sum().backward()
        if rank == 0 and step == 2:
            filler.write_bytes(bytes(60_000))
        elif rank == 0 and step == 4:
            filler.unlink()
        dist.barrier()
        checkpoint.save(step, 1.0)
        dist.barrier()
        there.append(sorted(str(path.relative_to(folder)) for path in folder.rglob("*.p*")))
        dist.barrier()
    checkpoint.load()
    dist.barrier()
    for name in ("link-1.pt", "model.pt"):
        if rank == 0:
            flip_a_bit(folder / "step-00000004" / name)
        dist.barrier()
        with pytest.raises(training.CheckpointError, match=rf"cannot be used \({name} does not match its checksum\)"):
            checkpoint.load()
        dist.barrier()
    link.detach()
    logging.getLogger("thinwire.checkpoint").removeHandler(handler)
    return said, there


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of a file, which is in a tensor."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_full_disk_is_reported_once_and_damaged_files_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "200k") as disk:
        (first, there), (second, _) = cluster.run(saving, 2, disk / "saved", disk / "filler")
    files = [[f"step-0000000{step}/{name}.pt" for name in ("link-0", "link-1", "model")] for step in (1, 4)]
    assert there == [files[0], files[0], files[0], files[1]]
    assert len(first) == 2 and not second
    full = rf"\(no space left on device on the disk {disk}: the file needs at least [\d,]+ bytes, [\d,]+ are free\)"
    assert re.match(rf"cannot write the checkpoint .*step-00000002 {full}: training goes on", first[0])
    assert first[1] == f"the checkpoint {disk / 'saved' / 'step-00000004'} can be written again"


def test_warnings_of_ranks_are_shown() -> None:
    console = Console(file=io.StringIO(), width=200, record=True)
    with launch.RunProgress(["topk1"], [8], "accuracy", console) as progress:
        follower = launch.Follower([], progress)
        follower.read(0, "WARNING cannot write the checkpoint [x]")
        follower.read(0, "something else")
    assert console.export_text().splitlines()[1:] == ["cannot write the checkpoint [x]"]


@pytest.mark.long
def test_local_steps_and_their_tuner_train_over_emulated_links(tmp_path: Path) -> None:
    """`local4` exchanges every four steps; `auto` exchanges its first steps, and then takes local steps."""
    needs("lab")
    words = ["--rate", "2mbit", "--methods", "local4,auto", "--max-steps", "14", "--evaluate-every", "14"]
    run("race", "gpt", "--workers", "2", *words, "--batch", "2", "--json", "race.json", "--logs", "logs", cwd=tmp_path)
    figures = json.loads((tmp_path / "race.json").read_text())
    assert [method["name"] for method in figures["methods"]] == ["local4", "auto"]
    assert all(method["test_metric"] < 4.2 for method in figures["methods"])  # 4.7 in the first step
    local, auto = (
        [s.bytes_sent for s in read_log(tmp_path / "logs" / f"{name}-0.jsonl").steps if s.rank == 0]
        for name in ("local4", "auto")
    )
    exchange = 813_312 * 0.6 * 2 / 8  # 0.6 numbers per element in 2 bits
    assert max(local[:3]) < 0.1 * exchange and exchange < sum(local) < 5.0 * exchange
    assert min(auto[:5]) > 20_000 and sum(sent < 5_000 for sent in auto[6:]) >= 4


@pytest.mark.long
@pytest.mark.parametrize("server", [[], ["--server"]], ids=["ddp", "server"])
def test_a_training_goes_on_when_the_disk_is_full(tmp_path: Path, server: list[str]) -> None:
    (tmp_path / "run.toml").write_text("[output]\nevents = 'run.jsonl'\n[training]\nevaluate_every = 2\n")
    words = ["train", "digits", *server, "--workers", "2", "--batch", "4", "--max-steps", "4", "--config", "run.toml"]
    with small_disk(tmp_path / "disk", "1m") as disk:
        done = subprocess.run(
            [THINWIRE, *words, "--checkpoint", disk], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("cannot write the ") == 1 and f"no space left on device on the disk {disk}: the file" in said
    assert len([step for step in read_log(tmp_path / "run.jsonl").steps if step.rank == 0]) == 4


DENSE = MethodResult("dense", 100.0, 10.0, 90.0, 1e6, 40.0, 60.0, 1.0, 0.99, 0.97)
SPARSE = replace(DENSE, name="topk1+gather", step_ms=10.0, seconds_to_target=12.0, speedup=5.0)


def result(*methods: MethodResult, target: float | None = 0.96) -> Result:
    return Result(ClusterSpec(2, LinkSettings("100mbit"), ""), "digits", "accuracy", target, 9.0, list(methods), [])


def test_the_verdict_names_a_line_that_works() -> None:
    said = result(DENSE, SPARSE).verdict()
    assert said.startswith("Worth it with 2 workers at 100mbit: topk1+gather reaches 96.0 % accuracy 5.0x sooner")
    assert said.endswith("use thinwire.attach(model, 'topk1', exchange='gather').")


def test_a_small_gain_is_not_worth_it() -> None:
    assert result(DENSE, replace(SPARSE, speedup=1.05)).verdict().startswith("Not worth it")
    never = replace(SPARSE, seconds_to_target=None, speedup=None)
    assert "dense reaches 96.0 % accuracy and no compressed method does" in result(DENSE, never).verdict()


def test_the_verdict_says_what_was_not_measured() -> None:
    never = [replace(m, seconds_to_target=None, speedup=None) for m in (DENSE, SPARSE)]
    worse = replace(never[1], test_metric=0.9)
    said = result(never[0], worse, target=None).verdict()
    assert said.startswith("Not decided") and "no target was set" in said and "has only 90.0 % accuracy" in said
    assert "no method reached 96.0 % accuracy" in result(*never).verdict()
    assert result(SPARSE).verdict().startswith("Not decided")


def test_figures_tell_the_versions_that_made_them() -> None:
    figures = result(DENSE, SPARSE).to_json()
    assert (figures["version"], figures["python"]) == (thinwire.__version__, platform.python_version())


def test_the_results_table_fits_80_columns() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    wide = replace(DENSE, name="percentile90-residual", step_ms=12345.0, seconds_to_target=12345.6, speedup=123.4)
    console.print(table_of([wide.row(), SPARSE.row()], title="digits"))
    shown = console.export_text()
    assert "12,345.6" in shown and "123.4x" in shown and "…" not in shown


def test_progress_is_a_line_every_few_seconds_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LINE_EVERY", 0.02)
    console = Console(file=io.StringIO(), width=200, record=True)

    def said(pattern: str) -> None:
        until = time.monotonic() + 60
        while not re.search(pattern, console.export_text(clear=False)):
            assert time.monotonic() < until, console.export_text()
            time.sleep(0.01)

    with launch.RunProgress(["infinite", "topk1"], [8, 100], "accuracy", console) as progress:
        said(r"^infinite, topk1: starting the workers \.\.\.\nstarting the workers, \d+ s so far\n")
        for number in (1, 2):
            step = Step(
                step=number, epoch=0.1, wall=0.1, compute=0.1, compress=0.0, exchange=0.1, apply=0.0,
                bytes_sent=1_000_000, bytes_received=1, loss=1.5,
            )  # fmt: skip
            progress.watch(1, step)
            left = "" if number == 1 else r", at most \d+ (s|min) left in this run"
            said(rf"\ntopk1 \(run 2 of 2\): step {number} of 100, loss 1.500, {number}.0 MB sent{left}\n")
        progress.watch(1, "max_steps")
    assert "ended after 2 steps" in console.export_text().splitlines()[-1]


def test_the_same_command_works_under_torchrun(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    (tmp_path / "run.toml").write_text("[output]\nevents = 'run.jsonl'\n[training]\nevaluate_every = 6\n")
    train = [str(THINWIRE), "train", "digits", "--config", "run.toml", "--max-steps", "12", "--batch", "4"]
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
        (["race", "--workers", "1"], "workers"),
        (["race", "--workers", "2000"], "a lab has 1 to 250 hosts"),
        (["race", "--transport", "mpi"], "--transport takes tcp and udp"),
        (["race", "--transport", "udp", "--loss", "much"], "is not understood"),
        (["race", "--transport", "udp", "--on-loss", "hope"], "restore"),
        (["race", "--loss", "0%,5%"], "the loss '0%,5%' is not understood"),
        (["race", "--preset", "moon"], "there is no network preset 'moon'"),
        (["race", "--host-delay", "4=5ms"], "there is no host 4"),
        (["race", "--delay", "5"], "the delay '5' is not understood"),
        (["train", "digits", "--delay", "5"], "the delay '5' is not understood"),
        (["advise", "--preset", "moon"], "there is no network preset 'moon'"),
        (["race", "--method", "topk1"], "--method go with --transport"),
        (["race", "--transport", "udp", "--rate", "none"], "lost in the lab"),
        (["race", "--methods", "infinite"], "no method besides the infinite network"),
        (["race", "--transport", "udp", "--methods", "topk1", "--seeds", "2"], "--methods, --seeds do not go with"),
        (["train", "digits", "--resume"], "--checkpoint"),
        (["train", "digits", "--resume", "--checkpoint", "nowhere"], "nowhere holds no checkpoint"),
        (["train", "digits", "--lr", "nan"], "a learning rate is positive, not nan"),
        (["race", "--rate", "100Mbps"], "write bits: 100mbit"),
        (["race", "--rate", "100mbit/s"], "in '100mbit/s'"),
        (["simulate", "scale", "--compute", "80"], "--compute '80' is not understood"),
        (["simulate", "scale", "--compute", "80ms", "--cores", "2"], "--cores describe measurements"),
        (["train", "cifar10", "--data", "nowhere"], "nowhere"),
        (["train", "digits", "--workers", "2", "--checkpoint", "/proc/none", "--max-steps", "1"], "/proc/none"),
    ],
)
def test_mistakes_get_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], hint: str) -> None:
    assert cli.run(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("thinwire") and hint in lines[0]


@pytest.mark.parametrize(
    ("words", "settings", "hint"),
    [
        (["train", "digits"], "[server]\nmode = 'async'\npull_method = 'topk1'", "mode and pull_method would have no"),
        (["train", "digits", "--server"], "[server]\nbound = 2", "bound would have no effect"),
        (["train", "digits"], "[training]\nepochs = -1", "the number of epochs must be above 0, not -1.0"),
        (["train", "digits", "--method", "fp16"], "[training]\ndiagnose = 5", "diagnose compares a compressed link"),
        (["train", "digits"], "[training]\nbatch = 'many'", "[training] batch must be a whole number, not 'many'"),
        (["train", "digits"], "[training]\nbatch = true", "[training] batch must be a whole number, not True"),
        (["train", "digits"], "[training]\nbatch = 0", "[training] batch must be at least 1, not 0"),
        (["train", "digits"], "[training]\nbatsch = 1", "[training] has no key 'batsch'; its keys are workers, method"),
        (["train", "digits"], "[trainings]\nbatch = 1", "has no use for 'trainings': its tables are [training]"),
        (["train", "digits"], "batch = 1", "has no use for 'batch'"),
        (["train", "digits"], "batch 1", "is not TOML"),
        (["train", "digits"], None, "cannot read the configuration"),
        (["serve", "digits"], "[server]\nbound = 2", "bound would have no effect"),
        (["serve", "digits"], "[server]\nsave_every = 2", "save_every would have no effect: it goes with --checkpoint"),
        (["serve", "digits"], "[network]\nrate = '1mbit'", "[network] has no key 'rate'"),
    ],
)
def test_mistakes_in_the_configuration_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], settings: str | None, hint: str
) -> None:
    if settings is not None:
        (tmp_path / "run.toml").write_text(settings)
    assert cli.run([*words, "--config", str(tmp_path / "run.toml")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("thinwire") and hint in lines[0]


def test_options_override_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[training]\nworkers = 3\nbatch = 4\nseed = 7\nlr = 1\n[output]\nevents = 'run.jsonl'\n"
    )
    seen: list[TrainConfig] = []

    def command(context: typer.Context, workers: int = 4, batch: int | None = None, events: Path | None = None) -> None:
        seen.append(load_config(TrainConfig, tmp_path / "run.toml", context))

    application = typer.Typer()
    application.command()(command)
    assert cli.run(["--workers", "2", "--events", "other.jsonl"], application) == 0
    (config,) = seen
    assert (config.workers, config.batch, config.seed, config.lr) == (2, 4, 7, 1.0)
    assert config.events == Path("other.jsonl") and isinstance(config.lr, float)


@pytest.mark.parametrize(("command", "kind"), [("train", TrainConfig), ("serve", ServeConfig)])
def test_the_printed_configuration_holds_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, kind: type[RunConfig]
) -> None:
    assert cli.run([command, "--print-config"]) == 0
    text = capsys.readouterr().out
    found = tomllib.loads(text)
    given = {name: value for table in found.values() for name, value in table.items()}
    assert given == {k: v for k, v in vars(kind()).items() if v is not None}
    # With the examples, too, it is a file that the command reads.
    every = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert {name for table in tomllib.loads(every).values() for name in table} == set(vars(kind()))
    (tmp_path / "run.toml").write_text(every)
    assert set(_read(kind, tmp_path / "run.toml")) == set(vars(kind()))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "saved" / "step-00000005").mkdir(parents=True)
    (tmp_path / "saved" / "step-00000005" / "model.pt").write_bytes(b"no model at all")
    words = ["train", "digits", "--workers", "1", "--checkpoint", "saved", "--resume", "--max-steps", "6"]
    done = subprocess.run([THINWIRE, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "the checkpoint saved/step-00000005 cannot be used" in done.stderr


def test_ctrl_c_stops_everything_and_shows_the_finished_methods(tmp_path: Path) -> None:
    needs("lab")
    mark = f"thinwire-test-{os.getpid()}"
    words = ["race", "--workers", "2", "--rate", "50mbit", "--methods", "topk1,dense", "--logs", mark]
    process = subprocess.Popen(
        [THINWIRE, *words, "--max-steps", "20", "--batch", "4"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    log = tmp_path / mark / "dense-0.jsonl"
    until = time.monotonic() + 180
    while time.monotonic() < until and (not log.exists() or log.read_text().count("\n") < 3):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "topk1" in out and "dense" not in out
    assert "the race was stopped: 1 of 2 runs were finished." in error
    workers = subprocess.run(
        ["pgrep", "-f", "thinwire.tools.race.training"], capture_output=True, text=True
    ).stdout.split()
    mine = [pid for pid in workers if str(tmp_path) in os.readlink(f"/proc/{pid}/cwd")]
    assert not mine
    end = read_log(log).end
    assert end is not None and end.reason == "interrupted"
