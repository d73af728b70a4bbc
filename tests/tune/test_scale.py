"""The scale model: its arithmetic against direct computation, its calibration, and the command with its page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.report.browser import render
from thinwire.tools.cli import run
from thinwire.tools.simulate.scale import (
    EXCHANGES,
    Point,
    Scaling,
    SimulatedCluster,
    Task,
    calibrated,
    off,
    predict,
    slowest,
)
from thinwire.tune.forecast import EVERY

TASK = Task(elements=1_000_000, frame=25_000.0, compute=0.05, encode=0.002, decode=0.0004)
CLUSTER = SimulatedCluster(rate=100e6, delay=0.001)
LAB = replace(CLUSTER, delay=0.0, cores=2, switching=0.001)


@pytest.mark.parametrize("n", [2, 16, 300])
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_the_slowest_of_many_is_the_mean_maximum(n: int, spread: float) -> None:
    sigma = np.sqrt(np.log1p(spread**2))
    drawn = np.random.default_rng(0).lognormal(-0.5 * sigma**2, sigma, (20_000, n))
    assert drawn.mean() == pytest.approx(1.0, rel=0.02) and drawn.std() == pytest.approx(spread, rel=0.05)
    assert slowest(n, spread) == pytest.approx(drawn.max(axis=1).mean(), rel=0.03)


def test_without_a_spread_nobody_is_slower() -> None:
    assert slowest(4096, 0.0) == slowest(1, 0.5) == 1.0


def test_what_travels() -> None:
    def sent(exchange: str, n: int) -> float:
        return EXCHANGES[exchange](n, TASK, CLUSTER).sent

    assert sent("ring", 4) == pytest.approx(2 * 4e6 * 3 / 4)
    assert sent("gather", 16) == 15 * 25_000
    assert sent("star", 16) == 25_000 and EXCHANGES["star"](16, TASK, CLUSTER).busiest == 2 * 16 * 25_000
    assert sent("scatter-reduce", 2) == pytest.approx(1.5 * 25_000, rel=0.1)  # half a frame, and what two ranks chose
    for n in (4, 16, 64):
        assert sent("scatter-reduce", n) == pytest.approx(2 * 25_000 + 700 * (n - 1), rel=0.01)
    assert sent("hierarchical", 8) == 0.0  # one machine
    assert 8 * sent("hierarchical", 64) == pytest.approx(sent("gather", 8))


def test_a_step_is_the_sum_of_its_parts() -> None:
    plain = replace(TASK, per_byte=0.0, per_message=0.0)
    found = predict("gather", 5, plain, CLUSTER)
    assert found.seconds == pytest.approx(0.05 + 8 * 4 * 25_000 / 100e6 + 0.001 + 0.002 + 5 * 0.0004)
    assert found.efficiency == pytest.approx(0.05 / found.seconds)
    shared = predict("gather", 8, plain, replace(CLUSTER, cores=2))
    computing = 4 * (0.05 + 0.002 + 8 * 0.0004)
    assert shared.seconds == pytest.approx(computing + 8 * 7 * 25_000 / 100e6 + 0.001)
    # With a longer way TCP paces the packets over 0.8 of it, of which the link's own time is a part.
    far = predict("gather", 5, plain, replace(CLUSTER, delay=0.05))
    paced = 0.8 * 0.05 * (1 - 2 * 1448 / 25_000)
    assert far.seconds == pytest.approx(found.seconds - 8 * 4 * 25_000 / 100e6 - 0.001 + paced + 0.05)
    hidden = predict("gather", 5, replace(plain, overlap=0.1), CLUSTER)
    assert hidden.seconds == pytest.approx(found.seconds - 0.1 * 0.05)
    slow = replace(CLUSTER, stragglers=0.3, rate_spread=0.3)
    assert predict("none", 64, plain, slow).seconds == pytest.approx(0.05 * slowest(64, 0.3))
    ring, usual = predict("ring", 64, plain, slow).seconds, predict("ring", 64, plain, CLUSTER).seconds
    assert ring == pytest.approx(slowest(64, 0.3) * (usual - 2 * 63 * 0.001) + 2 * 63 * 0.001)


@given(
    exchange=st.sampled_from(sorted(EXCHANGES)),
    workers=st.integers(2, 4096),
    rate=st.floats(1e6, 1e11),
    spread=st.floats(0.0, 2.0),
)
def test_more_of_everything_takes_longer(exchange: str, workers: int, rate: float, spread: float) -> None:
    cluster = replace(CLUSTER, rate=rate, stragglers=spread, rate_spread=spread)
    found = predict(exchange, workers, TASK, cluster)
    assert found.seconds >= TASK.compute and 0.0 < found.efficiency <= 1.0
    assert predict(exchange, 2 * workers, TASK, cluster).seconds >= 0.999 * found.seconds
    assert predict(exchange, workers, TASK, replace(cluster, rate=rate / 2)).seconds >= found.seconds
    uneven = predict(exchange, workers, TASK, replace(cluster, stragglers=spread + 0.5)).seconds
    # Where an exchange takes longer than the local steps beside it, their time does not count.
    assert uneven >= 0.999999 * found.seconds if EVERY.get(exchange, 1) > 1 else uneven > found.seconds
    assert predict(exchange, workers, TASK, replace(cluster, cores=1)).seconds > found.seconds


def test_local_steps_hide_the_network_and_stragglers() -> None:
    place = replace(CLUSTER, rate=5e6, stragglers=0.3)
    step = {name: predict(name, 16, TASK, place) for name in ("ring", *EVERY)}
    assert [p.seconds for p in step.values()] == sorted((p.seconds for p in step.values()), reverse=True)
    assert step["local64"].seconds == pytest.approx(0.05 * slowest(16, 0.3 / 8))  # a round of 64 steps is more even
    once = EXCHANGES["local16"](16, TASK, place).sent
    assert once == pytest.approx(2 * 15 / 16 * 1.08 * 5e5, rel=0.01)  # 4 bits for each of a million elements
    assert step["local16"].sent == pytest.approx(once / 16)


def test_the_choice_for_adam_is_the_first_that_hides_the_network() -> None:
    found = Scaling(TASK, CLUSTER, ("ring", "gather", *EVERY), (2, 16, 256), (), LAB, "")
    assert {name for name, _ in found.fastest()} <= {"ring", "gather", "update"}
    assert found.hiding()[-1][1] == 256 and found.hiding()[0][0] != "ring"
    assert "With Adam, the first to hide the network is" in found.verdict()
    free = replace(TASK, per_byte=0.0, per_message=0.0)
    fast = replace(found, task=free, cluster=replace(CLUSTER, rate=1e12, delay=0.0))
    assert fast.hiding() == [("ring", 256)]
    gathered = replace(found, exchanges=("gather",))
    assert gathered.hiding() == [] and "Adam" not in gathered.verdict()


def measured(workers: int, rate: float, task: Task = TASK) -> list[Point]:
    """Steps as the model itself has them."""
    points = []
    for exchange in ("none", "ring", "gather", "scatter-reduce"):
        place = replace(LAB, rate=rate)
        found = predict(exchange, workers, task, place)
        traffic = EXCHANGES[exchange](workers, task, place) if exchange != "none" else None
        codec = traffic.encodes * task.encode + traffic.decodes * task.decode if traffic else 0.0
        points.append(Point(exchange, workers, rate, found.seconds, found.sent, codec))
    return points


@pytest.mark.parametrize("overlap", [0.0, 0.2])
def test_calibration_finds_what_is_measured(overlap: float) -> None:
    # With an overlap the exchange must be long enough to show it.
    true = replace(TASK, per_byte=1e-9, wire=1.1, overlap=overlap, encode=0.004 + 0.05 * overlap)
    points = [p for n in (2, 4, 8) for rate in (100e6, 400e6) for p in measured(n, rate, true)]
    start = Task(elements=TASK.elements, frame=1.0, compute=0.0)
    task, lab = calibrated(points, start, replace(LAB, switching=0.0))
    assert task.frame == pytest.approx(25_000.0)
    assert task.encode == pytest.approx(true.encode) and task.decode == pytest.approx(true.decode)
    assert task.compute == pytest.approx(true.compute, rel=1e-3) and task.overlap == overlap
    for point in measured(16, 200e6, true):  # what was not measured
        assert abs(off(point, task, lab)) < 0.01


def test_calibration_needs_a_step_without_exchange() -> None:
    with pytest.raises(ValueError, match="without communication"):
        calibrated([Point("ring", 2, 1e8, 1.0, 1.0)], TASK, LAB)


def bench_file(path: Path, hosts: int, rate: str, bits: float) -> Path:
    """What `thinwire bench ddp --json` would write."""
    names = {"none": "infinite", "ring": "dense", "gather": "topk1+gather", "scatter-reduce": "topk1+scatter-reduce"}
    kinds = {"gather": "Gather()", "scatter-reduce": "ScatterReduce()"}
    rows = [
        {
            "name": names[p.exchange],
            "step_ms": 1e3 * p.seconds,
            "bytes_sent": p.sent + 500.0,
            "hook_cpu_ms": 1e3 * p.codec,
            "exchange": kinds.get(p.exchange, ""),
        }
        for p in measured(hosts, 1448 / 1514 * bits)
    ]
    rows.append({**rows[1], "name": "powersgd"})
    path.write_text(json.dumps({"hosts": hosts, "rate": rate, "rows": rows}))
    return path


def test_the_command_with_measurements_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [bench_file(tmp_path / f"{n}.json", n, "100mbit", 100e6) for n in (2, 4, 8)]
    target, page = tmp_path / "figures.json", tmp_path / "page.html"
    words = [word for path in files for word in ("--measured", str(path))]
    words += ["--parameters", "1000000", "--cores", "2", "--calibrate-up-to", "4", "--json", str(target)]
    assert run(["simulate", "scale", *words, "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Predicted and measured steps" in said
    assert "12 of 12 measured steps are within 20 %" in " ".join(said.split())
    figures = json.loads(target.read_text())
    assert list(figures["curves"]) == ["star", "ring", "gather", "scatter-reduce", "hierarchical"]
    assert figures["curves"]["ring"][-1]["workers"] == 4096
    assert figures["task"]["compute"] == pytest.approx(0.05, rel=1e-2)
    assert {check["workers"] for check in figures["measured"]} == {2, 4, 8}
    rendered = render(page)
    assert rendered.console == []
    assert re.search(r'<html[^>]* data-drawn="[1-9]', rendered.dom)
    assert len(re.findall(r'class="trace scatter trace\w+"', rendered.dom)) == 3 * 5 + 2 * 4
    assert len(re.findall(r'<td data-label="Off">', rendered.dom)) == 12


def test_the_command_without_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    words = "--compute 80ms --parameters 25000000 --workers 2,64 --exchanges ring,gather --density 1 --rate 1gbit"
    assert run(["simulate", "scale", *words.split(), "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["task"]["frame"] == 1e8 and found["measured"] == []
    assert found["curves"]["gather"][1]["sent"] == 63e8
    assert "Ring is the fastest; with 64 workers" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "give --compute"),
        ("--compute 80ms --exchanges ring,mesh", "no exchange is called 'mesh'"),
        ("--compute 80ms --workers 1,2", "--workers takes numbers from 2"),
        ("--compute 80ms --rate none", "--rate must be a rate"),
        ("--compute 80ms --density 2", "--density lies in"),
        ("--compute 80ms --stragglers -1", "a spread is a share"),
        ("--compute soon", "soon"),
        ("--measured missing.json", "cannot read missing.json"),
        ("--compute 80ms --json /nowhere/at/all.json", "/nowhere/at/all.json cannot be written"),
        ("--compute 80ms --report /nowhere/at/all.html", "/nowhere/at/all.html cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "scale", *options.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize("text", ["{}", "[1]", '{"hosts": 2, "rate": "1gbit", "rows": []}', "no JSON"])
def test_a_file_that_is_no_measurement(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.json").write_text(text)
    assert run(["simulate", "scale", "--measured", str(tmp_path / "m.json")]) == 2
    assert "is not a file of thinwire bench ddp --json" in capsys.readouterr().err


def test_measurements_with_a_delay_are_checked_and_do_not_calibrate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near = json.loads(bench_file(tmp_path / "near.json", 4, "100mbit", 100e6).read_text())
    # One-way delays, and what TCP's pacing takes beyond the transfer.
    later = {"dense": 6 * 50.0, "topk1+gather": 50.0 + 29.0, "topk1+scatter-reduce": 100.0 + 25.0, "infinite": 400.0}
    rows = [{**row, "step_ms": row["step_ms"] + later[row["name"]]} for row in near["rows"] if row["name"] in later]
    half = {**rows[1], "name": "fp16", "step_ms": 4_000.0}
    far = {**near, "delay": "50ms", "rows": [*rows, half]}
    (tmp_path / "both.json").write_text(json.dumps({"delays": [near, far]}))
    (tmp_path / "far.json").write_text(json.dumps(far))
    figures = tmp_path / "figures.json"
    words = ["simulate", "scale", "--parameters", "1000000", "--cores", "2", "--json", str(figures), "--measured"]
    assert run([*words, str(tmp_path / "both.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 measured steps are within 20 %" in said
    assert "3 of 4 measured steps with a delay are within 25 %" in said
    delayed = [each for each in json.loads(figures.read_text())["measured"] if each["delay_ms"]]
    assert [each["exchange"] for each in delayed] == ["ring", "gather", "scatter-reduce", "ring, 16 bits"]
    assert all(abs(each["off"]) < 0.05 for each in delayed[:3])
    narrow = delayed[3]["predicted_ms"] - 6 * 50.0
    assert 0.5 * near["rows"][1]["step_ms"] < narrow < 0.7 * near["rows"][1]["step_ms"]
    assert run([*words, str(tmp_path / "far.json")]) == 2
    assert "a measured step without communication" in capsys.readouterr().err
