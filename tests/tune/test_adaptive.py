"""Adaptive: the number of entries is the one that pays best of all, moves slowly, and stays within its bounds."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from tests.codec.codec_cases import KINDS, quick
from thinwire.codec.feedback import Vector
from thinwire.codec.selection import NativeGroup, TorchGroup
from thinwire.tune.adaptive import Adaptive, MagnitudeCurve, Rule
from thinwire.tune.cost import Affine, Array, Cost, Measured, Packets, Payload

COSTS: list[Cost] = [
    Payload(),
    Affine(1e-4, 1e8),
    Affine(1e-2, 1e9),
    Affine(1.0, 1e6),
    Packets(),
    Packets(mtu=300, header=40, fixed=2000.0),
]


def curve_of(x: torch.Tensor, make: Any = NativeGroup) -> MagnitudeCurve:
    return MagnitudeCurve(make([Vector(x, None, 1.0, None, None)]).histogram(1 << 40, 0), x.numel())


def gains(x: torch.Tensor, rule: Rule) -> Array:
    """What 1, 2, ... n entries buy, by the papers' formulas, from all magnitudes in order."""
    m = np.sort(x.double().abs().numpy())[::-1]
    if rule == "plain":
        return np.asarray(np.cumsum(m * m) / np.sum(m * m))
    return np.asarray(np.cumsum(m) ** 2 / (np.arange(1, len(m) + 1) * np.sum(m * m)))


def random_gain(x: torch.Tensor, entries: int) -> float:
    """The same for a random choice of so many."""
    m = x.double().abs().sort(descending=True).values
    return float(m.square().sum()) / _expected_square(m, entries)


def _expected_square(m: torch.Tensor, entries: int) -> float:
    """E||sent||^2 at probabilities in proportion to the magnitudes, capped at 1, that add up to `entries`."""
    nonzero = m[m > 0]
    entries = min(entries, len(nonzero))
    for capped in range(entries):  # the largest `capped` travel for sure
        scale = float(nonzero[capped:].sum()) / (entries - capped)
        if scale >= float(nonzero[capped]):
            return float(nonzero[:capped].square().sum() + scale * nonzero[capped:].sum())
    return float(nonzero[:entries].square().sum())


@quick
@given(
    kind=st.integers(0, len(KINDS) - 1),
    n=st.sampled_from([1, 2, 33, 500, 3000]),
    seed=st.integers(0, 99),
    cost=st.sampled_from(COSTS),
    rule=st.sampled_from(["plain", "sign"]),
)
def test_no_number_of_entries_pays_better(kind: int, n: int, seed: int, cost: Cost, rule: Rule) -> None:
    x = KINDS[kind](n, torch.Generator().manual_seed(seed))
    selection = Adaptive(cost, rule=rule, floor=1e-9, ceiling=1.0)
    curve = curve_of(x)
    if curve.empty:
        return
    entries = np.arange(1, n + 1, dtype=np.float64)
    prices = cost.of(selection.frame_bits(entries, n))
    worth = gains(x, rule) / prices
    chosen = round(selection.best(curve) * n)
    assert worth[chosen - 1] >= 0.96 * worth.max()


@quick
@given(n=st.sampled_from([1, 7, 200]), seed=st.integers(0, 99), kind=st.integers(0, len(KINDS) - 1))
def test_the_random_choice_is_weighed_by_its_own_formula(n: int, seed: int, kind: int) -> None:
    x = KINDS[kind](n, torch.Generator().manual_seed(seed))
    curve = curve_of(x)
    if curve.empty:
        return
    for entries in {1, max(1, n // 10), max(1, n // 2)}:
        if entries <= int((x != 0).sum()):
            found = float(curve.omega(np.array([float(entries)]))[0])
            assert found == pytest.approx(random_gain(x, entries), rel=0.06)


@quick
@given(kind=st.integers(0, len(KINDS) - 1), n=st.sampled_from([1, 31, 513, 4127]), seed=st.integers(0, 99))
def test_both_twins_count_the_same(kind: int, n: int, seed: int) -> None:
    x = KINDS[kind](n, torch.Generator().manual_seed(seed))
    native, twin = curve_of(x).found, curve_of(x, TorchGroup).found
    assert native.taken == twin.taken == n
    for one, other in zip((native.counts, native.low, native.high), (twin.counts, twin.low, twin.high), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_travels_is_what_was_chosen(kind: int, kernels: Any) -> None:
    x = KINDS[kind](60_000, torch.Generator().manual_seed(3))
    codec = tw.Codec(Adaptive(Affine(1e-3, 1e8)), kernels=kernels)
    (count,) = codec.encode({"w": x}).counts
    wanted = min(codec.learned["w"].get("density", 0.0) * x.numel(), int((x != 0).sum()))
    assert count == pytest.approx(wanted, rel=0.15, abs=2.0)


def test_more_time_or_bandwidth_pays_for_more_entries() -> None:
    curve = curve_of(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    wide = {"floor": 1e-5, "ceiling": 1.0}
    densities = [
        Adaptive(Affine(latency, 1e8), elements=25_000_000, **wide).best(curve)  # type: ignore[arg-type]
        for latency in (1e-4, 1e-3, 1e-2, 1e-1)
    ]
    assert densities == sorted(densities) and densities[-1] > 10 * densities[0]
    assert Adaptive(Affine(1e-2, 1e9), **wide).best(curve) > Adaptive(Affine(1e-2, 1e8), **wide).best(curve)  # type: ignore[arg-type]
    assert Adaptive(Payload(), **wide).best(curve) * curve.n < 10  # type: ignore[arg-type]


def test_bounds_hold_and_the_density_moves_slowly() -> None:
    cost = Measured()
    selection = Adaptive(cost, floor=0.002, ceiling=0.05, start=0.01, smooth=0.2)
    codec = tw.Codec(selection, feedback=tw.NoFeedback())  # the same curve at every step
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    counts = []
    for step in range(60):
        # Cheap at first, then one on which every bit is dear.
        for bits in (1e3, 1e5):
            cost.observe(bits, bits * (1e-12 if step < 30 else 1e-3), beside=0.01)
        counts.append(codec.encode({"w": x}).counts[0] / x.numel())
    assert max(counts) <= 0.05 * 1.2 and min(counts) >= 0.002 * 0.8
    assert counts[25] > 0.04 and counts[-1] < 0.003
    ratios = [max(a, b) / min(a, b) for a, b in pairwise(counts)]
    assert max(ratios) < (0.05 / 0.002) ** 0.2 * 1.2


def test_until_the_cost_is_known_the_start_is_kept() -> None:
    codec = tw.Codec(Adaptive(Measured(), start=0.02))
    counts = [codec.encode({"w": torch.randn(30_000)}).counts[0] for _ in range(3)]
    assert all(count == pytest.approx(600, rel=0.2) for count in counts)


def test_the_random_choice_is_right_on_average_and_takes_no_memory() -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    codec = tw.Codec(Adaptive(Affine(1e-5, 1e9), rule="stochastic"), tw.Float32(), tw.NoFeedback())
    total, sent = torch.zeros(4000), 0
    for _ in range(300):
        frame = codec.encode({"w": x})
        sent += frame.counts[0]
        total += tw.Codec.decode(frame, {"w": x})["w"]
    assert sent / 300 == pytest.approx(codec.learned["w"]["density"] * 4000, rel=0.1)
    slope = float((total / 300 * x).sum() / x.square().sum())
    assert slope == pytest.approx(1.0, abs=0.03)
    with pytest.raises(ValueError, match="use NoFeedback"):
        tw.Codec(Adaptive(Affine(1e-5, 1e9), rule="stochastic")).encode({"w": x})


def test_state_is_saved_and_a_change_of_unit_leaves_it() -> None:
    codec = tw.Codec(Adaptive(Affine(1e-3, 1e8), smooth=0.1))
    for _ in range(3):
        codec.encode({"w": torch.randn(20_000)})
    before = dict(codec.learned["w"])
    codec.rescale(16.0)
    assert codec.learned["w"] == before
    again = codec.copy()
    again.load_state_dict(codec.state_dict())
    assert again.learned == codec.learned


def test_a_line_is_fitted_to_what_exchanges_took() -> None:
    cost = Measured()
    assert not cost.known
    for step in range(40):
        bits = 1e5 * (1 + step % 5)
        cost.observe(bits, 0.002 + bits * 1e-8, beside=0.05)
    assert cost.known
    assert cost.per_bit == pytest.approx(1e-8, rel=0.01)
    assert cost.fixed == pytest.approx(0.052, rel=0.01)
    for _ in range(100):  # frames of one size: everything counts as time per bit
        cost.observe(1e5, 0.003, beside=0.05)
    assert cost.per_bit == pytest.approx(3e-8, rel=0.01)
    assert math.isfinite(float(cost.of(np.array([0.0]))[0]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Adaptive(Payload(), rule="best"), "the rule is"),  # type: ignore[arg-type]
        (lambda: Adaptive(Payload(), floor=0.5), "floor <= start <= ceiling"),
        (lambda: Adaptive(Payload(), smooth=0.0), "smooth lies in"),
        (lambda: Adaptive(Payload(), agree="median"), "agree is"),  # type: ignore[arg-type]
        (lambda: Affine(-1.0, 1e6), "a latency is"),
        (lambda: Affine(0.0, 0.0), "a bandwidth is"),
        (lambda: Packets(mtu=0), "mtu above 0"),
        (lambda: Measured(decay=1.0), "decay between"),
    ],
)
def test_what_cannot_be_is_said(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize(
    ("cost", "density"),
    [(Payload(), 0.001), (Affine(0.0, 1e8), 0.001), (Affine(0.01, 1e8), 0.02), (Packets(), 0.02), (Measured(), 0.02)],
)
def test_the_first_messages_are_sized_for_where_the_rule_goes(cost: Cost, density: float) -> None:
    assert Adaptive(cost, floor=0.001, start=0.02).expected(100_000, 0) == round(100_000 * density)
