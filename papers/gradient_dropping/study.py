"""Aji and Heafield 2017: training with 99 % of each gradient dropped is as accurate, and faster over a slow network.

MNIST on 4096-2048-1024 units with and without error feedback, with a threshold per matrix or a global one, and with
narrow values; German to English translation with recurrent networks and a Transformer. Steps are simulated; the time
of a step is measured in the lab.
"""

from typing import Any, Literal

from papers.labs import ConfirmationRun, LabTestbed, accuracy_figures, accuracy_row, confirm, step_times_part
from papers.simulation import Curve, Goal, TrainingSetting
from papers.study import Claim, Figure, Series, Study, Table, number, percent
from papers.workspace import Workspace, run_name, without_skipped
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import ErrorFeedback, Feedback, NoFeedback
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits, Float32, Sign, Values
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Splits
from thinwire.tune.presets import resolve_codec

WORKERS = 4
MNIST_SPEEDUP, TRANSLATION_SPEEDUP = 1.49, 1.22  # the paper's
MNIST_MARGIN = 0.002  # of accuracy: the target is dense's best less this
TRANSLATORS = {"translate": "GRU", "translate-layernorm": "GRU, layer norm", "translate-transformer": "Transformer"}
# At the full scale. After 10 epochs the dense GRU still improved, and 99 % dropped was 0.9 BLEU behind it. An epoch of
# the other two networks takes up to three times as long; they are not trained until they stop improving.
EPOCHS = {"translate": 20, "translate-layernorm": 2, "translate-transformer": 4}
# For each run of MNIST that the lab can time: the name of a codec with the same selection.
LAB = {"dense": "dense", "90 %": "percentile90-residual", "99.9 %": "topk0.1", "99 %, 8 bit": "8bit"}
TRANSLATION_LAB = {"dense": "dense", "99 %": "8bit"}  # likewise; the lab does not run a global threshold


def _codec(
    dropped: float,
    values: Values | None = None,
    feedback: Feedback | None = None,
    scope: Literal["tensor", "global"] = "tensor",
) -> Codec:
    return Codec(TopK(1.0 - dropped / 100.0), values or Float32(), feedback or ErrorFeedback(), scope=scope)


MNIST: dict[str, Codec | None] = {
    "dense": None,
    "90 %": _codec(90.0),
    "99 %": _codec(99.0),
    "99.9 %": _codec(99.9),
    "90 %, no residual": _codec(90.0, feedback=NoFeedback()),
    "99 %, no residual": _codec(99.0, feedback=NoFeedback()),
    "99.9 %, no residual": _codec(99.9, feedback=NoFeedback()),
    "99 %, global": _codec(99.0, scope="global"),
    "99 %, 8 bit": _codec(99.0, Bits(8)),
    "99 %, 2 bit": _codec(99.0, Bits(2)),
    "99 %, 1 bit": _codec(99.0, Sign()),
}
TRANSLATION: dict[str, Codec | None] = {
    "dense": None,
    "99 %": _codec(99.0, Bits(8)),
    "99 %, global": _codec(99.0, Bits(8), scope="global"),
}


def study(workspace: Workspace) -> Study:
    """Train MNIST in all variants, then translation."""
    splits = workspace.load(get_recipe("mnist"))
    digits = _train_digits(workspace, splits)
    testbed = LabTestbed("mnist", workspace.data, hosts=WORKERS, rate="1gbit", batch=32, lr=0.05)
    lab = step_times_part(workspace, "mnist-steps", testbed, list(LAB.values()), 16, splits)
    ms = without_skipped({name: lab_ms(lab, name, codec) for name, codec in MNIST.items()})
    translations = _train_translations(workspace)
    times = _translation_times(workspace)
    run = ConfirmationRun(testbed, "8bit", Codec(TopK(0.01), Bits(8)), 0.9, 200, 10)
    confirm_claims, confirm_tables = confirm(workspace, run, lab)
    trained = ", ".join(f"the {TRANSLATORS[name]} {epochs}" for name, epochs in EPOCHS.items())
    size = f"Translation trains for as many epochs as the available time allowed: {trained}."
    if not workspace.full:
        size = "Small scale: half an epoch of MNIST, one epoch of translation, and only the plain GRU."
    claims = [*digit_claims(digits, lab), *translation_claims(translations, times), *confirm_claims]
    return Study(
        "gradient-dropping",
        workspace.scale,
        "Gradient dropping",
        "Aji and Heafield, 2017",
        _verdict(claims),
        claims,
        [_digit_table(digits, ms), *lab_tables(lab), *translation_tables(translations, times), *confirm_tables],
        _figures(digits, translations, ms),
        [
            size,
            "Translation is Multi30k from German to English with small networks instead of Romanian to English.",
            "thinwire estimates thresholds from a sample; layers of fewer than 1,024 entries are sent whole.",
            "1-bit values are sent with two means per block of 512 values instead of one mean per column.",
            "The first 100 steps of translation are dense, as in the paper's code.",
            "The network is emulated: all hosts share this machine's cores. A step therefore takes longer, and the "
            "gain from sending less is smaller, than on separate hosts. The lab sends 8-bit values: a time to the "
            "target is given only for runs whose messages the lab sent.",
        ],
        facts={"workers": f"{WORKERS}", "network": "1 Gbit/s, emulated"},
    )


def _train_digits(workspace: Workspace, splits: Splits) -> dict[str, Curve]:
    recipe = get_recipe("mnist")
    steps = 2340 if workspace.full else 234
    goal = Goal(steps, steps // 12, train_samples=0, test_samples=None if workspace.full else 2000)
    settings = {name: TrainingSetting(WORKERS, 32, 0.05, 0.0, codec) for name, codec in MNIST.items()}
    return without_skipped(
        {name: workspace.train(run_name("mnist", name), recipe, splits, own, goal) for name, own in settings.items()}
    )


def _translators(workspace: Workspace) -> list[str]:
    return list(TRANSLATORS) if workspace.full else ["translate"]


def _train_translations(workspace: Workspace) -> dict[str, dict[str, Curve]]:
    """Return the curves by recipe and method; the small scale has only the plain GRU with a threshold per matrix."""
    methods = TRANSLATION if workspace.full else {n: c for n, c in TRANSLATION.items() if "global" not in n}
    curves: dict[str, dict[str, Curve]] = {}
    for name in _translators(workspace):
        recipe = get_recipe(name)
        splits, defaults = workspace.load(recipe), recipe.defaults
        per_epoch = len(splits.train) // (WORKERS * defaults.batch)
        steps = max(1, per_epoch * (EPOCHS[name] if workspace.full else 1))
        every = max(1, steps // (EPOCHS[name] if workspace.full else 3))
        goal = Goal(steps, every, train_samples=0, test_samples=None)
        own = {}
        for method, codec in methods.items():
            dense_steps = 100 if codec is not None else 0
            setting = TrainingSetting(WORKERS, defaults.batch, defaults.lr, defaults.momentum, codec, dense_steps)
            own[method] = workspace.train(run_name(name, method), recipe, splits, setting, goal)
        curves[name] = without_skipped(own)
    return {name: own for name, own in curves.items() if own}


def _translation_times(workspace: Workspace) -> dict[str, Any]:
    times = {}
    for name in _translators(workspace):
        recipe = get_recipe(name)
        testbed = LabTestbed(name, workspace.data, WORKERS, "1gbit", recipe.defaults.batch, recipe.defaults.lr)
        splits = workspace.load(recipe)
        times[name] = step_times_part(workspace, f"{name}-steps", testbed, ["dense", "8bit"], 16, splits)
    return times


def lab_ms(lab: Any, name: str, codec: Codec | None) -> float | None:
    """Return the lab's step time for a run; None if the lab did not measure a codec that sends the same values."""
    method = LAB.get(name)
    if not lab or method is None or (codec is not None and resolve_codec(method).values != codec.values):
        return None
    return float(lab[method]["ms"])


def _speedup_claim(what: str, paper: float, lab: Any) -> Claim:
    gain = lab["dense"]["ms"] / lab["8bit"]["ms"]
    return Claim(f"{what}, 99 % dropped: a step faster, 4 hosts at 1 Gbit/s", paper, gain, "x", gain >= paper)


def digit_claims(curves: dict[str, Curve], lab: Any) -> list[Claim]:
    """Compare accuracy, the time of a step, the time to dense's accuracy, and training without error feedback."""
    claims = []
    dense, sparse = curves.get("dense"), curves.get("99 %")
    if dense and sparse:
        points = 100 * (sparse.best_test - dense.best_test)
        note = f"{percent(sparse.best_test)} against {percent(dense.best_test)}; at least -0.2 is asked for"
        what = "MNIST, 99 % dropped: points above dense's accuracy"
        claims.append(Claim(what, 0.0, points, "", points >= -0.2, note))
    if lab:
        claims.append(_speedup_claim("MNIST", MNIST_SPEEDUP, lab))
    timed = curves.get("99 %, 8 bit", sparse)  # the lab sends 8-bit values
    if lab and dense and timed:
        target = dense.best_test - MNIST_MARGIN
        steps = dense.first_at(target), timed.first_at(target)
        gain = steps[0] * lab["dense"]["ms"] / (steps[1] * lab["8bit"]["ms"]) if steps[0] and steps[1] else None
        bits = "8" if "99 %, 8 bit" in curves else "32"
        note = f"to {percent(target)} in {steps[1] or 'no'} steps of {bits}-bit values against {steps[0]}"
        holds = gain is not None and gain >= MNIST_SPEEDUP
        claims.append(Claim("MNIST, 99 % dropped: time to dense's accuracy", MNIST_SPEEDUP, gain, "x", holds, note))
    without = curves.get("99 %, no residual")
    if sparse and without:
        points = 100 * (without.best_test - sparse.best_test)
        note = "without the residual, against with it; holds if it is worse"
        claims.append(Claim("MNIST, 99 % dropped: points lost without residual", None, points, "", points < 0.0, note))
    return claims


def translation_claims(curves: dict[str, dict[str, Curve]], times: dict[str, Any]) -> list[Claim]:
    """Compare every network's BLEU with dense's, and the time of a step with the paper's speed-up."""
    claims = []
    for name, methods in curves.items():
        dense = methods.get("dense")
        for method, curve in methods.items():
            if dense and method != "dense":
                gap = curve.best_test - dense.best_test
                both = f"{curve.best_test:.2f} against {dense.best_test:.2f}"
                note = f"{both} after {curve.epoch[-1]:g} epochs; at least -0.5 is asked for"
                what = f"{TRANSLATORS[name]}, {method} dropped: BLEU above dense's"
                claims.append(Claim(what, 0.0, gap, "", gap >= -0.5, note))
        if times.get(name):
            claims.append(_speedup_claim(TRANSLATORS[name], TRANSLATION_SPEEDUP, times[name]))
    return claims


def _verdict(claims: list[Claim]) -> str:
    held = [claim for claim in claims if claim.holds]
    failed = [claim.what for claim in claims if claim.holds is False]
    if not held and not failed:
        return "Nothing is judged: none of the runs that the claims are about was made."
    if not failed:
        return f"All {len(held)} claims hold here."
    return f"{len(held)} of {len(held) + len(failed)} claims hold here; not: {'; '.join(failed)}."


def _digit_table(curves: dict[str, Curve], times: dict[str, float]) -> Table:
    dense = curves.get("dense")
    target = dense.best_test - MNIST_MARGIN if dense else 1.0
    rows = [{"Dropped": name, **accuracy_row(curve, target, times.get(name))} for name, curve in curves.items()]
    return Table("MNIST, 4096-2048-1024", rows, f"Target: {percent(target)}, dense's best less 0.2 points.")


def lab_tables(lab: Any) -> list[Table]:
    """Return the table of the lab's step times on MNIST, by codec."""
    if not lab:
        return []
    rows = []
    for method in LAB.values():
        ms, megabytes = lab[method]["ms"], lab[method]["bytes"] / 1e6
        rows.append({"Codec": method, "Step": number(ms, "ms"), "Sent by a host": number(megabytes, "MB")})
    return [Table("MNIST, a step in the lab", rows, "4 hosts at 1 Gbit/s; values of 8 bits where not dense.")]


def translation_tables(curves: dict[str, dict[str, Curve]], times: dict[str, Any]) -> list[Table]:
    """Return the table of BLEU, steps and bytes by network and method."""
    rows = []
    for name, methods in curves.items():
        lab = times.get(name)
        for method, curve in methods.items():
            ms = lab[TRANSLATION_LAB[method]]["ms"] if lab and method in TRANSLATION_LAB else None
            row = {"Model": f"{TRANSLATORS[name]}, {method}", "Best BLEU": f"{curve.best_test:.2f}"}
            row |= {"Steps": number(curve.step[-1]), "MB sent": number(curve.megabytes[-1])}
            rows.append(row | {"Step in the lab": number(ms, "ms")})
    return [Table("Translation, Multi30k", rows)] if rows else []


def _figures(
    digits: dict[str, Curve], translations: dict[str, dict[str, Curve]], times: dict[str, float]
) -> list[Figure]:
    titles = ("MNIST", "MNIST over time", "MNIST over what a worker sent")
    figures = accuracy_figures(digits, times, titles, "4 hosts at 1 Gbit/s")
    for name, methods in translations.items():
        series = [Series(method, curve.step, list(curve.test)) for method, curve in methods.items()]
        figures.append(Figure(f"Translation: {TRANSLATORS[name]}", "step", "BLEU", series))
    return figures
