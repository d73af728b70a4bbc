"""The model of the scheduler: small cases by hand, all orders of one, and what must hold in any."""

import random
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.serving import gradients, serving, small_net
from thinwire.errors import LogError
from thinwire.server.schedule import POLICIES, Policy
from thinwire.server.server import Server
from thinwire.server.worker import Worker
from thinwire.tools.race.profile import LayerTimes, Profiler, read_profile, write_profile
from thinwire.tools.simulate.schedule import Case, ScheduleOutcome, SharedLink, compare, even_slices, simulate, winner

ALL = sorted(POLICIES)


def case(transfer: list[float], *, forward: float = 1, backward: float = 1, workers: int = 1, **more: Any) -> Case:
    """Times in milliseconds; two steps unless said otherwise."""
    layers = tuple(LayerTimes(f"{n}", forward / 1e3, backward / 1e3, t / 1e3) for n, t in enumerate(transfer))
    return Case(layers, workers, **{"iterations": 2, **more})


def ms(outcome: ScheduleOutcome) -> float:
    """The makespan in milliseconds; the model rounds to millionths of one."""
    return round(outcome.makespan * 1e3, 6)


def by_hand(policy: str, **more: Any) -> float:
    """One worker, two layers in two slices each: the first takes 2 ms, the last 4 ms; a window of 2 ms."""
    return ms(simulate(case([2, 4], slices=(2, 2), window=2e-3, **more), policy))


@pytest.mark.parametrize("policy", ALL)
def test_by_hand_one_worker_two_layers(policy: str) -> None:
    # Backward of layer 1 ends at 3 and of layer 0 at 4. fifo pushes 1a 3-5, 1b 5-7, 0 7-9 and pulls 1a 5-7, 1b 7-9,
    # 0 9-11; step 2 computes 11-15 and pushes 14-20. The others push 0 before 1b, at 5-7, and pull it 7-9: layer 0
    # starts at 9, layer 1 when it has come at 11, its backward ends at 13, and the last push at 13 + 6.
    assert by_hand(policy) == (20 if policy == "fifo" else 19)
    # A lone worker that waits for its own pulls gains nothing from a bound; if its copy will do, it never waits for
    # step 2: its pushes of step 1 end at 9, and those of step 2 take 6 more.
    assert by_hand(policy, staleness=1) == by_hand(policy)
    assert by_hand(policy, staleness=1, waits_for="copy") == 15


def test_by_hand_versions_of_whole_layers() -> None:
    # Layer 1 is there at 7 and comes 7-11, layer 0 comes 11-13; step 2 computes 13-17 and pushes 16-22.
    assert by_hand("fifo", versions="layer") == 22
    # Layer 0 is pushed 5-7 and comes 7-9, layer 1 is there at 9 and comes 9-13; its backward ends at 15.
    assert by_hand("forward", versions="layer") == 21


def test_by_hand_latency_window_and_slowness() -> None:
    # One layer of one slice: forward, backward, push and pull one after the other, and half a millisecond each way.
    assert ms(simulate(case([4], latency=0.5e-3), "fifo")) == 2 + 4.5 + 4.5 + 2 + 4.5
    # In four slices with a window of one, three slices wait for an acknowledgement of the one before.
    sliced: dict[str, Any] = {"slices": (4,), "latency": 0.5e-3}
    assert ms(simulate(case([4], iterations=1, window=1e-3, **sliced), "fifo")) == 2 + 4 + 3 + 0.5
    assert ms(simulate(case([4], iterations=1, **sliced), "fifo")) == 2 + 4 + 0.5  # a window of two never waits
    assert ms(simulate(case([4], iterations=1, slowness=(3.0,)), "fifo")) == 6 + 4


def test_by_hand_workers_share_the_servers_link() -> None:
    assert ms(simulate(case([4], workers=2), "fifo")) == 2 + 8 + 8 + 2 + 8
    assert ms(simulate(case([4], workers=2, server_rate=2.0), "fifo")) == 2 + 4 + 4 + 2 + 4
    assert ms(simulate(case([4], workers=2, server_rate=0.5), "fifo")) == 2 + 16 + 16 + 2 + 16
    # The slow worker computes until 6 while the other pushes alone: 2-6 and 6-10, then both pull at half the rate.
    assert ms(simulate(case([4], workers=2, slowness=(1.0, 3.0)), "fifo")) == 10 + 8 + 6 + 4


def fixed_order(ranks: tuple[int, ...]) -> Policy:
    """A policy that sends layers in one fixed order."""
    return lambda request, arrival, known: (ranks[request.layer],)


@pytest.mark.parametrize("transfer", [[2, 2, 2, 2], [6, 3, 3, 3], [1, 1, 1, 4]])
def test_forward_is_the_best_of_all_fixed_orders(transfer: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = case(transfer).layers
    tiny = Case(layers, workers=2, iterations=3, slices=even_slices(layers, 4))
    makespans = []
    for ranks in permutations(range(4)):
        monkeypatch.setitem(POLICIES, "ranked", fixed_order(ranks))
        makespans.append(simulate(tiny, "ranked").makespan)
    assert simulate(tiny, "forward").makespan == makespans[0] == min(makespans)
    assert simulate(tiny, "fifo").makespan == max(makespans) > min(makespans)


def random_case(seed: int, staleness: int) -> Case:
    draw = random.Random(seed)
    layers, workers = draw.randint(1, 5), draw.randint(1, 4)
    return Case(
        tuple(LayerTimes(f"{n}", *(draw.randint(0, 9) / 1e3 for _ in range(3))) for n in range(layers)),
        workers,
        iterations=5,
        staleness=staleness,
        slices=tuple(draw.randint(1, 3) for _ in range(layers)),
        server_rate=draw.choice([0.5, 1.0, 4.0]),
        latency=draw.choice([0.0, 0.3e-3]),
        slowness=tuple(draw.choice([1.0, 1.0, 3.0]) for _ in range(workers)),
        waits_for=draw.choice(["answer", "copy"]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_more_staleness_is_not_slower_and_never_beyond_its_bound(seed: int) -> None:
    # Nearly: a list schedule may become longer when a constraint goes away, but not by much.
    for policy in ALL:
        makespans = []
        for bound in (0, 1, 3):
            outcome = simulate(random_case(seed, bound), policy)
            assert outcome.staleness_max <= bound and outcome.staleness_mean <= bound
            makespans.append(outcome.makespan)
        assert all(looser <= 1.05 * tighter for tighter, looser in pairwise(makespans))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), bound=st.integers(0, 2), policy=st.sampled_from(ALL))
def test_what_holds_in_any_case(seed: int, bound: int, policy: str) -> None:
    given_case = random_case(seed, bound)
    outcome = simulate(given_case, policy)
    assert outcome == simulate(given_case, policy)  # to the last bit
    steps = given_case.iterations
    seen = {(i.worker, i.doing, i.layer, i.part, i.clock) for i in outcome.intervals}
    assert len(seen) == len(outcome.intervals)
    wanted = {
        (worker, doing, layer, part, clock)
        for worker in range(given_case.workers)
        for layer in range(len(given_case.layers))
        for doing in ("forward", "backward", "push", "pull")
        for part in range(given_case.slices_of(layer) if doing in ("push", "pull") else 1)
        for clock in range(doing == "pull", steps)  # the parameters of step 0 are there
    }
    assert seen == wanted
    for worker in range(given_case.workers):
        for lane in (("forward", "backward"), ("push",), ("pull",)):
            busy = sorted((i.start, i.end) for i in outcome.intervals if i.worker == worker and i.doing in lane)
            assert all(first[1] <= then[0] for first, then in pairwise(busy))
    work = sum(layer.forward + layer.backward for layer in given_case.layers) * max(given_case.slowness)
    load = sum(layer.transfer for layer in given_case.layers) * given_case.workers / given_case.server_rate
    assert outcome.makespan >= steps * max(work, load) - 1e-6


@given(st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 4.0]))
def test_a_shared_link_carries_everything_in_order_and_never_idles(lanes: list[list[int]], rate: float) -> None:
    link: SharedLink[int] = SharedLink(len(lanes), rate)
    for lane, sizes in enumerate(lanes):
        for place, size in enumerate(sizes):
            link.send(lane, place, size / 1e3)
    now, through = 0.0, []
    while (moment := link.next_time()) is not None:
        assert moment >= now
        now = moment
        through += link.advance(now)
    for lane, sizes in enumerate(lanes):
        assert [d.message for d in through if d.lane == lane] == list(range(len(sizes)))
    alone, together = max(map(sum, lanes)) / 1e3, sum(map(sum, lanes)) / 1e3 / rate
    assert now >= max(alone, together) - 1e-6
    if rate <= 1 or rate >= len(lanes):
        assert now == pytest.approx(max(alone, together), abs=1e-6)


def test_slices_of_one_size() -> None:
    layers = case([8, 1, 2, 3, 0]).layers
    assert even_slices(layers, 4) == (4, 1, 1, 2, 1)
    assert even_slices(layers, 8) == (8, 1, 2, 3, 1)
    assert even_slices(case([0, 0]).layers, 4) == (1, 1)
    with pytest.raises(ValueError, match="at least one slice, not 0"):
        even_slices(layers, 0)


def test_the_winner() -> None:
    outcomes = compare(case([2] * 4, workers=4, slices=(4,) * 4), ["fifo", "forward"])
    assert [o.policy for o in outcomes] == ["fifo", "forward"]
    assert winner(outcomes).policy == "forward"
    assert sum(outcomes[0].waiting) > sum(outcomes[1].waiting) > 0
    assert winner(compare(case([1]), ["filo", "fifo", "forward"])).policy == "fifo"  # all equal; filo starves
    with pytest.raises(ValueError, match="the policy 'best' is unknown"):
        compare(case([1]), ["fifo", "best"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"workers": 0}, "at least one worker, not 0"),
        ({"iterations": 0}, "at least one iteration, not 0"),
        ({"staleness": -1}, "staleness bound must be 0 or more, not -1"),
        ({"slices": (1,)}, "2 layers need 2 numbers of slices"),
        ({"slices": (1, 0)}, "at least one slice"),
        ({"slowness": (1.0, 1.0)}, "1 workers need 1 figures"),
        ({"slowness": (0.0,)}, "slowness of a worker must be more than 0"),
        ({"server_rate": float("nan")}, "server's rate must be more than 0"),
        ({"latency": -1.0}, "latency must be 0 or more"),
        ({"window": 0.0}, "window must be more than 0"),
        ({"versions": "model"}, 'a "slice" or a "layer", not \'model\''),
        ({"waits_for": "luck"}, 'an "answer" or a "copy", not \'luck\''),
    ],
)
def test_impossible_cases_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        case([1, 1], **more)


def test_a_profile_goes_to_a_file_and_back(tmp_path: Path) -> None:
    layers = (LayerTimes("conv1", 0.001, 0.002, 0.008), LayerTimes("fc", 0, 0.1, 0.25))
    write_profile(tmp_path / "profile.json", layers)
    assert read_profile(tmp_path / "profile.json") == layers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "has no layers"),
        ('{"layers": []}', "has no layers"),
        ('{"layers": [3]}', "layer 0: it is not an object"),
        ('{"layers": [{"forward": 1, "backward": 1}]}', "layer 0: 'transfer' must be a number"),
        ('{"layers": [{"forward": 1, "backward": 1, "transfer": true}]}', "layer 0: 'transfer' must be a number"),
        ('{"layers": [{"forward": -1, "backward": 1, "transfer": 1}]}', "must be 0 or more, not -1"),
        ('{"layers": [{"forward": NaN, "backward": 1, "transfer": 1}]}', "must be 0 or more, not nan"),
    ],
)
def test_a_wrong_profile_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(LogError, match=said):
        read_profile(tmp_path / "profile.json")
    with pytest.raises(LogError, match="cannot read the profile"):
        read_profile(tmp_path / "missing.json")


def test_a_real_workers_profile_feeds_the_model(tmp_path: Path) -> None:
    model, path = small_net(), tmp_path / "profile.json"
    server = Server(model, torch.optim.SGD(model.parameters(), lr=0.1), expect=1)
    with serving(server, max_steps=5) as address, Worker(address, small_net(1)) as worker:
        profiler = Profiler(worker)
        while worker.stopped is None:
            gradients(worker.model, worker.clock, worker.slot)
            worker.step()
        profiler.close()
        profiler.write(path)
    layers = read_profile(path)
    assert [layer.name for layer in layers] == worker.layers
    assert all(layer.forward > 0 and layer.backward > 0 and layer.transfer > 0 for layer in layers)
    assert simulate(Case(layers, workers=2, iterations=3), "forward").makespan > 0
