"""Several buckets under way at the same time: how many, what a failure does to them, and what stays posted."""

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.exchange import golden
from thinwire.exchange.channel import checksum
from thinwire.link.assembly import LinkOptions, open_link
from thinwire.link.link import Link
from thinwire.link.thread import Job

STEPS = 6


def make(rank: int, late: int | None = None) -> DDP:
    """A model of four buckets (d, c and b, ...) in DDP; a late rank waits before its last ones are ready."""
    module = golden.Linear()
    if rank == late:
        module.get_parameter("b").register_hook(lambda grad: time.sleep(0.1))
    return DDP(module, bucket_cap_mb=0.01)


def train(model: DDP, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in steps:
        optimizer.zero_grad()
        model(golden.coefficients(rank, step, finite=True)).backward()
        optimizer.step()


def digest(model: DDP) -> int:
    return checksum(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


def counted(rank: int, exchange: Any) -> tuple[int, int, float, list[str]]:
    """Train with a late rank; returns the most buckets that were under way, a checksum and the round trips."""
    model = make(rank, late=1)
    link = tw.attach(model, 0.05, exchange=exchange)
    most, stages = 0, link.exchange.stages

    def watched(bucket: Any) -> Any:
        nonlocal most
        most = max(most, len(link._thread._flights) + 1)
        return stages(bucket)

    link.exchange.stages = watched  # type: ignore[method-assign]
    train(model, rank, range(STEPS))
    trips = link.stats()["last_step"]["round_trips"]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    link.detach()
    return most, digest(model), trips, sorted(threads)


@pytest.mark.parametrize(
    ("exchange", "trips"),
    [("gather", 0.5), ("scatter-reduce", 1.0), ("dense", 2.0), (tw.exchange.ScatterReduce(gather_below=2000), 1.0)],
    ids=str,
)
def test_buckets_are_under_way_together(cluster: Cluster, exchange: Any, trips: float) -> None:
    results = cluster.run(counted, 3, exchange)
    assert len({checksum for _, checksum, _, _ in results}) == 1
    assert results[0][0] >= 2 and results[2][0] >= 2  # rank 1 is late to the last buckets, the others wait for it
    for _, _, found, threads in results:
        assert found == trips
        assert "thinwire-link" in threads


def machines(rank: int) -> tuple[int, float]:
    model = make(rank, late=3)
    link = tw.attach(model, 0.05, exchange=tw.exchange.Hierarchical(per_machine=2))
    train(model, rank, range(STEPS))
    trips = link.stats()["last_step"]["round_trips"]
    link.detach()
    return digest(model), trips


def test_only_round_trips_between_machines_count(cluster: Cluster) -> None:
    results = cluster.run(machines, 4)
    assert len({checksum for checksum, _ in results}) == 1
    assert [trips for _, trips in results] == [0.5, 0.0, 0.5, 0.0]


def broken(rank: int, fault: str) -> str:
    """Rank 2 fails at step 4 between two of its buckets, while the others have all of theirs under way."""
    model = make(rank)
    step = [0]

    def die(grad: Any) -> None:
        if rank == 2 and step[0] == 4:
            time.sleep(0.3)
            os._exit(1)

    codec = tw.Codec(tw.TopK(0.05))
    if fault == "errs":
        selection = tw.TopK(lambda at: 7.0 if rank == 2 and at == 4 and step[0] == 4 and under_way() else 0.05)
        codec = tw.Codec(selection)
    else:
        model.module.get_parameter("b").register_hook(die)
    link = tw.attach(model, codec, exchange="scatter-reduce", timeout=20.0)

    def under_way() -> bool:
        return bool(link._thread._flights)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        for step[0] in range(6):
            if rank != 2 and step[0] == 4:
                time.sleep(0.2)  # the first buckets of rank 2 are under way when its error occurs
            optimizer.zero_grad()
            model(golden.coefficients(rank, step[0], finite=True)).backward()
            optimizer.step()
    except RuntimeError as error:
        link.wait()
        link.detach()
        assert link.step == 4
        return str(error)
    return ""


def test_a_rank_that_dies_between_its_buckets_is_named(cluster: Cluster) -> None:
    results = cluster.run(broken, 4, "dies", died=True)
    assert results[2] is None
    for rank in (0, 1, 3):
        assert f"LinkError: rank {rank}, step 4: the exchange failed; no sign of rank 2: " in results[rank]


def test_an_error_while_other_buckets_are_under_way_reaches_all_ranks(cluster: Cluster) -> None:
    results = cluster.run(broken, 3, "errs")
    assert "rank 2, step 4: a density must lie in (0, 1], not 7.0 (step 4)" in results[2]
    for rank in (0, 1):
        assert f"rank {rank}, step 4: rank 2 failed: a density must lie in (0, 1]" in results[rank]


def again(rank: int) -> tuple[list[int], list[int]]:
    """Links of different exchanges and buckets after one another, on the process group of the first."""
    found: list[int] = []
    alone: list[int] = []
    for turn in range(2):
        for exchange, cap in (("gather", 0.01), ("scatter-reduce", 25.0), ("gather", 0.02), ("scatter-reduce", 0.01)):
            model = DDP(golden.Linear(), bucket_cap_mb=cap)
            with tw.attach(model, 0.05, exchange=exchange):
                train(model, rank, range(3))
            (alone if turn else found).append(digest(model))
    return found, alone


def test_links_find_the_receives_that_others_left_posted(cluster: Cluster) -> None:
    results = cluster.run(again, 3)
    assert all(first == second == results[0][0] for first, second in results)


def given_up(rank: int, steps: int) -> list[float]:
    """A step without a last bucket is given up; the next one is exchanged all the same."""
    parameters = {name: torch.zeros(n) for name, n in golden.SIZES.items()}
    group = dist.distributed_c10d._get_default_group()
    link, _ = open_link(parameters, group, LinkOptions(codec=0.05, exchange="gather"), lambda: None)
    for step in range(steps):
        submit(link, rank, step, names=["d", "b"] if step == 2 else list(golden.SIZES))
    assert link.stats()["steps"] == steps - 1
    sums = [float(sum(t.double().abs().sum() for t in job.tensors.values())) for job in submit(link, rank, steps)]
    link.detach()
    return sums


def submit(link: Link, rank: int, step: int, names: list[str] | None = None) -> list[Job]:
    """Submit a bucket for each of these parameters, and wait for them if they are all."""
    tensors = golden.coefficients(rank, step, finite=True)
    chosen = names or list(tensors)
    jobs = [
        Job(tensors[name], {name: tensors[name]}, first=place == 0, last=place == len(tensors) - 1)
        for place, name in enumerate(chosen)
    ]
    futures = [link.submit(job) for job in jobs]
    if len(jobs) == len(tensors):
        for future in futures:
            future.wait()
    return jobs


def test_a_step_that_was_given_up_leaves_nothing_behind(cluster: Cluster) -> None:
    results = cluster.run(given_up, 3, 6)
    assert results[0] == results[1] == results[2] and all(total > 0.0 for total in results[0])
