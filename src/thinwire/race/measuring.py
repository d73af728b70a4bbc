"""Measuring: what a step of a model takes on this machine, and what each codec makes of its gradients.

On one machine alone, or on all ranks of a process group at once: then every figure is that of all computing together,
and the network between them is probed too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import FrameReader
from thinwire.codec.vectors import NativeGroup, Vector
from thinwire.errors import RecipeError
from thinwire.recipes import get_recipe
from thinwire.tune.forecast import DENSITIES, CodecTimes, Setting, Workload
from thinwire.tune.law import Law
from thinwire.tune.presets import any_codec_for

# DDP's own: the first bucket is small so that the exchange begins early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
EXCHANGES = ("gather", "scatter-reduce")


@dataclass
class Subject:
    """A model, the loss of its i-th step, and its optimizer."""

    name: str
    model: nn.Module
    loss: Callable[[int], Tensor]
    optimizer: torch.optim.Optimizer


def subject_of(model: str, *, data: Path | None = None, batch: int | None = None, rank: int = 0) -> Subject:
    """A recipe by name, or module:function that returns a Recipe, or a model and a function of it to its loss."""
    made = _made(model)
    if isinstance(made, tuple):
        net, loss = made
        return Subject(model, net, lambda step: loss(net), torch.optim.SGD(net.parameters(), lr=0.01))
    recipe = made
    splits, size = recipe.load(data), batch if batch is not None else recipe.defaults.batch
    net = recipe.build(0)

    def recipe_loss(step: int) -> Tensor:
        first = (step * 131 + rank) * size
        result: Tensor = recipe.loss(
            net, splits.train.batch([i % len(splits.train) for i in range(first, first + size)])
        )
        return result

    return Subject(recipe.name, net, recipe_loss, recipe.optimizer(net))


def _made(model: str) -> Any:
    try:
        return get_recipe(model)
    except RecipeError as error:
        module, colon, function = model.partition(":")
        if not colon or "returned" not in str(error):
            raise
        import sys

        made = getattr(sys.modules[module], function)()
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
            return made
        raise RecipeError(
            f"{model} must return a Recipe, or a model and a function of it to a loss, not {type(made).__name__}"
        ) from None


@dataclass(frozen=True)
class Figures:
    """A workload, the settings that were measured, and how much the computing varied."""

    work: Workload
    settings: tuple[Setting, ...]
    spread: float


class Meter:
    """Times what all ranks do together; `sync` waits for all of them and does nothing on one machine."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        sync()
        began = time.perf_counter()
        for _ in range(3):
            sync()
        self._own = (time.perf_counter() - began) / 3

    def time(self, work: Callable[[], object]) -> float:
        """Seconds until all have done it."""
        self._sync()
        began = time.perf_counter()
        work()
        self._sync()
        return max(time.perf_counter() - began - self._own, 1e-7)


def measure(
    subject: Subject, methods: Sequence[str], *, steps: int = 10, sync: Callable[[], None] = lambda: None
) -> Figures:
    """Run some steps alone, then each codec on real gradients."""
    meter = Meter(sync)
    filled: list[tuple[int, float]] = []
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: filled.append((p.numel(), time.perf_counter())))
        for p in parameters
    ]

    def step(number: int) -> None:
        filled.clear()
        subject.optimizer.zero_grad(set_to_none=True)
        subject.loss(number).backward()
        subject.optimizer.step()

    for number in range(3):
        step(number)
    taken = [meter.time(partial(step, 3 + number)) for number in range(steps)]
    for handle in handles:
        handle.remove()
    buckets, ready = in_buckets(filled)
    named = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    compute = statistics.median(taken)
    spread = statistics.median(abs(t - compute) for t in taken) / compute
    work = Workload(compute, buckets, ready, 0.0, 0.0, _copying(meter, named), _alpha(named))
    codecs: dict[str, CodecTimes] = {}
    settings: list[Setting] = []
    for method in methods:
        codec = any_codec_for(method)
        codecs[method], density = _codec_times(meter, codec, named)
        settings += [Setting(method, e, density=density, bits=codec.values.bits) for e in EXCHANGES]
    return Figures(replace(work, codecs=codecs), tuple(settings), spread)


def in_buckets(filled: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Gradients in the order in which they were ready, as DDP groups them; times count to the last."""
    buckets: list[int] = []
    ready: list[float] = []
    elements = 0
    for numel, at in filled:
        elements += numel
        if 4 * elements >= (_FIRST_BUCKET if not buckets else _BUCKET):
            buckets.append(elements)
            ready.append(at - filled[-1][1])
            elements = 0
    if elements:
        buckets.append(elements)
        ready.append(0.0)
    return tuple(buckets), tuple(ready)


def _codec_times(meter: Meter, codec: Codec, gradients: dict[str, Tensor]) -> tuple[CodecTimes, float]:
    """Steady state: a few encodes before any is timed."""
    frames = [codec.encode(gradients) for _ in range(3)]
    encode = statistics.median(meter.time(lambda: frames.append(codec.encode(gradients))) for _ in range(5))
    outs = [torch.zeros(g.numel()) for g in gradients.values()]

    def read() -> None:
        FrameReader(frames[-1], [out.numel() for out in outs]).add_to(outs, 0.5)

    decode = statistics.median(meter.time(read) for _ in range(5))
    count = sum(frames[-1].counts)
    density = min(max(count / sum(out.numel() for out in outs), 1e-6), 1.0)
    return CodecTimes(encode, decode, 1.04 * len(frames[-1]) + 64), density


def _copying(meter: Meter, gradients: dict[str, Tensor]) -> float:
    x = torch.zeros(sum(g.numel() for g in gradients.values()))
    return statistics.median(meter.time(lambda: x.copy_(x.to(torch.float16))) for _ in range(5))


def _alpha(gradients: dict[str, Tensor]) -> dict[float, float]:
    """Of the large tensors, each with its own threshold, as codecs select."""
    carried, everything = np.zeros(len(DENSITIES)), 0.0
    for gradient in gradients.values():
        group = NativeGroup([Vector(gradient.reshape(-1), None, 1.0, None, None)])
        law = Law(group.histogram(1 << 20, 0), gradient.numel())
        if gradient.numel() >= 1024 and not law.empty:
            carried += law.alpha(np.array(DENSITIES) * law.n) * law.squares[-1]
            everything += float(law.squares[-1])
    return {d: float(c) / everything if everything else 1.0 for d, c in zip(DENSITIES, carried, strict=True)}
