"""`thinwire bench fidelity`: the simulated ranks are the real ones to the bit, and the bars are judged by its files."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.cluster import Cluster
from tests.link import jobs
from thinwire.tools.bench import fidelity, value_fidelity
from thinwire.tools.bench.fidelity import FidelityRun, Results
from thinwire.tools.recipes.recipe import Batch, Defaults, Optimizer, Recipe, Splits
from thinwire.tools.simulate.ranks import training

STEPS = 9


def adamw(parameters: Any, lr: float, momentum: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(momentum, 0.99))


def no_data(folder: Path | None) -> Splits:
    raise AssertionError("the test makes its own batches")


def recipe() -> Recipe:
    return Recipe(
        "net",
        description="",
        data="",
        model=jobs.Net,
        load=no_data,
        make_optimizer=adamw,
        clip=1.0,
        defaults=Defaults(batch=16, lr=3e-3, momentum=0.9, epochs=1, target=1.0),
    )


def real(rank: int, codec: Any, options: dict[str, Any]) -> list[int]:
    """What ranks with a network between them compute."""
    made = recipe()
    model = DDP(made.build(3))
    optimizer = made.optimizer(model)
    with tw.attach(model, codec, optimizer=optimizer, **options):
        for step in range(STEPS):
            optimizer.zero_grad()
            made.loss(model, jobs.batch(rank, step)).backward()
            made.clip_gradients(model)
            optimizer.step()
    return jobs.digest(model.module)


def batches(step: int, workers: int) -> list[Batch]:
    return [jobs.batch(rank, step) for rank in range(workers)]


@pytest.mark.parametrize(
    ("method", "codec", "options"),
    [
        ("update:update", "update", {}),
        ("update:rotate", "rotate", {}),
        ("local2:update", "update", {"every": 2}),
        ("local2+overlap:update", "update", {"every": 2, "overlap": True}),
        ("local2+overlap+nesterov:rotate", "rotate", {"every": 2, "overlap": True, "outer": tw.Nesterov()}),
        ("local2:lowrank=1:4", tw.Codec(tw.LowRank(1.0), tw.Bits(4)), {"every": 2}),
        ("local4", "local4", {}),
        ("diloco2", "dense", {"every": 2, "outer": tw.Nesterov(0.7, momentum=0.9)}),
    ],
)
def test_simulated_updates_are_the_real_ones_to_the_bit(
    cluster: Cluster, method: str, codec: Any, options: dict[str, Any]
) -> None:
    """The exchange that overlaps the unfinished round is finished by detach, and by the simulation's `model`."""
    found = cluster.run(real, 3, codec, options)
    with _one_thread():
        simulated = training(method, recipe(), seed=3, workers=3, lr=3e-3, steps=STEPS)
        for step in range(STEPS):
            simulated.step(batches(step, 3))
    assert found == [jobs.digest(simulated.model)] * 3


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let one thread compute matrix products, as in the test's ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "method",
    [
        "dense",
        "alone",
        "gradient:topk1",
        "powersgd:2",
        "demo:0.05",
        "update:lowrank=0.2",
        "local4:lowrank=0.5:4",
        "diloco4",
        "local4:dense",
    ],
)
def test_every_method_learns(method: str) -> None:
    untrained = jobs.accuracy(jobs.Net())
    trained = training(method, recipe(), seed=0, workers=3, lr=3e-3, steps=40)
    for step in range(40):
        trained.step(batches(step, 1 if method == "alone" else 3))
    assert jobs.accuracy(trained.model) > untrained + 0.1
    dense = 64 * 2 / 3
    assert trained.bits == dense if method == "dense" else trained.bits < dense / 3
    assert trained.bits == dense / 4 or method not in ("diloco4", "local4:dense")


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no method 'ring'; there are dense, alone"):
        training("ring", recipe(), seed=0, workers=2, lr=0.1, steps=1)


def write(folder: Path, run: FidelityRun, loss: float, bits: float = 0.5) -> None:
    row = {"run": vars(run), "loss": loss, "curve": [[run.steps, loss]], "bits": bits}
    (folder / run.file).write_text(json.dumps(row))


def test_parts_build_on_each_other_and_bars_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ("dense", "update:update")
    missing = list(fidelity.wanted("rates", methods, Results(tmp_path)))
    assert len(missing) == 8 and not list(fidelity.wanted("seeds", methods, Results(tmp_path)))
    for run in missing:
        best = 4e-3 if run.method == "dense" else 1.6e-2
        write(tmp_path, run, 1.5 + abs(run.lr - best))
    results = Results(tmp_path)
    assert results.best_rate("dense") == 4e-3 and results.at_edge("dense") is None
    assert results.at_edge("update:update") == 3.2e-2  # the best rate is the largest: one more is tried
    assert FidelityRun("update:update", 3.2e-2, 800, 4, 0) in list(fidelity.wanted("rates", methods, results))
    seeds = list(fidelity.wanted("seeds", methods, results))
    assert len(seeds) == 9  # three seeds: dense, updates at their own best rate and at dense training's
    for run in seeds:
        write(tmp_path, run, 1.0 if run.method == "dense" else 1.02 if run.lr == 1.6e-2 else 1.2)
    assert fidelity.run(tmp_path, [], methods, 1, None, None) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "met 1,500 steps, each at its best rate: +2.0% (bar +3%)" in shown
    assert "MISSED 1,500 steps, at dense training's best rate: +20.0% (bar +5%)" in shown
    assert "open 4,000 steps: its runs are missing" in shown


def test_local_steps_are_searched_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search over rates, three seeds at the best rate, and then the bars, of which each limits loss and bits."""
    method, *others = "local16:lowrank=0.6:2:256", "diloco16", "local16:dense"
    for run in fidelity.wanted("local", (method, *others), Results(tmp_path)):
        assert run.steps == 800
        write(tmp_path, run, 1.5 + abs(run.lr - 4e-3))
    seeds = [r for r in fidelity.wanted("local", (method, *others), Results(tmp_path)) if r.steps == 1500]
    assert len(seeds) == 9 and {run.lr for run in seeds} == {4e-3}

    def judged(bits: float, losses: dict[str, float]) -> str:
        for run in seeds:
            write(tmp_path, run, losses[run.method], bits if run.method == method else 3.0)
        missed = fidelity.run(tmp_path, [], fidelity.METHODS, 1, None, None)
        said = " ".join(capsys.readouterr().out.split())
        assert missed == ("MISSED" in said)
        assert "open every=4 at the bytes of every=1: its runs are missing" in said
        return said

    what = "every=16 at 1/16 of the bytes of the best uncompressed:"
    good, better = {method: 1.1, "diloco16": 1.1}, "against local16:dense, with 4.00% of its bytes (bar 6.25%)"
    assert f"MISSED {what} +10.0% (bar +1.0%) {better}" in judged(0.12, {**good, "local16:dense": 1.0})
    assert f"met {what} +0.0% (bar +1.0%) against diloco16" in judged(0.12, {**good, "local16:dense": 1.2})
    assert f"MISSED {what} +0.0%" in judged(0.24, {**good, "local16:dense": 1.2})


def test_a_run_writes_its_file_once_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fidelity, "EVALUATED", 4)
    run = FidelityRun("dense", 1e-3, 2, 2, 0)
    monkeypatch.setattr(fidelity, "LINE_EVERY", 0.0)
    row = fidelity.simulate(run, tmp_path, report=fidelity._print_progress(run))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "PROGRESS step 1 of 2"
    assert re.fullmatch(r"PROGRESS step 2 of 2, \d\.\d{4} at step 2, about 0 s left", second)
    assert Results(tmp_path).rows == {run: json.loads((tmp_path / run.file).read_text())}
    assert row["curve"][-1][0] == 2 and 3.0 < row["loss"] < 6.0
    assert [path.name for path in tmp_path.iterdir()] == [run.file]


def test_values_are_judged_by_the_means_of_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = list(dict.fromkeys(fidelity.wanted("values", fidelity.METHODS, Results(tmp_path))))
    assert len(runs) == 30 and len({run.file for run in runs}) == 30
    worse = {"accuracy": -0.002, "bleu": -0.4, "loss": 0.02}  # 0.2 points of accuracy are allowed, the others are not
    for run in runs:
        task = value_fidelity.TASKS[run.recipe]
        value = 0.9 + 0.01 * run.seed + (worse[task.metric] if run.method.endswith("topk1") else 0.0)
        curve = [[step, value] for step in sorted(task.evaluated_steps())]
        assert len(curve) == task.evaluations and curve[-1][0] == run.steps
        row = {"run": vars(run), task.metric: value, "curve": curve, "bits": 0.5}
        (tmp_path / run.file).write_text(json.dumps(row))
    bars = value_fidelity.judge(Results(tmp_path).rows.values())
    assert {bar["what"].split(":")[0]: bar["met"] for bar in bars} == {
        **dict.fromkeys(("digits", "mnist", "cifar10"), True),
        **dict.fromkeys(("translate", "gpt"), False),
    }
    assert "MISSED gpt: loss of topk1 against 8bit" in capsys.readouterr().out
    assert not [run for run in fidelity.wanted("values", (), Results(tmp_path)) if run not in Results(tmp_path).rows]


def test_the_committed_runs_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[3] / "results" / "fidelity"
    assert fidelity.run(folder, [], fidelity.METHODS, 1, None, None) in (0, 1)
    assert "MISSED" in capsys.readouterr().out
