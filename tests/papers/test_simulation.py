"""Simulated training gives the same results as real workers, and the same after an interruption."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from papers.labs import ConfirmationRun, LabTestbed, end_to_end
from papers.simulation import (
    Cluster,
    Curve,
    Diverged,
    Goal,
    Gradients,
    PeriodicProbe,
    Simulation,
    TrainingSetting,
    seed_dropout,
)
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.translate import BEGIN, END, SentencePairs, TransformerTranslator
from thinwire.tune.presets import resolve_codec

WORKERS, BATCH, LR = 3, 8, 0.05


def cluster(codec: Codec | None, *, dense_steps: int = 0) -> Cluster:
    recipe = get_recipe("digits")
    return Cluster(recipe, recipe.load(None).train, TrainingSetting(WORKERS, BATCH, LR, 0.0, codec, dense_steps))


def parameters(of: Cluster) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in of.model.parameters()])


def test_dense_equals_a_mean_over_workers() -> None:
    one, other = cluster(None), cluster(None)
    for _ in range(3):
        found = [other.gradients([worker])[1] for worker in range(WORKERS)]
        for name, parameter in other.model.named_parameters():
            parameter.grad = torch.stack([gradients[name] for gradients in found]).mean(0)
        other.optimizer.step()
        other.done += 1
        one.step()
    torch.testing.assert_close(parameters(one), parameters(other))


def test_everything_sent_equals_dense() -> None:
    dense, sparse = cluster(None), cluster(Codec(1.0, resolve_codec("percentile90").values))
    for _ in range(3):
        assert dense.step().density == 1.0
        assert sparse.step().density > 0.2  # zeros never travel
    torch.testing.assert_close(parameters(dense), parameters(sparse), rtol=1e-4, atol=1e-6)


def test_the_first_steps_may_be_dense() -> None:
    run = cluster(resolve_codec("topk1"), dense_steps=2)
    assert [run.step().density == 1.0 for _ in range(3)] == [True, True, False]


def test_a_probe_changes_nothing() -> None:
    one, other, seen = cluster(resolve_codec("topk1")), cluster(resolve_codec("topk1")), []

    def probe(gradients: list[Gradients], codecs: list[Codec]) -> None:
        seen.append(len(gradients))

    for _ in range(3):
        assert one.step() == other.step(probe)
    assert seen == [WORKERS] * 3
    assert torch.equal(parameters(one), parameters(other))


def test_a_learning_rate_that_is_too_high_is_reported() -> None:
    run = cluster(resolve_codec("topk1"))
    run.optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(Diverged, match="rate is too high"):
        for _ in range(5):
            run.step()


@pytest.mark.parametrize("codec", [None, resolve_codec("topk1")], ids=str)
def test_a_run_that_diverges_ends_and_says_so(codec: Codec | None, tmp_path: Path) -> None:
    wild = simulation(codec)
    curve = replace(wild, setting=replace(wild.setting, lr=1e30)).run(tmp_path)
    assert curve.diverged is not None and curve.reached is None
    assert len(curve.step) == len(curve.test) == len(curve.objective) == len(curve.loss) >= 1
    assert json.loads((tmp_path / "run.json").read_text())["curve"]["diverged"] == curve.diverged


def simulation(codec: Codec | None, steps: int = 12) -> Simulation:
    recipe = get_recipe("digits")
    goal = Goal(steps, 3, train_samples=100, test_samples=100, objective_samples=50)
    return Simulation("run", recipe, recipe.load(None), TrainingSetting(WORKERS, BATCH, LR, 0.0, codec), goal)


def figures(curve: Curve) -> dict[str, object]:
    return {key: value for key, value in vars(curve).items() if key != "seconds"}


def test_an_interrupted_run_continues_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papers.simulation.SAVE_SECONDS", 0.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = simulation(resolve_codec("topk1")).run(whole)

    def interrupt(curve: Curve, step: int) -> None:
        if step == 9:  # the checkpoint is of step 8, between two evaluations
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulation(resolve_codec("topk1")).run(parts, interrupt)
    steps: list[int] = []
    resumed = simulation(resolve_codec("topk1")).run(parts, lambda curve, step: steps.append(step))
    assert steps[0] == 9 and figures(resumed) == figures(expected)
    assert sorted(p.name for p in parts.iterdir()) == ["run.json"]


def test_a_finished_run_is_read_and_another_is_not(tmp_path: Path) -> None:
    first = simulation(None).run(tmp_path)
    steps: list[int] = []
    again = simulation(None).run(tmp_path, lambda curve, step: steps.append(step))
    assert not steps and figures(again) == figures(first)
    simulation(None, steps=6).run(tmp_path, lambda curve, step: steps.append(step))
    assert steps[-1] == 6


def test_the_notes_of_a_probe_are_saved(tmp_path: Path) -> None:
    def note(curve: Curve, of: Cluster):  # type: ignore[no-untyped-def]
        return lambda gradients, codecs: curve.notes.setdefault("at", []).append(of.done)

    simulation(resolve_codec("topk1")).run(tmp_path, probe=PeriodicProbe(5, note))
    assert json.loads((tmp_path / "run.json").read_text())["curve"]["notes"] == {"at": [0, 5, 10]}


def test_real_workers_reach_the_same_accuracies(tmp_path: Path) -> None:
    testbed = LabTestbed("digits", None, hosts=2, rate=None, batch=BATCH, lr=0.02)
    real = end_to_end(ConfirmationRun(testbed, "topk1", None, 0.999, 12, 4, 200))
    recipe = get_recipe("digits")
    setting = TrainingSetting(2, BATCH, 0.02, recipe.defaults.momentum, resolve_codec("topk1"))
    goal = Goal(12, 4, train_samples=0, test_samples=200)
    curve = Simulation("same", recipe, recipe.load(None), setting, goal).run(tmp_path)
    assert [step for step, _ in real["values"]] == curve.step
    # Sums in another order round differently, and a link's frames grow with delay: a few samples may change.
    assert curve.test == pytest.approx([value for _, value in real["values"]], abs=0.04)


class _Attentive(nn.Module):
    """A model whose attention draws dropout masks inside its operation, where no generator can be given."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(pixels, 32), nn.Linear(32, 10)
        self.layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.layer(self.inputs(x.flatten(1)).unsqueeze(1).expand(-1, 3, -1)).mean(1))
        return out


def _plain(pixels: int) -> nn.Module:
    shared = nn.Dropout(0.5)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 32), nn.Sequential(nn.ReLU(), shared, shared), nn.Linear(32, 10)
    )


@pytest.mark.parametrize("model", [_plain, _Attentive])
def test_dropout_is_the_same_with_any_number_of_threads(model: Callable[[int], nn.Module]) -> None:
    recipe = get_recipe("digits")
    train = recipe.load(None).train
    pixels = train.batch([0])[0].numel()
    runs = []
    for threads in (1, 2, 2):
        torch.manual_seed(threads)  # the state of the global generator does not matter
        run = Cluster(
            replace(recipe, model=lambda: model(pixels)),
            train,
            TrainingSetting(WORKERS, BATCH, LR, 0.0, resolve_codec("topk1")),
            threads=threads,
        )
        losses = [run.step().loss for _ in range(5)]
        run.close()
        runs.append((losses, parameters(run)))
    for losses, found in runs[1:]:
        assert runs[0][0] == losses and torch.equal(runs[0][1], found)


def _pairs(count: int) -> SentencePairs:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, 40, (3 + i % 4,), generator=draw) for i in range(count)]
    targets = [torch.cat([torch.tensor([BEGIN]), text.flip(0), torch.tensor([END])]) for text in texts]
    return SentencePairs(texts, targets, [""] * count, None)


def test_a_transformer_uses_all_threads_with_the_same_numbers() -> None:
    recipe = get_recipe("translate-transformer")
    recipe = replace(recipe, model=lambda: TransformerTranslator(40, units=16, layers=2, heads=2))
    runs = []
    for threads in (1, 2):
        setting = TrainingSetting(WORKERS, 4, 1e-2, 0.9, resolve_codec("topk1"))
        run = Cluster(recipe, _pairs(48), setting, threads=threads)
        assert run._pool._max_workers == threads
        losses = [run.step().loss for _ in range(4)]
        run.close()
        runs.append((losses, parameters(run)))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])


def test_dropout_draws_what_torch_draws() -> None:
    x = torch.randn(64, 33)
    model = nn.Sequential(nn.Dropout(0.3))
    torch.manual_seed(7)
    expected = model(x)
    draws = seed_dropout(model)
    draws.seed(7)
    assert torch.equal(model(x), expected)
    assert torch.equal(model.eval()(x), x)
    everything = nn.Sequential(nn.Dropout(1.0))
    seed_dropout(everything).seed(7)
    assert torch.equal(everything(x), torch.zeros_like(x))
