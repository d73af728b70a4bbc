"""Studies as files: what is written is read, pages and docs are made from it, and the committed docs are current."""

import json
from pathlib import Path

import pytest

from tests.report.browser import render
from thinwire.cli import run
from thinwire.reproduce import STUDIES
from thinwire.reproduce.study import Claim, Figure, Series, Study, StudyError, Table, claim_rows, number
from thinwire.reproduce.workshop import Workshop
from thinwire.reproduce.writing import document, read_studies, write_study

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


def test_its_page_is_drawn_in_a_browser_and_photographed(tmp_path: Path) -> None:
    _, page, picture = write_study(example(), tmp_path)
    found = render(page)
    assert 'data-drawn="' in found.dom and found.dom.count('id="plot-') == 2 and not found.console
    assert "A title with &lt;b&gt;" in found.dom
    assert picture.read_bytes()[:4] == b"\x89PNG"


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
    assert said == document(studies), "docs/results.md is out of date: run thinwire reproduce --docs"


def test_every_committed_study_says_how_it_was_made() -> None:
    for study in read_studies(PROJECT / "results"):
        assert set(study.made) == {"command", "version", "machine", "date", "took"}
        assert study.claims and study.differs and (PROJECT / "results" / f"{study.stem}.png").exists()


def test_docs_are_made_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cat-small.json").write_text(example().to_json())
    assert run(["reproduce", "--docs", "--out", str(tmp_path / "results")]) == 0
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| speed-up | 2x | 3x | 1.5 | yes | a\\|b |" in text and "The network is emulated." in text


@pytest.mark.parametrize("arguments", [["reproduce"], ["reproduce", "frob"], ["reproduce", "cat", "--scale", "huge"]])
def test_mistakes_are_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in STUDIES)


def test_a_part_is_made_once(tmp_path: Path) -> None:
    shop = Workshop("small", None, tmp_path, lab=False)
    outcomes = iter([{"a": [1]}, {"a": [2]}])
    for _ in range(2):
        assert shop.part("one", lambda: next(outcomes)) == {"a": [1]}
    assert "all else" in shop.took()
    assert shop.lab_part("two", lambda: 1 / 0) is None and shop.skipped == ["two: needs the lab, which was left out"]
    assert shop.lab_part("one", lambda: 1 / 0) == {"a": [1]}
