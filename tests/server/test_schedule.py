"""Pool: with every policy each request is sent once, in its layer's order, within the window."""

from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.server.schedule import POLICIES, Pool, Request, Staleness

LAYERS = 4
requests = st.builds(
    Request,
    kind=st.sampled_from(["push", "pull"]),
    layer=st.integers(0, LAYERS - 1),
    part=st.integers(0, 3),
    clock=st.integers(0, 3),
    size=st.integers(0, 100),
)
clocks = st.lists(st.integers(0, 3), min_size=LAYERS, max_size=LAYERS)
knowledge = st.builds(Staleness, lowest=clocks, holders=clocks, here=clocks)
policies = st.sampled_from(sorted(POLICIES))


def push(layer: int, *, part: int = 0, clock: int = 0, size: int = 10) -> Request:
    return Request("push", layer, part, clock, size)


def pull(layer: int, *, clock: int = 0) -> Request:
    return Request("pull", layer, 0, clock, 0)


def pool(policy: str, *waiting: Request, known: Staleness | None = None, window: int = 10**6) -> Pool:
    made = Pool(policy, known or Staleness.at_start(LAYERS, workers=2), window)
    for request in waiting:
        made.put(request)
    return made


def drain(made: Pool) -> list[Request]:
    """Take all requests, each acknowledged before the next."""
    order = []
    while (request := made.next()) is not None:
        made.done(request.size)
        order.append(request)
    return order


# What happens to a pool: a request comes, the sender takes one, the oldest in flight is acknowledged.
steps = st.lists(st.one_of(requests, st.sampled_from(["next", "done"])), max_size=60)


@given(policies, knowledge, st.integers(1, 150), steps)
def test_nothing_is_lost_or_sent_twice_and_the_window_holds(
    policy: str, known: Staleness, window: int, steps: list[Request | Literal["next", "done"]]
) -> None:
    made = pool(policy, known=known, window=window)
    put, sent, in_flight = [], [], []
    for step in steps:
        if isinstance(step, Request):
            made.put(step)
            put.append(step)
        elif step == "next" and (request := made.next()) is not None:
            sent.append(request)
            in_flight.append(request)
        elif step == "done" and in_flight:
            made.done(in_flight.pop(0).size)
        assert made.in_flight == sum(request.size for request in in_flight)
        assert made.in_flight <= window or sum(request.size > 0 for request in in_flight) == 1
    while in_flight:
        made.done(in_flight.pop().size)
    sent += drain(made)
    assert len(made) == 0 and made.next() is None
    assert Counter(sent) == Counter(put)
    for layer in range(LAYERS):
        assert [r for r in sent if r.layer == layer] == [r for r in put if r.layer == layer]


@given(knowledge, st.lists(requests, max_size=30))
def test_fifo_keeps_the_order_of_arrival(known: Staleness, waiting: list[Request]) -> None:
    assert drain(pool("fifo", *waiting, known=known)) == waiting


@given(st.lists(requests, max_size=30), st.lists(requests, max_size=5))
def test_forward_never_sends_a_layer_while_an_earlier_one_waits(first: list[Request], later: list[Request]) -> None:
    made = pool("forward", *first)
    waiting = Counter(r.layer for r in first)
    for extra in [*later, *[None] * len(first)]:
        if extra is not None:
            made.put(extra)
            waiting[extra.layer] += 1
        if (request := made.next()) is not None:
            assert request.layer == min(+waiting)
            waiting[request.layer] -= 1


@given(st.lists(requests, min_size=1, max_size=30))
def test_filo_prefers_the_layer_whose_first_request_came_last(waiting: list[Request]) -> None:
    made = pool("filo", *waiting)
    request = made.next()
    firsts = {r.layer: place for place, r in reversed(list(enumerate(waiting)))}
    assert request is not None and firsts[request.layer] == max(firsts.values())


def test_only_filo_starves_early_requests() -> None:
    for policy, starves in (("filo", True), ("fifo", False)):
        made, sent = pool(policy, push(0)), []
        for _ in range(100):
            made.put(push(1))
            sent.append(made.next())
        assert (push(0) not in sent) == starves


def test_stalest_pulls_what_is_stalest_here_and_pushes_what_raises_the_minimum() -> None:
    known = Staleness(lowest=[2, 1, 3, 3], holders=[3, 2, 1, 2], here=[3, 1, 2, 1])
    pulls = [pull(layer) for layer in range(4)]
    assert [r.layer for r in drain(pool("stalest", *pulls, known=known))] == [1, 3, 2, 0]
    # Layer 2 lacks only this worker; then come the lowest step and the order of use.
    pushes = [push(layer, clock=3) for layer in range(4)]
    assert [r.layer for r in drain(pool("stalest", *pushes, known=known))] == [2, 1, 0, 3]
    mixed = drain(pool("stalest", push(2, clock=3), pull(0), known=known))
    assert [r.kind for r in mixed] == ["pull", "push"]


def test_stalest_uses_figures_that_change_while_requests_wait() -> None:
    known = Staleness.at_start(LAYERS, workers=2)
    made = pool("stalest", push(0), push(3), push(1), known=known)
    known.holders[3] = 1
    assert made.next() == push(3)
    known.lowest[0] = 1
    assert made.next() == push(1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_pull_does_not_overtake_its_push(policy: str) -> None:
    line = [push(1), pull(1), push(1, part=1), pull(1, clock=1)]
    assert drain(pool(policy, *line)) == line


def test_the_window_limits_bytes_in_flight() -> None:
    made = pool("fifo", push(0, size=50), push(1, size=60), push(2, size=10), window=100)
    assert made.next() == push(0, size=50)
    assert made.next() is None  # 110 would be in flight; layer 2 must not overtake
    made.sent(push(0, size=50), 30)  # it was smaller than estimated
    assert made.next() == push(1, size=60) and made.in_flight == 90
    made.done(30)
    assert made.next() == push(2, size=10) and made.in_flight == 70
    with pytest.raises(ValueError, match="71 bytes were acknowledged, but only 70"):
        made.done(71)


def test_any_request_fits_when_nothing_is_in_flight() -> None:
    made = pool("fifo", push(0, size=500), push(1, size=1), window=100)
    assert made.next() == push(0, size=500) and made.next() is None
    made.done(500)
    assert made.next() == push(1, size=1)


def test_unknown_policies_and_empty_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="the policy 'lifo' is unknown; choose one of fifo, filo, stalest, forward"):
        pool("lifo")
    with pytest.raises(ValueError, match="window must be at least 1 byte"):
        pool("fifo", window=0)
