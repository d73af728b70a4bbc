"""Result files: JSON is read as it was written, pages and docs are made from it, and the committed docs are current."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from papers.__main__ import main, report
from papers.files import read_studies, results_page, take_screenshot, write_study
from papers.study import Claim, Figure, Series, Study, StudyError, Table, claim_rows, number
from papers.workspace import Workspace

from papers import STUDIES
from tests.needs import needs
from tests.tools.report.browser import render

PROJECT = Path(__file__).parent.parent.parent
MADE = {"command": "thinwire reproduce cat", "version": "thinwire 0", "machine": "m", "date": "d", "took": "1 minute"}


def example() -> Study:
    return Study(
        "cat",
        "small",
        "A title with <b>",
        "Somebody, 2020",
        "It holds.",
        [Claim("speed-up", 2.0, 3.0, "x", True, "a|b"), Claim("only ours", None, 0.25, "", False)],
        [Table("Rows", [{"Method": "dense", "Steps": "10"}, {"Method": "other"}], "a note")],
        [
            Figure("Curve", "step", "loss", [Series("dense", [1, 2, 3], [3.0, 2.0, 1.5])], log="y"),
            Figure("Bars", "", "ms", [Series("time", ["a", "b"], [1.0, 200.0])], "bars", "y"),
        ],
        ["The network is emulated."],
        made=MADE,
    )


def test_a_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cat-small.json"
    path.write_text(example().to_json())
    assert Study.read(path) == example()
    assert json.loads(path.read_text())["claims"][0]["ratio"] == 1.5


def test_the_page_of_a_study_is_drawn_in_a_browser(tmp_path: Path) -> None:
    needs("browser")
    _, page = write_study(example(), tmp_path)
    picture = tmp_path / "cat-small.png"
    assert take_screenshot(page, picture) is None
    found = render(page)
    assert 'data-drawn="' in found.dom and found.dom.count('id="plot-') == 2 and not found.console
    assert "A title with &lt;b&gt;" in found.dom
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-small.html", "cat-small.json", "cat-small.png"]


BROKEN = {  # what a browser may do, and the reason that is reported
    "exit 1": "could not draw the page",
    "exec sleep 30": "did not end within 0.5 seconds",
    'case "$*" in *dump-dom*) echo data-height=\\"100\\";; esac': "took no picture",
    'for a in "$@"; do case "$a" in --dump-dom) echo data-height=\\"9\\"; exit;; '
    '--screenshot=*) printf "\\211PNG" > "${a#*=}";; esac; done; exit 3': "took no picture",
}


@pytest.mark.parametrize("script", BROKEN)
def test_an_old_picture_is_not_mistaken_for_a_new_one(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    browser = tmp_path / "bin" / "chromium"
    browser.parent.mkdir()
    browser.write_text(f"#!/bin/sh\n{script}\n")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", f"{browser.parent}:/usr/bin:/bin")
    monkeypatch.setattr("papers.files.BROWSER_TIMEOUT", 0.5 if "sleep" in script else 60.0)
    (tmp_path / "cat-small.png").write_bytes(b"\x89PNG of before")
    report(example(), tmp_path, None)
    said = capsys.readouterr().out
    assert "only ours" in said and f"{BROKEN[script]}." in said and "cat-small.png" not in said
    assert not (tmp_path / "cat-small.png").exists()


def test_a_browser_that_cannot_be_started_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papers.files.shutil.which", lambda name: str(tmp_path / "none"))
    _, page = write_study(example(), tmp_path)
    assert "No such file" in str(take_screenshot(page, tmp_path / "cat-small.png"))


def test_claims_as_rows() -> None:
    first, second = claim_rows(example().claims)
    assert (first["Paper"], first["Here"], first["Ratio"], first["Holds"]) == ("2x", "3x", "1.5", "yes")
    assert (second["Paper"], second["Ratio"], second["Holds"]) == ("–", "–", "no")
    assert number(12571.0, "s") == "12,571 s" and number(None) == "–"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "name": "x"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cat-small.json").write_text(text)
    with pytest.raises(StudyError):
        read_studies(tmp_path)


def test_the_committed_docs_are_current() -> None:
    studies = read_studies(PROJECT / "results")
    said = (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")
    assert said == results_page(studies), "docs/results.md is out of date: run thinwire reproduce --docs"


def test_every_committed_study_says_how_it_was_made() -> None:
    for study in read_studies(PROJECT / "results"):
        assert set(study.made) == {"command", "version", "machine", "date", "took"}
        assert study.claims and study.differs and (PROJECT / "results" / f"{study.stem}.png").exists()


def test_docs_are_made_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cat-small.json").write_text(example().to_json())
    assert main(["--docs", "--out", str(tmp_path / "results")]) == 0
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| speed-up | 2x | 3x | 1.5 | yes | a\\|b |" in text and "The network is emulated." in text


def test_docs_of_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text("of before")
    assert main(["--docs", "--out", str(tmp_path / "resluts")]) == 2
    assert "there are no results of studies in" in capsys.readouterr().err
    assert (tmp_path / "docs" / "results.md").read_text() == "of before"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cat-small.json").write_text(replace(example(), made={"command": "c"}).to_json())
    assert main(["--docs", "--out", str(tmp_path / "results")]) == 2
    said = capsys.readouterr().err
    assert "cat-small.json does not say how it was made (version, machine, date, took)" in said
    assert (tmp_path / "docs" / "results.md").read_text() == "of before"


@pytest.mark.parametrize("arguments", [[], ["frob"], ["cat", "--scale", "huge"]])
def test_mistakes_are_answered_with_the_studies(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in STUDIES)


def test_a_part_is_made_once(tmp_path: Path) -> None:
    workspace = Workspace("small", None, tmp_path, lab=False)
    outcomes = iter([{"a": [1]}, {"a": [2]}])
    for _ in range(2):
        assert workspace.part("one", lambda: next(outcomes), setup="s") == {"a": [1]}
    assert "all else" in workspace.made()["took"]
    assert workspace.lab_part("two", lambda: 1 / 0, setup="s") is None
    assert workspace.skipped == ["two: needs the lab, which was left out"]
    assert workspace.lab_part("one", lambda: 1 / 0, setup="s") == {"a": [1]}
