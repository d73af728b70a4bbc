"""The life of a link: what attach refuses, what a link says, and how the model goes back to plain DDP."""

import contextlib
import gc
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import jobs
from thinwire.codec.encode import encode_parts


def _python_reducer() -> DDP:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return jobs.make()


def refusals(rank: int) -> dict[str, str]:
    """What attach says to what cannot work."""
    hooked, attached, frozen_later = jobs.make(), jobs.make(), jobs.make()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    tw.attach(attached)
    frozen_later.module.layers[0].requires_grad_(False)
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "bare": (nn.Linear(2, 2), {}),
        "python reducer": (_python_reducer(), {}),
        "update of python reducer": (
            reduced := _python_reducer(),
            {"optimizer": torch.optim.AdamW(reduced.parameters())},
        ),
        "hooked": (hooked, {}),
        "twice": (attached, {}),
        "frozen": (frozen_later, {}),
        "sparse": (DDP(nn.Embedding(10, 4, sparse=True)), {}),
        "double": (DDP(nn.Linear(2, 2).double()), {}),
        "preset": (jobs.make(), {"codec": "topkk"}),
        "density": (jobs.make(), {"codec": 1.5}),
        "exchange": (jobs.make(), {"exchange": "ring"}),
        "machines": (jobs.make(), {"exchange": tw.exchange.Hierarchical(per_machine=3)}),
        "timeout": (jobs.make(), {"timeout": 0.0}),
        "nothing": (jobs.make(), {"codec": [1]}),
        "optimizer": (jobs.make(), {"optimizer": "sgd"}),
        "scaler": (jobs.make(), {"scaler": 3}),
    }
    seen = {}
    for name, (model, options) in cases.items():
        try:
            tw.attach(model, **options)
        except (TypeError, ValueError, tw.LinkError) as error:
            seen[name] = str(error)
    return seen


def test_what_cannot_work_raises_at_attach_with_the_reason(cluster: Cluster) -> None:
    expected = {
        "bare": "not Linear: wrap it as DDP",
        "python reducer": 'torch._dynamo.config.optimize_ddp is "python_reducer"',
        "update of python reducer": 'torch._dynamo.config.optimize_ddp is "python_reducer"',
        "hooked": "has a communication hook already",
        "twice": "attached already; call detach",
        "frozen": "DDP was made for 8 parameters and 6 require gradients now",
        "sparse": "use sparse=False",
        "double": "weight is torch.float64",
        "preset": "no preset is called 'topkk'; there are percentile90",
        "density": "a density must lie in (0, 1], not 1.5",
        "exchange": "no exchange is called 'ring'; there are dense, gather, scatter-reduce",
        "machines": "2 is not 3 x n",
        "timeout": "timeout is a number of seconds above 0",
        "nothing": "a codec is a Codec, a selection, a density or a preset's name, not [1]",
        "optimizer": "optimizer is a torch.optim.Optimizer or a list of them, not 'sgd'",
        "scaler": "scaler is a GradScaler, not 3",
    }
    for seen in cluster.run(refusals, 2):
        assert seen.keys() == expected.keys()
        for name, part in expected.items():
            assert part in seen[name], seen[name]


def momentum_warnings(rank: int) -> list[int]:
    counts = []
    makers: list[Any] = [lambda p: torch.optim.SGD(p, momentum=0.9), torch.optim.Adam, torch.optim.SGD]
    for make in makers:
        model = jobs.make()
        made = make(model.parameters())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tw.attach(model, "dgc", optimizer=made, domain="gradient")
        counts.append(len([w for w in seen if "use SGD with momentum=0" in str(w.message)]))
    return counts


def test_momentum_twice_is_warned_of(cluster: Cluster) -> None:
    assert cluster.run(momentum_warnings, 1) == [[1, 1, 0]]


def detached(rank: int, world: int) -> tuple[bool, bool, bool]:
    """Attach for some steps, then compare with a plain DDP that starts from the same parameters."""
    model = jobs.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.train(model, rank, range(2), optimizer)
    with tw.attach(model, 0.05) as link:
        jobs.train(model, rank, range(2, 5), optimizer)
    saved = link.state_dict()
    plain = jobs.make()
    plain.load_state_dict(model.state_dict())
    jobs.train(plain, rank, range(1), torch.optim.SGD(plain.parameters(), lr=0.0))  # rebuilds its buckets
    jobs.train(plain, rank, range(5, 9), torch.optim.SGD(plain.parameters(), lr=0.1))
    jobs.train(model, rank, range(5, 9), optimizer)
    same = jobs.digest(model) == jobs.digest(plain)
    again = tw.attach(model, 0.05)
    again.load_state_dict(saved)
    link.detach()  # an old link's detach does not touch the new one
    jobs.train(model, rank, range(9, 11), optimizer)
    return same, again.step == 5, link.step == 3


@pytest.mark.parametrize("world", [2, 3])
def test_detach_gives_back_plain_ddp_bit_for_bit(cluster: Cluster, world: int) -> None:
    assert cluster.run(detached, world, world) == [(True, True, True)] * world


def watched(rank: int, exchange: str) -> dict[str, Any]:
    model = jobs.make()
    link = tw.attach(model, tw.Codec(tw.TopK(0.02, exact=True)), exchange=exchange)
    jobs.train(model, rank, range(6), torch.optim.SGD(model.parameters(), lr=0.1))
    stats = link.stats()
    assert "parameters, Codec(TopK(density=0.02" in repr(link)
    assert f"rank {rank} of 2, step 6)" in repr(link)
    if exchange != "dense":
        before = link.codec.residuals("layers.2.weight")["residual"].clone()
        link.rescale(0.5)
        assert torch.equal(link.codec.residuals("layers.2.weight")["residual"], before * 0.5)
    return {**stats, "metrics": link.metrics("link/")}


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce", "dense"])
def test_stats(cluster: Cluster, exchange: str) -> None:
    sizes = {name: p.numel() for name, p in jobs.Net().named_parameters()}
    for stats in cluster.run(watched, 2, exchange):
        last = stats["last_step"]
        assert (stats["steps"], stats["skipped"]) == (6, 0)
        assert 0 < last["bytes_sent"] < stats["bytes_sent"]
        assert last["bytes_received"] > 0
        assert stats["elements"] == 6 * sum(sizes.values())
        assert last["entries"] == sum(stats["per_parameter"].values())
        assert stats["per_parameter"].keys() == sizes.keys()
        if exchange != "dense":
            assert stats["per_parameter"]["layers.2.weight"] == round(0.02 * 9216)
            assert stats["per_parameter"]["layers.2.bias"] == 96  # small ones travel whole
            assert 0.02 < stats["density"] < 0.05
            assert stats["compress_seconds"] > 0 < stats["decode_seconds"]
            assert stats["residual_norm"] > 0 and stats["compression_ratio"] > 10
            assert last["bytes_sent"] < 0.1 * 4 * sum(sizes.values())
        assert stats["exchange_seconds"] > 0
        metrics = stats["metrics"]
        assert all(isinstance(value, float) for value in metrics.values())
        for name in ("bytes_sent", "bytes_received", "density", "compression_ratio", "exchange_seconds"):
            assert metrics[f"link/{name}"] == last[name] > 0
        assert metrics["link/total_bytes_sent"] == stats["bytes_sent"] and metrics["link/steps"] == 6
        factor = 1.0 if exchange == "dense" else 0.5  # the residual was rescaled in between
        assert metrics["link/residual_norm"] == pytest.approx(factor * stats["residual_norm"])


def collected(rank: int) -> tuple[bool, bool]:
    """A link that nobody holds any more is freed, and its thread ends."""
    before = threading.active_count()
    model = jobs.make()
    link = tw.attach(model, 0.05)
    jobs.train(model, rank, range(2), torch.optim.SGD(model.parameters(), lr=0.1))
    link.detach()
    gone = weakref.ref(link)
    del link
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "thinwire-link" and gone() is None:
            thread.join(0.2)
    return gone() is None, threading.active_count() <= before


def test_a_forgotten_link_is_freed(cluster: Cluster) -> None:
    assert all(freed for freed, _ in cluster.run(collected, 2))


def descriptors(rank: int) -> list[int]:
    """Open file descriptors after each of several links of the same model, exchanges between machines among them."""
    model, counts = jobs.make(), []
    for turn in range(8):
        exchange = tw.exchange.Hierarchical(per_machine=2) if turn % 2 else "gather"
        with tw.attach(model, 0.05, exchange=exchange):
            jobs.train(model, rank, range(2), torch.optim.SGD(model.parameters(), lr=0.1))
        torch.distributed.barrier()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_attaching_again_and_again_opens_no_more_files(cluster: Cluster) -> None:
    for counts in cluster.run(descriptors, 4):
        # A thread of another library may hold a file for a moment; a link that leaves one adds it at every turn.
        assert min(counts[-2:]) <= counts[1], counts


def second_moments(rank: int) -> list[int]:
    """How often attaching and two steps warn of Adam, with and without naming the optimizer."""
    makers: list[Any] = [torch.optim.AdamW, torch.optim.RMSprop, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
    counts = []
    for named in (True, False):
        for make in makers:
            model = jobs.make()
            optimizer = make(model.parameters())
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                with tw.attach(model, 0.05, optimizer=optimizer if named else None, domain="gradient"):
                    jobs.train(model, rank, range(2), optimizer)
            counts.append(len([w for w in seen if "divides by second moments" in str(w.message)]))
    return counts


def test_adam_is_warned_of_and_sgd_is_not(cluster: Cluster) -> None:
    assert cluster.run(second_moments, 2) == [[1, 1, 0, 1, 1, 0], [0] * 6]


def wrapped(rank: int) -> list[bool]:
    """Models inside other modules' wrappers are found."""
    same = []
    for attribute in ("_orig_mod", "_forward_module"):
        model = jobs.make()
        outside = nn.Module()
        setattr(outside, attribute, model)
        with tw.attach(outside, 0.05) as link:
            jobs.train(model, rank, range(2), torch.optim.SGD(model.parameters(), lr=0.1))
            same.append(link.stats()["steps"] == 2)
    return same


def test_wrappers_are_looked_through(cluster: Cluster) -> None:
    assert cluster.run(wrapped, 2) == [[True, True]] * 2


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What thinwire logs meanwhile."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield seen
    logger.removeHandler(handler)


def logged(rank: int) -> str:
    with messages() as seen:
        link = tw.attach(jobs.make(), 0.01)
    assert seen == ([] if rank else [f"{link!r} attached; gradients are exchanged; {link.why}"])
    return str(link.why)


def test_the_choice_of_exchange_is_said(cluster: Cluster) -> None:
    assert all(why.startswith("gather: ") for why in cluster.run(logged, 2))


ADAMW = "updates are exchanged, because AdamW would normalise away gradients that arrive late"
LOCAL4 = "exchanged every 4 steps, while the next ones compute, the mean applied by SGD(alpha=1.0)"
CORRECTED = "Adam's second moments are corrected for the number of ranks"
# The arguments, why updates are exchanged, megabytes, and what becomes of the learning rate. The model has 1.3 M
# parameters; shared parameters and residuals take 8 bytes each, and so do the starts and means of an overlap.
UPDATES_SAID: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("AdamW", {}, ADAMW, 11, CORRECTED),
    ("AdamW", {"codec": "local4"}, f"{ADAMW}; {LOCAL4}", 21, "that of one rank's batch"),
    ("RMSprop", {}, ADAMW.replace("AdamW", "RMSprop"), 11, "may have to be up to sqrt(ranks) times higher"),
    ("SGD", {"domain": "update"}, "updates are exchanged, as asked", 11, "sqrt(ranks)"),
]


def logged_updates(rank: int) -> list[list[str]]:
    """What each of the cases logs, with the link's own words in front."""
    said = []
    for name, options, *_ in UPDATES_SAID:
        net = jobs.Net(512)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=1e-3)
        with messages() as seen:
            link = tw.attach(net, optimizer=optimizer, **options)
        said.append([repr(link), link.why, *seen])
        link.detach()
    return said


def test_what_updates_cost_is_said(cluster: Cluster) -> None:
    first, second = cluster.run(logged_updates, 2)
    assert all(len(said) == 2 for said in second)  # rank 0 speaks for all
    for (_, _, reason, megabytes, noise), (link, why, attached, memory) in zip(UPDATES_SAID, first, strict=True):
        assert attached == f"{link} attached; {reason}; {why}"
        assert memory.startswith(f"updates take {megabytes} MB more memory (shared parameters, residuals); ")
        assert noise in memory


def steps_without_the_single_call(rank: int, codec: str | float) -> int:
    """How many buckets were encoded step by step, instead of by one call of the kernels."""
    called = []

    def counted(*args: Any, **options: Any) -> Any:
        called.append(1)
        return encode_parts(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.exchange.gather.encode_parts", counted)
        model = jobs.make(buckets=3)
        with tw.attach(model, codec, exchange="gather"):
            jobs.train(model, rank, range(5), torch.optim.SGD(model.parameters(), lr=0.1))
    return len(called)


def test_buckets_that_stay_in_place_take_one_call(cluster: Cluster) -> None:
    assert cluster.run(steps_without_the_single_call, 2, 0.05) == [0, 0]
    assert min(cluster.run(steps_without_the_single_call, 2, "percentile90")) > 0
