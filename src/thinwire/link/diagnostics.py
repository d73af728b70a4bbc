"""Diagnostics: compares a link's exchange with a dense one every so many steps.

A diagnosis costs two dense reductions and a few passes over the tensors. The steps in between only follow the ages of a
sample of the residual's entries.
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
from thinwire.link.stats import Diagnosis

_log = logging.getLogger("thinwire")

# Entries of a tensor whose ages are followed.
SAMPLE = 4096
# Relative difference up to which an entry of the residual counts as unchanged: the kernels round differently.
_UNCHANGED = 1e-6


@dataclass
class _Sums:
    """Sums over ranks: squared norms, weighted by the ranks that a residual stands for, and ages by entries."""

    sent: float = 0.0
    accumulated: float = 0.0
    kept: float = 0.0
    gradient: float = 0.0
    age: float = 0.0
    aged: float = 0.0
    waited: float = 0.0
    arrived: float = 0.0


@dataclass
class _Means:
    """Figures that every rank computes alike from the means over all ranks."""

    apart: float = 0.0  # squared distance between the applied mean and the largest entries of the true mean
    dense: float = 0.0
    applied: float = 0.0
    product: float = 0.0


class Ages:
    """How many steps entries stay in the residual, from a sample of each tensor's entries."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self._since: dict[str, Tensor] = {}  # the step after which an entry was last sent, or first seen
        self._before: dict[str, Tensor] = {}
        self._waited = [0.0, 0.0]  # steps, entries

    def opened(self, batch: Batch) -> None:
        """Remember the accumulated values of the sampled entries."""
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
        """An entry was sent if the residual now differs from what was accumulated."""
        for name, vector in zip(batch.names, batch.vectors, strict=True):
            before = self._before.pop(name, None)
            if before is None or vector.kept is None:
                continue
            gone = (vector.kept[self._places[name]] - before).abs() > _UNCHANGED * before.abs()
            since, weight = self._since[name], vector.n / len(before)
            self._waited[0] += weight * float((batch.step + 1 - since[gone]).sum())
            self._waited[1] += weight * int(gone.sum())
            since[gone] = batch.step + 1

    def add_to(self, sums: _Sums, kept: Mapping[str, Tensor], step: int) -> int:
        """Add the residual's ages and the delays of entries sent since the last call; returns the greatest age."""
        oldest = 0
        for name, places in self._places.items():
            if name not in kept:
                continue
            ages = step + 1 - self._since[name][kept[name][places] != 0.0]
            weight = kept[name].numel() / len(places)
            sums.age += weight * float(ages.sum())
            sums.aged += weight * len(ages)
            oldest = max(oldest, int(ages.max()) if len(ages) else 0)
        sums.waited, sums.arrived = self._waited
        self._waited = [0.0, 0.0]
        return oldest


class Diagnostics:
    """Diagnoses one link. Either all ranks have one, started at the same step, or none has."""

    def __init__(self, channel: Channel, every: int) -> None:
        self._channel, self._every = channel, every
        self._ages = Ages()
        self._active = False
        self._gradients: dict[str, Tensor] = {}
        self._accumulated: dict[str, Tensor] = {}
        self._sums, self._means = _Sums(), _Means()
        self._kept: dict[str, Tensor] = {}

    # Called by the codec

    def opened(self, batch: Batch) -> None:
        """Tensors are accumulated and the entries to send are chosen."""
        self._ages.opened(batch)
        if self._active:
            for name, vector in zip(batch.names, batch.vectors, strict=True):
                self._accumulated[name] = vector.accumulated().cpu().clone()

    def written(self, batch: Batch) -> None:
        """The frame is written."""
        self._ages.written(batch)

    # Called by the link

    def begin_step(self, step: int) -> None:
        """Decide whether this step, counted from 0, is diagnosed."""
        self._active = (step + 1) % self._every == 0
        self._sums, self._means = _Sums(), _Means()
        self._kept.clear()

    def before(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy a bucket's gradients, which the mean is going to overwrite."""
        if self._active:
            self._gradients = {name: g.detach().reshape(-1).float().cpu().clone() for name, g in gradients.items()}

    def after(self, bucket: Bucket, exchange: Exchange, outcome: Outcome, kept: Mapping[str, Tensor]) -> None:
        """Compare the mean in the bucket's outputs with a dense mean. `kept` are the residuals after the exchange."""
        accumulated, self._accumulated = self._accumulated, {}
        if not self._active or outcome.non_finite:
            return
        gradients, weight = list(self._gradients.values()), exchange.weight()
        dense = outcome.sent is None and weight > 0  # an exchange without a codec sends everything
        if dense:
            accumulated = self._gradients
        vectors = [accumulated.get(n, torch.zeros(g.numel())) for n, g in self._gradients.items()]
        sent = vectors if dense else [torch.zeros(g.numel()) for g in gradients]
        if outcome.sent is not None:
            outcome.sent(sent)
        self._kept |= {name: kept[name] for name in accumulated if name in kept}
        sums = self._sums
        sums.sent += weight * _square(sent)
        sums.accumulated += weight * _square(vectors)
        sums.gradient += _square(gradients)
        self._compare(gradients, vectors, bucket, outcome, weight)
        self._gradients = {}

    def _compare(
        self, gradients: Sequence[Tensor], accumulated: Sequence[Tensor], bucket: Bucket, outcome: Outcome, weight: int
    ) -> None:
        """Compare the applied mean with the dense mean, and with the largest entries of the accumulated mean."""
        world = self._channel.world
        dense = self._mean(gradients, 1.0 / world)
        whole = self._mean(accumulated, weight / world)
        counts = [float(outcome.counts.get(name, 0)) for name in bucket.tensors]
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

    def end_step(self, step: int, weight: int, *, skipped: bool) -> Diagnosis | None:
        """The diagnosis, the same on all ranks; None if the step is not diagnosed or is skipped by all ranks."""
        if not self._active or skipped:
            return None
        self._sums.kept = weight * _square(list(self._kept.values()))
        oldest = self._ages.add_to(self._sums, self._kept, step)
        mine = [float(getattr(self._sums, field.name)) for field in fields(_Sums)]
        rows = share(self._channel, [*mine, float(oldest)])
        total = _Sums(*(sum(column) for column in list(zip(*rows, strict=True))[:-1]))
        means = self._means
        found = Diagnosis(
            step=step + 1,
            delta=_ratio(total.sent, total.accumulated),
            xi=math.sqrt(_ratio(means.apart, means.dense)),
            residual_ratio=math.sqrt(_ratio(total.kept, total.gradient)),
            cosine=_ratio(means.product, math.sqrt(means.applied * means.dense)),
            age=_ratio(total.age, total.aged),
            age_oldest=int(max(row[-1] for row in rows)),
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
    """The vector with all but its largest entries set to zero; entries equal to the smallest of these are kept."""
    n = vector.numel()
    if entries >= n:
        return vector
    if entries <= 0:
        return torch.zeros_like(vector)
    magnitudes = vector.abs()
    least = float(np.partition(magnitudes.numpy(), n - entries)[n - entries])
    return torch.where(magnitudes >= least, vector, 0.0)


def agree_on_every(channel: Channel, every: int) -> None:
    """ValueError on all ranks if they ask for diagnoses at different steps, or for a negative number."""
    wishes = [int(row[0]) for row in share(channel, [float(every)])]
    if len(set(wishes)) > 1:
        rank = next(r for r, wish in enumerate(wishes) if wish != wishes[0])
        raise ValueError(f"rank 0 asks for a diagnosis every {wishes[0]} steps and rank {rank} every {wishes[rank]}")
    if every < 0:
        raise ValueError(f"every counts steps from 1, or 0 for never, not {every}")
