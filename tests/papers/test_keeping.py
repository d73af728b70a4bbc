"""Files of finished work: only those of the same work on the same data count, and damage never stops a study."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from papers.cluster import Setting
from papers.runs import Curve, Goal, Simulation, fingerprint, save, save_json
from papers.study import StudyError
from papers.workshop import Workshop

from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Splits, TensorSplit
from thinwire.tools.recipes.translate import SentencePairs


def other(splits: Splits) -> Splits:
    """As much data, of which the last test sample is another."""
    test = splits.test
    assert isinstance(test, TensorSplit)
    inputs = test.inputs.clone()
    inputs[-1] += 1
    return Splits(splits.train, replace(test, inputs=inputs))


def simulation() -> Simulation:
    recipe = get_recipe("digits")
    goal = Goal(4, 2, train_samples=0, test_samples=50)
    return Simulation("run", recipe, recipe.load(None), Setting(2, 8, 0.05), goal)


def steps_of(run: Simulation, folder: Path) -> list[int]:
    """The steps that were trained and not read."""
    steps: list[int] = []
    run.run(folder, lambda curve, step: steps.append(step))
    return steps


def test_a_run_on_other_data_is_made_anew(tmp_path: Path) -> None:
    first = simulation()
    assert steps_of(first, tmp_path) == [1, 2, 3, 4] and steps_of(first, tmp_path) == []
    assert steps_of(replace(first, splits=other(first.splits)), tmp_path) == [1, 2, 3, 4]


def test_the_data_is_named_after_all_else() -> None:
    """So that files of before can be given it."""
    run = simulation()
    old = f"{run.recipe.name} {len(run.splits.train)} {run.setting} {run.goal}"
    assert run.described() == f"{old} data={fingerprint(run.splits)}"


def test_a_fingerprint_is_of_the_data_alone() -> None:
    splits = get_recipe("digits").load(None)
    assert fingerprint(splits) == fingerprint(get_recipe("digits").load(None)) != fingerprint(other(splits))
    pieces = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    pairs = SentencePairs(pieces, pieces, ["a", "b"], None)
    turned = SentencePairs(pieces[::-1], pieces, ["a", "b"], None)
    assert fingerprint(Splits(pairs, pairs)) == fingerprint(Splits(pairs, pairs)) != fingerprint(Splits(pairs, turned))


def test_a_part_of_another_set_up_or_of_other_data_is_made_anew(tmp_path: Path) -> None:
    shop = Workshop("small", None, tmp_path, lab=False)
    splits = get_recipe("digits").load(None)
    outcomes = iter(range(10))

    def part(setup: str, data: Splits) -> int | None:
        return shop.part("one", lambda: next(outcomes), setup=setup, data=data)

    assert [part("a", splits), part("a", splits), part("b", splits), part("b", other(splits))] == [0, 0, 1, 2]
    (tmp_path / "part-one.json").write_text('{"seconds": 1.0, "outcome": 99}')  # as before parts had an identity
    assert part("b", splits) == 3


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '"x"', '{"described": 3}', '{"curve": {}, "seconds": "x"}'])
def test_damaged_and_foreign_files_are_made_anew(text: str, tmp_path: Path) -> None:
    for name in ("run.json", "part-one.json", "somebody-elses.json"):
        (tmp_path / name).write_text(text)
    shop, run = Workshop("small", None, tmp_path, lab=False), simulation()
    assert shop.train("run", run.recipe, run.splits, run.setting, run.goal) is not None
    assert shop.part("one", lambda: 5, setup="a") == 5
    assert "all else" in shop.made()["took"]


def test_a_curve_that_lost_its_inside_is_made_anew(tmp_path: Path) -> None:
    run = simulation()
    for curve in ({}, {"name": "run", "steps_per_epoch": 1}, {"frob": 1}):
        save_json({"described": run.described(), "curve": curve}, tmp_path / "run.json")
        assert steps_of(run, tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_a_damaged_checkpoint_is_not_gone_on_from(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_bytes(content)
    assert steps_of(simulation(), tmp_path) == [1, 2, 3, 4]


def test_a_checkpoint_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    run = simulation()
    torch.save({"described": run.described(), "cluster": {}, "curve": "{}"}, tmp_path / "run.pt")
    with pytest.raises(StudyError, match=r"run\.pt is damaged .*: delete it"):
        run.run(tmp_path)


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.partial").mkdir()
    with pytest.raises(StudyError, match=r"cannot write .*one\.json \(Is a directory\): make room"):
        save_json({}, tmp_path / "one.json")

    def full(out: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file\nmore")

    with pytest.raises(StudyError, match=r"cannot write .*two\.pt \(PytorchStreamWriter failed writing file\)"):
        save(tmp_path / "two.pt", full)
    assert not (tmp_path / "two.partial").exists() and not (tmp_path / "two.pt").exists()


def test_files_say_what_made_them_and_the_result_lists_it_once(tmp_path: Path) -> None:
    shop, run = Workshop("small", None, tmp_path, lab=False), simulation()
    assert shop.made()["version"] == "not noted"
    shop.train("run", run.recipe, run.splits, run.setting, run.goal)
    shop.part("one", lambda: 5, setup="a")
    held = json.loads((tmp_path / "part-one.json").read_text())
    assert set(held["made"]) == {"version", "machine", "date"}
    assert shop.made()["version"] == held["made"]["version"] and shop.made()["date"] == held["made"]["date"][:10]
    held["made"] |= {"version": "thinwire 0", "date": "2020-01-02T03:04:05+00:00"}
    (tmp_path / "part-one.json").write_text(json.dumps(held))
    made = shop.made()
    assert made["version"].endswith("; thinwire 0") and made["date"].startswith("2020-01-02; 20")


def test_a_run_from_before_checkpoints_at_any_step_goes_on(tmp_path: Path) -> None:
    run = simulation()
    whole = run.run(tmp_path)
    (tmp_path / "run.json").unlink()
    saved: list[dict[str, object]] = []

    def keep(curve: Curve, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("papers.runs.SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            run.run(tmp_path, keep)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    saved.append(state.pop("since"))  # step 2 was an evaluation, as all of them were
    torch.save(state, tmp_path / "run.pt")
    again = run.run(tmp_path)
    assert (again.megabytes, again.loss, again.test) == (whole.megabytes, whole.loss, whole.test)
