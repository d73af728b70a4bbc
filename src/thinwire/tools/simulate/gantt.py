"""The page of a simulated schedule: a table, a Gantt chart of each policy, and waiting times by layer."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from thinwire.tools.report.markup import Row, write_page
from thinwire.tools.simulate.schedule import Case, Interval, ScheduleOutcome, winner

# More bars make a browser slow; of a longer run only the first steps are shown.
MOST_BARS = 24_000
LANES = ("forward", "backward", "push", "pull")


def write_gantt(case: Case, outcomes: Sequence[ScheduleOutcome], path: Path, command: str) -> None:
    """Write one self-contained page about a case and the outcome of each policy."""
    write_page(
        path,
        "gantt",
        title=f"Request scheduling: {case.workers} workers, {len(case.layers)} layers",
        verdict=verdict(outcomes),
        facts=_facts(case),
        table=comparison(outcomes),
        made={"Command": command},
        data=_data(case, outcomes),
    )


def verdict(outcomes: Sequence[ScheduleOutcome]) -> str:
    """Say in one sentence which policy is the fastest, and by how much over fifo, or over the slowest."""
    best = winner(outcomes)
    time = f"{1000 * best.makespan:.5g} ms"
    first = [o.policy for o in outcomes if o.makespan == best.makespan]
    if len(outcomes) == 1:
        return f"{best.policy} takes {time}."
    if len(first) == len(outcomes):
        newest = {o.staleness_mean for o in outcomes} != {best.staleness_mean}
        return f"All policies take {time}" + (f"; the copies are newest with {best.policy}." if newest else ".")
    other = next((o for o in outcomes if o.policy == "fifo"), outcomes[0])
    if other.policy in first:
        other = max(outcomes, key=lambda o: o.makespan)
    who = f"{first[0]} takes" if len(first) == 1 else f"{', '.join(first[:-1])} and {first[-1]} take"
    saved = 1 - best.makespan / other.makespan
    return f"{who} {time}, {saved:.1%} less than {other.policy} ({1000 * other.makespan:.5g} ms)."


def comparison(outcomes: Sequence[ScheduleOutcome]) -> list[Row]:
    """Return the comparison as text, one row per policy."""
    best = winner(outcomes).makespan or 1.0
    return [
        {
            "policy": o.policy,
            "makespan": f"{1000 * o.makespan:,.1f} ms",
            "step": f"{1000 * o.step:,.2f} ms",
            "to the best": "-" if o.makespan == best else f"{o.makespan / best - 1:+.1%}",
            "waiting": f"{1000 * sum(o.waiting):,.2f} ms",
            "staleness": f"{o.staleness_mean:.2f}",
            "most": f"{o.staleness_max}",
        }
        for o in outcomes
    ]


def _facts(case: Case) -> dict[str, str]:
    slow = f" (computing {', '.join(f'{factor:g}' for factor in case.slowness)} × as long)" if case.slowness else ""
    return {
        "workers": f"{case.workers}{slow}",
        "layers": f"{len(case.layers)} in {sum(case.slices_of(n) for n in range(len(case.layers)))} slices",
        "iterations": f"{case.iterations}",
        "staleness bound": f"{case.staleness}",
        "window": f"{1000 * case.window_seconds():.4g} ms",
        "server's link": f"{case.server_rate:g} × a worker's",
        **({"one-way delay": f"{1000 * case.latency:.4g} ms"} if case.latency else {}),
    }


def _data(case: Case, outcomes: Sequence[ScheduleOutcome]) -> dict[str, Any]:
    """Return the data of the page's script; times are in milliseconds."""
    steps = _steps_shown(case, outcomes)
    return {
        "layers": [layer.name for layer in case.layers],
        "workers": case.workers,
        "steps": steps,
        "iterations": case.iterations,
        "step": 1000 * max(o.step for o in outcomes),
        "policies": [
            {
                "name": o.policy,
                "makespan": round(1000 * o.makespan, 4),
                "waiting": [round(1000 * seconds, 4) for seconds in o.waiting],
                "bars": _bars(case.workers, (i for i in o.intervals if i.clock < steps)),
            }
            for o in outcomes
        ],
    }


def _steps_shown(case: Case, outcomes: Sequence[ScheduleOutcome]) -> int:
    counts = Counter(i.clock for o in outcomes for i in o.intervals)
    totals = accumulate(counts[step] for step in range(case.iterations))
    return max(1, sum(total <= MOST_BARS for total in totals))


def _bars(workers: int, intervals: Iterable[Interval]) -> list[dict[str, dict[str, list[float]]]]:
    """Return start, length, layer, step and slices by worker and lane; adjacent slices of a layer form one bar."""
    lanes: list[dict[str, dict[str, list[float]]]] = [
        {lane: {"start": [], "ms": [], "layer": [], "step": [], "slices": []} for lane in LANES} for _ in range(workers)
    ]
    for i in sorted(intervals, key=lambda i: (i.start, i.end)):
        lane = lanes[i.worker][i.doing]
        start, end = round(1000 * i.start, 6), round(1000 * i.end, 6)
        follows = bool(lane["start"]) and lane["start"][-1] + lane["ms"][-1] >= start - 1e-6
        if follows and (lane["layer"][-1], lane["step"][-1]) == (i.layer, i.clock):
            lane["ms"][-1] = round(end - lane["start"][-1], 6)
            lane["slices"][-1] += 1
            continue
        for values, value in zip(lane.values(), (start, round(end - start, 6), i.layer, i.clock, 1), strict=True):
            values.append(value)
    return lanes
