"""Diagnose: every so many steps, how far what travels is from what training would do without compression.

docs/convergence.md explains the figures. A diagnosis costs two dense reductions and a few passes over the gradient;
the steps between two of them only look at a sample of the memory, and a link without one does nothing at all.
"""

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from thinwire.codec.encode import Batch
from thinwire.exchange.base import Bucket, Exchange, Outcome
from thinwire.exchange.channel import Channel, share
from thinwire.link.diagnosis import Diagnosis

_log = logging.getLogger("thinwire")

# Entries of a tensor whose ages are followed.
SAMPLE = 4096
# An entry that stayed is what was accumulated, but for the kernels' rounding.
_STAYED = 1e-6


@dataclass
class _Sums:
    """What ranks add up: squared norms weighed by the ranks that a memory stands for, and ages by entries."""

    sent: float = 0.0
    accumulated: float = 0.0
    held: float = 0.0
    gradient: float = 0.0
    age: float = 0.0
    aged: float = 0.0
    waited: float = 0.0
    arrived: float = 0.0


@dataclass
class _Means:
    """What every rank computes alike, from the means of all."""

    apart: float = 0.0  # squared distance of what was applied to the selection of the mean
    dense: float = 0.0
    applied: float = 0.0
    product: float = 0.0


class Ages:
    """How long entries of the memory wait; follows a sample of each tensor's, or all of a small one's."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self._since: dict[str, Tensor] = {}  # the step after which an entry last travelled, or after which it was seen
        self._before: dict[str, Tensor] = {}
        self._waited = [0.0, 0.0]  # steps, entries

    def opened(self, batch: Batch) -> None:
        """Note what was accumulated."""
        for name, vector, chosen in zip(batch.names, batch.vectors, batch.choices, strict=True):
            if vector.kept is None or chosen.whole:
                continue
            if name not in self._places:
                self._places[name] = _sample(name, vector.n).to(vector.kept.device)
                self._since[name] = torch.full_like(self._places[name], batch.step)
            places = self._places[name]
            before = vector.gradient.reshape(-1)[places].float()
            self._before[name] = before if vector.residual is None else before + vector.decay * vector.residual[places]

    def written(self, batch: Batch) -> None:
        """An entry travelled if the memory holds something else than was accumulated."""
        for name, vector in zip(batch.names, batch.vectors, strict=True):
            before = self._before.pop(name, None)
            if before is None or vector.kept is None:
                continue
            gone = (vector.kept[self._places[name]] - before).abs() > _STAYED * before.abs()
            since, weight = self._since[name], vector.n / len(before)
            self._waited[0] += weight * float((batch.step + 1 - since[gone]).sum())
            self._waited[1] += weight * int(gone.sum())
            since[gone] = batch.step + 1

    def add_to(self, sums: _Sums, held: Mapping[str, Tensor], step: int) -> int:
        """Ages of what is held back after a step, and how long what travelled since the last call had waited."""
        oldest = 0
        for name, places in self._places.items():
            if name not in held:
                continue
            ages = step + 1 - self._since[name][held[name][places] != 0.0]
            weight = held[name].numel() / len(places)
            sums.age += weight * float(ages.sum())
            sums.aged += weight * len(ages)
            oldest = max(oldest, int(ages.max()) if len(ages) else 0)
        sums.waited, sums.arrived = self._waited
        self._waited = [0.0, 0.0]
        return oldest


class Examiner:
    """Looks at one link's steps; all ranks have one that begins at the same step, or none has."""

    def __init__(self, channel: Channel, every: int) -> None:
        self._channel, self._every = channel, every
        self._ages = Ages()
        self._looking = False
        self._gradients: dict[str, Tensor] = {}
        self._accumulated: dict[str, Tensor] = {}
        self._sums, self._means = _Sums(), _Means()
        self._held: dict[str, Tensor] = {}

    # What the codec tells

    def opened(self, batch: Batch) -> None:
        """Gradients are in the memory, and what is to travel is chosen."""
        self._ages.opened(batch)
        if self._looking:
            for name, vector in zip(batch.names, batch.vectors, strict=True):
                self._accumulated[name] = vector.accumulated().cpu().clone()

    def written(self, batch: Batch) -> None:
        """What travels is in a frame."""
        self._ages.written(batch)

    # What the link tells

    def begin_step(self, step: int) -> None:
        """Decide whether to look at a step, which counts from 0."""
        self._looking = (step + 1) % self._every == 0
        self._sums, self._means = _Sums(), _Means()
        self._held.clear()

    def before(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep a bucket's gradients, which the mean is going to overwrite."""
        if self._looking:
            self._gradients = {name: g.detach().reshape(-1).float().cpu().clone() for name, g in gradients.items()}

    def after(self, bucket: Bucket, exchange: Exchange, outcome: Outcome, held: Mapping[str, Tensor]) -> None:
        """The bucket's outs hold the mean; all ranks know alike whether it is one."""
        accumulated, self._accumulated = self._accumulated, {}
        if not self._looking or outcome.non_finite:
            return
        gradients, weight = list(self._gradients.values()), exchange.weight()
        straight = outcome.sent is None and weight > 0  # an exchange without a codec sends everything
        if straight:
            accumulated = self._gradients
        vectors = [accumulated.get(n, torch.zeros(g.numel())) for n, g in self._gradients.items()]
        sent = vectors if straight else [torch.zeros(g.numel()) for g in gradients]
        if outcome.sent is not None:
            outcome.sent(sent)
        self._held |= {name: held[name] for name in accumulated if name in held}
        sums = self._sums
        sums.sent += weight * _square(sent)
        sums.accumulated += weight * _square(vectors)
        sums.gradient += _square(gradients)
        self._compare(gradients, vectors, bucket, outcome, weight)
        self._gradients = {}

    def _compare(
        self, gradients: Sequence[Tensor], accumulated: Sequence[Tensor], bucket: Bucket, outcome: Outcome, weight: int
    ) -> None:
        """Means over all ranks, and what one selection from the mean would have sent."""
        world = self._channel.world
        dense = self._mean(gradients, 1.0 / world)
        whole = self._mean(accumulated, weight / world)
        counts = [float(outcome.counts.get(name, 0)) for name in bucket.gradients]
        rows = [row for row in share(self._channel, [float(weight), *counts]) if row[0] > 0.0]
        applied = [out.reshape(-1) for out in bucket.outs]
        for place, (mean, out) in enumerate(zip(whole, applied, strict=True), start=1):
            entries = round(sum(row[place] for row in rows) / max(len(rows), 1))
            self._means.apart += _square([_largest(mean, entries) - out])
        self._means.dense += _square(dense)
        self._means.applied += _square(applied)
        self._means.product += sum(
            float(torch.dot(d.double(), o.double())) for d, o in zip(dense, applied, strict=True)
        )

    def _mean(self, parts: Sequence[Tensor], weight: float) -> list[Tensor]:
        together = (torch.cat(list(parts)) * weight).to(self._channel.device)
        self._channel.all_reduce(together)
        return list(torch.split(together.cpu(), [part.numel() for part in parts]))

    def end_step(self, step: int, weight: int, *, spoiled: bool) -> Diagnosis | None:
        """What was found, on all ranks alike; None where nobody looked or the step does not count."""
        if not self._looking or spoiled:
            return None
        self._sums.held = weight * _square(list(self._held.values()))
        oldest = self._ages.add_to(self._sums, self._held, step)
        mine = [float(getattr(self._sums, field.name)) for field in fields(_Sums)]
        everybody = share(self._channel, [*mine, float(oldest)])
        total = _Sums(*(sum(column) for column in list(zip(*everybody, strict=True))[:-1]))
        means = self._means
        found = Diagnosis(
            step=step + 1,
            delta=_ratio(total.sent, total.accumulated),
            xi=math.sqrt(_ratio(means.apart, means.dense)),
            residual_ratio=math.sqrt(_ratio(total.held, total.gradient)),
            cosine=_ratio(means.product, math.sqrt(means.applied * means.dense)),
            age=_ratio(total.age, total.aged),
            age_oldest=int(max(row[-1] for row in everybody)),
            waited=_ratio(total.waited, total.arrived),
        )
        if self._channel.rank == 0:
            _log.info("diagnosis, step %d: %s", found.step, found.text())
        return found


def _sample(name: str, n: int) -> Tensor:
    if n <= SAMPLE:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    places: Tensor = torch.randint(n, (SAMPLE,), generator=generator).unique()
    return places


def _square(parts: Sequence[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0.0 else math.nan


def _largest(vector: Tensor, entries: int) -> Tensor:
    """The vector with all but its largest entries set to zero; those equal to the last of them stay too."""
    n = vector.numel()
    if entries >= n:
        return vector
    if entries <= 0:
        return torch.zeros_like(vector)
    magnitudes = vector.abs()
    least = float(np.partition(magnitudes.numpy(), n - entries)[n - entries])
    return torch.where(magnitudes >= least, vector, 0.0)


def agree_on_every(channel: Channel, every: int) -> None:
    """ValueError on all ranks if they ask for diagnoses at different steps, or for something that is no number."""
    wishes = [int(row[0]) for row in share(channel, [float(every)])]
    if len(set(wishes)) > 1:
        rank = next(r for r, wish in enumerate(wishes) if wish != wishes[0])
        raise ValueError(f"rank 0 asks for a diagnosis every {wishes[0]} steps and rank {rank} every {wishes[rank]}")
    if every < 0:
        raise ValueError(f"every counts steps from 1, or 0 for never, not {every}")
