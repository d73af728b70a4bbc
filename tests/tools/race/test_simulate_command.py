"""`thinwire simulate schedule`: the table, the file, the page, and mistakes in one sentence."""

import json
import re
from pathlib import Path

import pytest

from tests.tools.report.browser import render
from thinwire.tools.cli import run
from thinwire.tools.race.profile import LayerTimes, write_profile
from thinwire.tools.simulate import gantt
from thinwire.tools.simulate.schedule import Case, ScheduleOutcome, compare, even_slices

COMMAND = ["simulate", "schedule"]
SMALL = [*COMMAND, "--workers", "2", "--iterations", "3"]


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    assert run([*SMALL, "--transfer", "4,2,2,2", "--policies", "fifo, forward", "--json", str(target)]) == 0
    said = capsys.readouterr().out
    assert "2 workers, 4 layers, 3 steps, B = 0" in said
    record = json.loads(target.read_text())
    assert record["winner"] == "forward" and "forward" in record["fastest"] and record["unit"] == "seconds"
    assert record["case"]["slices"] == [8, 4, 4, 4]
    fifo, forward = record["outcomes"]
    assert (fifo["policy"], forward["policy"]) == ("fifo", "forward")
    assert fifo["makespan"] > forward["makespan"]
    assert f"forward takes {1000 * forward['makespan']:.5g} ms" in said
    assert len(forward["waiting"]) == 4 and forward["staleness_max"] == 0


def test_options_reach_the_model(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    options = "--layers 3 --forward 0.5 --backward 1,2,3 --slices 1,2,3 --staleness 2 --waits-for copy --versions layer"
    more = "--window 4 --server-rate 2 --delay 0.1 --slow 1,3 --policies stalest"
    assert run([*SMALL, *options.split(), *more.split(), "--json", str(target)]) == 0
    given = json.loads(target.read_text())["case"]
    assert [layer["backward"] for layer in given["layers"]] == [0.001, 0.002, 0.003]
    assert [layer["forward"] for layer in given["layers"]] == [0.0005] * 3
    assert (given["slices"], given["staleness"]) == ([1, 2, 3], 2)
    assert (given["versions"], given["waits_for"]) == ("layer", "copy")
    assert (given["window"], given["latency"], given["slowness"]) == (0.004, pytest.approx(0.0001), [1.0, 3.0])


def test_a_profile_and_its_page_in_a_browser(tmp_path: Path) -> None:
    evil = "</script><script>document.title='broken'</script>"
    layers = [LayerTimes(evil, 0.001, 0.002, 0.004), LayerTimes("fc", 0.001, 0.002, 0.002)]
    write_profile(tmp_path / "profile.json", layers)
    page = tmp_path / "page.html"
    assert run([*SMALL, "--from", str(tmp_path / "profile.json"), "--report", str(page)]) == 0
    (tmp_path / "phone.html").write_text("""<iframe src="page.html" width="390" height="900"></iframe><script>
        onload = () => {
          const frame = document.querySelector("iframe").contentDocument;
          frame.querySelectorAll(".splits button")[1].click();
          Object.assign(document.documentElement.dataset, {
            wide: frame.documentElement.scrollWidth, drawn: frame.documentElement.dataset.drawn, title: frame.title,
            bars: frame.querySelectorAll("#policies .bars .point").length,
            charts: frame.querySelectorAll(".js-plotly-plot").length,
          });
        };
        </script>""")
    rendered = render(tmp_path / "phone.html")
    assert rendered.console == []
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', rendered.dom))
    assert found["title"].startswith("Request scheduling: 2 workers, 2 layers")
    assert int(found["charts"]) == 4 + 1 and int(found["drawn"]) > 0
    assert int(found["bars"]) >= 4 * 3 * (2 * 2 + 2)  # computations and pushes of each policy and step
    assert 300 < int(found["wide"]) <= 390
    markup = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)[^"'>\s]+""", markup) == []


def case(iterations: int) -> Case:
    layers = tuple(LayerTimes(f"{n}", 0.001, 0.002, 0.004) for n in range(4))
    return Case(layers, 2, iterations, slices=even_slices(layers, 4))


def test_a_long_run_shows_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    long = case(6)
    outcomes = compare(long, ["fifo"])
    whole = gantt._data(long, outcomes)
    bars = whole["policies"][0]["bars"]
    assert whole["steps"] == 6
    assert sum(map(len, (lane["start"] for worker in bars for lane in worker.values()))) < len(outcomes[0].intervals)
    pushed = sum(sum(worker["push"]["slices"]) for worker in bars)
    assert pushed == 2 * 6 * 16  # slices are joined in bars, none is left out
    monkeypatch.setattr(gantt, "MOST_BARS", len(outcomes[0].intervals) // 2)
    part = gantt._data(long, outcomes)
    assert 1 <= part["steps"] < 6
    assert max(max(w["push"]["step"]) for w in part["policies"][0]["bars"]) == part["steps"] - 1


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"fifo": 2.0}, "fifo takes 2000 ms."),
        ({"fifo": 2.0, "forward": 2.0}, "All policies take 2000 ms."),
        ({"fifo": 2.0, "stalest": 1.5, "forward": 1.5}, "stalest and forward take 1500 ms, 25.0% less than fifo"),
        ({"fifo": 1.0, "filo": 2.0}, "fifo takes 1000 ms, 50.0% less than filo (2000 ms)."),
        ({"stalest": 2.0, "forward": 1.0}, "forward takes 1000 ms, 50.0% less than stalest"),
    ],
)
def test_the_verdict(times: dict[str, float], said: str) -> None:
    assert gantt.verdict([ScheduleOutcome(policy, makespan=time) for policy, time in times.items()]).startswith(said)


def test_the_verdict_names_who_has_the_newest_copies() -> None:
    outcomes = [
        ScheduleOutcome("fifo", makespan=1.0, staleness_mean=2.0),
        ScheduleOutcome("forward", makespan=1.0, staleness_mean=1.0),
    ]
    assert gantt.verdict(outcomes) == "All policies take 1000 ms; the copies are newest with forward."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--layers 3 --forward 1,2", "--forward has 2 numbers, but there are 3 layers: give 1 or 3"),
        ("--transfer fast", "--transfer is a number, or numbers with commas between them, not 'fast'"),
        ("--transfer -1", "must be 0 or more"),
        ("--slices 0", "--slices are whole numbers from 1"),
        ("--slices inf", "--slices are whole numbers from 1"),
        ("--slow 1,2,3", "--slow has 3 numbers, but there are 2 workers"),
        ("--policies fifo,best", "the policy 'best' is unknown"),
        ("--versions model", 'a "slice" or a "layer"'),
        ("--iterations 9999999", "slices to push"),
        ("--from missing.json", "cannot read the profile missing.json"),
        ("--from missing.json --forward 1", "leave out --forward"),
        ("--json /nowhere/at/all.json", "/nowhere/at/all.json cannot be written"),
        ("--report /nowhere/at/all.html", "/nowhere/at/all.html cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, *options.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and lines[0].endswith(".")


def test_a_profile_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path / "profile.json", [LayerTimes("fc", 0.001, 0.001, 0.001)])
    assert run([*COMMAND, "--from", str(tmp_path / "profile.json"), "--layers", "2"]) == 2
    assert "has 1 layers, not 2" in capsys.readouterr().err
