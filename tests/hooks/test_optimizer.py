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


def with_features(rank: int, feature: str) -> tuple[list[int], float]:
    """Train with something that users do; returns checksums and the accuracy."""
    net, model = made(rank, ddp=feature == "accumulation")
    params = list(net.parameters())
    if feature == "frozen":
        params[0].requires_grad_(False)
    halves = [{"params": params[:4], "lr": 1e-3}, {"params": params[4:], "lr": 5e-3}]
    optimizer = torch.optim.AdamW(halves if feature == "groups" else params, lr=3e-3)
    several = [torch.optim.AdamW(params[:4], lr=3e-3), torch.optim.RMSprop(params[4:], lr=1e-3)]
    made_of = several if feature == "optimizers" else [optimizer]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    link = tw.attach(model, optimizer=made_of, check_every=2)
    for step in range(STEPS):
        x, y = jobs.batch(rank, step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        if feature == "closure":
            optimizer.step(closure)
            continue
        for each in made_of:
            each.zero_grad()
        for part in range(2) if feature == "accumulation" else range(1):
            quiet = model.no_sync() if isinstance(model, DDP) and part == 0 else torch.enable_grad()
            with quiet:
                nn.functional.cross_entropy(model(x), y).backward()
        if feature == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for each in made_of:
            each.step()
        schedule.step()
    link.flush()
    assert not any(link.codec.residuals(name)["residual"].any() for name, _ in net.named_parameters())
    link.detach()
    return jobs.digest(net), jobs.accuracy(net)


FEATURES = ["plain", "frozen", "groups", "optimizers", "closure", "accumulation", "clipping"]


@pytest.mark.parametrize("feature", FEATURES)
def test_what_users_do(cluster: Cluster, feature: str) -> None:
    untrained = jobs.accuracy(jobs.Net())
    first, second = cluster.run(with_features, 2, feature)
    assert first == second and first[1] > untrained + 0.1


def compiled(rank: int, how: str) -> tuple[list[int], bool]:
    net, _ = made(rank, ddp=False)
    model = torch.compile(net, backend="eager") if how == "outside" else net
    optimizer = adamw(net)
    link = tw.attach(model, optimizer=optimizer)  # type: ignore[arg-type]
    if how == "later":
        model = torch.compile(net, backend="eager")
    jobs.train(model, rank, range(6), optimizer)  # type: ignore[arg-type]
    moved = link.stats()["steps"] == 6
    link.detach()
    return jobs.digest(net), moved


@pytest.mark.parametrize("how", ["outside", "later"])
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


def bfloat16(rank: int) -> tuple[list[int], bool, float]:
    net, _ = made(rank, ddp=False)
    net.bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    link = tw.attach(net, optimizer=optimizer, check_every=2)
    for step in range(30):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.bfloat16()).float(), y).backward()
        optimizer.step()
    hook = attached_hook(net)
    assert hook is not None
    finer = any(not torch.equal(t, t.bfloat16().float()) for t in hook.updates.shared.values())
    link.detach()
    x, y = jobs.batch(99, 99, 1024)
    with torch.no_grad():
        return jobs.digest(net), finer, float((net(x.bfloat16()).argmax(1) == y).float().mean())


def test_shared_parameters_of_16_bit_models_have_32(cluster: Cluster) -> None:
    first, second = cluster.run(bfloat16, 2)
    assert first == second and first[1] and first[2] > 0.4


# Values that are not finite


def scaled(rank: int, fused: bool, ddp: bool) -> tuple[list[int], list[float], list[bool]]:
    """At step 4 the gradient of rank 1 overflows: all ranks skip that step, and their scales stay equal."""
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
    link = tw.attach(model, optimizer=optimizer, check_every=1)
    scales, stepped = [], []
    for step in range(12):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if step == 4 and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        before = {name: dict(state) for name, state in _moments(net, optimizer).items()}
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = _moments(net, optimizer)
        stepped.append(before.keys() != after.keys() or any(before[n]["step"] != after[n]["step"] for n in after))
        assert all(bool(p.isfinite().all()) for p in net.parameters())
    link.detach()
    return jobs.digest(net), scales, stepped


def _moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    found = {name: optimizer.state.get(p, {}) for name, p in net.named_parameters()}
    return {name: {"step": float(state["step"])} for name, state in found.items() if "step" in state}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loops"])
@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
def test_all_ranks_skip_a_step_whose_loss_scale_is_too_high(cluster: Cluster, fused: bool, ddp: bool) -> None:
    results = cluster.run(scaled, 2, fused, ddp)
    assert results[0] == results[1]
    _, scales, stepped = results[0]
    assert stepped == [step != 4 for step in range(12)]
    assert scales[4] == scales[3] / 2


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


# What users do to parameters and optimizers


def edited(rank: int) -> dict[str, bool]:
    """Values that are written to parameters between steps stay, and are what a state dict holds."""
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, optimizer=optimizer, check_every=1)
    jobs.train(net, rank, range(2), optimizer)
    seen = {}
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.01, 0.01)
    seen["saved"] = max(float(t.abs().max()) for t in net.state_dict().values()) <= 0.01
    jobs.train(net, rank, range(2, 3), optimizer)
    seen["clamped"] = max(float(p.abs().max()) for p in net.parameters()) < 0.05
    net.get_submodule("layers.0").load_state_dict({"weight": torch.full((96, 20), 0.123), "bias": torch.zeros(96)})
    jobs.train(net, rank, range(3, 4), optimizer)
    seen["loaded into a part"] = abs(float(net.get_parameter("layers.0.weight").mean()) - 0.123) < 0.02
    link.detach()
    link.detach()
    torch.save(net, "/dev/null")
    return seen


def test_values_that_users_write_stay(cluster: Cluster) -> None:
    for seen in cluster.run(edited, 2):
        assert all(seen.values()), seen


def stranger(rank: int) -> list[str]:
    """An optimizer that is not attached steps: with parameters of an attached model, and with its own."""
    net, model = made(rank, ddp=True)
    link = tw.attach(model, optimizer=adamw(model))
    copied = copy.deepcopy(net)
    errors = []
    for parameters in (net.parameters(), copied.parameters()):
        other = torch.optim.SGD(parameters, lr=0.1)
        for group in other.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        try:
            other.step()
        except LinkError as error:
            errors.append(str(error))
    link.detach()
    return errors


def test_an_optimizer_that_is_not_attached_is_an_error(cluster: Cluster) -> None:
    for errors in cluster.run(stranger, 2):
        assert len(errors) == 1 and "give attach() all optimizers" in errors[0]


def adversarial(rank: int) -> list[int]:
    """Two optimizers of one link step in turns, and the second's graph was made before the first stepped."""
    several_buckets()
    torch.manual_seed(rank)
    net = nn.ModuleDict({"g": nn.Linear(8, 20), "d": jobs.Net()})
    both = [adamw(net["g"]), adamw(net["d"])]
    link = tw.attach(net, optimizer=both, check_every=1)
    for step in range(4):
        x, _ = jobs.batch(rank, step)
        fake = net["g"](x[:, :8])
        both[1].zero_grad()
        (net["d"](x).mean() - net["d"](fake.detach()).mean()).backward()
        both[1].step()
        both[0].zero_grad()
        net["d"](fake).mean().backward()
        both[0].step()
    link.detach()
    return jobs.digest(net)


def test_optimizers_of_one_link_step_in_turns(cluster: Cluster) -> None:
    first, second = cluster.run(adversarial, 2)
    assert first == second


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


# State


def unbroken(rank: int, codec: Any) -> list[int]:
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    tw.attach(model, codec, optimizer=optimizer)
    jobs.train(model, rank, range(10), optimizer)
    return jobs.digest(net)


def saved(rank: int, codec: Any, folder: str) -> None:
    _, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, codec, optimizer=optimizer)
    jobs.train(model, rank, range(6), optimizer)
    torch.save(link.state_dict(), f"{folder}/link-{rank}.pt")


def resumed(rank: int, codec: Any, folder: str) -> list[int]:
    """Neither the model nor the optimizer is saved besides the link's state."""
    net, model = made(rank + 7, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, codec, optimizer=optimizer)
    link.load_state_dict(torch.load(f"{folder}/link-{rank}.pt", weights_only=True))
    jobs.train(model, rank, range(6, 10), optimizer)
    return jobs.digest(net)


@pytest.mark.parametrize("codec", [None, "rotate", 0.05], ids=str)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(cluster: Cluster, tmp_path: Any, codec: Any) -> None:
    expected = cluster.run(unbroken, 3, codec)
    cluster.run(saved, 3, codec, str(tmp_path))
    assert cluster.run(resumed, 3, codec, str(tmp_path)) == expected


def fewer(rank: int, folder: str, gather: bool) -> tuple[bool, bool, bool]:
    """Two ranks continue what three have saved: mean residuals, shared parameters, mean second moments."""
    states = [torch.load(f"{folder}/link-{r}.pt", weights_only=True) for r in range(3)]
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer)
    link.load_state_dict(tw.merge_states(states) if gather else states)
    name, p = "layers.2.weight", net.get_parameter("layers.2.weight")
    residual = torch.stack([s["codec"]["residuals"][name]["residual"] for s in states]).mean(0)
    square = torch.stack([s["updates"]["optimizers"][0][name]["exp_avg_sq"] for s in states]).mean(0)
    seen = (
        torch.allclose(link.codec.residuals(name)["residual"], residual, atol=1e-7),
        torch.equal(p.detach().flatten(), states[0]["updates"]["shared"][name]),
        torch.allclose(optimizer.state[p]["exp_avg_sq"], square),
    )
    jobs.train(model, rank, range(6, 8), optimizer)
    link.detach()
    return seen


@pytest.mark.parametrize("gather", [True, False])
def test_another_number_of_ranks_keeps_the_mean(cluster: Cluster, tmp_path: Any, gather: bool) -> None:
    cluster.run(saved, 3, "rotate", str(tmp_path))
    assert cluster.run(fewer, 2, str(tmp_path), gather) == [(True, True, True)] * 2


def gathered(rank: int) -> tuple[float, float]:
    """The mean state that all ranks compute together, and the mean of what they hold."""
    _, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, "rotate", optimizer=optimizer)
    jobs.train(model, rank, range(4), optimizer)
    state = link.state_dict(gather=True)
    name = "layers.2.weight"
    mine = link.codec.residuals(name)["residual"].clone()
    dist.all_reduce(mine)
    apart = (state["codec"]["residuals"][name]["residual"] - mine / dist.get_world_size()).abs().max()
    assert state["updates"]["optimizers"][0][name]["exp_avg"].shape == (96, 96)
    link.detach()
    return float(apart), float(mine.abs().max())


def test_a_gathered_state_is_the_mean(cluster: Cluster) -> None:
    for apart, largest in cluster.run(gathered, 2):
        assert apart < 1e-6 and largest > 1e-4


def unevenly_gathered(rank: int) -> tuple[int, bool]:
    """Rank 1 has no optimizer state for the last layer, because it never had a gradient there."""
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, "rotate", optimizer=optimizer)
    for step in range(2):
        x, y = jobs.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if rank == 1:
            net.get_parameter("layers.6.weight").grad = None
        optimizer.step()
    state = link.state_dict(gather=True)
    found = state["updates"]["optimizers"][0]
    link.detach()
    return len(found), bool(found["layers.6.weight"]["exp_avg"].any())


def test_states_that_a_rank_lacks_are_gathered_from_the_others(cluster: Cluster) -> None:
    assert cluster.run(unevenly_gathered, 2) == [(8, True)] * 2


def reloaded(rank: int) -> list[bool]:
    """Weights that are loaded into an attached model become the shared ones."""
    net, model = made(rank, ddp=True)
    optimizer = adamw(model)
    link = tw.attach(model, optimizer=optimizer, check_every=1)
    first = copy.deepcopy(net.state_dict())
    jobs.train(model, rank, range(4), optimizer)
    model.load_state_dict({f"module.{name}": t for name, t in first.items()})
    hook = attached_hook(net)
    assert hook is not None
    seen = [all(torch.equal(hook.updates.shared[name], t.flatten()) for name, t in first.items())]
    jobs.train(model, rank, range(4, 8), optimizer)
    link.detach()
    return seen


def test_loaded_weights_become_the_shared_ones(cluster: Cluster) -> None:
    assert cluster.run(reloaded, 2) == [[True]] * 2


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
