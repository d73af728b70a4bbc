"""Replicas and layouts: in any order of events a replica equals the worker's parameters, bit for bit."""

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.server.serving import lost_entries, residual
from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits
from thinwire.server.layout import Layout, flat
from thinwire.server.replicas import LossyReplicas, ReceivedShards, Replicas, add_delta, write_full
from thinwire.transport.udp.recovery import pack

events = st.lists(st.tuples(st.sampled_from(["pull", "pull", "change", "forget"]), st.integers(0, 3)), max_size=60)


@settings(max_examples=60)
@given(events, st.integers(0, 2**31))
# One of two workers with the same replica pulls twice at the same version, which must not change the other's replica.
@example([("pull", 0), ("pull", 1), ("change", 0), ("pull", 0), ("pull", 0), ("pull", 1)], 0)
def test_a_replica_equals_the_parameters_of_its_worker(events: list[tuple[str, int]], seed: int) -> None:
    torch.manual_seed(seed)
    layout = Layout.of(nn.Linear(60, 30, bias=False), 0)
    model = [torch.randn(1800)]
    replicas = Replicas(layout, [[model]], Codec(TopK(0.1), Bits(4), min_numel=100))
    workers: dict[int, list[Tensor]] = {}
    for event, who in events:
        if event == "change":
            model[0] += torch.randn(1800)
            replicas.changed(0, 0)
        elif event == "forget":
            replicas.forget(who)
            workers.pop(who, None)
        else:
            answer = replicas.reply(who, 0, 0, full=who not in workers)
            mine = workers.setdefault(who, [torch.zeros(1800)])
            (write_full if answer.full else add_delta)(answer.body, mine)
        for each, values in workers.items():
            assert torch.equal(model[0] - values[0], residual(replicas, each, 0, 0)[0])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["pull", "pull", "change", "forget"]), st.integers(0, 2)), max_size=40),
    st.integers(0, 2**31),
)
def test_lost_entries_are_sent_again_exactly(events: list[tuple[str, int]], seed: int) -> None:
    """A worker differs from its replica only in entries that are known as lost, and the next delta repairs those."""
    torch.manual_seed(seed)
    model = [torch.randn(1800), torch.randn(40)]
    layout = Layout.of(nn.Linear(45, 40), 0)
    replicas = LossyReplicas(layout, [[model]], Codec(TopK(0.1), Bits(4), min_numel=100), budget=220)
    chance, workers = random.Random(seed), dict[int, list[Tensor]]()

    def pull(who: int, loss: float) -> None:
        answer = replicas.reply(who, 0, 0, full=who not in workers)
        mine = workers.setdefault(who, [torch.zeros(1800), torch.zeros(40)])
        if answer.full:
            write_full(answer.body, mine)
            return
        replicas.sent(who, (0, 0), b"peer", who)
        lost = frozenset(i for i in range(len(answer.shards)) if chance.random() < loss)
        pieces = [(i, shard) for i, shard in enumerate(answer.shards) if i not in lost]
        ReceivedShards(pack(len(answer.shards), answer.size, pieces), [1800, 40], exact=True).add_to(mine)
        replicas.settle(b"peer", who, lost)

    def check(may_differ: bool) -> None:
        for each, values in workers.items():
            lost = lost_entries(replicas, each, 0, 0)
            assert may_differ or not lost
            for tensor, missing in enumerate(residual(replicas, each, 0, 0)):
                agreed = torch.ones(len(missing), dtype=torch.bool)
                agreed[lost.get(tensor, torch.tensor([], dtype=torch.int64))] = False
                assert torch.equal((model[tensor] - values[tensor])[agreed], missing[agreed])

    for event, who in events:
        if event == "change":
            for values in model:
                values += torch.randn(len(values))
            replicas.changed(0, 0)
        elif event == "forget":
            replicas.forget(who)
            workers.pop(who, None)
        else:
            pull(who, 0.4)
        check(may_differ=True)
    for who in list(workers):
        pull(who, 0.0)
    check(may_differ=False)


def test_workers_at_the_same_version_share_one_delta_and_old_deltas_are_freed() -> None:
    layout = Layout.of(nn.Linear(60, 30, bias=False), 0)
    model = [torch.randn(1800)]
    replicas = Replicas(layout, [[model]], Codec(0.1))
    for who in range(3):
        replicas.reply(who, 0, 0, full=True)
    slow = replicas._at[0, 0][2]
    for _ in range(5):  # the third does not pull
        model[0] += torch.randn(1800)
        replicas.changed(0, 0)
        first, second = (replicas.reply(who, 0, 0, full=False) for who in range(2))
        assert first.body is second.body
    chain, node = 0, slow
    while node.delta is not None:
        node = node.delta[1]
        chain += 1
    assert chain <= 1  # a slow worker's replica must not keep all later versions alive


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6), st.integers(0, 200))
def test_a_layout_has_every_element_once(sizes: list[tuple[int, int]], cut: int) -> None:
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in sizes))
    layout = Layout.of(model, cut)
    seen = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    for layer, part in layout.places():
        pieces = layout.layers[layer].parts[part]
        assert not cut or sum(map(len, pieces)) <= cut
        for piece in pieces:
            seen[piece.parameter][piece.begin : piece.end] += 1
    assert all((count == 1).all() for count in seen.values())
    names = [piece.name for i, j in layout.places() for piece in layout.layers[i].parts[j]]
    assert len(set(names)) == len(names)
    assert list(layout.numbers.values()) == list(range(len(layout.numbers)))
    assert Layout.of(model, cut) == layout


def test_small_modules_join_the_layer_before_them() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Linear(100, 100), *(nn.BatchNorm1d(40) for _ in range(5)), nn.Linear(60, 60)
    )
    layers = [layer.modules for layer in Layout.of(model, 0).layers]
    # 1/64 of 14,166 elements are 221: two of 80 join a layer, and the next begins a new one.
    assert layers == [("0",), ("1", "2", "3"), ("4", "5", "6"), ("7",)]
    assert [name for layer in Layout.of(model, 0).layers for name in layer.parameters] == list(
        dict(model.named_parameters())
    )


@pytest.mark.parametrize(
    ("model", "cut", "reason"),
    [
        (lambda: nn.ReLU(), 0, "no parameter"),
        (lambda: nn.Linear(2, 2), -1, "at least one element"),
        (lambda: nn.Linear(1000, 1000), 3, "too many"),
        (lambda: nn.Linear(40_000, 40_000, device="meta"), 0, "too large for a message"),
    ],
)
def test_impossible_layouts_are_refused(model: Any, cut: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Layout.of(model(), cut)


def test_a_part_of_a_parameter_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        flat(torch.randn(3, 4).t())
