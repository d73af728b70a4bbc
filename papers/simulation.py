"""Simulated data-parallel training: all workers in one process, with the library's codecs, run to a target.

There is one model. A step computes every worker's gradient on it, encodes the gradient with that worker's own codec and
averages the frames as `Gather` does, in the order of the ranks. Only the residuals exist once per worker.

A finished run is one JSON file. An unfinished run is a checkpoint from which the next call continues exactly.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from papers.files import fingerprint, provenance, read_json, save, save_json
from papers.study import StudyError
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import MomentumCorrection
from thinwire.codec.frame import Frame, read_frames
from thinwire.errors import DamagedFileError, ThinwireError
from thinwire.files import open_checked
from thinwire.tools.recipes.metric import reaches
from thinwire.tools.recipes.recipe import DataOrder, Recipe, Split, Splits, classify

SAVE_SECONDS = 45.0  # between checkpoints: about what an interruption costs
LARGEST_LOSS = 1e9  # recorded for losses that are larger or not a number, because JSON has no infinity
PACKET_BYTES = 1448  # payload of a TCP packet on Ethernet

Gradients = dict[str, Tensor]
# Receives all workers' gradients before they are encoded, and the codecs that own the residuals.
Probe = Callable[[list[Gradients], list[Codec]], None]
Watch = Callable[["Curve", int], None]  # is called after each step with the curve so far and the step


class DropoutGenerators(threading.local):
    """The random generator of the calling thread, from which dropout masks are drawn.

    `global_only` says that a layer of the model draws from the process's global generator, as attention does inside
    its fused operations. Then only one thread may use the model.
    """

    generator: torch.Generator | None = None

    def __init__(self, global_only: bool) -> None:
        self.global_only = global_only

    def seed(self, seed: int) -> None:
        """Seed the masks that one worker draws in one step."""
        self.generator = torch.Generator().manual_seed(seed)
        if self.global_only:
            torch.manual_seed(seed)


class SeededDropout(nn.Module):
    """torch.nn.Dropout with masks from the thread's own generator; equal seeds give the same masks as torch's."""

    def __init__(self, p: float, generators: DropoutGenerators) -> None:
        super().__init__()
        self.p, self._generators = p, generators

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        mask = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self._generators.generator)
        return x * (mask.div_(1.0 - self.p) if self.p < 1.0 else mask)


def seed_dropout(model: nn.Module) -> DropoutGenerators:
    """Replace every dropout layer of a model; the caller seeds the returned generators before each forward pass."""
    generators = DropoutGenerators(any(_uses_global_generator(module) for module in model.modules()))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Dropout):
            model.set_submodule(name, SeededDropout(module.p, generators))
    return generators


def _uses_global_generator(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0.0
    others = nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
    return isinstance(module, others) and module.p > 0.0


@dataclass(frozen=True)
class TrainingSetting:
    """How a cluster trains; without a codec it trains dense."""

    workers: int
    batch: int  # of each worker
    lr: float
    momentum: float = 0.0
    codec: Codec | None = None
    dense_steps: int = 0  # the first steps send all entries, as Aji and Heafield's code does
    seed: int = 0


@dataclass(frozen=True)
class StepResult:
    """Means over the workers of one step: loss, bytes of a message, and share of the entries in it."""

    loss: float
    bytes: float
    density: float


class Diverged(ThinwireError):
    """The loss of a step is not finite."""


class Cluster:
    """A model and all its workers; `step` trains one step of `steps`, which a schedule of the learning rate needs."""

    def __init__(
        self, recipe: Recipe, train: Split, setting: TrainingSetting, *, steps: int | None = None, threads: int = 2
    ) -> None:
        if steps is None and recipe.schedule is not None:
            raise ValueError(f"the recipe {recipe.name} has a schedule: give the number of steps")
        self.recipe, self.setting, self._train, self._steps = recipe, setting, train, steps or 0
        self.model = recipe.build(setting.seed)
        # Momentum correction applies the momentum before sending: the optimizer must not apply it again.
        corrected = setting.codec is not None and isinstance(setting.codec.feedback, MomentumCorrection)
        self.optimizer = recipe.optimizer(self.model, lr=setting.lr, momentum=0.0 if corrected else setting.momentum)
        self.order = DataOrder(len(train), batch=setting.batch, workers=setting.workers, seed=setting.seed)
        self.codecs = [setting.codec.copy() for _ in range(setting.workers)] if setting.codec is not None else []
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.numels = [p.numel() for p in self.parameters]
        self.done = 0  # steps
        self.frames: list[Frame] = []  # of the last step, by worker
        self._dropout = seed_dropout(self.model)
        self._threads = 1 if self._dropout.global_only else threads
        # Each torch operation gets one thread: on a GRU's small operations two are no faster and cost a third more.
        self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def step(self, probe: Probe | None = None) -> StepResult:
        """Train one step of all workers."""
        self.recipe.set_rate(self.optimizer, self.done, self._steps)
        dense = not self.codecs or (self.done < self.setting.dense_steps and probe is None)
        result = self._dense_step() if dense else self._encoded_step(probe)
        if not math.isfinite(result.loss):
            raise Diverged(f"the loss is {result.loss} at step {self.done + 1}: the learning rate is too high")
        self.recipe.clip_gradients(self.model)
        self.optimizer.step()
        self.done += 1
        return result

    def gradients(self, workers: Sequence[int]) -> tuple[float, Gradients]:
        """Return the mean loss and the mean gradient of some workers' batches, computed as one batch."""
        self._dropout.seed((self.setting.seed * 1_000_003 + self.done + 1) * 4099 + workers[0])
        samples = [sample for worker in workers for sample in self.order.at(self.done, worker)]
        loss = self.recipe.loss(self.model, self._train.batch(samples))
        gradients = torch.autograd.grad(loss, self.parameters)
        return float(loss.detach()), dict(zip(self.names, gradients, strict=True))

    def _dense_step(self) -> StepResult:
        # For a loss that is a mean over samples, the mean over equal batches is the mean over all samples: workers
        # can share a batch, one batch per thread. Other losses are averaged worker by worker, as DDP does.
        workers = range(self.setting.workers)
        count = min(self._threads, len(workers)) if self.recipe.loss is classify else len(workers)
        parts = [workers[i::count] for i in range(count)]
        results = list(self._pool.map(self.gradients, parts))
        shares = [len(part) / len(workers) for part in parts]
        for name, parameter in zip(self.names, self.parameters, strict=True):
            total = results[0][1][name] * shares[0]
            for share, (_, gradients) in zip(shares[1:], results[1:], strict=True):
                total.add_(gradients[name], alpha=share)
            parameter.grad = total
        loss = sum(share * loss for share, (loss, _) in zip(shares, results, strict=True))
        return StepResult(loss, 4.0 * sum(self.numels), 1.0)

    def _encoded_step(self, probe: Probe | None) -> StepResult:
        def encode(codec: Codec, computed: tuple[float, Gradients]) -> tuple[float, Frame]:
            return computed[0], codec.encode(computed[1], step=self.done)

        count = self.setting.workers
        if probe is not None:
            computed = list(self._pool.map(lambda worker: self.gradients([worker]), range(count)))
            probe([gradients for _, gradients in computed], self.codecs)
            sent = list(map(encode, self.codecs, computed))
        else:
            sent = list(self._pool.map(lambda i: encode(self.codecs[i], self.gradients([i])), range(count)))
        self.frames = [frame for _, frame in sent]
        frames = read_frames(self.frames, [self.numels])
        if frames.non_finite:
            return StepResult(math.nan, 0.0, 0.0)
        means = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in self.parameters]
        frames.sum_to(means, 1.0 / count)
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean
        loss = sum(loss for loss, _ in sent) / count
        size = sum(len(frame) for frame in self.frames) / count
        entries = sum(sum(frame.counts) for frame in self.frames) / count
        return StepResult(loss, size, entries / sum(self.numels))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "step": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "codecs": [codec.state_dict() for codec in self.codecs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        if len(state["codecs"]) != len(self.codecs):
            raise ValueError(f"the state has {len(state['codecs'])} codecs, the cluster has {len(self.codecs)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for codec, codec_state in zip(self.codecs, state["codecs"], strict=True):
            codec.load_state_dict(codec_state)
        self.done = int(state["step"])


@dataclass(frozen=True)
class Goal:
    """When a run ends and what is evaluated on the way."""

    max_steps: int
    evaluate_every: int
    train_samples: int = 2000  # the metric on the first so many samples of the training split; 0: do not evaluate
    test_samples: int | None = 2000  # likewise of the test split; None: all
    objective_samples: int = 0  # the mean loss on so many samples of the training split
    target: float | None = None  # the run ends when the metric on `split` reaches it
    split: str = "train"


@dataclass
class Curve:
    """The course of a run; the lists have one entry per evaluation."""

    name: str
    steps_per_epoch: int
    step: list[int] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # mean over the workers since the previous evaluation
    megabytes: list[float] = field(default_factory=list)  # that one worker has sent so far
    packets: list[float] = field(default_factory=list)  # likewise
    density: float = 0.0  # mean over all steps
    reached: int | None = None  # the step that reached the target
    higher_is_better: bool = True  # of the metric
    diverged: int | None = None  # the step whose loss was not finite, which ended the run
    seconds: float = 0.0  # of processor time that the simulation took
    notes: dict[str, Any] = field(default_factory=dict)  # what a probe recorded

    @property
    def epoch(self) -> list[float]:
        return [step / self.steps_per_epoch for step in self.step]

    @property
    def best_test(self) -> float:
        return max(self.test) if self.higher_is_better else min(self.test)

    def first_at(self, target: float) -> int | None:
        """Return the step of the first evaluation at which the metric on the test split reached the target."""
        up = self.higher_is_better
        values = zip(self.step, self.test, strict=True)
        return next((step for step, value in values if reaches(value, target, higher_is_better=up)), None)


@dataclass(frozen=True)
class PeriodicProbe:
    """Makes a probe every so many steps; the probe writes to the curve's notes."""

    every: int
    make: Callable[[Curve, Cluster], Probe]


@dataclass
class Totals:
    """The losses since the last evaluation, and what a worker has sent in all."""

    losses: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    packets: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """One simulated run: a recipe, its data, the setting and the goal. Its files are NAME.json and NAME.pt."""

    name: str
    recipe: Recipe
    splits: Splits
    setting: TrainingSetting
    goal: Goal

    @cached_property
    def _data(self) -> str:
        return fingerprint(self.splits)

    def described(self) -> str:
        """Return the description that a file must contain to be reused for this run."""
        return f"{self.recipe.name} {len(self.splits.train)} {self.setting} {self.goal} data={self._data}"

    def finished(self, folder: Path) -> Curve | None:
        """Return the curve of a finished run; None if its file is missing, damaged or of another run."""
        content = read_json(folder / f"{self.name}.json")
        with contextlib.suppress(KeyError, TypeError):
            if content.get("described") == self.described() and content["curve"]["step"]:
                return Curve(**content["curve"])
        return None

    def run(self, folder: Path, watch: Watch | None = None, probe: PeriodicProbe | None = None) -> Curve:
        """Return the curve: read it if the run is finished, else train on from the checkpoint."""
        finished = self.finished(folder)
        if finished is not None:
            return finished
        checkpoint = folder / f"{self.name}.pt"
        cluster = Cluster(self.recipe, self.splits.train, self.setting, steps=self.goal.max_steps)
        with contextlib.closing(cluster):
            curve = self._train(cluster, checkpoint, watch, probe)
        content = {"described": self.described(), "made": provenance(), "curve": asdict(curve)}
        save_json(content, folder / f"{self.name}.json")
        checkpoint.unlink(missing_ok=True)
        return curve

    def _train(self, cluster: Cluster, checkpoint: Path, watch: Watch | None, probe: PeriodicProbe | None) -> Curve:
        curve, totals = self._resume(cluster, checkpoint)
        began, saved, before = time.process_time(), time.monotonic(), curve.seconds
        while cluster.done < self.goal.max_steps and curve.reached is None:
            look = probe.make(curve, cluster) if probe is not None and cluster.done % probe.every == 0 else None
            try:
                result = cluster.step(look)
            except Diverged:
                curve.diverged = cluster.done + 1
                if not curve.step:
                    self._evaluate(cluster, curve, replace(totals, losses=[LARGEST_LOSS]))
                break
            totals.losses.append(result.loss)
            totals.megabytes += result.bytes / 1e6
            totals.packets += math.ceil(result.bytes / PACKET_BYTES)
            curve.density += (result.density - curve.density) / cluster.done
            curve.seconds = before + time.process_time() - began
            if watch is not None:
                watch(curve, cluster.done)
            if cluster.done % self.goal.evaluate_every == 0 or cluster.done == self.goal.max_steps:
                self._evaluate(cluster, curve, totals)
                totals.losses.clear()
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save(cluster, curve, totals, checkpoint)
                saved = time.monotonic()
        return curve

    def _evaluate(self, cluster: Cluster, curve: Curve, totals: Totals) -> None:
        goal, recipe, model = self.goal, self.recipe, cluster.model
        curve.step.append(cluster.done)
        curve.loss.append(min(sum(totals.losses) / len(totals.losses), LARGEST_LOSS))
        curve.megabytes.append(totals.megabytes)
        curve.packets.append(totals.packets)
        if goal.train_samples != 0:
            curve.train.append(recipe.evaluate(model, self.splits.train, goal.train_samples))
        if goal.test_samples != 0:
            curve.test.append(recipe.evaluate(model, self.splits.test, goal.test_samples))
        if goal.objective_samples:
            value = objective(recipe, model, self.splits.train, goal.objective_samples)
            curve.objective.append(value if value < LARGEST_LOSS else LARGEST_LOSS)  # also replaces NaN
        if goal.target is not None and recipe.reaches(getattr(curve, goal.split)[-1], goal.target):
            curve.reached = cluster.done

    def _resume(self, cluster: Cluster, checkpoint: Path) -> tuple[Curve, Totals]:
        new = Curve(self.name, cluster.order.steps_per_epoch, higher_is_better=self.recipe.higher_is_better)
        state = _read_checkpoint(checkpoint)
        if state.get("described") != self.described():
            return new, Totals()
        try:
            curve, totals = replace(new, **json.loads(state["curve"])), Totals(**json.loads(state["since"]))
            cluster.load_state_dict(state["cluster"])
            return curve, totals
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StudyError(f"{checkpoint} is damaged ({error}): delete it to start the run again") from error

    def _save(self, cluster: Cluster, curve: Curve, totals: Totals, checkpoint: Path) -> None:
        texts = {"curve": json.dumps(asdict(curve)), "since": json.dumps(asdict(totals))}
        state = {"described": self.described(), "cluster": cluster.state_dict(), **texts}
        save(checkpoint, lambda out: torch.save(state, out), checksum=True)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; {} if it is missing or foreign. Those of 0.2.0 have no checksum and are read all the same."""
    try:
        with open_checked(path, required=False) as (file, _):
            state = torch.load(file, weights_only=True)
    except FileNotFoundError:
        return {}
    except DamagedFileError as error:
        raise StudyError(f"{path} is damaged ({error}): delete it to start the run again") from error
    except OSError as error:
        raise StudyError(f"cannot read {path} ({error.strerror}): make it readable, or delete it") from error
    except Exception:  # torch raises many kinds for files that it did not write
        return {}
    return state if isinstance(state, dict) else {}


@torch.no_grad()
def objective(recipe: Recipe, model: nn.Module, split: Split, samples: int) -> float:
    """Return the mean loss on the first samples of a split."""
    indices = range(min(samples, len(split)))
    batches = [indices[start : start + 500] for start in indices[::500]]
    return sum(float(recipe.loss(model, split.batch(batch))) * len(batch) for batch in batches) / len(indices)
