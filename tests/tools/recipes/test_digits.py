"""The recipe digits: its data, and that a few steps of training improve the accuracy."""

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from thinwire.errors import RecipeError
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.digits import read_digits
from thinwire.tools.recipes.recipe import DataOrder, TensorSplit


def test_the_split_of_the_data_is_always_the_same() -> None:
    one, two = get_recipe("digits").load(None), get_recipe("digits").load(None)
    assert (len(one.train), len(one.test)) == (1297, 500)
    images, labels = one.train.batch([0, 1, 2])
    assert images.shape == (3, 3, 16, 16)
    assert torch.equal(images, two.train.batch([0, 1, 2])[0])
    assert labels.dtype == torch.long
    assert isinstance(one.test, TensorSplit)
    assert isinstance(one.train, TensorSplit)
    assert abs(float(one.train.inputs.mean())) < 1e-4
    assert abs(float(one.train.inputs.std()) - 1) < 1e-4
    assert sorted(set(one.test.labels.tolist())) == list(range(10))


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    assert len(get_recipe("digits").load(tmp_path).test) == 500
    with pytest.raises(RecipeError, match="nowhere does not exist: leave out --data"):
        get_recipe("digits").load(tmp_path / "nowhere")


def test_the_file_holds_what_scikit_learn_reads_from_it() -> None:
    known, answers = load_digits(return_X_y=True)
    pixels, labels = read_digits()
    assert torch.equal(pixels, torch.from_numpy(known).float())
    assert torch.equal(labels, torch.from_numpy(answers))


def test_training_improves_the_accuracy() -> None:
    recipe = get_recipe("digits")
    splits, model = recipe.load(None), recipe.build(0)
    optimizer = recipe.optimizer(model)
    order = DataOrder(len(splits.train), batch=4 * recipe.defaults.batch, workers=1, seed=0)
    for step in range(40):
        optimizer.zero_grad()
        recipe.loss(model, splits.train.batch(order.at(step, 0))).backward()
        optimizer.step()
    assert recipe.evaluate(model, splits.test) > 0.7
