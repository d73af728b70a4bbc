"""Lam, Look and Whittell 2017 (SparsifyGradients): 13 workers and a master train cuda-convnet on CIFAR-10.

Dense, 90 % dropped as in the paper, and thinwire. The epochs to 99.5 % train accuracy are simulated, with several seeds
at the full scale; the time of a step is measured in the lab. Beyond the paper: test accuracy, how long dropped entries
stay unsent, and how much can be dropped.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from papers.labs import ConfirmationRun, LabTestbed, confirm, step_times
from papers.simulation import Cluster, Curve, Goal, TrainingSetting
from papers.sparsify_gradients import findings
from papers.sparsify_gradients.findings import BATCH, DROPPED, LR, SEEDS, TARGET, THINWIRE, WORKERS, Seeds
from papers.sparsify_gradients.process import COALESCE_SECONDS
from papers.study import Study
from papers.workspace import Workspace, without_skipped
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import ErrorFeedback, NoFeedback
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import Percentile, TopK
from thinwire.codec.values import Bits, Float32
from thinwire.tools.events import Step, read_log
from thinwire.tools.lab.links import LinkSettings
from thinwire.tools.observe import gradient_histogram
from thinwire.tools.progress import WorkProgress
from thinwire.tools.race.launch import ClusterSpec, launch
from thinwire.tools.race.served import ServedWork, ServerSettings
from thinwire.tools.race.train import ServedTraining
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.recipe import Recipe, Splits
from thinwire.tune.presets import resolve_codec


def study(workspace: Workspace) -> Study:
    """Train to the target, measure steps in the lab, predict times to the target, and study what is dropped."""
    recipe = get_recipe("cifar10")
    splits = workspace.load(recipe, first=None if workspace.full else 1040)
    seeds = _seeds(workspace, recipe, splits)
    sweep = _sweep(workspace, recipe, splits)
    steps = (300, 100) if workspace.full else (40, 20)
    setup = f"{recipe.name} {WORKERS} x {BATCH} lr={LR:g} steps="
    intervals, magnitudes = (
        workspace.part(name, partial(make, recipe, splits, count), setup=f"{setup}{count}", data=splits)
        for name, make, count in (("away", _intervals, steps[0]), ("magnitudes", _magnitudes, steps[1]))
    )
    testbed = LabTestbed("cifar10", workspace.data, hosts=WORKERS + 1, rate="500mbit", batch=BATCH, lr=LR)
    workers = replace(testbed, hosts=WORKERS)  # without the master, for DDP
    paper, served, ring = _step_times(workspace, testbed, workers, workspace.load(recipe))
    method = THINWIRE[workspace.full]
    run = ConfirmationRun(workers, method, resolve_codec(method), 0.35, 300, 10, 1000)
    confirm_claims, confirm_tables = confirm(workspace, run, ring)
    times = findings.times_of(seeds, paper, served, ring)
    claims = [*findings.time_claims(times, seeds, workspace.full), *findings.epoch_claims(seeds, workspace.full)]
    claims += [*findings.phase_claims(paper), *findings.test_claims(seeds), *confirm_claims]
    phases = {"Phases of a step as in the paper": paper, "Phases of a step with thinwire's server": served}
    tables = [findings.time_table(seeds, times), *findings.seed_tables(seeds)]
    tables += [findings.phase_table(title, measured) for title, measured in phases.items() if measured]
    figures = findings.curve_figures(seeds, times)
    if any(sweep.values()):
        tables.append(findings.sweep_table(sweep))
        figures += findings.sweep_figures(sweep)
    figures += [*findings.interval_figures(intervals or {}), *findings.magnitude_figures(magnitudes or [])]
    return Study(
        "sparsify-gradients",
        workspace.scale,
        "SparsifyGradients",
        "Lam, Look and Whittell, 2017",
        findings.verdict(times, seeds),
        claims,
        tables + confirm_tables,
        figures,
        findings.differences(workspace, len(splits.train), seeds),
        facts={"workers": f"{WORKERS} and a master", "batch": f"{BATCH} x {WORKERS}"}
        | {"rate": f"{LR:g}", "network": "500 Mbit/s, emulated"},
    )


def _step_times(workspace: Workspace, testbed: LabTestbed, workers: LabTestbed, splits: Splits) -> tuple[Any, Any, Any]:
    """Measure a step in three ways: the paper's, thinwire's server, and without a master. None without the lab."""
    both = findings.codecs(workspace.full)
    broadcast, ring = ["dense", "percentile90"], {name: push for name, (push, _) in both.items()}
    steps = 40 if workspace.full else 12  # a few per cent decide whether the paper's own claim holds
    chain = f"chain of {1e3 * COALESCE_SECONDS:g} ms, exact, also alone: {', '.join(broadcast)} steps={steps}"
    return (
        workspace.lab_part(  # its processes use random images, so the data is not part of its identity
            "broadcast",
            lambda: broadcast_phases(testbed, broadcast, steps=steps),
            setup=f"{testbed.setup} {chain}",
        ),
        workspace.lab_part(
            "phases",
            lambda: {name: served_phases(testbed, push, pull, steps=9) for name, (push, pull) in both.items()},
            setup=f"{testbed.setup} {both} steps=9",
            data=splits,
        ),
        workspace.lab_part(
            "all-reduce",
            lambda: _ring_times(workers, ring),
            setup=f"{workers.setup} {', '.join(ring.values())} steps=12",
            data=splits,
        ),
    )


def broadcast_phases(testbed: LabTestbed, methods: Sequence[str], *, steps: int) -> dict[str, dict[str, float]]:
    """Measure the milliseconds of a step and of its phases in the lab, by method.

    Also returned are `moved`, the distance by which the steps changed the model, `sent`, the bytes of a gradient, and
    `alone`, the milliseconds of the slowest host's computation while the other hosts are idle.
    """
    events: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)  # by kind and method

    options = json.dumps({"methods": list(methods), "batch": testbed.batch, "steps": steps})
    argv = [sys.executable, "-m", "papers.sparsify_gradients.process", options]
    with WorkProgress(f"steps as in the paper, {testbed}", steps * len(methods)) as progress:

        def read(host: int, line: str) -> None:
            kind, _, rest = line.partition(" ")
            if kind in ("STEP", "ALONE"):
                event = json.loads(rest)
                events[kind, event.pop("method")].append(event)
                progress.advance(1.0 if kind == "STEP" else 0.0)

        launch(argv, testbed.hosts, LinkSettings(testbed.rate), read)
    found = {}
    for method in methods:
        medians = _median_phases(events["STEP", method][2:])
        alone = 1e3 * statistics.median(event["seconds"] for event in events["ALONE", method])
        found[method] = {**medians, "moved": events["STEP", method][-1]["moved"], "alone": alone}
    return found


def _median_phases(events: list[dict[str, float]]) -> dict[str, float]:
    phases = {"synchronise": ("began", "synchronised"), "compute": ("synchronised", "computed")}
    phases |= {"aggregate": ("computed", "ended"), "ms": ("began", "ended")}
    medians = {
        name: 1e3 * statistics.median(event[end] - event[begin] for event in events)
        for name, (begin, end) in phases.items()
    }
    return medians | {"sent": statistics.median(event["sent"] for event in events)}


def served_phases(testbed: LabTestbed, push: str, pull: str, *, steps: int) -> dict[str, float]:
    """Measure the milliseconds of a parameter server's step and of its phases; one of the hosts is the server.

    As in the paper, the steps are bulk synchronous and nothing overlaps. Medians over steps of means over workers.
    """
    workers = testbed.hosts - 1
    settings = ServerSettings(
        testbed.plan(steps, steps + 1),
        workers=workers,
        method=push,
        pull_method=pull,
        overlap=False,
        phased=True,
        timeout=60.0,
    )
    served = ServedWork(testbed.recipe, testbed.data, settings)
    place = ClusterSpec(workers, LinkSettings(testbed.rate), "thinwire reproduce")
    with tempfile.TemporaryDirectory() as folder:
        training = ServedTraining(get_recipe(testbed.recipe), served, place, Path(folder) / "log.jsonl")
        training.run()
        log = read_log(training.log)
    by_step: dict[int, list[Step]] = defaultdict(list)
    for step in log.steps:
        by_step[step.step].append(step)
    complete = [steps for number, steps in sorted(by_step.items()) if number > 2 and len(steps) == workers]

    def median(name: str) -> float:
        means = [statistics.mean(getattr(step, name) for step in steps) for steps in complete]
        return 1e3 * float(statistics.median(means))

    phases = {name: median(name) for name in ("compute", "aggregate", "synchronise")}
    ends = [max(step.wall for step in steps) for steps in complete]
    return {**phases, "ms": 1e3 * statistics.median(after - before for before, after in pairwise(ends))}


def _ring_times(testbed: LabTestbed, methods: dict[str, str]) -> Any:
    """Return the step times under the names of the lab's methods and of the study's."""
    measured = step_times(testbed, list(methods.values()), steps=12)
    return {**measured, **{name: measured[method] for name, method in methods.items()}}


def _seeds(workspace: Workspace, recipe: Recipe, splits: Splits) -> dict[str, Seeds]:
    """Train every method to the target with every seed; methods without a finished run are left out."""
    per_epoch = len(splits.train) // (WORKERS * BATCH)
    # Evaluating an image takes a third of the time of training on it: every epoch at the full scale, else every other.
    epochs, every, samples, test = (60, 1, 5000, 10_000) if workspace.full else (90, 2, 1040, 500)
    goal = Goal(epochs * per_epoch, every * per_epoch, samples, test, target=TARGET)
    methods = findings.codecs(workspace.full)
    curves: dict[str, dict[int, Curve | None]] = {name: {} for name in methods}
    for seed in range(SEEDS[workspace.full]):  # in this order, methods can be compared after the first seed
        for name, (push, _) in methods.items():
            codec = None if push == "dense" else resolve_codec(push)
            setting = TrainingSetting(WORKERS, BATCH, LR, 0.0, codec, seed=seed)
            run = f"{name}-seed{seed}" if seed else name
            curves[name][seed] = workspace.train(run, recipe, splits, setting, goal)
    return {name: Seeds(found) for name, own in curves.items() if (found := without_skipped(own))}


def _sweep(workspace: Workspace, recipe: Recipe, splits: Splits) -> dict[str, dict[float, Curve]]:
    """Train for the same number of steps with every share dropped, with and without error feedback."""
    steps, samples = (1500, 2000) if workspace.full else (60, 1040)
    goal = Goal(steps, steps, samples, 1000)
    curves: dict[str, dict[float, Curve | None]] = {"without error feedback": {}, "with error feedback": {}}
    for dropped in (0.0, *DROPPED):
        for words, feedback in zip(curves, (NoFeedback(), ErrorFeedback()), strict=True):
            codec = Codec(Percentile(dropped), Float32(), feedback) if dropped else None
            name = f"dropped-{dropped:g}-{words.split()[0]}" if dropped else "dropped-0"
            setting = TrainingSetting(WORKERS, BATCH, LR, 0.0, codec)
            curves[words][dropped] = workspace.train(name, recipe, splits, setting, goal)
    return {words: without_skipped(found) for words, found in curves.items()}


def _intervals(recipe: Recipe, splits: Splits, steps: int) -> dict[str, Any]:
    """Count after how many steps one worker sends an entry again, by method.

    `share` has the share of all repeated entries for each number of steps, `never` the share of entries never sent.
    """
    found = {}
    for name, codec in (
        ("percentile90", resolve_codec("percentile90")),
        ("percentile90 with error feedback", Codec(Percentile(90), Bits(8))),
        ("thinwire at 1 %", Codec(TopK(0.01), Bits(8))),
    ):
        cluster = Cluster(recipe, splits.train, TrainingSetting(WORKERS, BATCH, LR, 0.0, codec))
        last_sent = {i: torch.full((n,), -1) for i, n in enumerate(cluster.numels) if n >= codec.min_numel}
        counts = torch.zeros(steps + 1, dtype=torch.long)
        for step in range(steps):
            cluster.step()
            reader = FrameReader(cluster.frames[0], cluster.numels)
            for section in reader.sections:
                if section.id in last_sent:
                    indices = reader.entries(section)[0]
                    before = last_sent[section.id][indices]
                    counts += torch.bincount(step - before[before >= 0], minlength=steps + 1)[: steps + 1]
                    last_sent[section.id][indices] = step
        cluster.close()
        never = torch.cat([last < 0 for last in last_sent.values()]).double().mean()
        found[name] = {"share": (counts[1:] / max(int(counts.sum()), 1)).tolist(), "never": float(never)}
    return found


def _magnitudes(recipe: Recipe, splits: Splits, steps: int) -> list[dict[str, Any]]:
    """Return histograms of one worker's gradient magnitudes per layer, at the start and after some steps."""
    found = []
    with closing(Cluster(recipe, splits.train, TrainingSetting(WORKERS, BATCH, LR))) as cluster:
        for step in (0, steps):
            while cluster.done < step:
                cluster.step()
            for name, gradient in cluster.gradients([0])[1].items():
                if gradient.dim() > 1:
                    shape = gradient_histogram(step, name, gradient)
                    middles = [(a * b) ** 0.5 for a, b in pairwise(shape.edges)]
                    shares = [100 * count / gradient.numel() for count in shape.counts]
                    found.append({"layer": name, "step": step, "x": middles, "y": shares})
    return found
