"""The findings of sparsify-gradients: predicted times, means over seeds and claims; and the reuse of finished runs."""

import json
from pathlib import Path

import pytest
import torch
from papers.simulation import Curve, Simulation
from papers.sparsify_gradients import findings
from papers.sparsify_gradients import study as sparsify_gradients
from papers.sparsify_gradients.findings import Seeds, listed
from papers.workspace import Workspace

from tests.papers.test_studies import curve
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Splits, TensorSplit

WORK = Path(__file__).parents[2] / "results" / "work" / "sparsify-gradients-full"
PAPER = {
    "dense": {"ms": 1000.0, "compute": 250.0, "alone": 50.0},
    "percentile90": {"ms": 500.0, "compute": 300.0, "alone": 100.0},
}
SERVED = {"dense": {"ms": 2000.0}, "percentile90": {"ms": 1500.0}, "thinwire": {"ms": 100.0}}


def seeds_of(**curves: list[Curve]) -> dict[str, Seeds]:
    """The curves of each method's seeds 0, 1 and so on."""
    return {name: Seeds(dict(enumerate(own))) for name, own in curves.items()}


def test_time_to_target_is_steps_times_the_time_of_a_step() -> None:
    seeds = seeds_of(
        dense=[curve("dense", 100, [0.5, 0.9])],
        percentile90=[curve("percentile90", 110, [0.5, 0.9])],
        thinwire=[curve("thinwire", 105, [0.5, 0.898])],
    )
    times = findings.times_of(seeds, PAPER, SERVED, None)
    assert times["dense"]["paper_seconds"] == pytest.approx(100.0) and times["dense"]["served_seconds"] == 200.0
    assert times["dense"]["ring_seconds"] is None
    claims = {claim.what: claim for claim in findings.time_claims(times, seeds, full=True)}
    slow = claims[f"percentile90: speed-up to the target, {findings.WAYS['paper']}"]
    fast = claims["thinwire: speed-up to the target, thinwire's own server, against dense the paper's way"]
    assert slow.ours == pytest.approx(100 / 55) and slow.holds is False
    assert fast.ours == pytest.approx(100 / 10.5) and fast.holds is True
    own = claims[f"percentile90: speed-up to the target, {findings.WAYS['own']}"]
    assert own.ours == pytest.approx(80 / 33) and own.holds is True
    assert slow.note == "" and fast.note == "5x is asked for"
    assert [c.holds for c in findings.test_claims(seeds)] == [True] * 4
    absolute = "dense: seconds to 99.5 % train accuracy"
    assert claims[absolute].paper == findings.PAPER_SECONDS["dense"]
    small = {claim.what: claim for claim in findings.time_claims(times, seeds, full=False)}
    assert small[absolute].paper is None and small[absolute].ours == claims[absolute].ours


def test_accuracy_is_also_compared_over_the_last_epochs() -> None:
    """One bad epoch at the end decides one claim but not the other."""
    seeds = seeds_of(
        dense=[curve("dense", 40, [0.5, 0.6, 0.7, 0.71])], thinwire=[curve("thinwire", 40, [0.5, 0.61, 0.72, 0.70])]
    )
    last, mean = findings.test_claims(seeds)
    assert last.ours == pytest.approx(-1.0) and last.holds is False
    assert last.note == "70.00 % against 71.00 %; at least -0.3 is asked for"
    assert mean.ours == pytest.approx(100 * (2.03 - 2.01) / 3) and mean.holds is True


def test_epochs_are_judged_at_the_full_scale_with_a_margin_of_a_tenth() -> None:
    def held(dense: int, full: bool) -> list[bool | None]:
        reached = {"dense": dense, "percentile90": 290, "thinwire": 270}
        seeds = seeds_of(**{name: [curve(name, steps, [0.9])] for name, steps in reached.items()})
        return [claim.holds for claim in findings.epoch_claims(seeds, full)]

    assert held(275, True) == [True, True, None, True] and held(276, True) == [False, True, None, True]
    assert held(100, True) == [True, True, None, False]
    assert held(360, False) == [None, None, None, True]


def test_a_target_that_was_not_reached_is_noted() -> None:
    seeds = seeds_of(dense=[curve("dense", None, [0.5, 0.9])])
    (claim,) = findings.epoch_claims(seeds, full=True)
    assert claim.ours is None and claim.holds is False
    assert claim.note == "at most 1.1x the paper's is asked for; not reached: 90.00 % at best"
    (claim,) = findings.epoch_claims(seeds, full=False)
    assert claim.holds is None and claim.note == "not reached: 90.00 % at best"


def test_several_seeds_are_judged_by_their_means() -> None:
    seeds = seeds_of(
        dense=[curve("dense", steps, [0.5, test]) for steps, test in ((170, 0.75), (190, 0.76), (180, 0.74))],
        thinwire=[curve("thinwire", steps, [0.5, test]) for steps, test in ((190, 0.745), (200, 0.751))],
    )
    times = findings.times_of(seeds, PAPER, SERVED, None)
    assert times["dense"]["paper_seconds"] == pytest.approx(180.0) and times["thinwire"]["steps"] == 195
    claims = {claim.what: claim for claim in findings.time_claims(times, seeds, full=True)}
    assert claims["dense: seconds to 99.5 % train accuracy"].note.endswith("; 17, 19 and 18 epochs")
    gain = claims[f"thinwire: speed-up to the target, {findings.OWN_SERVER}"]
    singles = "thinwire: 19 and 20 epochs; dense: 17 and 19 epochs (seeds 0 and 1, which both have)"
    assert gain.ours == pytest.approx(180 / 19.5) and gain.note == f"5x is asked for; {singles}"
    dense, thin, over = findings.epoch_claims(seeds, full=True)
    assert dense.ours == 18.0 and dense.note.endswith("asked for; 17, 19 and 18 epochs") and dense.holds
    assert thin.ours == 19.5 and thin.note == "19 and 20 epochs"
    assert over.ours == pytest.approx(19.5 / 18) and over.holds and over.note.endswith(singles)
    last, mean = findings.test_claims(seeds)
    assert last.ours == pytest.approx(-0.7) and not last.holds and last.note.startswith("74.80 % against 75.50 %; ")
    assert "thinwire: 74.50 and 75.10 %; dense: 75.00 and 76.00 % (seeds 0 and 1, which both have)" in last.note
    assert mean.ours == pytest.approx(-0.35) and "thinwire: 62.25 and 62.55 %; dense: 62.50 and 63" in mean.note
    assert findings.verdict(times, seeds).endswith("Means of the seeds: 3 of dense and 2 of thinwire.")


def test_only_seeds_that_both_have_are_compared() -> None:
    """A slow second seed of dense does not make a method faster that was not run with it."""
    seeds = seeds_of(
        dense=[curve("dense", 170, [0.5, 0.75]), curve("dense", 400, [0.5, 0.60])],
        percentile90=[curve("percentile90", 200, [0.5, 0.7])],
    )
    seeds["thinwire"] = Seeds({2: curve("thinwire", 170, [0.5, 0.75])})
    times = findings.times_of(seeds, PAPER, SERVED, None)
    claims = {claim.what: claim for claim in findings.time_claims(times, seeds, full=True)}
    gain = claims[f"percentile90: speed-up to the target, {findings.WAYS['paper']}"]
    assert gain.ours == pytest.approx(170 / 100) and gain.holds is False
    assert gain.note == "percentile90: 20 epochs; dense: 17 epochs (seed 0, which both have)"
    apart = claims[f"thinwire: speed-up to the target, {findings.OWN_SERVER}"]
    assert apart.ours is None and apart.holds is None and apart.note == "5x is asked for"
    assert {claim.what.partition(":")[0] for claim in findings.test_claims(seeds)} == {"percentile90"}
    assert findings.test_claims(seeds)[0].ours == pytest.approx(-5.0)


def test_a_seed_that_misses_the_target_prevents_a_predicted_time() -> None:
    """A mean over those that reached it would be biased."""
    seeds = seeds_of(
        dense=[curve("dense", 170, [0.5, 0.75]), curve("dense", 190, [0.5, 0.76])],
        thinwire=[curve("thinwire", 190, [0.5, 0.7]), curve("thinwire", None, [0.5, 0.72])],
    )
    times = findings.times_of(seeds, PAPER, SERVED, None)
    assert times["thinwire"]["steps"] is None and times["thinwire"]["served_seconds"] is None
    few = "1 of 2 seeds reached the target: 19 epochs"
    _, thin, over = findings.epoch_claims(seeds, full=True)
    assert thin.ours is None and thin.note == f"{few}; not reached: 72.00 % at best"
    assert over.ours is None and over.holds is False and f"thinwire: {few}; dense: 17 and 19 epochs" in over.note
    claims = {claim.what: claim for claim in findings.time_claims(times, seeds, full=True)}
    gain = claims[f"thinwire: speed-up to the target, {findings.OWN_SERVER}"]
    assert gain.ours is None and gain.holds is False and few in gain.note
    assert findings.verdict(times, seeds).startswith("thinwire reaches 99.5 % train accuracy with 1 of 2 seeds")
    untimed = findings.times_of(seeds, None, None, None)
    assert "dense, thinwire (1 of 2 seeds); no time" in findings.verdict(untimed, seeds)
    assert Seeds({0: curve("dense", None, [0.5])}).list_epochs() == "0 of 1 seeds reached the target"


def test_every_seed_is_shown() -> None:
    one = seeds_of(dense=[curve("dense", 20, [0.5, 0.7])], thinwire=[curve("thinwire", 20, [0.6, 0.7])])
    two = seeds_of(
        dense=[*one["dense"].curves.values(), curve("dense", 30, [0.5, 0.9, 0.8])],
        thinwire=[*one["thinwire"].curves.values()],
    )
    times = findings.times_of(two, PAPER, SERVED, None)
    assert findings.seed_tables(one) == []
    (table,) = findings.seed_tables(two)
    assert [(row["Method"], row["Seed"], row["Epochs"]) for row in table.rows] == [
        *(("dense", "0", "2"), ("dense", "1", "3"), ("thinwire", "0", "2"))
    ]
    assert list(table.rows[1].values())[3:] == ["80.00 %", "73.33 %", "90.00 %"]
    row = findings.time_table(two, times).rows[0]
    assert [row[key] for key in ("Seeds", "Epochs", "Steps", "Sent by a worker")] == ["2", "2.5", "25", "25 MB"]
    assert row["Test accuracy"] == "75.00 %"
    figures = findings.curve_figures(two, times)
    assert [series.name for series in figures[0].series] == ["dense", "thinwire", "dense, seed 1"]
    assert figures[1].series[2].x == pytest.approx([10.0, 20.0, 30.0])


def test_words_are_listed() -> None:
    assert [listed(list(words)) for words in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]


def cifar(samples: int) -> Splits:
    """Black images that take no memory."""
    images = torch.zeros(1).expand(samples, 3, 32, 32)
    return Splits(TensorSplit(images, torch.zeros(samples).long()), TensorSplit(images[:9], torch.zeros(9).long()))


@pytest.mark.parametrize("scale", ["small", "full"])
def test_runs_of_further_seeds_have_their_own_names(scale: str, tmp_path: Path) -> None:
    workspace = Workspace(scale, None, tmp_path, only=("none of them",))
    assert sparsify_gradients._seeds(workspace, get_recipe("cifar10"), cifar(1040)) == {}
    first = ["dense", "percentile90", "thinwire"]
    more = [f"{name}-seed{seed}" for seed in (1, 2) for name in first] if scale == "full" else []
    assert workspace.requested == [*first, *more]
    assert workspace.skipped == [f"{name}: this run was left out" for name in workspace.requested]


def test_finished_seeds_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs in results/work have the expected descriptions; other seeds differ only in the seed."""
    splits, asked = cifar(50_000), {}

    def finished(simulation: Simulation, folder: Path) -> Curve | None:
        asked[simulation.name] = simulation.described().partition(" data=")[0]
        return curve(simulation.name, 20, [0.9]) if simulation.name in ("dense", "dense-seed2") else None

    monkeypatch.setattr(Simulation, "finished", finished)
    found = sparsify_gradients._seeds(
        Workspace("full", None, tmp_path, only=("none of them",)), get_recipe("cifar10"), splits
    )
    assert {name: list(own.curves) for name, own in found.items()} == {"dense": [0, 2]}
    for name in ("dense", "percentile90", "thinwire"):
        kept = json.loads((WORK / f"{name}.json").read_text())["described"].partition(" data=")[0]
        assert asked[name] == kept and kept.count(" seed=0)") == 1
        assert asked[f"{name}-seed2"] == kept.replace(" seed=0)", " seed=2)")


@pytest.mark.parametrize("full", [False, True])
def test_the_listed_differences_match_the_scale(full: bool, tmp_path: Path) -> None:
    seeds = seeds_of(dense=[curve("dense", 20, [0.9])] * 2, thinwire=[curve("thinwire", 20, [0.9])])
    workspace = Workspace("full" if full else "small", None, tmp_path)
    said = " ".join(findings.differences(workspace, 1040, seeds))
    assert ("the first 5,000 training images, every epoch" in said) == full
    assert ("all of these, every other epoch" in said) == (not full)
    assert ("up to 3 seeds" in said and "2 of dense and 1 of thinwire. A seed" in said) == full
    assert ("with one seed" in said) == (not full)
