"""Views and layouts: what the server believes a worker has is what it has, bit for bit, in any order of events."""

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.selection import TopK
from thinwire.codec.values import Bits
from thinwire.server.layout import Layout, flat
from thinwire.server.replicas import LossyReplicas, ReceivedShards, Replicas, add_delta, write_full
from thinwire.transport.udp.recovery import pack

events = st.lists(st.tuples(st.sampled_from(["pull", "pull", "change", "forget"]), st.integers(0, 3)), max_size=60)


@settings(max_examples=60)
@given(events, st.integers(0, 2**31))
# One of two that were alike goes ahead, twice at the same edition: the other must not be taken where it is now.
@example([("pull", 0), ("pull", 1), ("change", 0), ("pull", 0), ("pull", 0), ("pull", 1)], 0)
def test_workers_have_what_their_nodes_say(events: list[tuple[str, int]], seed: int) -> None:
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
            assert torch.equal(model[0] - values[0], replicas.residual(each, 0, 0)[0])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["pull", "pull", "change", "forget"]), st.integers(0, 2)), max_size=40),
    st.integers(0, 2**31),
)
def test_what_a_worker_lost_it_gets_exactly(events: list[tuple[str, int]], seed: int) -> None:
    """Through any losses a worker has its node's bits but where it is owed some; a delta that arrives pays all."""
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
        replicas.sent(who, 0, 0, b"peer", who)
        lost = frozenset(i for i in range(len(answer.shards)) if chance.random() < loss)
        pieces = [(i, shard) for i, shard in enumerate(answer.shards) if i not in lost]
        ReceivedShards(pack(len(answer.shards), answer.size, pieces), [1800, 40], exact=True).add_to(mine)
        replicas.settle(b"peer", who, lost)

    def check(owed: bool) -> None:
        for each, values in workers.items():
            due = replicas.lost_entries(each, 0, 0)
            assert owed or not due
            for tensor, held in enumerate(replicas.residual(each, 0, 0)):
                agreed = torch.ones(len(held), dtype=torch.bool)
                agreed[due.get(tensor, torch.tensor([], dtype=torch.int64))] = False
                assert torch.equal((model[tensor] - values[tensor])[agreed], held[agreed])

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
        check(owed=True)
    for who in list(workers):
        pull(who, 0.0)
    check(owed=False)


def test_workers_in_step_share_one_delta_and_old_ones_are_let_go() -> None:
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
    assert chain <= 1  # what a slow worker has must not keep all editions since


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
    # 1/64 of 14,166 elements are 221: two of 80 join a layer, the next begins one; the first has none before it.
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
def test_layouts_that_cannot_be(model: Any, cut: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Layout.of(model(), cut)


def test_a_part_of_a_parameter_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        flat(torch.randn(3, 4).t())
