"""Selections: exact ones are compared with a sort, sampled ones with the density that was asked for."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
import thinwire.codec
from tests.codec.codec_cases import KINDS, gradients, positions_of, quick
from thinwire.codec.codec import Kernels
from thinwire.codec.selection import Selection, entry_count
from thinwire.codec.values import Values


def selected(selection: Selection, x: Tensor, *, step: int = 0, kernels: Kernels = "native") -> Tensor:
    """Return the positions of one tensor that are sent."""
    codec = tw.Codec(selection, tw.Float32(), tw.NoFeedback(), min_numel=0, kernels=kernels)
    return positions_of(codec.encode({"w": x}, step=step), [x.numel()])[0]


def largest(x: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes by a stable sort, without zeros."""
    order = x.abs().sort(descending=True, stable=True).indices[:k]
    return order[x[order] != 0].sort().values


@quick
@given(
    n=st.integers(1, 6000),
    density=st.floats(1e-4, 1.0),
    kind=st.integers(0, 5),
    seed=st.integers(0, 2**31),
    kernels=st.sampled_from(["native", "torch"]),
)
def test_exact_topk_is_a_stable_sort(n: int, density: float, kind: int, seed: int, kernels: Kernels) -> None:
    x = gradients([n], torch.float32, kind, seed)["t0"]
    found = selected(tw.TopK(density, exact=True), x, kernels=kernels)
    assert torch.equal(found, largest(x, entry_count(density, n)))


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("density", [0.0005, 0.02, 0.5])
def test_exact_topk_of_a_large_tensor(kind: int, density: float) -> None:
    # More than 2^19 elements: the answer comes from sampled candidates, or by radix where those are too many.
    x = KINDS[kind](700_001, torch.Generator().manual_seed(kind))
    assert torch.equal(selected(tw.TopK(density, exact=True), x), largest(x, entry_count(density, len(x))))


@quick
@given(n=st.integers(1, 4000), percent=st.floats(0, 99.99), kind=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_exact_percentile_equals_numpy(n: int, percent: float, kind: int, seed: int) -> None:
    x = gradients([n], torch.float32, kind, seed)["t0"]
    magnitudes = x.abs().double().numpy()
    expected = np.flatnonzero(magnitudes > np.percentile(magnitudes, percent))
    assert selected(tw.Percentile(percent, exact=True), x).tolist() == expected.tolist()


@pytest.mark.parametrize("n", [1000, 123_457])
def test_exact_deviation_equals_torch(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) + 0.5
    limit = (2.0 * x.double().std(correction=0)).float()
    expected = (x.abs() > limit).nonzero().flatten()
    for kernels in ("native", "torch"):
        assert torch.equal(selected(tw.StdDev(2.0, exact=True), x, kernels=kernels), expected)


def _distribution(name: str, n: int) -> Tensor:
    g = torch.Generator().manual_seed(n + len(name))
    if name == "gaussian":
        return torch.randn(n, generator=g)
    uniform = torch.rand(n, generator=g).clamp_(1e-7, 1 - 1e-7)
    sign = torch.where(torch.rand(n, generator=g) < 0.5, -1.0, 1.0)
    return sign * (-uniform.log() if name == "laplace" else uniform.pow(-1 / 1.2))  # Pareto: no variance at all


@pytest.mark.parametrize("distribution", ["gaussian", "laplace", "pareto"])
@pytest.mark.parametrize("n", [1_000_000, 4_000_000])
def test_sampled_topk_keeps_the_density(distribution: str, n: int) -> None:
    x = _distribution(distribution, n)
    for density in (0.1, 0.01, 0.001):
        for kernels in ("native", "torch"):
            kept = len(selected(tw.TopK(density), x, kernels=kernels))
            assert abs(kept / (density * n) - 1.0) < 0.1, (distribution, n, density, kernels, kept)
    assert abs(len(selected(tw.Percentile(99.0), x)) / (0.01 * n) - 1.0) < 0.1


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_sampled_topk_of_few_distinct_magnitudes(kernels: Kernels) -> None:
    n = 1_000_000
    rare = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.005, 1.0, 0.1)
    for x in (torch.full((n,), 0.37), torch.full((n,), -1.0), rare):
        kept = len(selected(tw.TopK(0.01), x, kernels=kernels))
        assert abs(kept / (0.01 * n) - 1.0) < 0.1
    spike = torch.zeros(n)
    spike[77] = -3.0
    assert selected(tw.TopK(0.01), spike, kernels=kernels).tolist() == [77]
    assert len(selected(tw.TopK(0.01), torch.zeros(n), kernels=kernels)) == 0


def _spike(step: int, noise: Tensor) -> Tensor:
    x = torch.zeros_like(noise)
    x[step % len(x)] = 5.0
    return x


STREAMS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "steady": lambda step, noise: noise,
    "constant": lambda step, noise: torch.full_like(noise, 0.3),
    "shrinking": lambda step, noise: noise * 10.0 ** (-3 * step),
    "growing": lambda step, noise: noise * 10.0 ** min(3 * step - 30, 30),
    "alternating": lambda step, noise: noise * (1000.0 if step % 2 else 1.0),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("n", [20_000, 1_000_000])
def test_dynamic_stays_between_floor_and_ceiling(stream: str, n: int) -> None:
    codec = tw.Codec(tw.Dynamic(0.001, 0.1), tw.Float32(), tw.ErrorFeedback())
    g = torch.Generator().manual_seed(1)
    for step in range(30 if n < 100_000 else 8):
        x = STREAMS[stream](step, torch.randn(n, generator=g))
        (count,) = codec.encode({"w": x}).counts
        # Below a million the sample is everything; above it holds some 300 exceeding entries.
        slack = 1.0 if n < 300_000 else 1.4
        assert 0.001 * n / slack - 1 <= count <= 0.1 * n * slack + 1, (step, count)


def test_dynamic_with_zeros_and_with_a_single_entry() -> None:
    codec = tw.Codec(tw.Dynamic(), tw.Float32(), tw.ErrorFeedback())
    noise = torch.randn(50_000)
    for step in range(5):
        assert codec.encode({"w": torch.zeros_like(noise)}).counts == (0,)
        assert codec.encode({"w": _spike(step, noise)}).counts == (1,)
    (count,) = codec.encode({"w": noise}).counts
    assert 49 <= count <= 5001


def test_dynamic_moves_to_the_mean_of_the_sent_magnitudes() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2))
    codec = tw.Codec(tw.Dynamic(1e-4, 0.9, start=0.5), tw.Float32(), tw.NoFeedback())
    first = positions_of(codec.encode({"w": x}), [len(x)])[0]
    assert torch.equal(first, (x.abs() > 0.5).nonzero().flatten())
    mean = float(x[first].abs().double().mean())
    assert math.isclose(codec.state_dict()["selection"]["w"]["threshold"], mean, rel_tol=1e-9)
    second = positions_of(codec.encode({"w": x}), [len(x)])[0]
    assert torch.equal(second, (x.abs() > mean).nonzero().flatten())


def test_random_positions_agree_between_ranks_and_change_with_the_step() -> None:
    x, y = torch.randn(10_000), torch.randn(10_000)
    one = selected(tw.RandomK(0.01, seed=4), x, step=3)
    assert len(one) == 100 and (one.diff() > 0).all()
    assert torch.equal(one, selected(tw.RandomK(0.01, seed=4), y, step=3, kernels="torch"))
    assert not torch.equal(one, selected(tw.RandomK(0.01, seed=4), x, step=4))
    assert not torch.equal(one, selected(tw.RandomK(0.01, seed=-5), x, step=3))
    seen = torch.zeros(10_000)
    for step in range(100):
        seen[selected(tw.RandomK(0.1), x, step=step)] = 1.0
    assert seen.sum() > 9_990  # almost every entry is selected within 100 steps


def test_schedules() -> None:
    x = torch.randn(10_000)
    warm = tw.Warmup([0.25, 0.0625, 0.01], steps_each=2)
    counts = [len(selected(tw.TopK(warm, exact=True), x, step=step)) for step in (0, 1, 2, 3, 4, 5, 99)]
    assert counts == [2500, 2500, 625, 625, 100, 100, 100]
    assert len(selected(tw.TopK(lambda step: 1 / (step + 2), exact=True), x, step=2)) == 2500
    cutoff = tw.codec.AccuracyCutoff()
    rule = tw.Percentile(cutoff, exact=True)
    assert len(selected(rule, x)) == 1000
    for accuracy, count in [(0.7, 1000), (0.81, 2000), (0.5, 2000)]:
        cutoff.update(accuracy)
        assert len(selected(rule, x)) == count
    with pytest.raises(ValueError, match="density"):
        selected(tw.TopK(lambda step: 0.0), x)


def test_scope() -> None:
    small, large = torch.randn(2000), 100 * torch.randn(2000)
    g = {"small": small, "large": large}
    each = tw.Codec(tw.TopK(0.1, exact=True), tw.Float32()).encode(g)
    assert each.counts == (200, 200)
    together = tw.Codec(tw.TopK(0.1, exact=True), tw.Float32(), scope="global").encode(g)
    found = positions_of(together, [2000, 2000])
    expected = largest(torch.cat([small, large]), 400)
    assert torch.equal(torch.cat([found[0], found[1] + 2000]), expected)


def test_small_tensors_are_sent_whole() -> None:
    g = {"w": torch.randn(5000), "b": torch.randn(1023), "edge": torch.randn(1024)}
    codec = tw.Codec(tw.TopK(0.01, exact=True), tw.Bits(2))
    frame = codec.encode(g)
    assert frame.counts == (50, 1023, 10)
    reader = tw.codec.FrameReader(frame, [5000, 1023, 1024])
    assert [s.format for s in reader.sections] == [5, 3, 5]  # small tensors keep 8 bits
    assert codec.expected_counts([5000, 1023, 1024]) == [50, 1023, 10]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tw.TopK(0.0),
        lambda: tw.TopK(1.1),
        lambda: tw.TopK(float("nan")),
        lambda: tw.Percentile(100),
        lambda: tw.Percentile(-1),
        lambda: tw.Threshold(-1.0),
        lambda: tw.Threshold(float("nan")),
        lambda: tw.StdDev(0.0),
        lambda: tw.Dynamic(0.2, 0.1),
        lambda: tw.RandomK(2.0),
        lambda: tw.Rotate(0.0),
        lambda: tw.Rotate(1.5),
        lambda: tw.Rotate(0.1, min_window=0),
        lambda: tw.Warmup([], 1),
        lambda: tw.Warmup([0.1], 0),
        lambda: tw.Bits(3),
        lambda: tw.ErrorFeedback(0.0),
        lambda: tw.MomentumCorrection(1.0),
        lambda: tw.Codec(0.1, scope="all"),  # type: ignore[arg-type]
        lambda: tw.Codec(0.1, kernels="cuda"),  # type: ignore[arg-type]
        lambda: tw.Codec(0.1).encode({"w": torch.zeros(3, dtype=torch.float64)}),
        lambda: tw.Codec(0.1).encode({"w": torch.zeros(3).to_sparse()}),
        lambda: tw.Codec(0.1).encode({"w": torch.zeros(3)}, step=-1),
    ],
)
def test_impossible_settings_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError):
        make()


def test_a_group_with_a_tensor_smaller_than_the_stride_of_its_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {"a": torch.randn(4_000_000, generator=generator), "b": torch.randn(1100, generator=generator)}
    frame = tw.Codec(0.5, scope="global", kernels="torch").encode(gradients)
    assert 0.45 < sum(frame.counts) / 4_001_100 < 0.55


def windows_of(codec: tw.Codec, numels: dict[str, int], steps: range) -> dict[str, list[Tensor]]:
    """Return the positions of every tensor that are sent at each of these steps, read from frames."""
    found: dict[str, list[Tensor]] = {name: [] for name in numels}
    x = {name: torch.zeros(n) for name, n in numels.items()}  # zeros are sent as well
    for step in steps:
        frame = codec.encode(x, step=step)
        places = positions_of(frame, list(numels.values()))
        for i, name in enumerate(numels):
            found[name].append(places.get(i, torch.empty(0, dtype=torch.int64)))
    return found


@quick
@given(
    numels=st.lists(st.one_of(st.integers(0, 700), st.integers(0, 20_000)), min_size=1, max_size=4),
    share=st.one_of(st.floats(0.02, 1.0), st.integers(1, 60).map(lambda period: 1 / period)),
    min_window=st.sampled_from([1, 64, 256]),
    first=st.integers(0, 1000),
)
def test_rotation_sends_every_entry_once_in_a_period(
    numels: list[int], share: float, min_window: int, first: int
) -> None:
    rule = tw.Rotate(share, min_window=min_window)
    period = rule.period(0)
    assert 1 / share <= period * (1 + 1e-8) and period < 1 / share + 1
    sizes = {f"t{i}": n for i, n in enumerate(numels)}
    found = windows_of(tw.Codec(rule, tw.Sign(), tw.NoFeedback()), sizes, range(first, first + period))
    for name, n in sizes.items():
        sent = torch.cat(found[name])
        assert torch.equal(sent.sort().values, torch.arange(n))
        for places in found[name]:  # each of them is a window, of `min_window` entries unless it is the last
            assert len(places) <= max(-(-n // period), min_window)
            assert len(places) >= min(min_window, n) or not len(places) or places[-1] == n - 1
            assert (places.diff() == 1).all()


@pytest.mark.parametrize(
    ("share", "period"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.1, 10), (0.08, 13), (1 / 49, 49), (1 / 3, 3), (0.999, 2)]
)
def test_the_period_of_a_rotation(share: float, period: int) -> None:
    assert tw.Rotate(share).period(0) == period
    rule, n = tw.Rotate(share), 100_000
    assert [len(p) for p in windows_of(tw.Codec(rule), {"w": n}, range(1))["w"]] == [rule.expected(n, 0)]


def test_small_tensors_of_a_rotation_are_sent_whole_once_in_a_period() -> None:
    sizes = {"weight": 50_000, "bias": 100, "norm": 256, "middle": 600}
    codec = tw.Codec(tw.Rotate(0.1), tw.Bits(2))
    counts = {name: [len(p) for p in found] for name, found in windows_of(codec, sizes, range(10)).items()}
    assert counts["weight"] == [5000] * 10
    assert sorted(counts["bias"]) == [0] * 9 + [100] and sorted(counts["norm"]) == [0] * 9 + [256]
    assert sorted(counts["middle"]) == [0] * 7 + [88, 256, 256]
    assert codec.min_numel == 0 and codec.copy(selection=tw.TopK(0.1)).min_numel == 1024
    for step in range(10):
        frame = codec.encode({name: torch.randn(n) for name, n in sizes.items()}, step=step)
        sections = tw.codec.FrameReader(frame, list(sizes.values())).sections
        assert {s.format for s in sections} == {5}  # small tensors are in the codec's values, too
        assert [s.id for s in sections] == [i for i, count in enumerate(frame.counts) if count]  # no empty sections


def test_ranks_rotate_alike_and_tensors_have_different_phases() -> None:
    rule, n = tw.Rotate(0.05), 40_000
    one = tw.Codec(rule, tw.Bits(2))
    other = tw.Codec(rule, tw.Float32(), tw.MomentumCorrection(), kernels="torch")
    for step in (0, 7, 123_456):
        ours = positions_of(one.encode({"a": torch.randn(n), "w": torch.randn(n)}, step=step), [n, n])
        theirs = positions_of(other.encode({"w": torch.randn(n)}, step=step), [n])  # in another bucket
        assert torch.equal(ours[1], theirs[0])
        assert not torch.equal(ours[0], ours[1])


def test_a_rotation_with_a_schedule_still_sends_every_entry() -> None:
    sizes = {"weight": 30_000, "bias": 10}
    rule = tw.Rotate(tw.Warmup([1.0, 0.3, 0.04], 3))
    codec = tw.Codec(rule, tw.Sign(), tw.NoFeedback())
    found = windows_of(codec, sizes, range(6 + 25))
    assert [len(p) for p in found["weight"][:7]] == [30_000] * 3 + [7500] * 3 + [1200]
    for name, n in sizes.items():
        assert torch.equal(torch.cat(found[name][6:]).sort().values, torch.arange(n))
    # A share that changes at every step repeats no pattern that leaves an entry out for ever.
    moving = tw.Codec(tw.Rotate(lambda step: 1 / (2 + step % 5)), tw.Sign(), tw.NoFeedback())
    for name, places in windows_of(moving, sizes, range(60)).items():
        assert len(torch.cat(places).unique()) == sizes[name]


@quick
@given(
    numels=st.lists(st.one_of(st.integers(0, 700), st.integers(0, 70_000)), max_size=5),
    share=st.floats(0.02, 1.0),
    values=st.sampled_from([tw.Float32(), tw.Bits(2), tw.Sign()]),
    first=st.integers(0, 1000),
)
def test_the_bytes_of_a_rotation_are_known(numels: list[int], share: float, values: Values, first: int) -> None:
    codec = tw.Codec(tw.Rotate(share), values, tw.NoFeedback())
    x = {f"t{i}": torch.randn(n) for i, n in enumerate(numels)}
    assert isinstance(codec.selection, tw.Rotate)
    sizes = []
    for step in range(first, first + codec.selection.period(0)):
        known = codec.known_bytes(list(x), numels, step)
        assert known is not None
        frame = codec.encode(x, step=step, budget=known)  # everything fits into exactly these bytes
        assert len(frame) == known == len(codec.encode(x, step=step))
        sizes.append(known)
    assert codec.expected_bytes(numels) == math.ceil(sum(sizes) / len(sizes))


def test_the_bytes_of_other_selections_are_not_known() -> None:
    for selection in (tw.TopK(0.1), tw.RandomK(0.1), tw.Threshold(0.0)):
        codec = tw.Codec(selection)
        assert codec.known_bytes(["w"], [5000], 0) is None and codec.windows(["w"], [5000], 0) is None
        assert codec.expected_bytes([5000]) == codec.frame_bound([5000], codec.expected_counts([5000]))
