"""What users do between steps while updates are exchanged: with DDP and without it, with fused optimizers and loops."""

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks.test_optimizer import Normed, adamw, made, several_buckets
from tests.link import jobs
from thinwire.errors import LinkError
from thinwire.exchange.channel import checksum
from thinwire.hooks.optimizer import attached_hook

STEPS = 20


class Ordinary:
    """A training with AdamW and a schedule. Each subclass does one more thing that users do."""

    ddp: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, rank: int, wrapped: bool, fused: bool) -> None:
        several_buckets()
        self.rank, self.fused = rank, fused
        torch.manual_seed(0 if wrapped else rank)
        self.net = self.make()
        self.model: nn.Module = DDP(self.net, **self.ddp) if wrapped else self.net
        self.params = list(self.net.parameters())
        self.optimizers = self.optimize()
        self.schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in self.optimizers]

    def make(self) -> nn.Module:
        return jobs.Net()

    def optimize(self) -> list[torch.optim.Optimizer]:
        return [self.adamw(self.params)]

    def adamw(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3, fused=self.fused)

    def attached(self) -> None:
        """Do what comes after attach and before training."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def loss(self, step: int) -> Tensor:
        x, y = jobs.batch(self.rank, step)
        return nn.functional.cross_entropy(self.forward(x, step), y)

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, step: int) -> None:
        self.loss(step).backward()

    def update(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self) -> None:
        for step in range(STEPS):
            self.zero()
            self.backward(step)
            self.update(step)
            for schedule in self.schedules:
                schedule.step()

    def check(self, link: tw.Link) -> None:
        """Assert what is true after the training."""
        assert link.stats()["steps"] == STEPS and link.stats()["skipped"] == 0

    def result(self) -> nn.Module:
        """Return what the ranks have in common."""
        return self.net


class Frozen(Ordinary):
    def make(self) -> nn.Module:
        net = jobs.Net()
        net.get_parameter("layers.0.weight").requires_grad_(False)
        self.first = net.get_parameter("layers.0.weight")
        return net

    def attached(self) -> None:
        self.before = self.first.detach().clone()

    def check(self, link: tw.Link) -> None:
        super().check(link)
        assert torch.equal(self.first, self.before)


class Groups(Ordinary):
    def optimize(self) -> list[torch.optim.Optimizer]:
        return [self.adamw([{"params": self.params[:4], "lr": 1e-3}, {"params": self.params[4:], "lr": 5e-3}])]


class Optimizers(Ordinary):
    def optimize(self) -> list[torch.optim.Optimizer]:
        other = torch.optim.Adagrad(self.params[4:], lr=1e-2, fused=self.fused)
        return [self.adamw(self.params[:4]), other]

    def check(self, link: tw.Link) -> None:
        assert link.stats()["steps"] == 2 * STEPS  # exchanges


class Closure(Ordinary):
    def zero(self) -> None:
        """The closure does it."""

    def backward(self, step: int) -> None:
        """The closure does it."""

    def update(self, step: int) -> None:
        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(step)
            loss.backward()
            return loss

        self.optimizers[0].step(closure)  # type: ignore[arg-type]


class Accumulation(Ordinary):
    def backward(self, step: int) -> None:
        with self.model.no_sync() if isinstance(self.model, DDP) else contextlib.nullcontext():
            super().backward(step)
        super().backward(step + STEPS)


class Clipping(Ordinary):
    def update(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.params, 0.5)
        super().update(step)


class Branches(nn.Module):
    """A layer takes part in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last = nn.Linear(20, 96), nn.Linear(96, 96), nn.Linear(96, 4)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        hidden = torch.relu(self.first(x))
        if use:
            hidden = torch.relu(self.some(hidden))
        out: Tensor = self.last(hidden)
        return out


class Unused(Ordinary):
    """In a step the layer has a gradient on one rank, or on none."""

    ddp = {"find_unused_parameters": True}  # noqa: RUF012

    def make(self) -> nn.Module:
        return Branches()

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = self.model(x, (step + self.rank) % 3 == 0)
        return out


class Recomputing(nn.Module):
    """Parts of the model are computed again in the backward pass, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 96), nn.Linear(96, 96), nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda t: torch.relu(self.first(t)), x, use_reentrant=False)
        hidden = checkpoint(lambda t: torch.relu(self.second(t)), hidden, use_reentrant=True)
        out: Tensor = self.last(hidden)
        return out


class Checkpointing(Ordinary):
    def make(self) -> nn.Module:
        return Recomputing()


class WholeCheckpointing(Ordinary):
    """The whole model is computed again, from the parameters that the forward pass saw."""

    def attached(self) -> None:
        self.seen: list[list[int]] = []
        self.net.register_forward_pre_hook(lambda *_: self.seen.append(jobs.digest(self.net)))

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = checkpoint(self.model, x, use_reentrant=False)
        return out

    def check(self, link: tw.Link) -> None:
        super().check(link)
        assert len(self.seen) == 2 * STEPS and self.seen[::2] == self.seen[1::2]


class Averaging(Ordinary):
    """An exponential moving average of the parameters after every step reads the shared ones."""

    def attached(self) -> None:
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.expected = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def update(self, step: int) -> None:
        super().update(step)
        self.average.update_parameters(self.net)
        hook = attached_hook(self.net)
        assert hook is not None
        for name, p in self.expected.items():
            now = hook.updates.shared[name].view_as(p)
            p.copy_(now) if step == 0 else p.lerp_(now, 0.1)

    def check(self, link: tw.Link) -> None:
        super().check(link)
        for name, p in self.average.module.named_parameters():
            torch.testing.assert_close(p.detach(), self.expected[name])

    def result(self) -> nn.Module:
        return self.average.module


class Normalised(Ordinary):
    """Batch normalisation; DDP broadcasts the buffers of rank 0 with the next forward pass."""

    def make(self) -> nn.Module:
        return Normed()

    def check(self, link: tw.Link) -> None:
        super().check(link)
        jobs.accuracy(self.model.eval())


class SixteenBits(Ordinary):
    """The shared parameters of a bfloat16 model have 32 bits."""

    def make(self) -> nn.Module:
        return jobs.Net().bfloat16()

    def forward(self, x: Tensor, step: int) -> Tensor:
        return super().forward(x.bfloat16(), step).float()

    def check(self, link: tw.Link) -> None:
        super().check(link)
        hook = attached_hook(self.net)
        assert hook is not None
        assert any(not torch.equal(t, t.bfloat16().float()) for t in hook.updates.shared.values())


class Compiled(Ordinary):
    def attached(self) -> None:
        self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


class CompiledFirst(Ordinary):
    def __init__(self, rank: int, wrapped: bool, fused: bool) -> None:
        super().__init__(rank, wrapped, fused)
        self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


class Scaled(Ordinary):
    """At step 4 a gradient of rank 1 overflows. The optimizer that owns it skips the step on all ranks."""

    def attached(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        self.scales: list[float] = []

    def backward(self, step: int) -> None:
        self.scaler.scale(self.loss(step)).backward()
        if step == 4 and self.rank == 1:
            bad = self.params[4].grad
            assert bad is not None
            bad[0, 0] = torch.inf

    def update(self, step: int) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())

    def check(self, link: tw.Link) -> None:
        taken = [int(o.state[o.param_groups[0]["params"][0]]["step"]) for o in self.optimizers]
        assert taken[-1] == STEPS - 1 and taken[:-1] == [STEPS] * (len(taken) - 1)
        assert self.scales == [256.0] * 4 + [128.0] * (STEPS - 4)


class Unscaled(Scaled):
    """Gradients are clipped in their own unit."""

    def update(self, step: int) -> None:
        self.scaler.unscale_(self.optimizers[0])
        norm = nn.utils.clip_grad_norm_(self.params, 0.5)
        assert float(norm) < 50.0 or not bool(norm.isfinite())
        super().update(step)


class ScaledOptimizers(Scaled):
    def optimize(self) -> list[torch.optim.Optimizer]:
        return [self.adamw(self.params[:4]), self.adamw(self.params[4:])]


FEATURES: list[type[Ordinary]] = [
    Ordinary,
    Frozen,
    Groups,
    Optimizers,
    Closure,
    Accumulation,
    Clipping,
    Unused,
    Checkpointing,
    WholeCheckpointing,
    Averaging,
    Normalised,
    SixteenBits,
    Compiled,
    CompiledFirst,
    Unscaled,
    ScaledOptimizers,
]


def with_feature(rank: int, feature: type[Ordinary], wrapped: bool, fused: bool) -> tuple[list[int], float]:
    """Train with something that users do; returns checksums and the accuracy."""
    training = feature(rank, wrapped, fused)
    link = tw.attach(training.model, optimizer=training.optimizers, check_every=2)
    training.attached()
    training.train()
    link.flush()
    owned = [name for name, p in training.net.named_parameters() if p.requires_grad]
    assert not any(link.codec.residuals(name)["residual"].any() for name in owned)
    training.check(link)
    link.detach()
    result = training.result().eval()
    return [checksum(t) for t in result.state_dict().values()], jobs.accuracy(result.float())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loops"])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_what_users_do(cluster: Cluster, feature: type[Ordinary], fused: bool) -> None:
    """Ranks agree with DDP and without it, and both ways give the same bits."""
    (with_ddp, other), (plain, another) = (
        cluster.run(with_feature, 2, feature, wrapped, fused) for wrapped in (True, False)
    )
    assert with_ddp == other and plain == another
    assert min(with_ddp[1], plain[1]) > 0.4  # an untrained model guesses one of four classes
    # DDP gives a rank zeros for a layer that only another rank used, and broadcasts buffers instead of averaging them.
    if feature not in (Unused, Normalised):
        assert with_ddp == plain


# Loss scaling


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
