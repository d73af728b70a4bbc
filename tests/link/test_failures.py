"""Failures: a peer that dies, hangs or errs raises on the others, naming rank and step; divergence is found."""

import contextlib
import datetime
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import thinwire as tw
from tests.cluster import Cluster
from tests.link import jobs


def faulty(rank: int, fault: str, exchange: str, timeout: float) -> tuple[str, str, float] | None:
    """Rank 2 fails at step 7; the others return what they saw, and after how long."""
    model = jobs.make()
    link = tw.attach(model, 0.05, exchange=exchange, timeout=timeout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.train(model, rank, range(7), optimizer)
    if rank == 2:
        os._exit(1) if fault == "dies" else time.sleep(timeout + 4.0)
        return None
    began = time.monotonic()
    try:
        jobs.train(model, rank, range(7, 9), optimizer)
    except Exception as error:
        link.detach()
        assert link.state_dict()["step"] == 7
        return type(error).__name__, str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
@pytest.mark.parametrize(("fault", "timeout"), [("dies", 60.0), ("hangs", 3.0)])
def test_a_lost_peer_raises_on_the_others(cluster: Cluster, fault: str, timeout: float, exchange: str) -> None:
    results = cluster.run(faulty, 4, fault, exchange, timeout, died=fault == "dies")
    assert results[2] is None
    for rank in (0, 1, 3):
        kind, message, seconds = results[rank]
        assert f"LinkError: rank {rank}, step 7: the exchange failed; no sign of rank 2: " in message
        assert kind == "RuntimeError"  # what autograd makes of an error in a hook
        assert seconds < 30.0


def killed(rank: int, victim: int, port: int, slow: float, folder: str) -> None:
    """The victim dies at step 3 and rank 1 comes late to it; rank 0 hosts the store, and ends as soon as it can."""
    limit = datetime.timedelta(seconds=60)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
    model = jobs.make()
    tw.attach(model, 0.05, exchange="gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.train(model, rank, range(3), optimizer)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(slow if rank == 1 else 0.0)
    try:
        jobs.train(model, rank, range(3, 5), optimizer)
    except Exception as error:
        Path(folder, str(rank)).write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize(("victim", "slow"), [(2, 6.0), (0, 0.0)], ids=["a rank", "the host"])
def test_every_rank_names_the_rank_that_was_killed_and_no_other(victim: int, slow: float, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with contextlib.closing(Cluster()) as fresh:
        fresh.run(killed, 4, victim, port, slow, str(tmp_path), timeout=0, died=True)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(said) == {"0", "1", "2", "3"} - {str(victim)}
    for rank, message in said.items():
        assert f"rank {rank}, step 3: the exchange failed; no sign of rank {victim}: " in message


def errs(rank: int) -> tuple[str, str]:
    """A density schedule that gives nonsense at step 3 on rank 1."""

    def schedule(step: int) -> float:
        return 7.0 if rank == 1 and step == 3 else 0.05

    model = jobs.make()
    tw.attach(model, tw.Codec(tw.TopK(schedule)), exchange="gather", timeout=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in (range(4), range(4, 5)):
        try:
            jobs.train(model, rank, step, optimizer)
        except RuntimeError as error:
            seen.append(str(error))
    assert len(seen) == 2
    return seen[0], seen[1]


def test_an_error_in_a_hook_surfaces_in_backward_on_all_ranks(cluster: Cluster) -> None:
    first, second = cluster.run(errs, 2)
    assert "rank 1, step 3: a density must lie in (0, 1], not 7.0 (step 3)" in second[0]
    assert "rank 0, step 3: rank 1 failed: a density must lie in (0, 1]" in first[0]
    for again in (first[1], second[1]):
        assert "step 3" in again  # a link that broke stays broken, and says why


def diverged(rank: int, world: int) -> str:
    model = jobs.make()
    tw.attach(model, 0.05, exchange="gather", check_every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.train(model, rank, range(4), optimizer)
    if rank == 1:
        with torch.no_grad():
            model.module.layers[2].bias[5] += 1e-6
    try:
        jobs.train(model, rank, range(4, 7), optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def test_replicas_that_diverge_are_named(cluster: Cluster) -> None:
    messages = cluster.run(diverged, 3, 3)
    expected = "step 6: rank 1 holds another layers.2.bias than the others; the replicas have diverged"
    assert all(expected in message for message in messages), messages
    assert all("step 6: ranks differ in layers.2.bias" in m for m in cluster.run(diverged, 2, 2))


def differing(rank: int, what: str) -> str:
    options: dict[str, Any] = {"codec": 0.05, "exchange": "gather", "check_every": 0}
    net = jobs.Net()
    if rank == 1 and what in options:
        options[what] = {"codec": 0.06, "exchange": "scatter-reduce", "check_every": 5}[what]
    if rank == 1 and what == "typo":
        options["codec"] = "topkk"
    if rank == 1 and what == "name":
        net.layers = nn.Sequential(*list(net.layers)[:-1], nn.Sequential(net.layers[-1]))
    model = nn.parallel.DistributedDataParallel(net)
    try:
        tw.attach(model, options.pop("codec"), **options)
    except (ValueError, RuntimeError) as error:
        # The model is left as it was: DDP's own all-reduce works.
        jobs.train(model, rank, range(2), torch.optim.SGD(model.parameters(), lr=0.1))
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("codec", "rank 1 differs from rank 0 in codec: Codec(TopK(density=0.06"),
        ("exchange", "rank 1 differs from rank 0 in exchange: ScatterReduce() against Gather()"),
        ("check_every", "rank 1 differs from rank 0 in check_every: 5 against 0"),
        ("name", "rank 1 differs from rank 0 in a parameter: layers.6.0.weight [4, 384] torch.float32"),
    ],
)
def test_ranks_that_disagree_all_raise(cluster: Cluster, what: str, message: str) -> None:
    for seen in cluster.run(differing, 3, what):
        assert seen.startswith(f"LinkError: {message}"), seen


def test_a_mistake_on_one_rank_raises_on_all(cluster: Cluster) -> None:
    first, second = cluster.run(differing, 2, "typo")
    assert second.startswith("ValueError: no preset is called 'topkk'")
    assert first.startswith("LinkError: rank 1 cannot attach: no preset is called 'topkk'")
