"""Calibrate: the figures of a scale model from steps that were measured.

A step is linear in what is not known (computing, encoding, decoding, a byte, a message, the wire): least squares of
relative errors, with nothing below zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thinwire.tune.cost import Array
from thinwire.tune.scale import EXCHANGES, Cluster, Task, on_wire, predict

# What is fitted, in the order of the columns.
_FITTED = ("compute", "per_byte", "switching", "wire")
_OVERLAPS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Point:
    """A step that was measured; the exchange `none` stands for a step without any."""

    exchange: str
    workers: int
    rate: float  # bits a second
    seconds: float
    sent: float  # bytes per worker
    codec: float = 0.0  # seconds of processor time for encoding and decoding


def calibrated(points: Sequence[Point], task: Task, cluster: Cluster) -> tuple[Task, Cluster]:
    """Task and cluster with their times as the points have them; ValueError where they tell too little."""
    if not any(p.exchange == "none" for p in points) or len(points) < 2:
        raise ValueError("to calibrate, measurements must have a step without exchange and at least one with")
    frames = [p.sent / (p.workers - 1) for p in points if p.exchange == "gather"]
    known = _with_codec(points, replace(task, frame=float(np.median(frames))) if frames else task, cluster)
    fits = [_fit(points, replace(known, overlap=overlap), cluster) for overlap in _OVERLAPS]
    return min(fits, key=lambda fit: max(abs(off(p, *fit)) for p in points))


def off(point: Point, task: Task, cluster: Cluster) -> float:
    """By what share of itself a measured step is missed."""
    return predict(point.exchange, point.workers, task, at(cluster, point)).seconds / point.seconds - 1.0


def at(cluster: Cluster, point: Point) -> Cluster:
    """The cluster with the rate that a point was measured at."""
    return replace(cluster, rate=point.rate)


def _fit(points: Sequence[Point], task: Task, cluster: Cluster) -> tuple[Task, Cluster]:
    """Columns are what one unit of each unknown adds to a step; what is known is taken off first."""
    empty, still = _with(task, cluster, [0.0] * len(_FITTED))
    columns = np.array([[_unit(p, empty, name, still) for name in _FITTED] for p in points])
    fixed = np.array([predict(p.exchange, p.workers, empty, at(still, p)).seconds for p in points])
    measured = np.array([p.seconds for p in points])
    solution = _least_squares(columns / measured[:, None], (measured - fixed) / measured)
    return _with(task, cluster, solution.tolist())


def _with(task: Task, cluster: Cluster, values: Sequence[float]) -> tuple[Task, Cluster]:
    compute, per_byte, switching, wire = values
    return replace(task, compute=compute, per_byte=per_byte, wire=wire), replace(cluster, switching=switching)


def _with_codec(points: Sequence[Point], task: Task, cluster: Cluster) -> Task:
    """What it takes to make and to read a frame, from the processor time that exchanges used for that."""
    timed = [(EXCHANGES[p.exchange](p.workers, task, cluster), p.codec) for p in points if p.codec > 0.0]
    if not timed:
        return task
    columns = np.array([[traffic.encodes, traffic.decodes] for traffic, _ in timed])
    taken = np.array([seconds for _, seconds in timed])
    encode, decode = _least_squares(columns / taken[:, None], np.ones(len(taken)))
    return replace(task, encode=float(encode), decode=float(decode))


def _unit(point: Point, task: Task, name: str, cluster: Cluster) -> float:
    """Seconds of a step for one second of an unknown."""
    if point.exchange == "none" and name != "compute":
        return 0.0
    place = at(cluster, point)
    share = place.share(point.workers)
    if name == "compute":
        hidden = 0.0 if point.exchange == "none" else task.overlap
        return predict("none", point.workers, replace(task, compute=1.0), place).seconds - hidden * share
    traffic = EXCHANGES[point.exchange](point.workers, task, place)
    if name == "wire":
        return on_wire(traffic, point.workers, place)
    return share * (2.0 * traffic.sent if name == "per_byte" else traffic.messages)


def _least_squares(columns: Array, wanted: Array) -> Array:
    """Unknowns that come out negative are zero, and the others are found without them."""
    used = [i for i in range(columns.shape[1]) if np.any(columns[:, i])]
    solution = np.zeros(columns.shape[1])
    while used:
        scale = np.abs(columns[:, used]).max(axis=0)
        part, *_ = np.linalg.lstsq(columns[:, used] / scale, wanted, rcond=None)
        worst = int(np.argmin(part))
        if part[worst] >= 0.0:
            solution[used] = part / scale
            break
        del used[worst]
    return solution
