"""The optimizer hook: every rank's optimizer steps alone, and all ranks hold the same parameters after every step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from tests.link import jobs
from thinwire.errors import LinkError
from thinwire.exchange.channel import checksum
from thinwire.hooks.optimizer import attached_hook
from thinwire.link import updates

CODECS: list[Any] = [None, "rotate", 0.05, tw.Codec(tw.RandomK(0.1), tw.Bits(4))]
STEPS = 20  # past one period of the rotation, and many changes of a basis


def several_buckets() -> None:
    """Every layer of the tests' model is exchanged by itself."""
    updates.BUCKET_ELEMENTS = 10_000


def made(rank: int, *, ddp: bool) -> tuple[nn.Module, nn.Module]:
    """The module and what is trained: DDP of it, or itself with other parameters on every rank."""
    several_buckets()
    torch.manual_seed(0 if ddp else rank)
    net = jobs.Net()
    return net, DDP(net) if ddp else net


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


def trained(rank: int, codec: Any, ddp: bool, options: dict[str, Any]) -> tuple[list[int], float, dict[str, Any], str]:
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model, **options)
    link = tw.attach(model, codec, optimizer=optimizer, check_every=3)
    jobs.train(model, rank, range(STEPS), optimizer)
    figures = link.stats()
    link.detach()
    return jobs.digest(net), jobs.accuracy(net), figures, link.domain


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_replicas_are_equal_and_learn(cluster: Cluster, codec: Any, ddp: bool) -> None:
    untrained = jobs.accuracy(jobs.Net())
    results = cluster.run(trained, 3, codec, ddp, {"fused": ddp})
    assert len({tuple(digest) for digest, *_ in results}) == 1
    for _, accuracy, figures, domain in results:
        assert domain == "update" and figures["steps"] == STEPS and figures["skipped"] == 0
        assert accuracy > untrained + 0.15
        assert figures["compression_ratio"] > 5


# Without compression the update domain is ordinary training


def whole(rank: int, optimizers: str) -> list[bool]:
    """Everything is sent: on equal batches all ranks take the step that one process would take."""
    several_buckets()
    torch.manual_seed(0)
    one, many = jobs.Net(), jobs.Net()
    many.load_state_dict(one.state_dict())
    make = getattr(torch.optim, optimizers)
    mine, theirs = make(one.parameters(), lr=1e-2), make(many.parameters(), lr=1e-2)
    codec = tw.Codec(tw.TopK(1.0), tw.Float32(), min_numel=0)
    link = tw.attach(many, codec, optimizer=theirs, domain="update", exchange="gather")
    near = []
    for step in range(4):
        x, y = jobs.batch(0, step)
        for model, optimizer in ((one, mine), (many, theirs)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        pairs = zip(one.parameters(), many.parameters(), strict=True)
        near.append(all(torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in pairs))
    link.detach()
    return near


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop", "Adagrad"])
def test_everything_sent_is_the_optimizer_itself(cluster: Cluster, optimizer: str) -> None:
    assert cluster.run(whole, 2, optimizer) == [[True] * 4] * 2


# What users do between steps


def shown(rank: int, ddp: bool) -> dict[str, bool]:
    """What evaluation, state dicts, copies and later readers of the parameters see."""
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer)
    jobs.train(model, rank, range(3), optimizer)
    hook = attached_hook(net)
    assert hook is not None
    shared = {name: t.clone() for name, t in hook.updates.shared.items()}

    def holds_shared() -> bool:
        return all(torch.equal(p.detach().flatten(), shared[name]) for name, p in net.named_parameters())

    seen = {"after a step": holds_shared()}
    copied = copy.deepcopy(net)
    x, y = jobs.batch(rank, 3)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    seen["look-ahead in training"] = not holds_shared()
    state = model.state_dict()
    prefix = "module." if ddp else ""
    seen["state dict"] = all(torch.equal(state[prefix + name].flatten(), t) for name, t in shared.items())
    with torch.no_grad():
        model.eval()
        evaluated = model(x)
        model.train()
        seen["evaluation"] = torch.equal(evaluated, copied.eval()(x))
    seen["look-ahead again"] = not holds_shared()
    loss.backward()  # raises if the evaluation had changed what the graph holds
    optimizer.step()
    seen["state dict is a copy"] = all(torch.equal(state[prefix + name].flatten(), t) for name, t in shared.items())
    copied.train()
    copied(x).sum().backward()
    seen["a copy is not attached"] = all(
        torch.equal(p.detach().flatten(), shared[name]) for name, p in copied.named_parameters()
    )
    link.detach()
    return seen


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
def test_only_training_looks_ahead(cluster: Cluster, ddp: bool) -> None:
    for seen in cluster.run(shown, 2, ddp):
        assert all(seen.values()), seen


def compiled(rank: int, how: str) -> tuple[list[int], bool]:
    net, _ = made(rank, ddp=False)
    model = torch.compile(net, backend="eager") if how == "outside" else net
    if how == "inside DDP":
        model = DDP(torch.compile(net, backend="aot_eager"))
    optimizer = adamw(net)
    link = tw.attach(model, optimizer=optimizer)  # type: ignore[arg-type]
    if how == "later":
        model = torch.compile(net, backend="eager")
    jobs.train(model, rank, range(6), optimizer)  # type: ignore[arg-type]
    moved = link.stats()["steps"] == 6
    link.detach()
    return jobs.digest(net), moved


@pytest.mark.parametrize("how", ["outside", "later", "inside DDP"])
def test_compiled_models(cluster: Cluster, how: str) -> None:
    first, second = cluster.run(compiled, 2, how)
    assert first == second and first[1]


class Normed(nn.Module):
    """Batch normalisation has buffers that training changes; the table is a constant."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        self.register_buffer("table", torch.rand(1000))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x + self.table[0])
        return out


def buffers(rank: int) -> tuple[list[int], bool, int]:
    torch.manual_seed(rank)
    net = Normed()
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer)
    before = net.table.clone()
    jobs.train(net, rank, range(8), optimizer)
    sent = int(link.stats()["last_step"]["bytes_sent"])
    link.detach()
    return [checksum(t) for t in net.state_dict().values()], torch.equal(before, net.table), sent


def test_buffers_that_training_changes_are_averaged(cluster: Cluster) -> None:
    first, second, third = cluster.run(buffers, 3)
    assert first[0] == second[0] == third[0] and first[1]
    assert first[2] < 4000  # the table of constants is not sent


# Values that are not finite


def infected(rank: int, codec: Any) -> tuple[list[int], list[bool], int]:
    """At step 5 rank 1 has an infinite gradient, without a GradScaler."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, codec, optimizer=optimizer, check_every=1)
    moved = []
    for step in range(9):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 5 and rank == 1:
            bad = next(net.parameters()).grad
            assert bad is not None
            bad[0, 0] = torch.inf
        before = jobs.digest(net)
        optimizer.step()
        moved.append(jobs.digest(net) != before)
        for name, p in net.named_parameters():
            assert bool(p.isfinite().all()) and bool(link.codec.residuals(name)["residual"].isfinite().all())
            assert all(bool(torch.as_tensor(v).isfinite().all()) for v in optimizer.state[p].values())
    skipped = link.stats()["skipped"]
    link.detach()
    return jobs.digest(net), moved, skipped


@pytest.mark.parametrize("codec", [None, 0.05], ids=str)
def test_an_infinite_gradient_is_seen_by_all_and_the_next_step_is_clean(cluster: Cluster, codec: Any) -> None:
    results = cluster.run(infected, 2, codec)
    assert results[0][0] == results[1][0]
    for _, moved, skipped in results:
        assert skipped == 1 and moved[6:] == [True] * 3


def infected_closure(rank: int, kind: str) -> tuple[list[bool], bool]:
    """A closure gives rank 1 an infinite gradient at step 3; later steps are normal ones."""
    net, _ = made(rank, ddp=False)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=1e-3)
    link = tw.attach(net, 0.05, optimizer=optimizer, domain="update", check_every=1)
    moved = []
    for step in range(7):
        x, y = jobs.batch(rank, step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)  # noqa: B023
            (loss * torch.inf if step == 3 and rank == 1 else loss).backward()  # noqa: B023
            return loss

        before = jobs.digest(net)
        optimizer.step(closure)
        moved.append(jobs.digest(net) != before)
    finite = all(bool(torch.as_tensor(v).isfinite().all()) for s in optimizer.state.values() for v in s.values())
    link.detach()
    return moved, finite


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_infinite_gradient_of_a_closure_spoils_one_step_only(cluster: Cluster, kind: str) -> None:
    for moved, finite in cluster.run(infected_closure, 2, kind):
        assert moved == [step != 3 for step in range(7)] and finite


def infected_buffers(rank: int) -> tuple[bool, list[int]]:
    torch.manual_seed(0)
    net = Normed()
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer)
    for step in range(4):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x * torch.inf if step == 1 and rank == 1 else x), y).backward()
        optimizer.step()
    link.detach()
    state = net.state_dict()
    return all(bool(t.isfinite().all()) for t in state.values()), [checksum(t) for t in state.values()]


def test_an_infinite_input_leaves_no_trace_in_buffers(cluster: Cluster) -> None:
    first, second = cluster.run(infected_buffers, 2)
    assert first == second and first[0]


# Refusals


def _bad(state: dict[str, Any]) -> dict[str, Any]:
    """Optimizer states of which one tensor is not finite."""
    states = copy.deepcopy(state["updates"]["optimizers"][0])
    states["layers.0.weight"]["exp_avg"][0, 0] = torch.nan
    return dict(states)


def refused(rank: int) -> dict[str, str]:
    several_buckets()

    def attach(**options: Any) -> tw.Link:
        net = jobs.Net()
        optimizer = adamw(net)
        return tw.attach(net, **{"optimizer": optimizer, **options})

    net = jobs.Net()
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer)
    gradient = tw.attach(jobs.make(), 0.05)
    jobs.train(net, rank, range(1), optimizer)
    state = link.state_dict()
    cases: dict[str, Callable[[], Any]] = {
        "twice": lambda: tw.attach(net, optimizer=optimizer),
        "nothing owned": lambda: attach(optimizer=adamw(jobs.Net())),
        "two owners": lambda: tw.attach(jobs_net := jobs.Net(), optimizer=[adamw(jobs_net), adamw(jobs_net)]),
        "no optimizer": lambda: attach(optimizer=None, domain="update"),
        "unknown domain": lambda: attach(domain="weights"),
        "momentum": lambda: attach(codec="dgc"),
        "plain gradients": lambda: attach(domain="gradient"),
        "dense low rank": lambda: attach(exchange="dense"),
        "dense": lambda: attach(codec=0.05, exchange="dense"),
        "machines": lambda: attach(codec=0.05, exchange=tw.exchange.Hierarchical(per_machine=1)),
        "forgotten": lambda: tw.attach(other := jobs.Net(), optimizer=torch.optim.AdamW(other.layers[0].parameters())),
        "optimizer twice": lambda: attach(optimizer=optimizer),
        "rescale": lambda: link.rescale(0.5),
        "diagnose": lambda: link.diagnose(),
        "flush": lambda: gradient.flush(),
        "state of updates": lambda: gradient.load_state_dict(state),
        "state of gradients": lambda: link.load_state_dict(gradient.state_dict()),
        "state without shared": lambda: link.load_state_dict({**state, "updates": {"clocks": [1]}}),
        "clocks": lambda: link.load_state_dict({**state, "updates": {**state["updates"], "clocks": ["x"]}}),
        "moments": lambda: link.load_state_dict(
            {**state, "updates": {**state["updates"], "optimizers": [_bad(state)]}}
        ),
    }
    seen = {}
    for name, case in cases.items():
        try:
            case()
        except (TypeError, ValueError, LinkError) as error:
            seen[name] = str(error)
    link.detach()
    return seen


def test_what_cannot_work_is_refused_in_a_sentence(cluster: Cluster) -> None:
    expected = {
        "twice": "attached already",
        "nothing owned": "owns no parameter of the model",
        "two owners": "two optimizers own",
        "no optimizer": "give it as optimizer=",
        "unknown domain": 'domain is "gradient" or "update"',
        "momentum": "accumulates gradients",
        "plain gradients": "wrap it as DDP(model)",
        "dense low rank": 'LowRank takes exchange="gather"',
        "dense": 'updates are exchanged by "gather" or "scatter-reduce"',
        "machines": 'updates are exchanged by "gather" or "scatter-reduce"',
        "forgotten": "layers.2.weight requires gradients and no optimizer that was given owns it",
        "optimizer twice": "the optimizer owns no parameter of the model",
        "rescale": "has the unit of the parameters",
        "diagnose": "compares gradients",
        "flush": "is for links that exchange updates",
        "state of updates": "residuals of the update domain",
        "state of gradients": "residuals of the gradient domain",
        "state without shared": "lacks its shared parameters",
        "clocks": "are not lists of numbers",
        "moments": "the optimizer's exp_avg is not finite",
    }
    for seen in cluster.run(refused, 2):
        assert seen.keys() == expected.keys()
        for name, part in expected.items():
            assert part in seen[name], (name, seen[name])


def differing(rank: int) -> str:
    """Ranks that disagree on the domain fail at attach."""
    model = jobs.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        tw.attach(model, 0.05, optimizer=optimizer, domain="update" if rank else "gradient")
    except tw.LinkError as error:
        return str(error)
    return ""


def test_ranks_that_differ_in_the_domain_fail_at_attach(cluster: Cluster) -> None:
    assert all("in domain" in error or "in codec" in error for error in cluster.run(differing, 2))


def added(rank: int) -> str:
    net, _ = made(rank, ddp=False)
    params = list(net.parameters())
    for p in params[4:]:
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(params[:4], lr=1e-3)
    tw.attach(net, optimizer=optimizer)
    for p in params[4:]:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": params[4:]})
    try:
        jobs.train(net, rank, range(1), optimizer)
    except LinkError as error:
        return str(error)
    return ""


def test_parameters_added_to_the_optimizer_later_are_an_error(cluster: Cluster) -> None:
    assert all("attach again" in error for error in cluster.run(added, 2))


def detached(rank: int) -> tuple[bool, bool]:
    """After detach DDP averages gradients again, from the shared parameters."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    with tw.attach(model, optimizer=optimizer):
        jobs.train(model, rank, range(3), optimizer)
    fresh = adamw(model)
    jobs.train(model, rank, range(3, 6), fresh)
    with tw.attach(model, 0.05) as link:  # a link of gradients on the same model
        jobs.train(model, rank, range(6, 8), torch.optim.SGD(model.parameters(), lr=0.1))
        stepped = link.stats()["steps"] == 2
    mine = torch.tensor(jobs.digest(net))
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return torch.equal(mine, theirs), stepped


def test_detach_gives_the_model_back(cluster: Cluster) -> None:
    assert cluster.run(detached, 2) == [(True, True)] * 2
