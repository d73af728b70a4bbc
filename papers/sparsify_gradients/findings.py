"""What the study of SparsifyGradients draws: curves, what may be dropped, how long it stays away, magnitudes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from papers.runs import Curve
from papers.study import Claim, Figure, Series, Table, number
from papers.workshop import Workshop

SEEDS = {False: 1, True: 3}  # of each method, by whether the scale is full
LAST = 3  # evaluations of which a mean is taken


@dataclass(frozen=True)
class Seeds:
    """A method's curves by seed: at least one, and not those that were left out."""

    curves: dict[int, Curve]

    def __len__(self) -> int:
        return len(self.curves)

    @property
    def reached(self) -> list[int]:
        """The steps that met the target, of those seeds that met it."""
        return [curve.reached for curve in self.curves.values() if curve.reached]

    @property
    def steps(self) -> float | None:
        """Their mean; None unless every seed met the target, since a mean of the lucky ones would flatter."""
        return statistics.mean(self.reached) if len(self.reached) == len(self) else None

    @property
    def epochs(self) -> float | None:
        """The same in passes over the data."""
        return self.steps / self._per_epoch if self.steps else None

    def epochs_told(self) -> str:
        """What `epochs` is the mean of, or how many of the seeds met the target."""
        epochs = listed([f"{steps / self._per_epoch:g}" for steps in self.reached])
        few = f"{len(self.reached)} of {len(self)} seeds reached the target" if self.steps is None else ""
        return ": ".join(filter(None, [few, f"{epochs} epochs" if epochs else ""]))

    def tests(self, last: int = 1) -> list[float]:
        """Each seed's mean test accuracy over its last evaluations, in per cent."""
        return [100 * statistics.mean(curve.test[-last:]) for curve in self.curves.values()]

    def test(self, last: int = 1) -> float:
        """Their mean."""
        return statistics.mean(self.tests(last))

    def tests_told(self, last: int = 1) -> str:
        """What `test` is the mean of."""
        return f"{listed([f'{value:.2f}' for value in self.tests(last)])} %"

    @property
    def megabytes(self) -> float:
        """What a worker sent in all, on average."""
        return statistics.mean(curve.megabytes[-1] for curve in self.curves.values())

    @property
    def _per_epoch(self) -> int:
        return next(iter(self.curves.values())).steps_per_epoch


def run_name(method: str, seed: int) -> str:
    """What a run and its file are called."""
    return f"{method}-seed{seed}" if seed else method


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def counted(seeds: dict[str, Seeds]) -> str:
    """How many seeds each method has."""
    return listed([f"{len(own)} of {name}" for name, own in seeds.items()])


def several(seeds: dict[str, Seeds]) -> bool:
    """Whether any method has more than one seed."""
    return any(len(own) > 1 for own in seeds.values())


def matched(seeds: dict[str, Seeds], name: str) -> tuple[Seeds, Seeds] | None:
    """A method and dense with those seeds alone that both have: a seed's luck is in both sides of a comparison then."""
    if not {name, "dense"} <= set(seeds):
        return None
    own, dense = seeds[name].curves, seeds["dense"].curves
    both = [seed for seed in own if seed in dense]
    return (Seeds({s: own[s] for s in both}), Seeds({s: dense[s] for s in both})) if both else None


def compared(seeds: dict[str, Seeds], name: str, told: Callable[[Seeds], str]) -> str:
    """The single seeds of a method next to dense's; nothing where neither has several, or they have none in common."""
    pair = matched(seeds, name)
    counts = {len(seeds[each]) for each in (name, "dense") if each in seeds}
    if pair is None or counts == {1}:
        return ""
    own, dense = pair
    which = listed([str(seed) for seed in own.curves])
    some = "" if counts == {len(own)} else f" ({'seed' if len(own) == 1 else 'seeds'} {which}, which both have)"
    return f"{name}: {told(own)}; dense: {told(dense)}{some}"


WORKERS, BATCH, LR = 13, 8, 0.1
TARGET = 0.995
METHODS = ("dense", "percentile90", "thinwire")
# What thinwire sends, by whether the scale is full. On the first images 1 % is enough; on all of them it came close to
# the target without reaching it in 23 epochs, and ten times the entries cost little time on this network.
THIN = {False: "topk1", True: "0.1"}
PAPER_SECONDS = {"dense": 12_571.0, "percentile90": 6_750.0}
PAPER_EPOCHS = {"dense": 25.0, "percentile90": 29.0}
EPOCHS_OVER = 1.1  # times as many epochs are still as many
PAPER_AGGREGATION = {"dense": 0.805, "percentile90": 0.249}
DROPPED = (50.0, 90.0, 99.0, 99.9, 99.99)


def codecs(full: bool) -> dict[str, tuple[str, str]]:
    """By method: the worker's codec, and the master's."""
    return {
        "dense": ("dense", "dense"),
        "percentile90": ("percentile90", "dense"),
        "thinwire": (THIN[full], THIN[full]),
    }


def times_of(seeds: dict[str, Seeds], paper: Any, served: Any, flat: Any) -> dict[str, dict[str, float | None]]:
    """Per method: steps, and the time of a step and to the target: the paper's way, also on hosts whose computation
    takes what it takes one host alone; served; and without a master."""
    found = {}
    for name in METHODS:
        steps = seeds[name].steps if name in seeds else None
        seconds = {
            # thinwire sends changes of the model through its own server instead of broadcasting the model.
            "paper": _seconds(served if name == "thinwire" else paper, name),
            "own": None if name == "thinwire" or not paper else own_ms(paper[name]) / 1e3,
            "served": _seconds(served, name),
            "ring": _seconds(flat, name),
        }
        products = {f"{way}_seconds": steps * each if steps and each else None for way, each in seconds.items()}
        found[name] = {"steps": steps, **seconds, **products}
    return found


def own_ms(phases: dict[str, float]) -> float:
    """A step on hosts that do not share cores: its computation takes as long as the slowest host's alone."""
    return phases["ms"] - phases["compute"] + phases["alone"]


def _seconds(measured: Any, name: str) -> float | None:
    return measured[name]["ms"] / 1e3 if measured else None


def _speedup(
    times: dict[str, dict[str, float | None]], seeds: dict[str, Seeds], name: str, way: str
) -> tuple[float | None, bool]:
    """How much sooner than dense a method is there, and whether that was settled: also by missing the target."""
    pair, dense, own = matched(seeds, name), times["dense"][way], times[name][way]
    if pair is None or not dense or not own or not pair[1].steps:
        return None, False
    return (pair[1].steps * dense / (pair[0].steps * own) if pair[0].steps else None), True


def time_claims(times: dict[str, dict[str, float | None]], seeds: dict[str, Seeds], full: bool) -> list[Claim]:
    """Seconds, next to the paper's where the data is as large as the paper's, and every speed-up over dense."""
    claims = []
    for name, seconds in PAPER_SECONDS.items():
        own = times[name]["paper_seconds"]
        what = f"{name}: seconds to 99.5 % train accuracy"
        note = _joined(_PRODUCT, _seeds_told(seeds, name))
        claims.append(Claim(what, seconds if full else None, own, "s", None, note))
    paper = PAPER_SECONDS["dense"] / PAPER_SECONDS["percentile90"]
    for name, bar in (("percentile90", paper), ("thinwire", 5.0)):
        epochs = compared(seeds, name, Seeds.epochs_told)
        for way, words in _WAYS.items():
            gain, settled = _speedup(times, seeds, name, way)
            held = (gain is not None and gain >= bar) if settled else None
            figure, note = (paper, "") if name == "percentile90" else (None, "5x is asked for")
            if (name, way) == ("thinwire", "own"):
                continue  # what its server's step takes alone was not measured
            if (name, way) == ("thinwire", "paper"):
                words = OWN_SERVER
            what = f"{name}: speed-up to the target, {words}"
            claims.append(Claim(what, figure, gain, "x", held, _joined(note, epochs)))
    return claims


def _seeds_told(seeds: dict[str, Seeds], name: str) -> str:
    """The epochs of a method's single seeds, where it has several."""
    return seeds[name].epochs_told() if len(seeds.get(name, ())) > 1 else ""


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


_PRODUCT = "simulated steps x the lab's step of a master that broadcasts its model to 13 workers"
OWN_SERVER = "thinwire's own server, against dense the paper's way"  # it broadcasts no model
_WAYS = {
    "paper": "the paper's way: the model is broadcast, gradients go to the master",
    "own": "the paper's way, with the computation of one host alone, as on machines of their own",
    "served": "thinwire's parameter server for all, which sends to every worker",
    "ring": "no master: all-reduce, or all-gather of frames",
}


def epoch_claims(seeds: dict[str, Seeds], full: bool) -> list[Claim]:
    """Epochs, judged next to the paper's where the data is as large as the paper's; fewer are as good."""
    claims = []
    for name, own in seeds.items():
        value, paper = own.epochs, PAPER_EPOCHS.get(name) if full else None
        held = (value is not None and value <= EPOCHS_OVER * paper) if paper else None
        asked = f"at most {EPOCHS_OVER:g}x the paper's is asked for" if paper else ""
        note = _joined(asked, _seeds_told(seeds, name), _short_of_it(own))
        claims.append(Claim(f"{name}: epochs to 99.5 %", paper, value, "", held, note))
    pair = matched(seeds, "thinwire")
    if pair and pair[1].epochs:
        ratio = pair[0].epochs / pair[1].epochs if pair[0].epochs else None
        held = ratio is not None and ratio <= EPOCHS_OVER
        asked = f"at most {EPOCHS_OVER:g}x is asked for"
        note = _joined(asked, compared(seeds, "thinwire", Seeds.epochs_told))
        claims.append(Claim("thinwire: epochs over dense's", None, ratio, "x", held, note))
    return claims


def _short_of_it(own: Seeds) -> str:
    """How far those seeds came that did not reach the target."""
    found = []
    for curve in own.curves.values():
        if not curve.reached:
            end = f", diverged at step {curve.diverged}" if curve.diverged else ""
            found.append(f"{100 * max(curve.train):.2f} % at best{end}")
    return f"not reached: {listed(found)}" if found else ""


def phase_claims(phases: Any) -> list[Claim]:
    if not phases:
        return []
    claims = [
        Claim(f"{name}: aggregation", paper, phases[name]["aggregate"] / 1e3, "s", None)
        for name, paper in PAPER_AGGREGATION.items()
    ]
    paper = PAPER_AGGREGATION["dense"] / PAPER_AGGREGATION["percentile90"]
    gain = phases["dense"]["aggregate"] / phases["percentile90"]["aggregate"]
    return [*claims, Claim("percentile90: aggregation faster than dense", paper, gain, "x", gain >= paper)]


def test_claims(seeds: dict[str, Seeds]) -> list[Claim]:
    """At the end, and over the last epochs: one epoch's test accuracy is off by more than what is asked for."""
    claims, pairs = [], {name: matched(seeds, name) for name in seeds if name != "dense"}
    for words, last in (("at the end", 1), (f"mean of the last {LAST} evaluations", LAST)):
        for name, pair in pairs.items():
            if pair is None:
                continue
            own, dense = pair[0].test(last), pair[1].test(last)
            single = compared(seeds, name, partial(Seeds.tests_told, last=last))
            note = _joined(f"{own:.2f} % against {dense:.2f} %", "at least -0.3 is asked for", single)
            what = f"{name}: test accuracy, {words}, points above dense's"
            claims.append(Claim(what, None, own - dense, "", own >= dense - 0.3, note))
    return claims


def verdict(times: dict[str, dict[str, float | None]], seeds: dict[str, Seeds]) -> str:
    parts = []
    for name in ("percentile90", "thinwire"):
        gain, settled = _speedup(times, seeds, name, "paper")
        if gain is not None:
            own, _ = _speedup(times, seeds, name, "own")
            alone = f" ({own:.2f}x on hosts that do not share cores)" if own is not None else ""
            parts.append(f"{name} reaches 99.5 % train accuracy {gain:.2f}x sooner than dense{alone}")
        elif settled:
            few = f"{len(seeds[name].reached)} of {len(seeds[name])} seeds"
            parts.append(f"{name} reaches 99.5 % train accuracy with {few} only")
    paper = PAPER_SECONDS["dense"] / PAPER_SECONDS["percentile90"]
    means = f" Means of the seeds: {counted(seeds)}." if several(seeds) else ""
    if parts:
        return f"{' and '.join(parts)}, with a master at 500 Mbit/s (the paper's: {paper:.2f}x).{means}"
    if not seeds:
        return "Nothing is judged: no run to the target was made."
    reached = [
        name if own.steps else f"{name} ({len(own.reached)} of {len(own)} seeds)"
        for name, own in seeds.items()
        if own.reached
    ]
    return f"Reached 99.5 % train accuracy: {', '.join(reached) or 'nobody'}; no time was predicted."


def differences(workshop: Workshop, samples: int, seeds: dict[str, Seeds]) -> list[str]:
    size = [] if workshop.full else [f"Small scale: the first {samples:,} training images instead of 50,000."]
    every = "the first 5,000 training images, every epoch" if workshop.full else "all of these, every other epoch"
    trained = "Each method is trained with one seed, that of the initial weights and of the order of the images."
    if workshop.full:
        trained = (
            f"Each method is trained with up to {SEEDS[True]} seeds, and figures are means over those that were run: "
            f"{counted(seeds) or 'none'}. Seed n is that of the initial weights and of the order of the images."
        )
    return [
        *size,
        "CIFAR-10 was re-encoded as JPEG where the data of the project's own results comes from.",
        "The network is emulated: all hosts compute on this machine's cores, which takes longer than on their own.",
        f"The rate is {LR:g} on the mean of the gradients; the paper added them up, with a rate that it does not tell.",
        f"Train accuracy is that of {every}.",
        "The paper's way: the model goes along a chain of hosts in pieces, as Open MPI broadcasts long messages; "
        "gradients go to the master, 8 bytes per kept value; barriers keep the phases apart. Choosing the values is "
        "counted as computation. thinwire's server sends a dense model to each worker instead, which takes 13 times as "
        "long as to one, and is shown next to it.",
        f"thinwire: the largest {10 if workshop.full else 1} % in 8 bits with memory, both ways with a master; "
        "simulated one way (Gather).",
        trained,
    ]


def time_table(seeds: dict[str, Seeds], times: dict[str, dict[str, float | None]]) -> Table:
    rows = []
    for name, own in seeds.items():
        t = times[name]
        rows.append(
            {
                "Method": name,
                "Seeds": str(len(own)),
                "Epochs": number(own.epochs),
                "Steps": number(own.steps),
                "Step": number(t["paper"], "s"),
                "To target": number(t["paper_seconds"], "s"),
                "Step, own cores": number(t["own"], "s"),
                "To target, own cores": number(t["own_seconds"], "s"),
                "Step, served": number(t["served"], "s"),
                "To target, served": number(t["served_seconds"], "s"),
                "Step, all-reduce": number(t["ring"], "s"),
                "To target, all-reduce": number(t["ring_seconds"], "s"),
                "Sent by a worker": number(own.megabytes, "MB"),
                "Test accuracy": f"{own.test():.2f} %",
            }
        )
    means = " Epochs, steps, megabytes and test accuracy: means over the seeds." if several(seeds) else ""
    return Table("Steps to the target x time of a step", rows, _TIMED + means)


_TIMED = (
    "Steps: simulated exactly. Times: measured in the lab. First a master that broadcasts the model, as in the paper "
    "(thinwire: its own server), on this machine's cores, which all hosts share; own cores: the same with the "
    "computation of the slowest host alone; served: thinwire's server for all; all-reduce: no master."
)


def seed_tables(seeds: dict[str, Seeds]) -> list[Table]:
    """What the means are made of; nothing where no method has several seeds."""
    if not several(seeds):
        return []
    rows = []
    for name, own in seeds.items():
        for seed, curve in own.curves.items():
            alone = Seeds({seed: curve})
            rows.append(
                {
                    "Method": name,
                    "Seed": str(seed),
                    "Epochs": number(alone.epochs),
                    "Test accuracy": alone.tests_told(),
                    f"Mean of the last {LAST}": alone.tests_told(LAST),
                    "Best test accuracy": f"{100 * curve.best_test:.2f} %",
                }
            )
    return [Table("Every seed", rows, f"Test accuracy: at the end, over the last {LAST} evaluations, and at its best.")]


def phase_table(title: str, phases: Any) -> Table:
    rows = [
        {"Method": name, **{words: number(row[key], "ms") for key, words in _PHASES.items() if key in row}}
        for name, row in phases.items()
    ]
    return Table(title, rows, "13 workers' gradients are computed on this machine's cores.")


_PHASES = {
    "synchronise": "Synchronisation",
    "compute": "Computation",
    "alone": "Computation, one host alone",
    "aggregate": "Aggregation",
    "ms": "Step",
}


def sweep_table(sweep: dict[str, dict[float, Curve]]) -> Table:
    rows = []
    for dropped in (0.0, *DROPPED):
        row = {"Dropped": f"{dropped:g} %"}
        for words, found in sweep.items():
            curve = found.get(dropped)
            row[f"Loss, {words}"] = "–" if curve is None else "diverged" if curve.diverged else number(curve.loss[-1])
            row[f"Train accuracy, {words}"] = f"{100 * curve.train[-1]:.1f} %" if curve else "–"
        rows.append(row)
    steps = max((c.step[-1] for found in sweep.values() for c in found.values()), default=0)
    return Table("How much may be dropped", rows, f"After {steps} steps; 32-bit values.")


def curve_figures(seeds: dict[str, Seeds], times: dict[str, dict[str, float | None]]) -> list[Figure]:
    """All seeds' curves over passes, and over time where a step was timed."""
    # By seed: the page gives colours in this order, and the methods keep theirs whatever seeds there are.
    runs = sorted((seed, place, name) for place, name in enumerate(seeds) for seed in seeds[name].curves)
    figures = []
    for split in ("train", "test"):
        title, axis = f"{split.capitalize()} accuracy over", f"{split} accuracy (%)"
        passes, timed = [], []
        for seed, _, name in runs:
            curve, seconds = seeds[name].curves[seed], times[name]["paper"]
            label = f"{name}, seed {seed}" if seed else name
            values: list[float | None] = [100 * v for v in getattr(curve, split)]
            passes.append(Series(label, curve.epoch, values))
            if seconds is not None:
                timed.append(Series(label, [step * seconds for step in curve.step], values))
        figures.append(Figure(f"{title} passes", "epoch", axis, passes))
        figures += [Figure(f"{title} time", "seconds, with a master", axis, timed)] if timed else []
    return figures


def sweep_figures(sweep: dict[str, dict[float, Curve]]) -> list[Figure]:
    series = []
    for words, found in sweep.items():
        kept = [d for d in DROPPED if d in found]
        series.append(
            Series(words, [f"{d:g} %" for d in kept], [None if found[d].diverged else found[d].loss[-1] for d in kept])
        )
    return [Figure("Training loss by what is dropped", "dropped", "loss after the same steps", series, "bars")]


def away_figures(away: Any) -> list[Figure]:
    if not away:
        return []
    series = []
    for name, found in away.items():
        total, share = 0.0, []
        for value in found["share"]:
            total += value
            share.append(100 * total)
        series.append(Series(name, list(range(1, len(share) + 1)), share))
    nothing = ", ".join(f"{name}: {100 * found['never']:.1f} %" for name, found in away.items())
    return [
        Figure(
            "How many steps until a value travels again",
            "steps since it last travelled",
            "share of what travels again (%)",
            series,
            log="x",
            note=f"Of one worker. Never sent in {len(series[0].x)} steps: {nothing}",
        )
    ]


def shape_figures(shapes: list[dict[str, Any]]) -> list[Figure]:
    layers = list(dict.fromkeys(shape["layer"] for shape in shapes))
    return [
        Figure(
            f"Gradient magnitudes: {layer}",
            "magnitude",
            "entries (%)",
            [Series(f"step {s['step']}", s["x"], s["y"]) for s in shapes if s["layer"] == layer],
            log="x",
        )
        for layer in layers
    ]
