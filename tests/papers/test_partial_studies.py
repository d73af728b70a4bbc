"""Studies with missing parts: claims without measurements are not judged, and complete results are not overwritten."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from papers.__main__ import main, without_places
from papers.files import write_study
from papers.study import Study
from papers.workspace import Workspace, requested_names

from papers import STUDIES
from tests.papers.test_result_files import example
from tests.tools.recipes.test_files import idx
from tests.tools.recipes.test_translate import PAIRS
from thinwire.tools.recipes.cifar10 import TEST_FILE, TRAIN_FILES
from thinwire.tools.recipes.files import CIFAR_IMAGES, CIFAR_RECORD


@pytest.fixture(autouse=True)
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no pictures here."""
    monkeypatch.setattr("papers.files.BROWSERS", ())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all data sets, as small as their formats allow."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 60)):
        images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(random.integers(0, 10, count).astype(np.uint8)))
    for part in ("train", "test_2016_flickr"):
        for side, language in enumerate(("de", "en")):
            (folder / f"{part}.{language}").write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    for name in (*TRAIN_FILES, TEST_FILE):
        with (folder / name).open("wb") as out:
            out.truncate(CIFAR_IMAGES * CIFAR_RECORD)  # black images in a sparse file
    return folder


def study_of(name: str, workspace: Workspace) -> Study:
    module, _, function = STUDIES[name].partition(":")
    made: Study = getattr(import_module(module), function)(workspace)
    return made


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("name", STUDIES)
def test_without_measurements_no_claim_is_judged(name: str, scale: str, data: Path, tmp_path: Path) -> None:
    workspace = Workspace(scale, data, tmp_path, lab=False, only=("none of them",))
    study = study_of(name, workspace)
    assert [claim.what for claim in study.claims if claim.holds is not None] == []
    assert study.verdict.startswith("Nothing is judged")
    assert {words.partition(":")[0] for words in workspace.skipped} <= set(workspace.requested)
    assert requested_names(lambda idle: study_of(name, idle), workspace) == list(dict.fromkeys(workspace.requested))


@pytest.mark.parametrize("name", ["request-scheduling", "topk-convergence"])
def test_a_name_that_does_not_exist_is_refused(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [name, "--data", str(data), "--out", str(tmp_path), "--only", "model, frob", "--no-lab"]
    assert main(typed) == 2
    said = capsys.readouterr().err
    assert "has no run or part called" in said and "frob; there are" in said
    assert ("server, model, model-larger" if name == "request-scheduling" else "logistic-dense, logistic-10") in said
    assert not list(tmp_path.glob("*.json"))


def test_request_scheduling_makes_only_what_was_asked_for(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["request-scheduling", "--out", str(tmp_path), "--only", "model"]) == 0
    study = Study.read(tmp_path / "request-scheduling-small.json")
    assert [words.partition(":")[0] for words in study.missing] == ["server", "model-larger"]
    assert study.verdict.startswith("In the model, ") and "times as fast as FIFO" in study.verdict
    assert {claim.what.partition(":")[0] for claim in study.claims} == {"model"}


@pytest.mark.parametrize("name", ["topk-convergence", "cat"])
def test_a_small_folder_of_data_is_enough(name: str, data: Path, tmp_path: Path) -> None:
    workspace = Workspace("small", data, tmp_path, lab=False, only=("logistic-dense", "logistic-10"))
    study = study_of(name, workspace)
    assert len(study.tables[0].rows) == 2
    # Runs that were left out could change each of these claims.
    assert all(claim.holds is not True for claim in study.claims)
    assert "holds" not in study.verdict


def test_a_result_with_fewer_parts_does_not_replace_one_with_more(tmp_path: Path) -> None:
    whole, less = example(), replace(example(), verdict="Less.", missing=["two: left out"])
    assert [path.name for path in write_study(less, tmp_path)] == ["cat-small.json", "cat-small.html"]
    assert [path.name for path in write_study(whole, tmp_path)] == ["cat-small.json", "cat-small.html"]
    assert [path.name for path in write_study(less, tmp_path)] == ["cat-small.partial.json", "cat-small.partial.html"]
    assert Study.read(tmp_path / "cat-small.json") == whole
    assert json.loads((tmp_path / "cat-small.partial.json").read_text())["verdict"] == "Less."
    (tmp_path / "cat-small.json").write_text('{"version": 99}')  # a later version may have more parts
    assert write_study(less, tmp_path)[0].name == "cat-small.partial.json"
    assert write_study(whole, tmp_path)[0].name == "cat-small.json"


def test_the_command_says_that_a_result_was_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = replace(example(), name="request-scheduling")
    (tmp_path / "request-scheduling-small.json").write_text(whole.to_json())
    assert main(["request-scheduling", "--out", str(tmp_path), "--only", "model"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "request-scheduling-small.partial.json" in said and "was not changed" in said
    assert Study.read(tmp_path / "request-scheduling-small.json") == whole
    assert main(["request-scheduling", "--out", str(tmp_path), "--only", "model", "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["missing"] and "was not changed" in " ".join(output.err.split())


def test_the_result_is_also_written_where_json_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, typed = tmp_path / "copy.json", ["request-scheduling", "--out", str(tmp_path), "--only", "model"]
    assert main([*typed, "--json", str(copy)]) == 0
    assert copy.read_text() == (tmp_path / "request-scheduling-small.json").read_text()
    assert main([*typed, "--json", str(tmp_path / "missing" / "copy.json")]) == 2
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())


def test_the_recorded_command_has_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["request-scheduling", "--only", "model", f"--out={tmp_path}", "--work", f"{tmp_path}/w"]
    monkeypatch.setattr(sys, "argv", ["papers", *typed])
    assert main(typed) == 0
    said = Study.read(tmp_path / "request-scheduling-small.json").made["command"]
    assert said == "thinwire reproduce request-scheduling --only model --out=DIR --work DIR"
    assert without_places(["thinwire", "--data", "/a b", "--scale", "full"]) == "thinwire --data DIR --scale full"


def test_an_interrupt_keeps_finished_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def predict(setup: object) -> list[dict[str, object]]:
        calls.append("predict")
        if len(calls) == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr("papers.tsai_thesis.request_scheduling.predict", predict)
    assert main(["request-scheduling", "--out", str(tmp_path), "--no-lab"]) == 130
    lines = capsys.readouterr().err.splitlines()
    folder = tmp_path / "work" / "request-scheduling-small"
    assert lines[-1] == f"thinwire: stopped; finished work is in {folder}, and the same command continues it."
    assert [path.name for path in folder.iterdir()] == ["part-model.json"]
