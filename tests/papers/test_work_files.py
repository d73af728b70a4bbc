"""Files of finished work: a file is reused only for the same work on the same data, and damaged files are replaced."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from papers.files import fingerprint, save, save_json
from papers.simulation import Curve, Goal, Simulation, TrainingSetting
from papers.study import StudyError
from papers.workspace import Workspace

from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Splits, TensorSplit
from thinwire.tools.recipes.translate import SentencePairs


def other(splits: Splits) -> Splits:
    """Return the same data with another last test sample."""
    test = splits.test
    assert isinstance(test, TensorSplit)
    inputs = test.inputs.clone()
    inputs[-1] += 1
    return Splits(splits.train, replace(test, inputs=inputs))


def simulation() -> Simulation:
    recipe = get_recipe("digits")
    goal = Goal(4, 2, train_samples=0, test_samples=50)
    return Simulation("run", recipe, recipe.load(None), TrainingSetting(2, 8, 0.05), goal)


def steps_of(run: Simulation, folder: Path) -> list[int]:
    """Return the steps that were trained; none if the run was read from its file."""
    steps: list[int] = []
    run.run(folder, lambda curve, step: steps.append(step))
    return steps


def test_a_run_on_other_data_is_repeated(tmp_path: Path) -> None:
    first = simulation()
    assert steps_of(first, tmp_path) == [1, 2, 3, 4] and steps_of(first, tmp_path) == []
    assert steps_of(replace(first, splits=other(first.splits)), tmp_path) == [1, 2, 3, 4]


def test_the_fingerprint_of_the_data_ends_a_description() -> None:
    """Files from before fingerprints can then be completed."""
    run = simulation()
    old = f"{run.recipe.name} {len(run.splits.train)} {run.setting} {run.goal}"
    assert run.described() == f"{old} data={fingerprint(run.splits)}"


def test_a_fingerprint_depends_on_the_data_alone() -> None:
    splits = get_recipe("digits").load(None)
    assert fingerprint(splits) == fingerprint(get_recipe("digits").load(None)) != fingerprint(other(splits))
    pieces = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    pairs = SentencePairs(pieces, pieces, ["a", "b"], None)
    turned = SentencePairs(pieces[::-1], pieces, ["a", "b"], None)
    assert fingerprint(Splits(pairs, pairs)) == fingerprint(Splits(pairs, pairs)) != fingerprint(Splits(pairs, turned))


def test_a_part_with_another_setup_or_other_data_is_repeated(tmp_path: Path) -> None:
    workspace = Workspace("small", None, tmp_path, lab=False)
    splits = get_recipe("digits").load(None)
    outcomes = iter(range(10))

    def part(setup: str, data: Splits) -> int | None:
        return workspace.part("one", lambda: next(outcomes), setup=setup, data=data)

    assert [part("a", splits), part("a", splits), part("b", splits), part("b", other(splits))] == [0, 0, 1, 2]
    (tmp_path / "part-one.json").write_text('{"seconds": 1.0, "outcome": 99}')  # without a description
    assert part("b", splits) == 3


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '"x"', '{"described": 3}', '{"curve": {}, "seconds": "x"}'])
def test_work_with_damaged_or_foreign_files_is_repeated(text: str, tmp_path: Path) -> None:
    for name in ("run.json", "part-one.json", "foreign.json"):
        (tmp_path / name).write_text(text)
    workspace, run = Workspace("small", None, tmp_path, lab=False), simulation()
    assert workspace.train("run", run.recipe, run.splits, run.setting, run.goal) is not None
    assert workspace.part("one", lambda: 5, setup="a") == 5
    assert "all else" in workspace.made()["took"]


def test_a_run_whose_file_has_no_valid_curve_is_repeated(tmp_path: Path) -> None:
    run = simulation()
    for curve in ({}, {"name": "run", "steps_per_epoch": 1}, {"frob": 1}):
        save_json({"described": run.described(), "curve": curve}, tmp_path / "run.json")
        assert steps_of(run, tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_a_damaged_checkpoint_is_ignored(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_bytes(content)
    assert steps_of(simulation(), tmp_path) == [1, 2, 3, 4]


def test_a_checkpoint_with_invalid_content_is_reported(tmp_path: Path) -> None:
    run = simulation()
    torch.save({"described": run.described(), "cluster": {}, "curve": "{}"}, tmp_path / "run.pt")
    with pytest.raises(StudyError, match=r"run\.pt is damaged .*: delete it"):
        run.run(tmp_path)


def test_a_file_that_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    (tmp_path / "one.json.partial").mkdir()
    with pytest.raises(StudyError, match=r"cannot write .*one\.json \(is a directory\): make room"):
        save_json({}, tmp_path / "one.json")

    def full(out: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file\nmore")

    with pytest.raises(StudyError, match=r"cannot write .*two\.pt \(PytorchStreamWriter failed writing file more\)"):
        save(tmp_path / "two.pt", full)
    assert not (tmp_path / "two.pt.partial").exists() and not (tmp_path / "two.pt").exists()


def test_files_record_their_provenance_and_the_result_lists_it_once(tmp_path: Path) -> None:
    workspace, run = Workspace("small", None, tmp_path, lab=False), simulation()
    assert workspace.made()["version"] == "not noted"
    workspace.train("run", run.recipe, run.splits, run.setting, run.goal)
    workspace.part("one", lambda: 5, setup="a")
    content = json.loads((tmp_path / "part-one.json").read_text())
    assert set(content["made"]) == {"version", "machine", "date"}
    made = workspace.made()
    assert made["version"] == content["made"]["version"] and made["date"] == content["made"]["date"][:10]
    content["made"] |= {"version": "thinwire 0", "date": "2020-01-02T03:04:05+00:00"}
    (tmp_path / "part-one.json").write_text(json.dumps(content))
    made = workspace.made()
    assert made["version"].endswith("; thinwire 0") and made["date"].startswith("2020-01-02; 20")


def test_a_checkpoint_with_a_flipped_bit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulation()
    monkeypatch.setattr("papers.simulation.SAVE_SECONDS", 0.0)

    def interrupt(curve: Curve, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(tmp_path, interrupt)
    data = bytearray((tmp_path / "run.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "run.pt").write_bytes(data)
    with pytest.raises(StudyError, match=r"run\.pt is damaged \(run\.pt does not match its checksum\): delete it"):
        run.run(tmp_path)


def test_a_checkpoint_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of a run in version 0.1 had other class names."""
    run = simulation()
    monkeypatch.setattr("papers.simulation.SAVE_SECONDS", 0.0)

    def interrupt(curve: Curve, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(tmp_path, interrupt)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    state["described"] = state["described"].replace("TrainingSetting(", "Setting(")
    torch.save(state, tmp_path / "run.pt")
    assert steps_of(run, tmp_path) == [1, 2, 3, 4]
