"""Several logs in one report: distinct names, comparisons between equal settings, and refused logs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.report.browser import render
from tests.tools.report.made_up import made_up
from thinwire.errors import LogError
from thinwire.tools.cli import run
from thinwire.tools.events import Event, RunLog, to_line
from thinwire.tools.report import markup
from thinwire.tools.report.page import figures, write_report
from thinwire.tools.report.summary import headline, prepare, summarise, told_apart


def saved(log: RunLog, path: Path) -> str:
    events: list[Event] = [log.run, *log.steps, *log.evals]
    path.write_text("".join(to_line(event) + "\n" for event in events))
    return str(path)


def names(*logs: RunLog) -> list[str]:
    return [log.run.method for log in told_apart(logs)]


def test_runs_on_different_networks_are_told_apart() -> None:
    slow = made_up("topk1", hit=4, ms=100, sent=40, rate="100mbit")
    quick = made_up("topk1", hit=4, ms=10, sent=40)
    found = {summary.method: summary.step_ms for summary in summarise(told_apart([slow, quick]))}
    assert found == {"topk1, 100mbit": pytest.approx(200), "topk1, no limit": pytest.approx(20)}
    assert names(slow, slow) == ["topk1", "topk1"]


def test_runs_are_told_apart_by_batch_transport_loss_and_target() -> None:
    plain = made_up("topk1", hit=4, ms=10, sent=40)
    assert names(plain, made_up("topk1", hit=4, ms=10, sent=40, batch=16)) == ["topk1, batch 8", "topk1, batch 16"]
    tcp, udp = (made_up("topk1", hit=4, ms=10, sent=40, transport=way) for way in ("tcp", "udp-restore"))
    assert names(tcp, udp, plain) == ["topk1, tcp", "topk1, udp-restore", "topk1"]
    lossy = made_up("topk1", hit=4, ms=10, sent=40, packet_loss=0.05)
    assert names(plain, lossy) == ["topk1, 0% loss", "topk1, 5% loss"]
    higher = made_up("topk1", hit=4, ms=10, sent=40, target=0.95)
    aimless = made_up("topk1", hit=4, ms=10, sent=40, target=math.nan)
    assert names(plain, higher, aimless) == ["topk1, target 90 %", "topk1, target 95 %", "topk1, no target"]


def test_a_name_that_has_the_property_already_is_kept() -> None:
    tcp = made_up("tcp 0%", hit=4, ms=10, sent=40, transport="tcp")
    udp = made_up("udp-restore 5%", hit=4, ms=10, sent=40, transport="udp-restore", packet_loss=0.05)
    assert names(tcp, udp) == ["tcp 0%", "udp-restore 5%"]
    served = made_up("bsp:topk1/topk1:udp-ignore", hit=4, ms=10, sent=40, transport="udp-ignore")
    assert names(served, tcp) == ["bsp:topk1/topk1:udp-ignore", "tcp 0%"]
    other = replace(tcp, run=replace(tcp.run, packet_loss=0.1))
    assert [log.run.method for log in prepare([tcp, other], named=True)] == [
        "tcp 0%",
        "tcp 0%",
    ]  # kept as given


def test_a_speed_up_is_over_dense_in_the_same_setting() -> None:
    logs = [
        made_up("dense", hit=8, ms=100, sent=4000, rate="100mbit"),
        made_up("dense", hit=8, ms=1000, sent=4000, rate="10mbit"),
        made_up("topk1", hit=8, ms=10, sent=40, rate="100mbit"),
        made_up("topk1", hit=8, ms=10, sent=40, rate="10mbit"),
        made_up("topk1", hit=8, ms=5, sent=40, rate="1gbit"),
    ]
    found = {s.method: s.speedup for s in summarise(told_apart(logs))}
    assert found["topk1, 100mbit"] == pytest.approx(10)
    assert found["topk1, 10mbit"] == pytest.approx(100)
    assert found["topk1, 1gbit"] is None
    said = headline(summarise(told_apart(logs)), metric="accuracy")
    reached = "topk1, 1gbit reached the target of 90.0 % accuracy in 0.08 s"
    assert said == f"{reached}; there is no dense run to compare it with."


def test_different_targets_are_not_compared(tmp_path: Path) -> None:
    dense = made_up("dense", hit=8, ms=100, sent=4000, target=0.9)
    sparse = made_up("topk1", hit=8, ms=10, sent=40, target=0.6)
    paths = [saved(dense, tmp_path / "dense.jsonl"), saved(sparse, tmp_path / "topk1.jsonl")]
    assert run(["report", *paths, "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "figures.json")]) == 0
    methods = json.loads((tmp_path / "figures.json").read_text())["methods"]
    assert [(m["method"], m["speedup"]) for m in methods] == [("dense, target 90 %", 1), ("topk1, target 60 %", None)]
    page = (tmp_path / "page.html").read_text()
    assert "The runs had different targets (90.0 %, 60.0 %), so their times to target are not compared." in page
    assert figures([dense, sparse])["target"] is None
    assert figures([dense, dense])["target"] == pytest.approx(90)


def test_the_json_and_the_page_name_the_same_methods(tmp_path: Path) -> None:
    logs = [made_up("topk1", hit=4, ms=10, sent=40, rate=rate) for rate in ("100mbit", "1gbit")]
    paths = [saved(log, tmp_path / f"{log.run.rate}.jsonl") for log in logs]
    assert run(["report", *paths, "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "figures.json")]) == 0
    methods = [method["method"] for method in json.loads((tmp_path / "figures.json").read_text())["methods"]]
    assert methods == ["topk1, 100mbit", "topk1, 1gbit"]
    page = (tmp_path / "page.html").read_text()
    assert all(f'data-method="{method}"' in page for method in methods)
    assert "digits: 2 workers at 100mbit, 1gbit" in page  # the title, and each fact, with all values


def test_different_metrics_do_not_go_into_one_report(tmp_path: Path) -> None:
    logs = [made_up("dense", hit=4, ms=10, sent=40, metric=metric) for metric in ("accuracy", "bleu")]
    with pytest.raises(LogError, match=r"different metrics \(accuracy, bleu\): make a report of each"):
        write_report(logs, tmp_path / "page.html")


def test_a_damaged_log_is_named_with_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = made_up("dense", hit=4, ms=10, sent=40)
    damaged = replace(good, evals=[replace(good.evals[0], wall=math.inf), *good.evals[1:]])
    path, page = tmp_path / "damaged.jsonl", tmp_path / "page.html"
    assert run(["report", saved(damaged, path), "-o", str(page)]) == 2
    said = capsys.readouterr().err
    assert f"the log {path}: eval.wall (step 1) is no finite number" in said
    assert not page.exists()
    with pytest.raises(LogError, match=r"run\.target"):
        prepare([made_up("dense", hit=4, ms=10, sent=40, target=math.inf)])


def test_a_metric_that_diverged_is_null_in_the_json(tmp_path: Path) -> None:
    log = made_up("topk1", hit=4, ms=10, sent=40)
    log.evals[-1] = replace(log.evals[-1], value=math.nan)
    figures_file = tmp_path / "figures.json"
    words = ["report", saved(log, tmp_path / "log"), "-o", str(tmp_path / "page.html"), "--json", str(figures_file)]
    assert run(words) == 0
    out = figures_file.read_text()
    assert json.loads(out)["methods"][0]["test"] is None
    assert "NaN" not in out


def test_figures_and_table_have_the_same_bytes() -> None:
    logs = [made_up("topk1", hit=4, ms=10, sent=sent, seed=sent) for sent in (1_000_000, 2_000_000, 9_000_000)]
    assert figures(logs)["bytes"] == {"methods": ["topk1"], "mb": [2.0]}
    assert summarise(logs)[0].bytes_per_host_step == 2_000_000


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_page_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises((KeyboardInterrupt, LogError)):
        markup.replace_file(tmp_path / "page.html", "text")
    assert list(tmp_path.iterdir()) == []


def test_only_a_page_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = saved(made_up("dense", hit=4, ms=10, sent=40), tmp_path / "run.jsonl")
    notes, page, before = tmp_path / "notes.txt", tmp_path / "page.html", Path(log).read_text()
    notes.write_text("mine")
    (tmp_path / "link").symlink_to(log)
    for place in (log, str(tmp_path / "link"), str(notes), str(tmp_path)):
        assert run(["report", log, "-o", place]) == 2
    said = capsys.readouterr().err.splitlines()
    assert ["is one of the logs" in line for line in said] == [True, True, False, False]
    assert "is no HTML page" in said[2] and "is no file" in said[3]
    assert (notes.read_text(), Path(log).read_text()) == ("mine", before)
    assert run(["report", log, "-o", str(page)]) == run(["report", log, "-o", str(page)]) == 0


def test_the_eighth_method_is_told_from_the_first(tmp_path: Path) -> None:
    logs = [made_up(f"topk{number}", hit=4, ms=number, sent=40) for number in range(1, 10)]
    write_report(logs, tmp_path / "page.html")
    rendered = render(tmp_path / "page.html")
    assert rendered.console == []
    assert rendered.dom.count('data-round="1"') == 2 * 2  # in the table and in the legend
    assert "stroke-dasharray: 9px" in rendered.dom
