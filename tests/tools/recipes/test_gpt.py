"""The recipes gpt and gpt-10m: the rules of the text, the model, the schedule, and that training lowers the loss."""

import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from thinwire.errors import RecipeError
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.gpt import GPT, LEFT_OUT, adamw, load, read_folder, read_text, split_files
from thinwire.tools.recipes.metric import name_metric, reaches, show_metric
from thinwire.tools.recipes.recipe import DataOrder, warm_up_then_cosine

HELD = [
    b"file 1\n\x7f\x7f",
    b"file 30\n\x7f\x7f",
    b"file 36\n\x7f\x7f",
    b"file 41\n\x7f\x7f",
    b"file 58\n\x7f\x7f",
    b"file 7\n\x7f\x7f",
]


def write(root: Path, **contents: bytes) -> None:
    for name, content in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_bytes(content)


def names(root: Path, left_out: Sequence[str] = ()) -> list[str]:
    return [file.name for file in read_folder(root, (".py",), left_out)]


def test_folders_of_tests_are_left_out_and_equal_files_count_once(tmp_path: Path) -> None:
    write(tmp_path, b=b"same", a__c=b"same", test_me=b"a module", unittest__x=b"kept", only__here=b"text")
    write(tmp_path, test__y=b"1", a__tests__y=b"2", a__testdata__y=b"3", lib2to3__y=b"4")
    (tmp_path / "site-packages").mkdir()
    write(tmp_path / "site-packages", z=b"5")
    (tmp_path / "notes.txt").write_text("not Python")
    assert names(tmp_path, sorted(LEFT_OUT)) == ["a/c.py", "only/here.py", "test_me.py", "unittest/x.py"]
    assert len(names(tmp_path)) == 9


def test_the_split_is_stable_and_by_whole_files(tmp_path: Path) -> None:
    write(tmp_path, **{f"f{i}": f"file {i}\r\n".encode() + b"\xc3\xa9" for i in range(60)})
    train, validation = split_files(read_folder(tmp_path, (".py",)))
    # int.from_bytes(sha256(name)[:4], "big") % 20 == 0 for these files, on every machine.
    assert validation.split(b"\0") == HELD
    assert len(train.split(b"\0")) == 60 - len(HELD) and not set(train.split(b"\0")) & set(HELD)
    assert read_text(tmp_path) == (train, validation)  # a user's folder with many files is split likewise


def test_a_few_files_are_split_by_their_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    (tmp_path / "b.md").write_bytes(b"y" * 99)
    (tmp_path / "c.bin").write_bytes(b"z" * 99)
    train, validation = read_text(tmp_path)
    assert train == b"x" * 100 + b"\0" + b"y" * 89 and validation == b"y" * 10
    assert read_text(tmp_path / "a.txt") == (b"x" * 95, b"x" * 5)


def test_too_little_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    with pytest.raises(RecipeError, match="950 characters for training and 50 for validation, but each needs more"):
        load(64, tmp_path)
    with pytest.raises(RecipeError, match="nowhere does not exist: give a folder or a file of text"):
        load(64, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="0 characters for training and 0 for validation"):
        load(64, tmp_path / "empty")


def test_the_standard_library_is_enough_text() -> None:
    recipe = get_recipe("gpt")
    assert platform.python_version() in recipe.data
    splits = recipe.load(None)
    assert len(splits.train) > 100_000 and len(splits.test) > 2_000
    inputs, targets = splits.test.batch([0, 7])
    assert inputs.shape == targets.shape == (2, 64) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < 128 and inputs.dtype == torch.long


@pytest.mark.parametrize(("name", "parameters"), [("gpt", 813_312), ("gpt-10m", 10_725_120)])
def test_the_size_of_the_models(name: str, parameters: int) -> None:
    assert get_recipe(name).parameter_count() == parameters


def test_the_model_is_causal_and_begins_with_a_guess() -> None:
    model = get_recipe("gpt").build(0)
    text = torch.randint(128, (2, 64), generator=torch.Generator().manual_seed(0))
    scores = model(text)
    assert scores.shape == (2, 128, 64)
    changed = text.clone()
    changed[:, 40:] = 0
    torch.testing.assert_close(model(changed)[:, :, :40], scores[:, :, :40])
    assert isinstance(model, GPT)
    outputs = [float(p.detach().std()) for name, p in model.named_parameters() if name.endswith("_out.weight")]
    assert all(abs(std - 0.02 / 8**0.5) < 1e-3 for std in outputs) and len(outputs) == 8


def test_only_matrices_decay() -> None:
    decaying, others = adamw(get_recipe("gpt").build(0).parameters(), 0.1, 0.9).param_groups
    assert decaying["weight_decay"] == 0.1 and all(p.dim() == 2 for p in decaying["params"])
    assert others["weight_decay"] == 0.0 and all(p.dim() == 1 for p in others["params"])
    assert decaying["betas"] == (0.9, 0.99)


def test_the_rate_rises_and_falls_and_gradients_are_clipped() -> None:
    assert [warm_up_then_cosine(step, 300) for step in (0, 99, 100, 200, 300)] == pytest.approx([0.01, 1, 1, 0.55, 0.1])
    recipe = get_recipe("gpt")
    model = torch.nn.Linear(2, 1)
    optimizer = recipe.optimizer(model)
    for step, rate in ((200, 2.2e-3), (0, 4e-5)):  # the rate depends on the step alone, as a resumed run needs
        recipe.set_rate(optimizer, step, 300)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, rate])
    (100 * model(torch.ones(1, 2))).sum().backward()
    recipe.clip_gradients(model)
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert float(torch.stack(norms).norm()) == pytest.approx(1.0, rel=1e-4)


def test_training_lowers_the_loss() -> None:
    recipe = replace(get_recipe("gpt"), model=partial(GPT, context=64, layers=1, width=64, heads=2))
    splits, model = recipe.load(None), recipe.build(0)
    optimizer = recipe.optimizer(model, lr=0.04)
    order = DataOrder(len(splits.train), batch=8, workers=1, seed=0)
    first = recipe.evaluate(model, splits.test, 20)
    for step in range(25):
        recipe.set_rate(optimizer, step, 25)
        optimizer.zero_grad()
        recipe.loss(model, splits.train.batch(order.at(step, 0))).backward()
        recipe.clip_gradients(model)
        optimizer.step()
    last = recipe.evaluate(model, splits.test, 20)
    assert first > 4.5 and last < 3.7
    assert recipe.reaches(last, 3.7) and not recipe.reaches(first, 3.7)


def test_a_loss_is_better_if_it_is_lower() -> None:
    assert reaches(1.9, 2.0, higher_is_better=False) and not reaches(2.1, 2.0, higher_is_better=False)
    assert not reaches(float("nan"), 2.0, higher_is_better=False)
    assert name_metric(1.48212, "loss") == "loss 1.482" and show_metric(None, "loss") == "–"
    assert name_metric(0.96, "accuracy") == "96.0 % accuracy" and name_metric(30.0, "bleu") == "BLEU 30.0"
