"""Simulated ranks: data-parallel training in one process, step by step what all ranks would compute.

Gradient codecs, updates and exchanges are the library's own; only the network is replaced by memory. PowerSGD and DeMo
are written here as their papers publish them, for comparison.
"""

import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.frame import read_frames
from thinwire.codec.low_rank import LowRank
from thinwire.exchange.base import Bucket, Exchange
from thinwire.exchange.channel import Channel
from thinwire.exchange.gather import Gather
from thinwire.exchange.low_rank import LowRankMean
from thinwire.exchange.rounds import Arrived, Round
from thinwire.exchange.scatter_reduce import ScatterReduce
from thinwire.hooks.adam import correct_noise, corrects
from thinwire.link.link import all_zero
from thinwire.link.rounds import Nesterov, Rounds
from thinwire.link.thread import Pending
from thinwire.link.updates import Updates
from thinwire.tools.race.methods import local_rounds, update_codec
from thinwire.tools.recipes.recipe import Batch, Recipe
from thinwire.tune.presets import resolve_codec


class MemoryChannel(Channel):
    """The channel of one of several ranks that are threads of one process."""

    def __init__(self, rank: int, world: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.world, self.device = rank, world, torch.device("cpu")
        self.sent = self.received = 0
        self.seconds = self.cpu = 0.0
        self._meeting, self._table = meeting, table

    def gather(self, message: Tensor, lane: int) -> Round:
        self.sent += message.numel() * (self.world - 1)
        return Arrived(self._meet(message.clone()))

    def gather_uneven(self, message: Tensor, sizes: Sequence[int], lane: int, *, doubling: bool = True) -> Round:
        return self.gather(message, lane)

    def scatter(self, messages: Tensor, sizes: Sequence[int], size: int, lane: int) -> Round:
        everything = self._meet((messages.clone(), list(sizes)))
        self.sent += messages.numel()
        return Arrived([torch.split(parts, sent)[self.rank] for parts, sent in everything])

    def _meet(self, mine: Any) -> list[Any]:
        """What all ranks brought."""
        self._table[self.rank] = mine
        self._meeting.wait()
        found = list(self._table)
        self._meeting.wait()
        return found


class SimulatedTraining(ABC):
    """Training of one model by some method. `model` holds what all ranks agree on after each step."""

    model: nn.Module
    bits: float  # that a rank sends to all others together, per element and step

    def __init__(self, recipe: Recipe, lr: float, steps: int) -> None:
        self.recipe, self.lr, self.steps = recipe, lr, steps
        self.done = 0

    @abstractmethod
    def step(self, batches: Sequence[Batch]) -> None:
        """Train all ranks for one step, each on its own batch."""

    def _backward(self, model: nn.Module, batch: Batch) -> None:
        model.zero_grad()
        self.recipe.loss(model, batch).backward()


class DenseTraining(SimulatedTraining):
    """The optimizer steps on the mean gradient. A subclass may replace the mean by what its method makes of it."""

    def __init__(self, recipe: Recipe, seed: int, workers: int, lr: float, steps: int) -> None:
        super().__init__(recipe, lr, steps)
        self.model = recipe.build(seed)
        self.optimizer = recipe.optimizer(self.model, lr=lr)
        self.named = dict(self.model.named_parameters())
        self.bits = 64.0 * (workers - 1) / workers  # an all-reduce in 32 bits

    def step(self, batches: Sequence[Batch]) -> None:
        self.recipe.set_rate(self.optimizer, self.done, self.steps)
        gradients = []
        for batch in batches:
            self._backward(self.model, batch)
            gradients.append({name: p.grad.clone() for name, p in self.named.items() if p.grad is not None})
        for name, mean in self.combine(gradients).items():
            self.named[name].grad = mean
        self.recipe.clip_gradients(self.model)
        self.optimizer.step()
        self.done += 1

    def combine(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return what all ranks give to the optimizer."""
        return {name: torch.stack([g[name] for g in gradients]).mean(0) for name in gradients[0]}


class GradientTraining(DenseTraining):
    """Every rank's gradient passes its own codec; frames are averaged in rank order."""

    def __init__(self, codec: str, recipe: Recipe, seed: int, workers: int, lr: float, steps: int) -> None:
        super().__init__(recipe, seed, workers, lr, steps)
        self.codecs = [resolve_codec(codec) for _ in range(workers)]
        self._sent = 0

    def combine(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        frames = [codec.encode(g, step=self.done) for codec, g in zip(self.codecs, gradients, strict=True)]
        shapes = {name: g.shape for name, g in gradients[0].items()}
        outs = [torch.empty(shape.numel()) for shape in shapes.values()]
        read_frames(frames, [[out.numel() for out in outs]]).sum_to(outs, 1.0 / len(frames))
        self._sent += sum(map(len, frames))
        elements = sum(out.numel() for out in outs)
        self.bits = 8.0 * self._sent / len(frames) * (len(frames) - 1) / elements / (self.done + 1)
        return {name: out.view(shape) for (name, shape), out in zip(shapes.items(), outs, strict=True)}


class PowerSGDTraining(DenseTraining):
    """PowerSGD with warm start and error feedback, in 32 bits, as torch's hook does it from the first step on.

    It is linear, so that the mean of all ranks' errors is all that matters.
    """

    def __init__(self, rank: int, recipe: Recipe, seed: int, workers: int, lr: float, steps: int) -> None:
        super().__init__(recipe, seed, workers, lr, steps)
        generator = torch.Generator().manual_seed(seed)
        matrices = {name: p for name, p in self.named.items() if p.dim() > 1}
        self._right = {n: torch.randn(p[0].numel(), rank, generator=generator) for n, p in matrices.items()}
        self._errors = {name: torch.zeros(p.shape[0], p[0].numel()) for name, p in matrices.items()}
        numbers = sum(rank * sum(error.shape) for error in self._errors.values())
        numbers += sum(p.numel() for name, p in self.named.items() if name not in matrices)
        self.bits *= numbers / sum(p.numel() for p in self.named.values())

    def combine(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        means = super().combine(gradients)
        for name, error in self._errors.items():
            matrix = means[name].reshape(error.shape) + error
            left = torch.linalg.qr(matrix @ self._right[name]).Q
            self._right[name] = matrix.T @ left
            sent = left @ self._right[name].T
            self._errors[name] = matrix - sent
            means[name] = sent.view_as(means[name])
        return means


@lru_cache
def _cosines(n: int) -> Tensor:
    """The orthonormal matrix of the discrete cosine transform of n numbers."""
    place = torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi / n * (place + 0.5) * place.unsqueeze(1)) * math.sqrt(2.0 / n)
    rows[0] /= math.sqrt(2.0)
    return rows.float()


class DeMoTraining(DenseTraining):
    """DeMo (Peng et al. 2024): each rank sends the largest DCT coefficients of chunks of its momentum.

    All ranks step by the sign of the sum. Chunks of 64 x 64, momentum 0.999; the recipe's clipping and schedule.
    """

    decay, chunk = 0.999, 64

    def __init__(self, share: float, recipe: Recipe, seed: int, workers: int, lr: float, steps: int) -> None:
        super().__init__(recipe, seed, workers, lr, steps)
        self._share = share
        self._momenta = [{name: torch.zeros_like(p) for name, p in self.named.items()} for _ in range(workers)]
        self.bits = share * (32 + 16) * (workers - 1)  # an all-gather of values and indices of 16 bits

    def step(self, batches: Sequence[Batch]) -> None:
        self.recipe.set_rate(self.optimizer, self.done, self.steps)
        rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        decays = {id(p): group["weight_decay"] for group in self.optimizer.param_groups for p in group["params"]}
        totals = {name: torch.zeros_like(p) for name, p in self.named.items()}
        for momenta, batch in zip(self._momenta, batches, strict=True):
            self._backward(self.model, batch)
            self.recipe.clip_gradients(self.model)
            for name, p in self.named.items():
                assert p.grad is not None
                momentum = momenta[name].mul_(self.decay).add_(p.grad, alpha=rates[id(p)])
                sent = self._largest(momentum)
                momentum -= sent
                totals[name] += sent
        with torch.no_grad():
            for name, p in self.named.items():
                p.mul_(1.0 - rates[id(p)] * decays[id(p)]).sub_(totals[name].sign(), alpha=rates[id(p)])
        self.done += 1

    def _largest(self, momentum: Tensor) -> Tensor:
        """Return the part of a momentum that its largest coefficients stand for."""
        matrix = momentum.view(momentum.shape[0], -1) if momentum.dim() > 1 else momentum.view(1, -1)
        rows, columns = (math.gcd(n, self.chunk) for n in matrix.shape)
        chunks = matrix.unfold(0, rows, rows).unfold(1, columns, columns)
        c, d = _cosines(rows), _cosines(columns)
        coefficients = (c @ chunks @ d.T).flatten(2)
        count = max(1, round(self._share * coefficients.shape[2]))
        places = coefficients.abs().topk(count, dim=2).indices
        kept = torch.zeros_like(coefficients).scatter_(2, places, coefficients.gather(2, places))
        parts = c.T @ kept.view(chunks.shape) @ d
        return parts.transpose(1, 2).reshape(matrix.shape).view_as(momentum)


class UpdateTraining(SimulatedTraining):
    """Every rank has a model and an optimizer of its own; the library's update domain keeps them together."""

    def __init__(
        self,
        codec: str,
        rounds: Rounds,
        recipe: Recipe,
        seed: int,
        workers: int,
        lr: float,
        steps: int,
    ) -> None:
        super().__init__(recipe, lr, steps)
        name, _, exchange = codec.partition("+")
        scatter = exchange == "scatter-reduce" or (not exchange and workers > 2)
        meeting, table = threading.Barrier(workers), [None] * workers
        channels = [MemoryChannel(rank, workers, meeting, table) for rank in range(workers)]
        self._ranks = [
            UpdateRank(recipe, seed, lr, update_codec(name), rounds, each, scatter=scatter) for each in channels
        ]
        self._shown = recipe.build(seed)
        self._pool = ThreadPoolExecutor(workers)

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """A model with the shared parameters."""
        updates = self._ranks[0].updates
        updates.finish()
        with torch.no_grad():
            for name, p in self._shown.named_parameters():
                p.copy_(updates.shared[name].view_as(p))
        return self._shown

    def step(self, batches: Sequence[Batch]) -> None:
        ended = False
        for rank, batch in zip(self._ranks, batches, strict=True):
            rank.updates.look_ahead()
            self.recipe.set_rate(rank.optimizer, self.done, self.steps)
            self._backward(rank.model, batch)
            self.recipe.clip_gradients(rank.model)
            rank.optimizer.step()
            if rank.updates.rounds.corrects and corrects(rank.optimizer):
                correct_noise(rank.optimizer, len(self._ranks))
            ended = rank.updates.count(0)
        if ended:
            list(self._pool.map(UpdateRank.exchange, self._ranks))  # a list: it raises what a thread raised
        self.done += 1
        elements = sum(t.numel() for t in self._ranks[0].updates.shared.values())
        self.bits = 8.0 * self._ranks[0].channel.sent / elements / self.done


class UncompressedTraining(UpdateTraining):
    """Local steps, and an all-reduce of their change in 32 bits: with Nesterov momentum DiLoCo (Douillard et al. 2023).

    Its bits are those of the all-reduce, fewer than those of the library's frames.
    """

    def __init__(self, rounds: Rounds, recipe: Recipe, seed: int, workers: int, lr: float, steps: int) -> None:
        super().__init__("dense", rounds, recipe, seed, workers, lr, steps)
        self._bits = 64.0 * (workers - 1) / workers / int(rounds.every)

    def step(self, batches: Sequence[Batch]) -> None:
        super().step(batches)
        self.bits = self._bits


class UpdateRank:
    """One rank of an `UpdateTraining`."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        lr: float,
        codec: Codec,
        rounds: Rounds,
        channel: MemoryChannel,
        *,
        scatter: bool,
    ) -> None:
        self.model, self.channel = recipe.build(seed), channel
        self.optimizer = recipe.optimizer(self.model, lr=lr)
        named = dict(self.model.named_parameters())
        self._exchange: Exchange = Gather()
        codec = resolve_codec(codec, channel.world)
        if isinstance(codec.selection, LowRank):
            inner = ScatterReduce() if scatter else Gather()
            self._exchange = LowRankMean(inner, {name: p.shape for name, p in named.items()})
        self._exchange.setup(channel, codec, {name: p.numel() for name, p in named.items()}, lambda members: [])
        self.updates = Updates(named, [self.optimizer], codec, rounds)

    def exchange(self) -> None:
        """Exchange what the optimizer changed in a round; all ranks call it at the same time."""
        self.updates.finish(0)
        step = self.updates.clocks[0]
        jobs = self.updates.jobs(0)
        for job in jobs:
            assert job.outs is not None
            outcome = self._exchange.mean(Bucket(job.tensors, list(job.outs.values()), step, all_zero(job.tensors)))
            assert not outcome.non_finite
        if self.updates.rounds.overlap:
            self.updates.begin(0, jobs, Pending(jobs, []))
        else:
            self.updates.apply(jobs, skipped=False)


Make = Callable[[Recipe, int, int, float, int], SimulatedTraining]


def training(method: str, recipe: Recipe, *, seed: int, workers: int, lr: float, steps: int) -> SimulatedTraining:
    """Return the training of a method.

    Methods are dense, alone, gradient:CODEC, update:CODEC, localH:CODEC for H local steps (also localH+overlap and
    localH+nesterov; localH:dense is uncompressed), dilocoH, powersgd:RANK and demo:SHARE. A preset with local steps,
    such as local16, needs no codec.
    """
    kind, _, what = method.partition(":")
    makers: dict[str, Make] = {
        "dense": DenseTraining,
        "alone": DenseTraining,
        "gradient": lambda *rest: GradientTraining(what, *rest),
        "update": lambda *rest: UpdateTraining(what, Rounds(), *rest),
        "local": lambda *rest: _local_training(kind, what, *rest),
        "diloco": lambda *rest: UncompressedTraining(
            Rounds(int(kind.removeprefix("diloco")), Nesterov(0.7, momentum=0.9)), *rest
        ),
        "powersgd": lambda *rest: PowerSGDTraining(int(what), *rest),
        "demo": lambda *rest: DeMoTraining(float(what), *rest),
    }
    family = re.match("[a-z]*", kind)
    if family is None or family.group() not in makers:
        raise ValueError(f"there is no method {method!r}; there are {', '.join(makers)}")
    return makers[family.group()](recipe, seed, 1 if kind == "alone" else workers, lr, steps)


def _local_training(kind: str, codec: str, *rest: Any) -> SimulatedTraining:
    rounds = local_rounds(kind, codec)
    return UncompressedTraining(rounds, *rest) if codec == "dense" else UpdateTraining(codec or kind, rounds, *rest)
