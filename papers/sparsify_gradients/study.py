"""Lam, Look and Whittell 2017 (SparsifyGradients): 13 workers and a master train cuda-convnet on CIFAR-10.

Dense, 90 % dropped as the paper did it, and thinwire: epochs to 99.5 % train accuracy from the simulation, with several
seeds at the full scale, the time of a step from the lab; and what the paper could not see: test accuracy, how long
dropped values stay away, and how much may be dropped.
"""

from typing import Any

import torch

from papers.cluster import Cluster, Setting
from papers.labs import Bed, Trial, broadcast_phases, confirm, served_phases, step_times
from papers.runs import Curve, Goal
from papers.sparsify_gradients.findings import (
    BATCH,
    DROPPED,
    LR,
    SEEDS,
    TARGET,
    THIN,
    WORKERS,
    Seeds,
    away_figures,
    codecs,
    curve_figures,
    differences,
    epoch_claims,
    phase_claims,
    phase_table,
    run_name,
    seed_tables,
    shape_figures,
    sweep_figures,
    sweep_table,
    test_claims,
    time_claims,
    time_table,
    times_of,
    verdict,
)
from papers.sparsify_gradients.process import GATHERED
from papers.study import Study, Table
from papers.workshop import Workshop
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import ErrorFeedback, NoFeedback
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import Percentile, TopK
from thinwire.codec.values import Bits, Float32
from thinwire.tools.observe import gradient_histogram
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Recipe, Splits
from thinwire.tune.presets import resolve_codec


def study(workshop: Workshop) -> Study:
    """Curves to the target, the lab's step times, their product, and the three extra questions."""
    recipe = get_recipe("cifar10")
    splits = workshop.load(recipe, first=None if workshop.full else 1040)
    seeds = _seeds(workshop, recipe, splits)
    sweep = _sweep(workshop, recipe, splits)
    steps = (300, 100) if workshop.full else (40, 20)
    setup = f"{recipe.name} {WORKERS} x {BATCH} lr={LR:g} steps="
    away = workshop.part("away", lambda: _away(recipe, splits, steps[0]), setup=f"{setup}{steps[0]}", data=splits)
    shapes = workshop.part(
        "magnitudes", lambda: _magnitudes(recipe, splits, steps[1]), setup=f"{setup}{steps[1]}", data=splits
    )
    bed = Bed("cifar10", workshop.data, hosts=WORKERS + 1, rate="500mbit", batch=BATCH, lr=LR)
    paper, phases, flat = _step_times(workshop, bed, workshop.load(recipe))
    trial = Trial(_workers_only(bed), THIN[workshop.full], resolve_codec(THIN[workshop.full]), 0.35, 300, 10, 1000)
    confirmed, proof = confirm(workshop, trial, flat)
    times = times_of(seeds, paper, phases, flat)
    claims = [*time_claims(times, seeds, workshop.full), *epoch_claims(seeds, workshop.full)]
    claims += [*phase_claims(paper), *test_claims(seeds), *confirmed]
    swept = any(sweep.values())
    tables = [
        time_table(seeds, times),
        *seed_tables(seeds),
        *_phase_tables(paper, phases),
        *([sweep_table(sweep)] if swept else []),
        *proof,
    ]
    figures = [*curve_figures(seeds, times), *(sweep_figures(sweep) if swept else []), *away_figures(away)]
    return Study(
        "sparsify-gradients",
        workshop.scale,
        "SparsifyGradients",
        "Lam, Look and Whittell, 2017",
        verdict(times, seeds),
        claims,
        tables,
        [*figures, *shape_figures(shapes or [])],
        differences(workshop, len(splits.train), seeds),
        facts={
            "workers": f"{WORKERS} and a master",
            "batch": f"{BATCH} x {WORKERS}",
            "rate": f"{LR:g}",
            "network": "500 Mbit/s, emulated",
        },
    )


def _step_times(workshop: Workshop, bed: Bed, splits: Splits) -> tuple[Any, Any, Any]:
    """The lab's steps: the paper's way, thinwire's server, and no master; None where the lab is left out."""
    both = codecs(workshop.full)
    broadcast, flat = ["dense", "percentile90"], {name: push for name, (push, _) in both.items()}
    steps = 40 if workshop.full else 12  # a few per cent decide over the paper's own claim
    return (
        # Its processes make up their images.
        workshop.lab_part(
            "broadcast",
            lambda: broadcast_phases(bed, broadcast, steps=steps),
            setup=f"{bed.setup} chain of {1e3 * GATHERED:g} ms, exact, also alone: "
            f"{', '.join(broadcast)} steps={steps}",
        ),
        workshop.lab_part("phases", lambda: _phases(bed, both), setup=f"{bed.setup} {both} steps=9", data=splits),
        workshop.lab_part(
            "all-reduce",
            lambda: _flat_times(_workers_only(bed), flat),
            setup=f"{_workers_only(bed).setup} {', '.join(flat.values())} steps=12",
            data=splits,
        ),
    )


def _phase_tables(paper: Any, served: Any) -> list[Table]:
    titled = {"Phases of a step as in the paper": paper, "Phases of a step with thinwire's server": served}
    return [phase_table(title, phases) for title, phases in titled.items() if phases]


def _workers_only(bed: Bed) -> Bed:
    """The same workers without a master, for DDP."""
    return Bed(bed.recipe, bed.data, WORKERS, bed.rate, bed.batch, bed.lr)


def _flat_times(bed: Bed, methods: dict[str, str]) -> Any:
    measured = step_times(bed, list(methods.values()), steps=12)
    return {**measured, **{name: measured[method] for name, method in methods.items()}}


def _seeds(workshop: Workshop, recipe: Recipe, splits: Splits) -> dict[str, Seeds]:
    """Every method's runs to the target; a method without any is left out."""
    per_epoch = len(splits.train) // (WORKERS * BATCH)
    # Evaluating takes a third of training's time for as many images: every epoch, or every other small one.
    epochs, every, samples, test = (60, 1, 5000, 10_000) if workshop.full else (90, 2, 1040, 500)
    goal = Goal(epochs * per_epoch, every * per_epoch, samples, test, target=TARGET)
    methods = codecs(workshop.full)
    found: dict[str, dict[int, Curve]] = {name: {} for name in methods}
    for seed in range(SEEDS[workshop.full]):  # all methods with one seed first: that much can be compared
        for name, (push, _) in methods.items():
            codec = None if push == "dense" else resolve_codec(push)
            setting = Setting(WORKERS, BATCH, LR, 0.0, codec, seed=seed)
            curve = workshop.train(run_name(name, seed), recipe, splits, setting, goal)
            if curve is not None:
                found[name][seed] = curve
    return {name: Seeds(curves) for name, curves in found.items() if curves}


def _sweep(workshop: Workshop, recipe: Recipe, splits: Splits) -> dict[str, dict[float, Curve]]:
    """Every share dropped, with and without memory, for the same number of steps."""
    steps, samples = (1500, 2000) if workshop.full else (60, 1040)
    goal = Goal(steps, steps, samples, 1000)
    found: dict[str, dict[float, Curve]] = {"without memory": {}, "with memory": {}}
    for dropped in (0.0, *DROPPED):
        for words, memory in (("without memory", NoFeedback()), ("with memory", ErrorFeedback())):
            codec = Codec(Percentile(dropped), Float32(), memory) if dropped else None
            name = f"dropped-{dropped:g}-{words.split()[0]}" if dropped else "dropped-0"
            curve = workshop.train(name, recipe, splits, Setting(WORKERS, BATCH, LR, 0.0, codec), goal)
            if curve is not None:
                found[words][dropped] = curve
    return found


def _away(recipe: Recipe, splits: Splits, steps: int) -> dict[str, Any]:
    """After how many steps an entry of one worker's gradient travels again, by method: shares per number of steps."""
    found = {}
    for name, codec in (
        ("percentile90", resolve_codec("percentile90")),
        ("percentile90 with memory", Codec(Percentile(90), Bits(8))),
        ("thinwire at 1 %", Codec(TopK(0.01), Bits(8))),
    ):
        cluster = Cluster(recipe, splits.train, Setting(WORKERS, BATCH, LR, 0.0, codec))
        large = [i for i, n in enumerate(cluster.numels) if n >= codec.min_numel]
        last = {i: torch.full((cluster.numels[i],), -1) for i in large}
        ages = torch.zeros(steps + 1, dtype=torch.long)
        for step in range(steps):
            cluster.step()
            reader = FrameReader(cluster.frames[0], cluster.numels)
            for section in reader.sections:
                if section.id in last:
                    places = reader.entries(section)[0]
                    before = last[section.id][places]
                    ages += torch.bincount(step - before[before >= 0], minlength=steps + 1)[: steps + 1]
                    last[section.id][places] = step
        cluster.close()
        never = sum(int((t < 0).sum()) for t in last.values()) / sum(t.numel() for t in last.values())
        found[name] = {"share": (ages[1:] / max(int(ages.sum()), 1)).tolist(), "never": never}
    return found


def _magnitudes(recipe: Recipe, splits: Splits, steps: int) -> list[dict[str, Any]]:
    """Histograms of one worker's gradient magnitudes per layer, at the start and after some steps."""
    cluster = Cluster(recipe, splits.train, Setting(WORKERS, BATCH, LR))
    found = []
    for step in range(steps + 1):
        if step in (0, steps):
            _, gradients = cluster.gradients([0])
            for name, gradient in gradients.items():
                if gradient.dim() > 1:
                    shape = gradient_histogram(step, name, gradient)
                    total = max(gradient.numel(), 1)
                    middles = [(a * b) ** 0.5 for a, b in zip(shape.edges, shape.edges[1:], strict=False)]
                    found.append(
                        {"layer": name, "step": step, "x": middles, "y": [100 * c / total for c in shape.counts]}
                    )
        if step < steps:
            cluster.step()
    cluster.close()
    return found


def _phases(bed: Bed, methods: dict[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    return {name: served_phases(bed, push, pull, steps=9) for name, (push, pull) in methods.items()}
