"""Aji and Heafield 2017: gradients of which 99 % are dropped train as well, and sooner, over a slow network.

MNIST on 4096-2048-1024 units with and without the residual, thresholds per matrix or for all, and narrow values;
German to English with recurrent networks and a Transformer. Steps are simulated, the time of a step is the lab's.
"""

from functools import partial
from typing import Any

from thinwire.codec.codec import Codec
from thinwire.codec.memory import Drop, Memory, Residual
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits, Float32, Sign, Values
from thinwire.recipes import get_recipe
from thinwire.reproduce.cluster import Setting
from thinwire.reproduce.confirming import Trial, confirm
from thinwire.reproduce.labs import Bed, step_times
from thinwire.reproduce.runs import Curve, Goal
from thinwire.reproduce.study import Claim, Figure, Series, Study, Table, number
from thinwire.reproduce.workshop import Workshop

WORKERS = 4
MNIST_FASTER, TRANSLATION_FASTER = 1.49, 1.22  # the paper's
# By what a method sends: what the lab knows under a name.
LAB = {"dense": "dense", "90 %": "percentile90-residual", "99 %": "topk1", "99.9 %": "topk0.1"}
TRANSLATORS = {"translate": "GRU", "translate-layernorm": "GRU, layer norm", "translate-transformer": "Transformer"}


def _codec(
    dropped: float, values: Values | None = None, memory: Memory | None = None, *, everywhere: bool = False
) -> Codec:
    scope = "global" if everywhere else "tensor"
    return Codec(TopK(1.0 - dropped / 100.0), values or Float32(), memory or Residual(), scope=scope)  # type: ignore[arg-type]


MNIST: dict[str, Codec | None] = {
    "dense": None,
    "90 %": _codec(90.0),
    "99 %": _codec(99.0),
    "99.9 %": _codec(99.9),
    "90 %, no residual": _codec(90.0, memory=Drop()),
    "99 %, no residual": _codec(99.0, memory=Drop()),
    "99.9 %, no residual": _codec(99.9, memory=Drop()),
    "99 %, global": _codec(99.0, everywhere=True),
    "99 %, 8 bit": _codec(99.0, Bits(8)),
    "99 %, 2 bit": _codec(99.0, Bits(2)),
    "99 %, 1 bit": _codec(99.0, Sign()),
}
TRANSLATION: dict[str, Codec | None] = {
    "dense": None,
    "99 %": _codec(99.0, Bits(8)),
    "99 %, global": _codec(99.0, Bits(8), everywhere=True),
}


def study(workshop: Workshop) -> Study:
    """MNIST in all variants, then translation."""
    digits = _digits(workshop)
    bed = Bed("mnist", workshop.data, hosts=WORKERS, rate="1gbit", batch=32, lr=0.05)
    lab = workshop.lab_part("mnist-steps", lambda: step_times(bed, list(LAB.values()), steps=16))
    translations = _translations(workshop)
    times = _translation_times(workshop, translations)
    confirmed, proof = confirm(workshop, Trial(bed, "topk1", Codec(TopK(0.01), Bits(8)), 0.9, 200, 10), lab)
    smaller = [] if workshop.full else ["Small scale: half an epoch of MNIST, one of translation, with the GRU alone."]
    claims = [*_digit_claims(digits, lab), *_translation_claims(translations, times), *confirmed]
    return Study(
        "gradient-dropping",
        workshop.scale,
        "Gradient dropping",
        "Aji and Heafield, 2017",
        _verdict(claims),
        claims,
        [_digit_table(digits, lab), *_translation_tables(translations, times), *proof],
        _figures(digits, translations, lab),
        [
            *smaller,
            "Translation is Multi30k from German to English with small networks instead of Romanian to English.",
            "A threshold comes from thinwire's sample; layers of fewer than 1,024 entries travel whole.",
            "The 1-bit values travel as two means a block of 512 instead of one a column.",
            "Translation's first 100 steps are dense, as in the paper's code.",
            "The network is emulated: all hosts compute on this machine's cores, which makes a step longer and the "
            "gain of sending less smaller than on hosts of their own. The lab's values are 8 bits wide.",
        ],
        facts={"workers": f"{WORKERS}", "network": "1 Gbit/s, emulated"},
    )


def _file(prefix: str, name: str) -> str:
    return f"{prefix}-{name}".lower().replace(" %", "").replace(", ", "-").replace(" ", "-")


def _digits(workshop: Workshop) -> dict[str, Curve]:
    recipe = get_recipe("mnist")
    splits = workshop.load(recipe)
    steps = 2340 if workshop.full else 234
    goal = Goal(steps, steps // 12, train_samples=0, test_samples=None if workshop.full else 2000)
    found = {}
    for name, codec in MNIST.items():
        setting = Setting(WORKERS, 32, 0.05, 0.0, codec)
        curve = workshop.train(_file("mnist", name), recipe, splits, setting, goal)
        if curve is not None:
            found[name] = curve
    return found


def _translations(workshop: Workshop) -> dict[str, dict[str, Curve]]:
    """By recipe, then by method; at the small scale the plain GRU alone, with one threshold per matrix."""
    names = list(TRANSLATORS) if workshop.full else ["translate"]
    methods = TRANSLATION if workshop.full else {n: c for n, c in TRANSLATION.items() if "global" not in n}
    found: dict[str, dict[str, Curve]] = {}
    for name in names:
        recipe = get_recipe(name)
        splits, defaults = workshop.load(recipe), recipe.defaults
        per_epoch = len(splits.train) // (WORKERS * defaults.batch)
        steps = per_epoch * (10 if workshop.full else 1)
        goal = Goal(steps, steps // (10 if workshop.full else 3), train_samples=0, test_samples=None)
        for method, codec in methods.items():
            dense = 100 if codec is not None else 0
            setting = Setting(WORKERS, defaults.batch, defaults.lr, defaults.momentum, codec, dense)
            curve = workshop.train(_file(name, method), recipe, splits, setting, goal)
            if curve is not None:
                found.setdefault(name, {})[method] = curve
    return found


def _translation_times(workshop: Workshop, found: dict[str, dict[str, Curve]]) -> dict[str, Any]:
    times = {}
    for name in found:
        defaults = get_recipe(name).defaults
        bed = Bed(name, workshop.data, WORKERS, "1gbit", defaults.batch, defaults.lr)
        lab = workshop.lab_part(f"{name}-steps", partial(step_times, bed, ["dense", "topk1"], steps=16))
        if lab:
            times[name] = lab
    return times


def _first(curve: Curve, target: float) -> int | None:
    return next((step for step, value in zip(curve.step, curve.test, strict=True) if value >= target), None)


def _lab_ms(lab: Any, name: str) -> float | None:
    """The lab's step of whatever sends as much."""
    method = LAB.get(name.split(",")[0])
    return lab[method]["ms"] if lab and method and "no residual" not in name else None


def _digit_claims(found: dict[str, Curve], lab: Any) -> list[Claim]:
    claims = []
    dense, thin = found.get("dense"), found.get("99 %")
    if dense and thin:
        points = 100 * (thin.best_test - dense.best_test)
        note = f"{100 * thin.best_test:.2f} % against {100 * dense.best_test:.2f} %; at least -0.2 is asked for"
        claims.append(
            Claim("MNIST, 99 % dropped: points above dense's accuracy", 0.0, points, "", points >= -0.2, note)
        )
    if lab:
        gain = lab["dense"]["ms"] / lab["topk1"]["ms"]
        claims.append(
            Claim(
                "MNIST, 99 % dropped: a step faster, 4 hosts at 1 Gbit/s", MNIST_FASTER, gain, "x", gain >= MNIST_FASTER
            )
        )
        if dense and thin:
            target = dense.best_test - 0.002
            steps = _first(dense, target), _first(thin, target)
            sooner = steps[0] * lab["dense"]["ms"] / (steps[1] * lab["topk1"]["ms"]) if steps[0] and steps[1] else None
            note = f"to {100 * target:.2f} % in {steps[1]} steps against {steps[0]}"
            held = sooner is not None and sooner >= MNIST_FASTER
            claims.append(Claim("MNIST, 99 % dropped: time to dense's accuracy", MNIST_FASTER, sooner, "x", held, note))
    lost = found.get("99 %, no residual")
    if thin and lost:
        points = 100 * (lost.best_test - thin.best_test)
        note = "without the residual, against with it; holds if it is worse"
        claims.append(Claim("MNIST, 99 % dropped: points lost without residual", None, points, "", points < 0.0, note))
    return claims


def _translation_claims(found: dict[str, dict[str, Curve]], times: dict[str, Any]) -> list[Claim]:
    claims = []
    for name, curves in found.items():
        dense, lab = curves.get("dense"), times.get(name)
        for method, curve in curves.items():
            if dense and method != "dense":
                gap = curve.best_test - dense.best_test
                note = f"{curve.best_test:.2f} against {dense.best_test:.2f}; at least -0.5 is asked for"
                what = f"{TRANSLATORS[name]}, {method} dropped: BLEU above dense's"
                claims.append(Claim(what, 0.0, gap, "", gap >= -0.5, note))
        if lab:
            gain = lab["dense"]["ms"] / lab["topk1"]["ms"]
            what = f"{TRANSLATORS[name]}, 99 % dropped: a step faster, 4 hosts at 1 Gbit/s"
            claims.append(Claim(what, TRANSLATION_FASTER, gain, "x", gain >= TRANSLATION_FASTER))
    return claims


def _verdict(claims: list[Claim]) -> str:
    judged = [claim for claim in claims if claim.holds is not None]
    failed = [claim.what for claim in judged if not claim.holds]
    if not failed:
        return f"All {len(judged)} claims hold here."
    return f"{len(judged) - len(failed)} of {len(judged)} claims hold here; not: {'; '.join(failed)}."


def _digit_table(found: dict[str, Curve], lab: Any) -> Table:
    dense = found.get("dense")
    target = dense.best_test - 0.002 if dense else 1.0
    rows = []
    for name, curve in found.items():
        steps, ms = _first(curve, target), _lab_ms(lab, name)
        rows.append(
            {
                "Dropped": name,
                "Best accuracy": f"{100 * curve.best_test:.2f} %",
                "MB sent": number(curve.megabytes[-1]),
                "Steps to target": number(steps),
                "Step in the lab": number(ms, "ms"),
                "Time to target": number(steps * ms / 1e3 if steps and ms else None, "s"),
            }
        )
    return Table("MNIST, 4096-2048-1024", rows, f"Target: {100 * target:.2f} %, dense's best less 0.2 points.")


def _translation_tables(found: dict[str, dict[str, Curve]], times: dict[str, Any]) -> list[Table]:
    rows = []
    for name, curves in found.items():
        for method, curve in curves.items():
            lab = times.get(name)
            ms = lab["dense" if method == "dense" else "topk1"]["ms"] if lab else None
            rows.append(
                {
                    "Model": f"{TRANSLATORS[name]}, {method}",
                    "Best BLEU": f"{curve.best_test:.2f}",
                    "Steps": number(curve.step[-1]),
                    "MB sent": number(curve.megabytes[-1]),
                    "Step in the lab": number(ms, "ms"),
                }
            )
    return [Table("Translation, Multi30k", rows)] if rows else []


def _figures(found: dict[str, Curve], translations: dict[str, dict[str, Curve]], lab: Any) -> list[Figure]:
    axis = "test accuracy (%)"
    values = {name: [100 * v for v in curve.test] for name, curve in found.items()}
    figures = [Figure("MNIST", "step", axis, [Series(n, c.step, list(values[n])) for n, c in found.items()])]
    timed = [
        Series(name, [step * ms / 1e3 for step in curve.step], list(values[name]))
        for name, curve in found.items()
        if (ms := _lab_ms(lab, name)) is not None and "," not in name
    ]
    figures += [Figure("MNIST over time", "seconds, 4 hosts at 1 Gbit/s", axis, timed)] if timed else []
    sent = [Series(name, curve.megabytes, list(values[name])) for name, curve in found.items()]
    figures.append(Figure("MNIST over what a worker sent", "MB", axis, sent, log="x"))
    for name, curves in translations.items():
        series = [Series(method, curve.step, list(curve.test)) for method, curve in curves.items()]
        figures.append(Figure(f"Translation: {TRANSLATORS[name]}", "step", "BLEU", series))
    return figures
