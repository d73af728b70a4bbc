"""Properties of all recipes: names, seeds, the order of the data, finding them, and the list."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.errors import RecipeError
from thinwire.tools.cli import run
from thinwire.tools.recipes import get_recipe, recipe_names
from thinwire.tools.recipes.recipe import DataOrder, TensorSplit


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_complete(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert recipe.description.endswith(".")
    assert recipe.parameter_count() > 100_000


def test_the_seed_decides_the_weights_and_nothing_else() -> None:
    recipe = get_recipe("mnist-conv")
    before = torch.random.get_rng_state()
    one, same, other = recipe.build(1), recipe.build(1), recipe.build(2)
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_workers_share_an_epoch_without_overlap() -> None:
    order = DataOrder(103, batch=5, workers=4, seed=7)
    assert order.steps_per_epoch == 5
    first = [order.at(step, rank) for step in range(5) for rank in range(4)]
    seen = [index for part in first for index in part]
    assert len(set(seen)) == len(seen) == 100
    assert order.at(5, 0) != order.at(0, 0)
    assert order.at(3, 2) == DataOrder(103, batch=5, workers=4, seed=7).at(3, 2)
    assert order.at(3, 2) != DataOrder(103, batch=5, workers=4, seed=8).at(3, 2)
    assert order.epoch(10) == 2.0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few for 4 workers"):
        DataOrder(10, batch=8, workers=4, seed=0)


def test_unknown_recipes_are_named_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="unknown recipe 'digit': give one of digits, mnist"):
        get_recipe("digit")
    with pytest.raises(RecipeError, match="cannot import 'no_such_module'"):
        get_recipe("no_such_module:recipe")
    with pytest.raises(RecipeError, match=r"the module 'thinwire.tools.recipes.digits' has no function 'nothing'"):
        get_recipe("thinwire.tools.recipes.digits:nothing")
    with pytest.raises(RecipeError, match="returned PosixPath, but it must return a Recipe"):
        get_recipe("pathlib:Path")


OWN = """
from dataclasses import replace
from thinwire.tools.recipes import get_recipe

def tiny():
    return replace(get_recipe("digits"), name="tiny")
"""


def test_a_users_recipe_is_found_by_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_recipes_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert get_recipe("my_recipes_of_a_test:tiny").name == "tiny"


def test_a_users_recipe_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "neighbour_of_a_test.py").write_text(OWN)
    (tmp_path / "folder" / "recipe_in_a_folder.py").write_text("from neighbour_of_a_test import tiny")
    (tmp_path / "recipe_file_of_a_test.py").write_text(OWN)
    for place in ("recipe_file_of_a_test.py", "folder/recipe_in_a_folder.py", f"{tmp_path}/recipe_file_of_a_test.py"):
        assert get_recipe(f"{place}:tiny").name == "tiny"


def test_mistakes_about_a_recipes_file_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "json.py").write_text(OWN)
    (tmp_path / "own_file_of_a_test.py").write_text(OWN)
    for name, words in (
        ("nowhere/own.py:tiny", "there is no file 'nowhere/own.py'"),
        ("own_file_of_a_test.py:large", "the file 'own_file_of_a_test.py' has no function 'large'"),
        ("json.py:tiny", "another module is named 'json', so rename the file"),
        ("own_file_of_a_test.py", "or file.py:function for your own"),
    ):
        with pytest.raises(RecipeError, match=words) as caught:
            get_recipe(name)
        assert "\n" not in str(caught.value)


def test_evaluation_keeps_the_mode_and_obeys_the_limit() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return torch.nn.functional.one_hot(torch.zeros(len(inputs), dtype=torch.long), 10).float()

    recipe, model = get_recipe("digits"), Half()
    split = TensorSplit(torch.zeros(600, 1), torch.tensor([0] * 300 + [1] * 300))
    assert recipe.evaluate(model, split) == 0.5
    assert recipe.evaluate(model, split, 300) == 1.0
    assert model.training
    with pytest.raises(ValueError, match="at least 1"):
        recipe.evaluate(model, split, 0)


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"]
    assert [row["name"] for row in rows] == recipe_names()
    assert next(row for row in rows if row["name"] == "cifar10")["parameters"] == 1_756_426


def test_the_list_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in recipe_names())
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown


def test_the_commands_load_no_torch() -> None:
    code = "import sys, thinwire.tools.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_whose_constructor_reads_values_can_be_counted() -> None:
    def model() -> nn.Module:
        return nn.Linear(int(torch.linspace(1, 3, 3)[2].item()), 2)

    assert replace(get_recipe("digits"), model=model).parameter_count() == 8
