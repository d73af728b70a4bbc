"""The event log: what is written is read back, and what is damaged is named."""

import json
import math
from pathlib import Path

import pytest
import torch

from thinwire.errors import LogError
from thinwire.tools.events import Eval, EventLog, Histogram, Run, Step, read_log
from thinwire.tools.observe import TensorBoardMirror, describe_machine, gradient_histogram

RUN = Run(command="thinwire train digits", recipe="digits", method="topk1", workers=4, batch=8, parameters=10)


def step(number: int, **changes: float) -> Step:
    values = {"compute": 0.1, "compress": 0.01, "exchange": 0.2, "apply": 0.02, "loss": 1.5} | changes
    return Step(step=number, epoch=number / 10, wall=0.33 * number, bytes_sent=100, bytes_received=300, **values)  # type: ignore[arg-type]


def evaluation(number: int, value: float) -> Eval:
    return Eval(step=number, epoch=0.1, wall=1.0, split="test", metric="accuracy", value=value)


def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    histogram = Histogram(step=2, layer="fc1.weight", edges=[0.1, 1.0, 10.0], counts=[3, 4], zeros=1)
    with EventLog(path, RUN) as log:
        log.write(step(1))
        log.write(step(2, loss=math.inf))
        log.write(evaluation(2, 0.5))
        log.write(histogram)
        log.end("target")
    back = read_log(path)
    assert back.run.method == "topk1"
    assert math.isnan(back.run.target)
    assert back.steps[0] == step(1)
    assert back.steps[0].seconds == pytest.approx(0.33)
    assert math.isnan(back.steps[1].loss)
    assert back.evals == [evaluation(2, 0.5)]
    assert back.histograms == [histogram]
    assert back.end is not None
    assert (back.end.reason, back.end.steps, back.end.bytes_sent) == ("target", 2, 200)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_every_event_is_on_disk_at_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run.jsonl", RUN)
    log.write(step(1))
    assert len(read_log(tmp_path / "run.jsonl").steps) == 1  # before the log is closed
    log.__exit__(None, None, None)


@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_a_run_that_is_cut_short_says_so(tmp_path: Path, error: type[BaseException], reason: str) -> None:
    with pytest.raises(error), EventLog(tmp_path / "run.jsonl", RUN) as log:
        log.write(step(1))
        raise error
    end = read_log(tmp_path / "run.jsonl").end
    assert end is not None
    assert end.reason == reason


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with EventLog(path, RUN) as log:
        log.write(step(1))
        log.write(step(2))
    whole = path.read_bytes()
    start = whole.rstrip().rfind(b"\n") + 1
    for cut in range(start, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert len(read_log(path).steps) == 1
    path.write_bytes(whole[:-1])  # only the newline is missing
    assert len(read_log(path).steps) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{]", "line 2: not JSON"),
        ('{"event": "dance"}', "line 2: not a record of a known event"),
        ("[1]", "line 2: not a record of a known event"),
        ('{"event": "step", "step": 1}', "line 2: incomplete step record"),
        ('{"event": "resume", "step": "one"}', "line 2: resume.step is 'one', not of type int"),
        ('{"event": "histogram", "edges": 3}', "line 2: histogram.edges is not a list"),
    ],
)
def test_a_corrupt_middle_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "run.jsonl"
    with EventLog(path, RUN):
        pass
    path.write_text(path.read_text() + line + "\n" + line)
    with pytest.raises(LogError, match=complaint):
        read_log(path)


def test_a_log_of_an_older_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with EventLog(path, RUN) as log:
        log.end("max_steps")
    path.write_text(
        path.read_text().replace('"format": 2', '"colour": 1').replace('"version": ""', '"version": "0.1.0"')
    )
    with pytest.raises(LogError, match=r"thinwire 0.1.0 wrote this log in another format: make its report with that"):
        read_log(path)


def test_files_that_are_no_logs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(LogError, match="No such file"):
        read_log(path)
    path.write_text("")
    with pytest.raises(LogError, match="is empty"):
        read_log(path)
    path.write_bytes(b"\x89PNG\x00\xff\n")
    with pytest.raises(LogError, match="line 1: not JSON"):
        read_log(path)
    path.write_text('{"event": "resume", "step": 1}\n')
    with pytest.raises(LogError, match="a log begins with a run record"):
        read_log(path)


def test_a_log_is_never_overwritten_but_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with EventLog(path, RUN) as log:
        for number in (1, 2, 3):
            log.write(step(number))
        log.end("interrupted")
    with pytest.raises(LogError, match="exists already"):
        EventLog(path, RUN)
    path.write_bytes(path.read_bytes() + b'{"event": "st')  # torn
    with EventLog(path, RUN, resume_at=2) as log:
        log.write(step(3, loss=0.5))
        log.end("max_steps")
    back = read_log(path)
    assert [one.step for one in back.steps] == [1, 2, 3]
    assert back.steps[-1].loss == 0.5
    assert back.end is not None
    assert (back.end.reason, back.end.bytes_sent) == ("max_steps", 300)


def test_unknown_keys_of_a_newer_writer_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with EventLog(path, RUN) as log:
        log.write(evaluation(1, 0.5))
    path.write_text(path.read_text().replace('"split"', '"colour": "blue", "split"'))
    assert read_log(path).evals == [evaluation(1, 0.5)]


def test_histograms_count_every_entry() -> None:
    gradient = torch.tensor([0.0, 1e-3, -1e-3, 0.5, 1e-30, 1e9])
    histogram = gradient_histogram(7, "fc", gradient)
    assert sum(histogram.counts) + histogram.zeros == 6
    assert histogram.zeros == 1
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert gradient_histogram(7, "fc", torch.zeros(3)).edges == []


def test_the_machine_is_described_in_one_line() -> None:
    assert f"torch {torch.__version__}" in describe_machine()
    assert "\n" not in describe_machine()


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mirror = TensorBoardMirror(tmp_path / "board")
    with EventLog(tmp_path / "run.jsonl", RUN, mirrors=[mirror]) as log:  # which closes the mirror
        log.write(step(1))
        log.write(evaluation(1, 0.25))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert board.Scalars("loss")[0].value == 1.5
    assert board.Scalars("accuracy/test")[0].value == 0.25


def test_without_tensorboard_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(LogError, match="install it with pip"):
        TensorBoardMirror(tmp_path)


def test_steps_need_not_be_kept(tmp_path: Path) -> None:
    with EventLog(tmp_path / "run.jsonl", RUN, keep=False) as log:
        for number in (1, 2, 3):
            log.write(step(number))
        assert not log.log.steps
        end = log.end("max_steps")
    kept = read_log(tmp_path / "run.jsonl")
    assert len(kept.steps) == 3 and kept.end == end == kept.totals("max_steps")


def test_a_full_disk_does_not_end_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LogError, match="choose another place"):
        EventLog(Path("/dev/full"), RUN)
    with EventLog(tmp_path / "run.jsonl", RUN) as log:
        log._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115 - as if the disk were full from now on
        for number in (1, 2):
            log.write(step(number))
        log.end("max_steps")
    told = [record for record in caplog.records if "training goes on" in record.message]
    assert len(told) == 1
