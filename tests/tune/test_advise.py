"""Advice: the recommendation, its limits, the figures and the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.needs import needs
from tests.tools.report.browser import render
from tests.tune.test_forecast import WORK
from thinwire.tools import cli
from thinwire.tools.race.advise import advise, at_rates, crossings, in_buckets, measure, subject_of
from thinwire.tools.race.measured import fidelity_folder, measured_costs
from thinwire.tune.forecast import DENSE, FP16, SETTINGS, Network, Setting, TuningPolicy, forecast, update_settings

THINWIRE = Path(sys.executable).with_name("thinwire")


def own_model() -> tuple[nn.Module, object]:
    """What a user's module:function may return."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(8, 64)

    def loss(model: nn.Module) -> Tensor:
        result: Tensor = (model(x) - x).square().mean()
        return result

    return net, loss


def no_model() -> int:
    return 5


def wire(rate: float) -> Network:
    return Network.ideal(8, rate, 1e-4)


def test_compression_is_recommended_on_a_slow_network_only() -> None:
    thin, thick = advise(SETTINGS, WORK, wire(5e7)), advise(SETTINGS, WORK, wire(1e11))
    assert thin.compress and thin.verdict.startswith("Compress: 0.01 takes") and "attach(" in thin.verdict
    assert "ms (± " in thin.verdict
    assert not thick.compress and thick.verdict.startswith("Do not compress: dense takes")
    assert {row.method for row in thin.rows} == {"dense", "fp16", "0.1", "0.01", "0.001"}
    for row in thin.rows:
        assert row.efficiency == pytest.approx(1.0 / (1.0 + row.overhead))
        assert 0.0 <= row.uncertainty < 0.3


def test_a_density_without_measured_training_is_not_recommended() -> None:
    network = wire(1e6)
    found = advise(SETTINGS, WORK, network, policy=TuningPolicy(alpha=0.0))
    fastest = min(found.rows, key=lambda row: row.seconds)
    assert fastest.method == "0.001" and found.best.method == "0.01"
    assert "0.001 is predicted to be faster, but the effect on training has not been measured" in found.verdict


def test_updates_are_recommended_for_adam_on_slow_networks_only() -> None:
    thin, thick = (advise(SETTINGS, WORK, wire(rate), optimizer="AdamW") for rate in (5e7, 1e12))
    assert thin.best.every and thin.verdict.startswith(f"Compress updates: {thin.best.method} takes")
    assert f'attach(model, "{thin.best.method}", optimizer=optimizer)' in thin.verdict
    assert thick.best.method == "dense" and thick.verdict.startswith("Do not compress")
    for found in (thin, thick):
        assert "trains worse with AdamW" in found.verdict
        assert "There is no measurement of what update, local4, local16 and local64 cost in training" in found.verdict
        assert [row.every for row in found.rows if row.every] == [1, 4, 16, 64]
    sgd = advise(SETTINGS, WORK, wire(5e7))
    assert not any(row.every for row in sgd.rows) and "AdamW" not in sgd.verdict


def test_local_steps_hide_slow_networks() -> None:
    """The exchange overlaps the next steps: the thinner the network, the more steps it takes to hide it."""
    for rate, hidden, shown in ((1e9, "local4", ""), (1e7, "local64", "local16")):
        times = {s.name: forecast(s, WORK, wire(rate)).seconds for s in update_settings(8)}
        assert times["update"] > WORK.compute and times[hidden] == WORK.compute
        assert times["update"] >= times["local4"] >= times["local16"] >= times["local64"]
        assert not shown or times[shown] > WORK.compute


def fidelity_run(method: str, loss: float, *, seed: int = 0, steps: int = 1500, lr: float = 8e-3) -> dict[str, object]:
    run = {"method": method, "lr": lr, "steps": steps, "workers": 4, "seed": seed, "recipe": "gpt"}
    return {"run": run, "loss": loss, "curve": [[steps / 2, 2.0], [steps, loss]]}


def test_costs_in_training_are_those_that_were_measured(tmp_path: Path) -> None:
    runs = [
        fidelity_run("dense", 1.0),
        fidelity_run("dense", 1.2, lr=1e-3),  # not its best rate
        fidelity_run("update:update", 1.03),
        fidelity_run("update:update", 9.0, steps=800),  # shorter
        fidelity_run("local16:lowrank=1:4", 1.5),
        fidelity_run("local16+overlap:lowrank=1:4", 1.1),
        fidelity_run("local64:lowrank=0.6:2:256", 1.2, seed=1),  # of another seed than dense training's
        fidelity_run("local4:lowrank=0.6:2:256", 1.05),
        fidelity_run("local4:lowrank=0.5:2:256", 1.01),  # not the preset's codec
    ]
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps(run))
    found = measured_costs(tmp_path)
    losses = {name: round(cost.loss, 6) for name, cost in found.items()}
    assert losses == {"update": 0.03, "local4": 0.05, "local16": 0.1}
    assert found["local16"].overlap and not found["local4"].overlap
    # Dense training went from 2.0 at step 750 to 1.0 at step 1500: it was at 1.1 after 1425 steps.
    assert found["local16"].more_steps == pytest.approx(1500 / 1425 - 1)
    said = advise(SETTINGS, WORK, wire(5e7), optimizer="AdamW", costs=found).verdict
    assert "local16 loss +10.0%, +5% steps to the same loss (1,500 steps, 4 workers, 1 seed)" in said
    assert "local4* loss +5.0%" in said and "* without overlap" in said
    assert "There is no measurement of what local64 costs in training" in said
    assert measured_costs(None) == {}


def test_the_committed_runs_can_be_read() -> None:
    costs = measured_costs(fidelity_folder())
    assert costs["update"].workers == 4 and -0.05 < costs["update"].loss < 0.1


def test_a_gain_within_the_uncertainty_is_not_decided() -> None:
    # The traffic of an all-gather grows with the number of workers, until it is close to that of dense.
    settings = (DENSE, Setting("0.01", "gather", density=0.01))
    said = [advise(settings, WORK, Network.ideal(world, 5e7, 1e-4)) for world in range(50, 800, 50)]
    undecided = [found for found in said if found.verdict.startswith("Not decided")]
    assert said[0].compress and undecided
    assert all(not found.compress and "thinwire race" in found.verdict for found in undecided)


def test_the_crossing_is_where_a_method_gains_five_per_cent() -> None:
    found = crossings(SETTINGS, WORK, wire)
    rate = found["0.1"]
    assert rate is not None
    those = [forecast(s, WORK, wire(rate)).seconds for s in SETTINGS if s.name == "0.1"]
    assert min(those) == pytest.approx(0.95 * forecast(DENSE, WORK, wire(rate)).seconds, rel=1e-6)
    rates, curves = at_rates(SETTINGS, WORK, wire, points=9)
    assert len(rates) == 9 and all(len(curve) == 9 for curve in curves.values())
    assert curves["dense"] == sorted(curves["dense"], reverse=True)


def test_gradients_fill_buckets_as_in_ddp() -> None:
    filled = [(2000, 1.0), (300_000, 1.1), (4_000_000, 1.2), (3_000_000, 1.3), (10, 1.5)]
    buckets, ready = in_buckets(filled)
    assert buckets == (302_000, 7_000_000, 10)
    assert ready == pytest.approx((-0.4, -0.2, 0.0))


def test_a_model_is_measured_with_its_codecs() -> None:
    subject = subject_of("tests.tune.test_advise:own_model")
    found = measure(subject, ["topk1", "percentile90"], steps=2)
    work = found.work
    assert work.elements == 64 * 256 + 256 + 256 * 64 + 64 and work.compute > 0.0
    assert work.codecs is not None and work.codecs["percentile90"].frame > 4 * work.codecs["topk1"].frame
    assert work.alpha is not None and 0.0 < work.alpha[0.001] < work.alpha[0.1] < 1.0
    assert forecast(FP16, work, wire(1e6)).seconds < forecast(DENSE, work, wire(1e6)).seconds


def test_the_command_gives_a_table_figures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, page = tmp_path / "advice.json", tmp_path / "advice.html"
    words = ["advise", "tests.tune.test_advise:own_model", "--workers", "14", "--rate", "1mbit"]
    assert cli.run([*words, "--methods", "topk1", "--json", str(json_file), "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Compress: " in said and "pays up to" in said
    figures = json.loads(json_file.read_text())
    assert figures["workers"] == 14 and figures["compress"] and figures["recommended"] == "topk1"
    dense, _, sparse = figures["methods"]
    assert dense["step_ms"] > sparse["step_ms"] > figures["compute_ms"]
    assert dense["bytes_per_host_step"] == pytest.approx(2 * 4 * figures["parameters"] * 13 / 14)
    rendered = render(page)
    assert rendered.console == []
    assert re.search(r'<html[^>]* data-drawn="[1-9]', rendered.dom)
    assert len(re.findall(r'class="trace scatter trace\w+"', rendered.dom)) >= 3
    assert figures["verdict"].split(";")[0] in rendered.dom


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--rate", "fast"], "fast"),
        (["--rate", "none"], "needs a rate"),
        (["--methods", "magic"], "magic"),
        (["nonsense"], "nonsense"),
        (["tests.tune.test_advise:no_model"], "must return a Recipe, or a model and"),
        (["--probe"], "torchrun"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and hint in said


def test_real_links_are_probed_in_the_lab(tmp_path: Path) -> None:
    needs("lab")
    advice = [str(THINWIRE), "advise", "--probe", "tests.tune.test_advise:own_model", "--methods", "topk1"]
    command = [
        str(THINWIRE),
        "lab",
        "--hosts",
        "2",
        "--rate",
        "20mbit",
        "--",
        *advice,
        "--json",
        str(tmp_path / "a.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["probed"] and figures["workers"] == 2
    # A busy machine makes links look slower than they are, never faster.
    assert 1e6 < figures["rate"] < 24e6
