"""attach(model, "auto") on real processes: all ranks choose alike, change their mind together, and lose nothing."""

import logging
import os
import sys
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
import thinwire.tune
from tests.cluster import Cluster
from tests.link import jobs, probe
from tests.needs import needs
from thinwire.hooks.ddp import DDPHook
from thinwire.link import autotune as module
from thinwire.tools.lab import Lab
from thinwire.tune.forecast import DENSE, Network, Setting, TuningPolicy


def tuner_of(model: DDP) -> module.Autotuner:
    hook = model._thinwire_hook
    assert isinstance(hook, DDPHook) and hook.link is not None
    found = hook.link.tuner
    assert isinstance(found, module.Autotuner)
    return found


class ScriptedNetwork:
    """Stands in for the probe: the network that a test wants, from exact steps on."""

    def __init__(self, world: int, rates: dict[int, float]) -> None:
        self.world, self.rates = world, rates
        self.step = 0

    def __call__(self, channel: Any, elements: int) -> Network:
        rate = next(r for step, r in sorted(self.rates.items(), reverse=True) if self.step >= step)
        return Network.ideal(self.world, rate, 1e-7)


def trained(rank: int, world: int, rates: dict[int, float], steps: int, nap: dict[int, float]) -> dict[str, Any]:
    """Train with auto under a scripted network; waits grow by `nap` seconds from exact steps on."""
    network, real, ended = ScriptedNetwork(world, rates), module.Autotuner.probe, module.Autotuner.end_step
    share, module.PROBE_SHARE = module.PROBE_SHARE, 1e9  # on a busy machine the scripted probe may take long, too
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)

    def slowly(self: module.Autotuner) -> None:
        ended(self)
        assert self._now is not None
        self._now.ended += next((s for step, s in sorted(nap.items(), reverse=True) if network.step >= step), 0.0)

    module.Autotuner.probe, module.Autotuner.end_step = network, slowly  # type: ignore[assignment,method-assign]
    try:
        model = jobs.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        link = tw.attach(model, "auto", optimizer=optimizer, check_every=5)
        chosen, modes = [], []
        for step in range(steps):
            network.step = step
            jobs.train(model, rank, range(step, step + 1), optimizer)
            chosen.append(str(tuner_of(model).setting))
            modes.append(link.dense_width)
        figures, why = link.stats(), link.why
        held = sum(
            float(t.abs().sum()) for n, _ in model.module.named_parameters() for t in link.codec.residuals(n).values()
        )
        link.detach()
    finally:
        module.Autotuner.probe, module.Autotuner.end_step = staticmethod(real), ended  # type: ignore[method-assign]
        module.PROBE_SHARE = share
        logging.getLogger("thinwire").removeHandler(handler)
    return {
        "chosen": chosen,
        "modes": modes,
        "digest": jobs.digest(model),
        "steps": figures["steps"],
        "sent": figures["last_step"]["bytes_sent"],
        "held": held,
        "why": why,
        "log": [line for line in records if line.startswith("auto")],
    }


def alike(seen_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    for other in seen_by_rank[1:]:
        assert (other["chosen"], other["modes"], other["digest"]) == tuple(
            seen_by_rank[0][key] for key in ("chosen", "modes", "digest")
        )
        assert other["log"] == []  # one line in all, not one a rank
    return seen_by_rank[0]


def test_on_a_fast_network_it_is_dense_and_keeps_nothing(cluster: Cluster) -> None:
    seen = alike(cluster.run(trained, 3, 3, {0: 1e13}, 20, {}))
    assert set(seen["chosen"]) == {"dense"} and set(seen["modes"]) == {4} and seen["held"] == 0.0
    assert seen["steps"] >= 19
    parameters = sum(p.numel() for p in jobs.Net().parameters())
    assert seen["sent"] == 2 * 4 * parameters * 2 // 3
    assert len(seen["log"]) == 1 and "dense at" in seen["log"][0] and seen["why"] in seen["log"][0]


def test_when_the_network_becomes_slow_it_compresses_and_back(cluster: Cluster) -> None:
    rates = {0: 1e13, 25: 2e5, 60: 1e13}
    seen = alike(cluster.run(trained, 2, 2, rates, 110, {0: 0.0, 25: 5.0, 60: 0.0}))
    assert seen["chosen"][20] == "dense"
    assert "by" in seen["chosen"][45], "a slow network at step 25 must be noticed within 20 steps"
    assert seen["chosen"][-1] == "dense" and seen["held"] == 0.0
    changes = sum(a != b for a, b in zip(seen["chosen"], seen["chosen"][1:], strict=False))
    assert changes == 2 and len(seen["log"]) == 3  # the first decision, there and back; no hunting


def test_a_network_with_moods_is_no_reason_to_hunt(cluster: Cluster) -> None:
    rates = {step: 2e6 * (1.0 + 0.3 * (step // 10 % 2)) for step in range(0, 90, 10)}
    seen = alike(cluster.run(trained, 2, 2, rates, 90, {s: 0.05 * (1 + s // 10 % 2) for s in range(0, 90, 10)}))
    assert len(set(seen["chosen"][10:])) == 1 and len(seen["log"]) == 1


def tiered(rank: int, rates: dict[int, float], steps: int) -> tuple[list[str], probe.Account, list[int]]:
    """Four ranks on two machines, with a model whose gradients are known; nothing of them may be lost."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    network, real, again = ScriptedNetwork(4, rates), module.Autotuner.probe, (module.PROBE_EVERY, module.PROBE_SHARE)
    module.Autotuner.probe, module.PROBE_EVERY, module.PROBE_SHARE = network, 1, 1e9  # type: ignore[assignment]
    try:
        model, account = probe.make(), probe.Account()
        link = tw.attach(model, "auto")
        # Machines are asked of loopback, which may be slow on a busy machine: nothing else is to be better.
        everything = TuningPolicy(alpha=0.0, margin=0.0, settings=(DENSE, Setting("0.01", "gather", density=0.01)))
        tuner_of(model)._policy = everything
        chosen = []
        for step in range(steps):
            network.step = step
            model.zero_grad()
            probe.plain(model, rank, step, account)
            assert account.apply(model)
            chosen.append(str(tuner_of(model).setting))
        weight = link.exchange.weight()
        account.close(link)
        link.detach()
    finally:
        module.Autotuner.probe, (module.PROBE_EVERY, module.PROBE_SHARE) = staticmethod(real), again
    return chosen, account, [weight]


def test_machines_of_several_ranks_exchange_as_one(cluster: Cluster) -> None:
    seen_by_rank = cluster.run(tiered, 4, {0: 1e3, 20: 1e13}, 48)
    chosen = seen_by_rank[0][0]
    assert all(other[0] == chosen for other in seen_by_rank)
    assert chosen[0] == "0.01 by gather" and "by hierarchical" in chosen[18] and chosen[-1] == "dense"
    accounts = [account for _, account, _ in seen_by_rank]
    assert probe.missing(accounts) < 1e-3 and sum(float(a.held["d"].abs().sum()) for a in accounts) == 0.0


def test_residuals_of_machines_are_not_lost_before_they_go_apart(cluster: Cluster) -> None:
    seen_by_rank = cluster.run(tiered, 4, {0: 1e3}, 16)
    assert "by hierarchical" in seen_by_rank[0][0][-1] and [weight for _, _, (weight,) in seen_by_rank] == [2, 0, 2, 0]
    accounts = [account for _, account, _ in seen_by_rank]
    for account, (_, _, (weight,)) in zip(accounts, seen_by_rank, strict=True):
        account.held = {name: weight * held for name, held in account.held.items()}
    assert probe.missing(accounts) < 1e-3 and float(accounts[0].held["d"].abs().sum()) > 0.0


def alone(rank: int) -> list[Any]:
    """One rank leaves its gradients alone; an exchange may not be given besides."""
    model = jobs.make()
    link = tw.attach(model, "auto")
    jobs.train(model, rank, range(3), torch.optim.SGD(model.parameters(), lr=0.1))
    why = link.why
    link.detach()
    try:
        tw.attach(jobs.make(), "auto", exchange="gather")
    except ValueError as error:
        return [why, str(error)]
    return [why]


def test_one_rank_has_nothing_to_choose(cluster: Cluster) -> None:
    (seen,) = cluster.run(alone, 1)
    assert "single process" in seen[0]
    assert seen[1:] == ['"auto" chooses the exchange itself: leave exchange out, or name a codec']


def narrow(rank: int) -> tuple[int, int, set[str], float]:
    """A model whose gradients are 16 bits wide, on a fast network: dense."""
    ddp = DDP(jobs.Net().to(torch.bfloat16))
    link = tw.attach(ddp, "auto")
    tuner = tuner_of(ddp)
    vars(tuner)["probe"] = lambda channel, elements: Network.ideal(2, 1e11, 5e-5)
    for _ in range(12):
        ddp.zero_grad()
        ddp(jobs.batch(rank, 0)[0].bfloat16())  # DDP wants a forward pass
        # float16 would make zeros of these gradients.
        torch.stack([p.float().square().sum() * 1e-30 for p in ddp.parameters()]).sum().backward()
    sent, width = link.stats()["last_step"]["bytes_sent"], link.dense_width
    link.detach()
    largest = max(float(p.grad.abs().max()) for p in ddp.parameters() if p.grad is not None)
    return sent, width, {setting.name for setting in tuner._policy.settings}, largest


def test_gradients_that_are_narrow_already_are_not_narrowed(cluster: Cluster) -> None:
    first, second = cluster.run(narrow, 2)
    assert first == second
    sent, width, names, largest = first
    assert width == 2 and "dense" in names and "fp16" not in names
    assert sent == 2 * sum(p.numel() for p in jobs.Net().parameters()) and largest > 0.0


def really(rank: int) -> tuple[list[int], str, int]:
    """The probe measures loopback."""
    model = jobs.make()
    link = tw.attach(model, "auto")
    jobs.train(model, rank, range(30), torch.optim.SGD(model.parameters(), lr=0.1))
    made = len(tuner_of(model).decisions)
    state = link.state_dict()
    link.detach()
    again = jobs.make()
    resumed = tw.attach(again, "auto")
    resumed.load_state_dict(state)
    jobs.train(again, rank, range(3), torch.optim.SGD(again.parameters(), lr=0.1))
    resumed.detach()
    return jobs.digest(model) + jobs.digest(again), link.why, made


def test_with_a_real_probe_the_ranks_stay_together(cluster: Cluster) -> None:
    (first, why, made), (second, other, _) = cluster.run(really, 2)
    assert first == second and why == other and made >= 1
    assert "Mbit/s" in why


def adaptive(rank: int, agree: str | None) -> tuple[list[int], list[float], bool]:
    cost = tw.tune.Measured()
    model = jobs.make()
    link = tw.attach(model, tw.Codec(tw.Adaptive(cost, agree=agree)), exchange="gather")  # type: ignore[arg-type]
    jobs.train(model, rank, range(20), torch.optim.SGD(model.parameters(), lr=0.1))
    link.wait()
    aims = [state.get("agreed", -1.0) for _, state in sorted(link.codec.learned.items())]
    selection = link.codec.selection
    assert isinstance(selection, tw.Adaptive) and selection.elements == sum(p.numel() for p in model.parameters())
    link.detach()
    return jobs.digest(model), aims, cost.known


@pytest.mark.parametrize("agree", ["mean", "min", None])
def test_adaptive_ranks_agree_on_what_they_send(cluster: Cluster, agree: str | None) -> None:
    (digest, aims, known), (other, others, _) = cluster.run(adaptive, 2, agree)
    assert digest == other and known
    assert aims == others
    assert all((aim > 0.0) == (agree is not None) for aim in aims)


def test_in_the_lab_a_rate_that_falls_is_noticed_within_fifty_steps() -> None:
    needs("lab")
    seen: list[tuple[int, float, bool]] = []

    def read(host: int, line: str) -> None:
        if line.startswith("STEP "):
            step, bandwidth, compressed, *_ = line.split()[1:]
            seen.append((int(step), float(bandwidth), compressed == "1"))
            if int(step) == 30:
                for each in range(2):
                    lab.set_rate(each, "20mbit")

    with Lab(2, rate="500mbit") as lab:
        command = [sys.executable, "-m", "tests.tune.autotune_worker", "82"]
        result = lab.run(command, output=read, timeout=240)
    assert result.failure is None, result.hosts[0].lines[-5:]
    assert seen[-1][2], "in the end it compresses"
    # On a busy machine even the fast link may look slow, and there is nothing to notice.
    if not any(compressed for step, _, compressed in seen if step <= 30):
        after = next(
            (step for step, bandwidth, compressed in seen if step > 30 and bandwidth < 40e6 and compressed), None
        )
        assert after is not None and after <= 30 + 50, seen[-1]
