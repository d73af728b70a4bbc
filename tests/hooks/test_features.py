"""What DDP users do: every feature of DDP gives replicas that agree, and gradients that are right."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster, printed
from tests.link import jobs

FULL = tw.Codec(tw.TopK(1.0), tw.Float32())


def both(rank: int, kind: str, exchange: str) -> list[tuple[Tensor, Tensor]]:
    """The same training by thinwire at density 1 and by plain DDP: parameters of both, buffers too."""
    found = []
    for attached in (True, False):
        torch.manual_seed(1)
        net, options = NETS[kind](), OPTIONS.get(kind, {})
        model = DDP(net, bucket_cap_mb=0.001, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        link = tw.attach(model, FULL, exchange=exchange, optimizer=optimizer) if attached else None
        for step in range(6):
            x, y = jobs.batch(rank, step)
            optimizer.zero_grad(set_to_none=kind != "zeros")
            if kind == "accumulation":
                with model.no_sync():
                    nn.functional.cross_entropy(model(x * 0.5), y).backward()
            nn.functional.cross_entropy(model(x), y).backward()
            if kind == "clipping":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
        found.append([t.detach().clone() for t in net.state_dict().values()])
        if link is not None:
            link.detach()
    return list(zip(*found, strict=True))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 4))


def frozen() -> nn.Module:
    net = plain()
    net.get_parameter("2.weight").requires_grad_(False)
    return net


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


NETS: dict[str, Any] = {
    **dict.fromkeys(("plain", "accumulation", "clipping", "static graph", "bucket view", "zeros", "unused"), plain),
    "batch norm": normed,
    "frozen": frozen,
    "tied": Tied,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "zeros": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce"])
@pytest.mark.parametrize("kind", NETS)
def test_two_ranks_at_density_1_are_plain_ddp_bit_for_bit(cluster: Cluster, kind: str, exchange: str) -> None:
    for pairs in cluster.run(both, 2, kind, exchange):
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("exchange", ["gather", "scatter-reduce", "dense"])
def test_more_ranks_at_density_1_are_plain_ddp_but_for_the_order_of_additions(cluster: Cluster, exchange: str) -> None:
    results = cluster.run(both, 4, "plain", exchange)
    for pairs in results:
        for (ours, theirs), (first, _) in zip(pairs, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours, first, rtol=0, atol=0)
            if exchange == "dense":
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def unfrozen(rank: int) -> tuple[list[int], bool]:
    """A layer is frozen at first; after unfreezing the model is wrapped again and the residual goes on."""
    torch.manual_seed(0)
    net = jobs.Net()
    net.layers[2].requires_grad_(False)
    model = DDP(net, bucket_cap_mb=0.01)
    link = tw.attach(model, 0.05, exchange="gather")
    jobs.train(model, rank, range(5), torch.optim.SGD(model.parameters(), lr=0.1))
    state = link.state_dict()
    net.layers[2].requires_grad_(True)
    again = DDP(net, bucket_cap_mb=0.01)
    link = tw.attach(again, 0.05, exchange="gather")
    link.load_state_dict(state)
    kept = all(
        torch.equal(link.codec.residuals(name)["residual"], slots["residual"])
        for name, slots in state["codec"]["residuals"].items()
    )
    jobs.train(again, rank, range(5, 10), torch.optim.SGD(again.parameters(), lr=0.1))
    kept = kept and float(link.codec.residuals("layers.2.weight")["residual"].abs().sum()) > 0
    net.layers[0].requires_grad_(False)
    third = tw.attach(DDP(net, bucket_cap_mb=0.01), 0.05, exchange="gather")
    third.load_state_dict(link.state_dict(), strict=False)
    return jobs.digest(net), kept and not third.codec.residuals("layers.0.weight")


def test_freezing_and_unfreezing(cluster: Cluster) -> None:
    first, second = cluster.run(unfrozen, 2)
    assert first == second
    assert first[1]


def two_models(rank: int) -> tuple[list[int], list[int]]:
    """Two attached models that train in turns, as in adversarial training."""
    models = [jobs.make(seed) for seed in (0, 1)]
    links = [tw.attach(m, 0.05, exchange=e) for m, e in zip(models, ("gather", "scatter-reduce"), strict=True)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(10):
        x, y = jobs.batch(rank, step)
        sum(nn.functional.cross_entropy(m(x), y) for m in models).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [link.step for link in links] == [10, 10]
    return jobs.digest(models[0]), jobs.digest(models[1])


def test_several_models_in_one_process(cluster: Cluster) -> None:
    first, second = cluster.run(two_models, 2)
    assert first == second


def autocast(rank: int) -> list[int]:
    model = jobs.make()
    link = tw.attach(model, 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(10):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    link.detach()
    return jobs.digest(model)


def test_autocast(cluster: Cluster) -> None:
    first, second = cluster.run(autocast, 2)
    assert first == second


def compiled(rank: int, after: bool) -> tuple[list[int], int]:
    """torch.compile around the DDP model, before or after attaching; inside DDP alone, and both."""
    # Dynamo wants buckets of at least 1 MB, and the test more than one of them.
    torch.manual_seed(0)
    nets: list[Any] = [jobs.Net(512) for _ in range(3)]
    nets[1:] = [torch.compile(net, backend="aot_eager") for net in nets[1:]]
    models, digests, steps = [DDP(net, bucket_cap_mb=1) for net in nets], [], 0
    for model, around in zip(models, (True, True, False), strict=True):
        outside = torch.compile(model, backend="aot_eager") if around else model
        link = tw.attach(model if after else outside, 0.05)  # type: ignore[arg-type]
        jobs.train(outside, rank, range(4), torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
        steps += link.stats()["steps"]
        link.detach()
        digests += jobs.digest(model)
    return digests, steps


@pytest.mark.parametrize("after", [True, False], ids=["attach-then-compile", "compile-then-attach"])
def test_compiled_models(cluster: Cluster, after: bool) -> None:
    first, second = cluster.run(compiled, 2, after)
    assert first == second and first[1] == 12


def fabric(rank: int, directory: str) -> None:
    """Lightning's Fabric wraps the model, and saves and loads one file for all ranks."""
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    made.launch()
    torch.manual_seed(0)
    net = jobs.Net()
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    link = tw.attach(model, 0.05)
    for step in range(3):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        made.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    state = {"model": model, "optimizer": optimizer, "link": link.gathered}
    made.save(f"{directory}/one.ckpt", state)
    before = link.state_dict(gather=True)["codec"]["residuals"]
    made.load(f"{directory}/one.ckpt", state)
    after = link.state_dict()["codec"]["residuals"]
    same = all(torch.allclose(before[name]["residual"], after[name]["residual"], atol=1e-6) for name in before)
    print(f"rank {rank}: {same and link.step == 3}", flush=True)


def test_fabric(tmp_path: Path) -> None:
    if find_spec("lightning") is None and os.environ.get("CI") != "true":
        pytest.skip("lightning is not installed")
    assert printed(fabric, 2, str(tmp_path)).count("True") == 2


def subgroup(rank: int) -> list[int] | None:
    """A model on ranks 1 and 2 of three."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return None
    torch.manual_seed(0)
    model = DDP(jobs.Net(), process_group=group, bucket_cap_mb=0.01)
    link = tw.attach(model, 0.05, exchange="scatter-reduce")
    jobs.train(model, rank, range(5), torch.optim.SGD(model.parameters(), lr=0.1))
    return jobs.digest(model) if "of 2" in repr(link) else None


def test_a_process_group_of_some_ranks(cluster: Cluster) -> None:
    _, first, second = cluster.run(subgroup, 3)
    assert first == second is not None


def alone(rank: int, exchange: Any) -> bool:
    """A single rank trains exactly as without a link, with DDP and without it; the link says so."""
    digests = []
    for wrapped in (True, False):
        model = jobs.make() if wrapped else jobs.make().module
        link = tw.attach(model, 0.05, exchange=exchange)
        assert "single process" in link.why and link.stats()["steps"] == 0
        jobs.train(model, rank, range(3), torch.optim.SGD(model.parameters(), lr=0.1))
        link.load_state_dict(link.state_dict(gather=True))
        link.detach()
        digests.append(jobs.digest(model))
    plain = jobs.make().module
    jobs.train(plain, rank, range(3), torch.optim.SGD(plain.parameters(), lr=0.1))
    return digests == [jobs.digest(plain)] * 2


@pytest.mark.parametrize("exchange", ["dense", "gather", "scatter-reduce", tw.exchange.Hierarchical(), None], ids=str)
def test_one_rank_alone(cluster: Cluster, exchange: Any) -> None:
    assert cluster.run(alone, 1, exchange) == [True]


class Scaled(nn.Module):
    """DDP's second grouping has the same first tensor and the same sizes, the others in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.second = nn.Linear(200, 200), nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x))) * self.scale
        return out


def scaled(rank: int) -> list[int]:
    torch.manual_seed(0)
    model = DDP(Scaled(), bucket_cap_mb=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.attach(model, 0.05, exchange="scatter-reduce"):
        for step in range(4):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 200)).square().mean().backward()
            optimizer.step()
    return jobs.digest(model)


def test_a_bucket_whose_order_changes_is_another_bucket(cluster: Cluster) -> None:
    first, second = cluster.run(scaled, 2)
    assert first == second
