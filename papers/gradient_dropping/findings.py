"""What the study of gradient dropping shows: claims, tables and figures from its curves and the lab's times."""

from typing import Any

from papers.runs import Curve
from papers.study import Claim, Figure, Series, Table, number
from thinwire.codec.codec import Codec
from thinwire.tune.presets import resolve_codec

MNIST_FASTER, TRANSLATION_FASTER = 1.49, 1.22  # the paper's
# By a run's name: what the lab knows a codec of its selection by.
LAB = {"dense": "dense", "90 %": "percentile90-residual", "99.9 %": "topk0.1", "99 %, 8 bit": "topk1"}
TRANSLATORS = {"translate": "GRU", "translate-layernorm": "GRU, layer norm", "translate-transformer": "Transformer"}


def lab_ms(lab: Any, name: str, codec: Codec | None) -> float | None:
    """The lab's step of a run's codec; None if the lab measured no codec that sends as much."""
    method = LAB.get(name)
    if not lab or method is None:
        return None
    if codec is not None and resolve_codec(method).values != codec.values:
        return None
    ms: float = lab[method]["ms"]
    return ms


def lab_table(lab: Any) -> list[Table]:
    """What the lab measured, by the names of its own codecs."""
    if not lab:
        return []
    rows = [
        {
            "Codec": method,
            "Step": number(lab[method]["ms"], "ms"),
            "Sent by a host": number(lab[method]["bytes"] / 1e6, "MB"),
        }
        for method in LAB.values()
    ]
    return [Table("MNIST, a step in the lab", rows, "4 hosts at 1 Gbit/s; values of 8 bits where not dense.")]


def digit_claims(found: dict[str, Curve], lab: Any) -> list[Claim]:
    claims = []
    dense, thin = found.get("dense"), found.get("99 %")
    timed = found.get("99 %, 8 bit", thin)  # what the lab sends
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
        if dense and timed:
            target = dense.best_test - 0.002
            steps = dense.first_at(target), timed.first_at(target)
            sooner = steps[0] * lab["dense"]["ms"] / (steps[1] * lab["topk1"]["ms"]) if steps[0] and steps[1] else None
            bits = "8" if "99 %, 8 bit" in found else "32"
            note = f"to {100 * target:.2f} % in {steps[1] or 'no'} steps of {bits}-bit values against {steps[0]}"
            held = sooner is not None and sooner >= MNIST_FASTER
            claims.append(Claim("MNIST, 99 % dropped: time to dense's accuracy", MNIST_FASTER, sooner, "x", held, note))
    lost = found.get("99 %, no residual")
    if thin and lost:
        points = 100 * (lost.best_test - thin.best_test)
        note = "without the residual, against with it; holds if it is worse"
        claims.append(Claim("MNIST, 99 % dropped: points lost without residual", None, points, "", points < 0.0, note))
    return claims


def translation_claims(found: dict[str, dict[str, Curve]], times: dict[str, Any]) -> list[Claim]:
    claims = []
    for name, curves in found.items():
        dense, lab = curves.get("dense"), times.get(name)
        for method, curve in curves.items():
            if dense and method != "dense":
                gap = curve.best_test - dense.best_test
                trained = f"{curve.step[-1] / curve.steps_per_epoch:g} epochs"
                note = (
                    f"{curve.best_test:.2f} against {dense.best_test:.2f} after {trained}; at least -0.5 is asked for"
                )
                what = f"{TRANSLATORS[name]}, {method} dropped: BLEU above dense's"
                claims.append(Claim(what, 0.0, gap, "", gap >= -0.5, note))
        if lab:
            gain = lab["dense"]["ms"] / lab["topk1"]["ms"]
            what = f"{TRANSLATORS[name]}, 99 % dropped: a step faster, 4 hosts at 1 Gbit/s"
            claims.append(Claim(what, TRANSLATION_FASTER, gain, "x", gain >= TRANSLATION_FASTER))
    return claims


def verdict(claims: list[Claim]) -> str:
    judged = [claim for claim in claims if claim.holds is not None]
    failed = [claim.what for claim in judged if not claim.holds]
    if not judged:
        return "Nothing is judged: no run that a claim is about was made."
    if not failed:
        return f"All {len(judged)} claims hold here."
    return f"{len(judged) - len(failed)} of {len(judged)} claims hold here; not: {'; '.join(failed)}."


def digit_table(found: dict[str, Curve], times: dict[str, float]) -> Table:
    dense = found.get("dense")
    target = dense.best_test - 0.002 if dense else 1.0
    rows = []
    for name, curve in found.items():
        steps, ms = curve.first_at(target), times.get(name)
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


_TRANSLATED = {"dense": "dense", "99 %": "topk1"}  # as LAB; a threshold for all is not what the lab ran


def translation_tables(found: dict[str, dict[str, Curve]], times: dict[str, Any]) -> list[Table]:
    rows = []
    for name, curves in found.items():
        for method, curve in curves.items():
            lab = times.get(name)
            ms = lab[_TRANSLATED[method]]["ms"] if lab and method in _TRANSLATED else None
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


def figures(
    found: dict[str, Curve], translations: dict[str, dict[str, Curve]], times: dict[str, float]
) -> list[Figure]:
    axis = "test accuracy (%)"
    values = {name: [100 * v for v in curve.test] for name, curve in found.items()}
    drawn = [Figure("MNIST", "step", axis, [Series(n, c.step, list(values[n])) for n, c in found.items()])]
    timed = [
        Series(name, [step * ms / 1e3 for step in curve.step], list(values[name]))
        for name, curve in found.items()
        if (ms := times.get(name)) is not None
    ]
    drawn += [Figure("MNIST over time", "seconds, 4 hosts at 1 Gbit/s", axis, timed)] if timed else []
    sent = [Series(name, curve.megabytes, list(values[name])) for name, curve in found.items()]
    drawn.append(Figure("MNIST over what a worker sent", "MB", axis, sent, log="x"))
    for name, curves in translations.items():
        series = [Series(method, curve.step, list(curve.test)) for method, curve in curves.items()]
        drawn.append(Figure(f"Translation: {TRANSLATORS[name]}", "step", "BLEU", series))
    return drawn
