"""attach(net, "auto", optimizer=AdamW): domain, local steps and share follow from the network, alike on all ranks."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.cluster import Cluster
from tests.hooks.test_local_steps import hook_of, shared_of
from tests.hooks.test_optimizer import adamw, made
from tests.link import jobs
from thinwire.link import assembly
from thinwire.link import autotune_updates as module
from thinwire.tune.forecast import (
    Network,
    Workload,
    decide_update,
    dense_instead,
    settings_for_updates,
    update_settings,
)

FAST, THIN = 1e13, 1e3  # bits per second: everything is hidden, and nothing is


def scripted(rate: float) -> None:
    """Let this process probe a network of that rate, and compress in no time."""
    probe = staticmethod(lambda channel, elements=None: Network.ideal(channel.world, rate, 1e-9))
    module.UpdateTuner.probe = probe
    assembly.probe_network = probe.__func__  # type: ignore[attr-defined]
    module.update_seconds = lambda codec, tensors: (0.0, 0.0)  # type: ignore[attr-defined]


def tuned(rank: int, rate: float, ddp: bool, options: dict[str, Any]) -> dict[str, Any]:
    scripted(rate)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    net, model = made(rank, ddp=ddp)
    optimizer = adamw(model)
    link = tw.attach(model, "auto", optimizer=optimizer, check_every=1, **options)
    if link.domain == "gradient":
        jobs.train(model, rank, range(3), optimizer)
        link.detach()
        return {"domain": link.domain, "exchange": str(link.exchange), "digest": jobs.digest(net)}
    settings, shared = [], []
    for step in range(12):
        jobs.train(model, rank, range(step, step + 1), optimizer)
        updates = hook_of(net).updates
        updates.finish()
        settings.append((updates.setting, updates.rounds.every, updates.rounds.overlap))
        shared.append(shared_of(net))
    why = link.why
    link.flush()
    link.detach()
    log = [line for line in records if line.startswith("auto")]
    return {"settings": settings, "shared": shared, "digest": jobs.digest(net), "why": why, "log": log}


@pytest.mark.parametrize(("rate", "name", "every"), [(FAST, "update", 1), (THIN, "local64", 64)])
def test_all_ranks_choose_the_first_preset_that_hides_the_network(
    cluster: Cluster, rate: float, name: str, every: int
) -> None:
    first, *others = cluster.run(tuned, 3, rate, False, {})
    assert all(other[key] == first[key] for other in others for key in ("settings", "shared", "digest", "why"))
    assert first["settings"][0] == ("", 1, False) and first["settings"][-1] == (name, every, every > 1)
    assert f"{name} at" in first["why"] and "hides the network" in first["why"]
    # The domain stays what it was when the time of a step was not known yet; the user is told what would be better.
    assert ("use DDP without thinwire" in first["why"]) == (rate == FAST)
    assert len(first["log"]) == 1 and all(other["log"] == [] for other in others)


def test_the_domain_follows_from_the_network(cluster: Cluster) -> None:
    """DDP averages gradients itself where that is quick; domain="update" overrides it."""
    for found in cluster.run(tuned, 2, FAST, True, {}):
        assert found["domain"] == "gradient" and found["exchange"].startswith("Dense")
    for found in cluster.run(tuned, 2, FAST, True, {"domain": "update"}):
        assert found["settings"][-1][0] == "update"
    first, second = cluster.run(tuned, 2, THIN, True, {})
    assert first["settings"][-1][0] == "local64" and first["shared"] == second["shared"]


def interrupted(rank: int, folder: str, at: int) -> bool:
    """Save after some steps, go on to 14, and again from the saved state; returns whether both ends are equal."""
    scripted(THIN)
    net, _ = made(rank, ddp=False)
    optimizer = adamw(net)
    link = tw.attach(net, "auto", optimizer=optimizer)
    jobs.train(net, rank, range(at), optimizer)
    torch.save([link.state_dict(), net.state_dict()], f"{folder}/{rank}.pt")
    jobs.train(net, rank, range(at, 14), optimizer)
    link.flush()
    link.detach()
    again, _ = made(rank, ddp=False)
    other = adamw(again)
    resumed = tw.attach(again, "auto", optimizer=other)
    state, weights = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    jobs.train(again, rank, range(at, 14), other)
    resumed.flush()
    resumed.detach()
    return jobs.digest(again) == jobs.digest(net)


def test_a_resumed_run_continues_with_the_choice(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(interrupted, 2, str(tmp_path), 9) == [True, True]


def refused(rank: int) -> str:
    net, _ = made(rank, ddp=False)
    try:
        tw.attach(net, "auto", optimizer=adamw(net), every=4)
    except ValueError as error:
        return str(error)
    return ""


def test_what_auto_chooses_cannot_be_given(cluster: Cluster) -> None:
    assert "chooses every, overlap and the exchange itself" in cluster.run(refused, 2)[0]


def test_dense_gradients_are_advised_where_they_hide_the_network() -> None:
    """An all-reduce of 40 MB at 1 Gbit/s takes 0.48 s: less than 5 % of a step of 10 s, and more than that of 1 s."""
    network, presets = Network.ideal(4, 1e9, 1e-4), update_settings(4)
    slow, fast = (Workload(compute, (10_000_000,), (0.0,), 0.0, 0.0) for compute in (10.0, 1.0))
    assert dense_instead(slow, network, presets, 4).startswith("uncompressed gradients would hide it as well, at 10481")
    assert dense_instead(fast, network, presets, 4) == ""


def test_thinner_networks_take_more_local_steps() -> None:
    work = Workload(0.2, (10_000_000,), (0.0,), 0.0, 0.0)
    chosen = [
        decide_update(work, Network.ideal(4, rate, 1e-4), settings_for_updates(4))[0].name
        for rate in (1e11, 2e9, 2e8, 2e7, 1e6)
    ]
    order = ["dense", "fp16", "update", "local4", "local16", "local64"]
    places = [order.index(name) for name in chosen]
    assert places == sorted(places) and chosen[0] == "dense" and chosen[-1] == "local64" and len(set(chosen)) >= 4
    assert [setting.every for setting in update_settings(2)] == [1, 4, 16, 64]
