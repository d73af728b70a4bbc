"""The report: its figures agree with the logs, and a browser draws the whole page."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tools.report.browser import render
from tests.tools.report.made_up import made_up
from tests.tools.report.training import Training
from thinwire.errors import LogError
from thinwire.tools.cli import run
from thinwire.tools.events import Diagnosis, Run, RunLog
from thinwire.tools.recipes.metric import show_metric
from thinwire.tools.report.page import figures, megabytes, write_report
from thinwire.tools.report.summary import headline, summarise


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[RunLog]:
    """Two methods really trained on digits for a few steps, one of them with two seeds."""
    folder = tmp_path_factory.mktemp("logs")
    torch.set_num_threads(1)  # on a busy machine threads wait for one another longer than they compute
    trainings = [
        Training("dense"),
        Training("topk1", 0.01),
        Training("topk1", 0.01, seed=1),
    ]
    return [training.run(folder / f"{i}.jsonl") for i, training in enumerate(trainings)]


def test_the_summary_is_computed_as_documented() -> None:
    dense, sparse = summarise(
        [
            made_up("dense", hit=8, ms=100, sent=4000),
            made_up("topk1", hit=4, ms=10, sent=40),
            made_up("topk1", hit=6, ms=10, sent=60, seed=1),
        ]
    )
    assert dense.step_ms == pytest.approx(200)  # the slower of two ranks, without the first step
    assert dense.speedup == 1
    assert (sparse.runs, sparse.steps_to_target, sparse.bytes_per_host_step) == (2, 5, 50)
    assert sparse.seconds_to_target == pytest.approx(0.1)
    assert sparse.speedup == pytest.approx(16)
    assert (sparse.train, sparse.test) == (0.95, 0.95)


def test_a_metric_that_is_not_a_number_leaves_a_gap(tmp_path: Path) -> None:
    log = made_up("topk1", hit=4, ms=10, sent=40)
    log.evals[3] = replace(log.evals[3], value=float("nan"))
    write_report([log], tmp_path / "page.html")
    values = [value for curve in figures([log])["curves"] for value in curve["value"]]
    assert values.count(None) == 1


def test_a_target_that_was_not_reached_gives_no_speed_up() -> None:
    dense = made_up("dense", hit=None, ms=100, sent=4000)
    fast = made_up("topk1", hit=4, ms=10, sent=40)
    half = made_up("topk1", hit=None, ms=10, sent=40, seed=1)
    assert summarise([dense, fast])[1].speedup is None
    assert summarise([fast, half])[0].seconds_to_target is None
    assert "dense did not reach it" in headline(summarise([dense, fast]), metric="accuracy")
    assert headline(summarise([dense]), metric="accuracy").startswith("None of the 1")
    aimless = [made_up(name, hit=None, ms=ms, sent=40, target=math.nan) for name, ms in (("dense", 100), ("topk1", 10))]
    assert "topk1 had the fastest step" in headline(summarise(aimless), metric="accuracy")
    slower = made_up("topk1", hit=9, ms=300, sent=40)
    arrived = made_up("dense", hit=4, ms=100, sent=4000)
    assert "no other method was faster" in headline(summarise([arrived, slower]), metric="accuracy")


def test_numbers_as_people_write_them() -> None:
    assert [megabytes(b) for b in (10_544_000, 7_025_704, 141_000, 9_400)] == [
        "10.5 MB",
        "7.03 MB",
        "0.14 MB",
        "9.4 kB",
    ]
    assert [show_metric(v, m) for v, m in ((0.975, "accuracy"), (31.26, "bleu"), (None, "bleu"))] == [
        "97.5 %",
        "31.3",
        "–",
    ]


def attribute(dom: str, name: str) -> int:
    found = re.search(rf'<html[^>]* data-{name}="(-?\d+)"', dom)
    assert found, f"the page's script did not set data-{name}"
    return int(found.group(1))


def test_the_page_is_drawn_in_a_browser(logs: list[RunLog], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(logs, page)
    rendered = render(page)
    assert rendered.console == []
    assert attribute(rendered.dom, "drawn") > 0
    for figure in ("over-time", "over-passes", "phase-times", "bytes"):
        assert re.search(rf'id="{figure}"[^>]*>\s*<div class="plot-container', rendered.dom), figure
    curves = re.findall(r'class="trace scatter trace\w+"', rendered.dom)
    layers = {histogram.layer for log in logs for histogram in log.histograms}
    assert len(curves) >= 2 * 3 + 2 * len(layers)
    assert len(re.findall(r'class="trace bars"', rendered.dom)) == 4 + 1
    for text in ("topk1 (2 runs)", "1,756,426", "conv1.weight", logs[0].run.command, logs[0].run.machine):
        assert text in rendered.dom


def test_the_page_fits_a_phone(logs: list[RunLog], tmp_path: Path) -> None:
    write_report(logs, tmp_path / "page.html")
    # A browser window cannot be as narrow as a phone, but a frame can.
    (tmp_path / "phone.html").write_text("""<iframe src="page.html" width="390" height="900"></iframe><script>
        onload = () => {
          const inner = document.querySelector("iframe").contentDocument.documentElement;
          Object.assign(document.documentElement.dataset, { wide: inner.scrollWidth, drawn: inner.dataset.drawn });
        };
        </script>""")
    rendered = render(tmp_path / "phone.html")
    assert rendered.console == []
    assert attribute(rendered.dom, "drawn") > 0
    assert 300 < attribute(rendered.dom, "wide") <= 390


def test_nothing_is_loaded_from_elsewhere(logs: list[RunLog], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(logs, page)
    markup = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)[^"'>\s]+""", markup) == []


def test_text_from_a_log_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>document.title='broken'</script>"
    log = made_up(evil, hit=3, ms=10, sent=40)
    for step in (5, 10):
        log.add(Diagnosis(step=step, delta=0.5, xi=1.0, residual_ratio=2.0, cosine=0.5, waited=3.0))
    page = tmp_path / "page.html"
    write_report([log], page, title=evil, verdict=evil, table=[{"Method": evil, "a<b": "&"}])
    rendered = render(page)
    assert rendered.console == []
    assert "<title>broken" not in rendered.dom
    assert "a&lt;b" in rendered.dom
    section = rendered.dom.partition('id="diagnosed"')[2].partition("</section>")[0]
    assert len(re.findall(r'class="trace scatter trace\w+"', section)) == 6  # an age that is not known gives no line
    assert len(re.findall(r'class="js-line"', section)) == 5


def test_a_log_without_steps_still_gives_a_page(tmp_path: Path) -> None:
    run_record = Run(command="c", recipe="digits", method="dense", workers=2, batch=8, parameters=9)
    write_report([RunLog(run_record)], tmp_path / "page.html", verdict="The run died at once.")
    rendered = render(tmp_path / "page.html")
    assert rendered.console == []
    assert "nothing was recorded" in rendered.dom
    assert "no end record, the run may have died" in rendered.dom


def test_the_command(logs: list[RunLog], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    paths = [str(log.path) for log in logs]
    assert run(["report", *paths, "-o", str(page), "--json", str(tmp_path / "figures.json")]) == 0
    assert "3 run(s)" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [method["method"] for method in figures["methods"]] == ["dense", "topk1"]
    assert "digits: 2 workers at none" in page.read_text()


def test_the_commands_mistakes(logs: list[RunLog], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(logs[0].path)
    assert run(["report", str(tmp_path / "none.jsonl")]) == 2
    assert run(["report", path, "-o", str(tmp_path / "no" / "page.html")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "cannot read the log" in said[0]
    assert "cannot write the report" in said[1]
    with pytest.raises(LogError, match="at least one"):
        write_report([], tmp_path / "page.html")
