"""What the study of request scheduling shows: claims, tables and figures from the model's times and the lab's."""

import statistics
from typing import Any

from papers.study import Claim, Figure, Series, Table, number

POLICIES = ("fifo", "filo", "stalest", "forward")
BOUNDS = range(6)
WITHIN = 0.15  # that the model may be off
MARGIN = 0.03  # of time or staleness: less of a difference is none
Row = dict[str, Any]  # policy, bound, seconds, staleness, most
TITLES = {
    "lab": "A real server in the lab, one worker twice as slow",
    "model": "The model, one worker twice as slow",
    "larger model": "A larger model",
}


def _find(rows: list[Row], policy: str, bound: int) -> Row:
    return next(row for row in rows if (row["policy"], row["bound"]) == (policy, bound))


def claims(found: dict[str, list[Row]]) -> list[Claim]:
    """Medians over the bounds: of several noisy ratios the largest is above one whatever is true."""
    made = [claim for words, rows in found.items() for claim in _expectations(words, rows)]
    if "lab" in found and "model" in found:
        made.append(_confirmed(found["model"], found["lab"]))
    return made


def _expectations(words: str, rows: list[Row]) -> list[Claim]:
    """What the thesis expects of one set of times."""
    fifo, filo, stalest, forward = ([_find(rows, p, bound)["seconds"] for bound in BOUNDS] for p in POLICIES)
    asked = f"more than {MARGIN:.0%} is asked for"

    def more(what: str, ratio: float, note: str = "") -> Claim:
        held = ratio > 1.0 + MARGIN
        return Claim(f"{words}: {what}", 1.0, ratio, "x", held, f"{asked}; {note}" if held and note else asked)

    stale = [
        _find(rows, "stalest", bound)["staleness"] / max(_find(rows, "fifo", bound)["staleness"], 1e-9)
        for bound in BOUNDS
        if bound
    ]
    fresher = statistics.median(stale)
    least = min(POLICIES, key=lambda p: _find(rows, p, 5)["staleness"])
    return [
        more("stalest-first faster than FIFO, median over the bounds", _median_ratio(fifo, stalest)),
        more("forward order faster than FIFO, median over the bounds", _median_ratio(fifo, forward)),
        more("FILO's time over FIFO's, median over the bounds", _median_ratio(filo, fifo), "it starves"),
        more("bounds 1 to 5 faster than bulk synchronous (FIFO), median", fifo[0] / statistics.median(fifo[1:])),
        Claim(
            f"{words}: stalest-first's staleness over FIFO's, median over bounds 1 to 5",
            1.0,
            fresher,
            "x",
            fresher < 1.0 - MARGIN,
            f"{MARGIN:.0%} less is asked for; least at bound 5: {least}",
        ),
    ]


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _confirmed(modelled: list[Row], measured: list[Row]) -> Claim:
    ratios = {
        (row["policy"], row["bound"]): row["seconds"] / _find(measured, row["policy"], row["bound"])["seconds"]
        for row in modelled
    }
    middle = statistics.median(ratios.values())
    worst = max(ratios, key=lambda key: abs(ratios[key] - 1.0))
    return Claim(
        "the model's time over the lab's, median of all runs",
        1.0,
        middle,
        "x",
        abs(middle - 1.0) <= WITHIN,
        f"within {WITHIN:.0%} is asked for; furthest off: {ratios[worst]:.2f}x at {worst[0]}, bound {worst[1]}",
    )


def verdict(found: dict[str, list[Row]]) -> str:
    """Of the lab if it was used, else of the model."""
    if not found:
        return "Nothing is judged: no part was made."
    words, rows = next(iter(found.items()))
    best = min(rows, key=lambda row: row["seconds"])
    fifo = _find(rows, "fifo", 0)["seconds"]
    by_policy = {policy: _find(rows, policy, 0)["seconds"] for policy in POLICIES}
    first = min(by_policy, key=lambda policy: by_policy[policy])
    return (
        f"In the {words}, bulk synchronous, {first} is fastest, {fifo / by_policy[first]:.2f} times as fast as FIFO; "
        f"of all, {best['policy']} with a bound of {best['bound']} is, {fifo / best['seconds']:.2f} times as fast as "
        "FIFO without one."
    )


def tables(found: dict[str, list[Row]]) -> list[Table]:
    return [_table(TITLES[words], rows) for words, rows in found.items()]


def _table(title: str, rows: list[Row]) -> Table:
    table = []
    for policy in POLICIES:
        row = {"Policy": policy}
        for bound in BOUNDS:
            found = _find(rows, policy, bound)
            row[f"B = {bound}"] = f"{number(found['seconds'], 's')} ({found['staleness']:.2f})"
        table.append(row)
    return Table(title, table, "Training time, and in brackets the mean staleness of the copies used, in steps.")


def figures(found: dict[str, list[Row]]) -> list[Figure]:
    drawn = []
    for words, rows in found.items():
        for key, axis in (("seconds", "training time (s)"), ("staleness", "mean staleness (steps)")):
            series = [Series(p, list(BOUNDS), [_find(rows, p, b)[key] for b in BOUNDS]) for p in POLICIES]
            title = "time" if key == "seconds" else "staleness"
            drawn.append(Figure(f"{words}: {title}", "staleness bound", axis, series))
    return drawn
