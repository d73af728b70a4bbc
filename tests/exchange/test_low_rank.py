"""LowRank: coordinates in a basis that all ranks share; what they do not express stays in the residual."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
import thinwire.codec.codec
import thinwire.exchange.low_rank
from tests.cluster import Cluster
from thinwire import _native
from thinwire.codec import feedback
from thinwire.codec.feedback import Accumulated
from thinwire.codec.low_rank import Basis, LowRank, matrix_shape
from thinwire.exchange.base import Bucket, Exchange
from thinwire.exchange.channel import Channel, checksum
from thinwire.exchange.gather import Gather
from thinwire.exchange.low_rank import LowRankMean
from thinwire.exchange.scatter_reduce import ScatterReduce

SHAPES: dict[str, tuple[int, ...]] = {
    "w": (60, 40),
    "conv": (16, 8, 3, 3),
    "bias": (60,),
    "tiny": (1, 1),
    "wide": (4, 900),
}


@settings(max_examples=40, deadline=None)
@given(rank=st.integers(1, 12), extra=st.integers(0, 60), seed=st.integers(0, 2**31), dependent=st.booleans())
def test_bases_are_orthonormal(rank: int, extra: int, seed: int, dependent: bool) -> None:
    length = rank + extra
    vectors = torch.randn(rank, length, generator=torch.Generator().manual_seed(seed))
    if dependent and rank > 1:
        vectors[-1] = 3.0 * vectors[0]
        vectors[0] *= 1e-30
    _native.orthonormalise(vectors.data_ptr(), rank, length, seed)
    assert torch.allclose(vectors @ vectors.T, torch.eye(rank), atol=1e-5)


@pytest.mark.parametrize("nearly", [0.5, 1e-3, 3e-5, 1e-6])
def test_vectors_that_nearly_depend_on_others_become_orthonormal(nearly: float) -> None:
    vectors = torch.randn(9, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors[5] = vectors[2] + nearly * vectors[5]
    basis = vectors.float()
    expected = torch.linalg.qr(basis.double().T).Q.T
    _native.orthonormalise(basis.data_ptr(), 9, 70, 1)
    assert torch.allclose(basis @ basis.T, torch.eye(9), atol=1e-5)
    assert torch.allclose((basis.double() * expected).sum(1).abs(), torch.ones(9, dtype=torch.float64), atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 5000), rank=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_products_are_those_of_matrices(rows: int, columns: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rank, rows, generator=generator), torch.randn(rank, columns, generator=generator)
    out = torch.full((rows, columns), torch.nan)
    next_basis = torch.empty(rank, rows) if rank <= rows else None
    by_rows = (rows, columns, rank, True, right.data_ptr(), left.data_ptr())
    (advanced,) = _native.expand_low_rank(
        [(*by_rows, out.data_ptr(), seed, next_basis.data_ptr() if next_basis is not None else 0)]
    )
    one_by_one = torch.zeros(rows, columns)
    for k in range(rank):
        one_by_one = one_by_one + left[k].unsqueeze(1) * right[k]
    assert torch.equal(out, one_by_one)
    whole = torch.randn(rows, columns, generator=generator)
    rest = whole.clone()
    _native.subtract_low_rank([(rows, columns, rank, False, left.data_ptr(), right.data_ptr(), rest.data_ptr())])
    assert torch.equal(rest, whole - one_by_one)
    assert advanced == (next_basis is not None)
    if next_basis is not None:
        _native.orthonormalise(left.data_ptr(), rank, rows, seed)
        assert torch.equal(next_basis, left)


def test_elements_of_tensors_without_a_basis_are_their_coordinates() -> None:
    coordinates, out, rest = torch.randn(7), torch.empty(7), torch.randn(7)
    before = rest.clone()
    assert _native.expand_low_rank([(1, 7, 0, True, 0, coordinates.data_ptr(), out.data_ptr(), 0, 0)]) == [False]
    _native.subtract_low_rank([(1, 7, 0, True, 0, coordinates.data_ptr(), rest.data_ptr())])
    assert torch.equal(out, coordinates) and torch.equal(rest, before - coordinates)


def test_ranks() -> None:
    assert LowRank(0.08).rank(128, 512) == 16 and LowRank(0.08).rank(128, 128) == 10
    assert LowRank(0.5, max_rank=8).rank(1000, 1000) == 8
    assert LowRank(0.01).rank(30, 30) == 1
    assert LowRank(0.15).rank(1, 500) == 0 and LowRank(1.0).rank(10, 10) == 0
    grown = [LowRank(0.15, ranks=4).for_ranks(world) for world in (2, 4, 8, 16, 64)]
    assert [round(each.density, 9) for each in grown] == [0.15, 0.15, 0.3, 0.4, 0.4]
    assert [each.max_rank for each in grown] == [64, 64, 128, 171, 171]
    assert LowRank(0.6).for_ranks(64) == LowRank(0.6)
    assert matrix_shape((16, 8, 3, 3)) == (16, 72) and matrix_shape((7,)) == (7, 1) and matrix_shape(()) == (1, 1)
    for wrong in (0.0, 1.5):
        try:
            LowRank(wrong)
        except ValueError as error:
            assert "a density must lie in (0, 1]" in str(error)
        else:
            raise AssertionError(wrong)


def test_repeated_projections_find_a_matrix_of_low_rank() -> None:
    """With error feedback a constant matrix of rank 3 arrives almost completely within a few exchanges."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 3, generator=generator) @ torch.randn(3, 80, generator=generator)
    basis, left, arrived = Basis.first("w", (50, 80), 4), matrix.clone().view(-1), torch.zeros(4000)
    for _ in range(6):
        coordinates, out = torch.empty(basis.size), torch.empty(4000)
        basis.project(left, coordinates)
        basis.subtract(left, coordinates)
        basis = basis.expand(coordinates, out)
        arrived += out
    assert float((arrived - matrix.view(-1)).norm() / matrix.norm()) < 0.05
    assert torch.allclose(arrived + left, matrix.view(-1), atol=1e-4)
    assert basis.expand(torch.zeros(basis.size), out) is basis and not out.any()


def changes(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator).flatten() for name, shape in SHAPES.items()}


def exchanged(rank: int, inner: str) -> tuple[list[int], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Several exchanges; returns checksums of all means, the sums of changes and means, and the residuals."""
    import torch.distributed as dist

    codec = tw.Codec(LowRank(0.15), tw.Bits(2))
    exchange: Exchange = LowRankMean(Gather() if inner == "gather" else ScatterReduce(), SHAPES)
    channel = Channel(dist.distributed_c10d._get_default_group())
    exchange.setup(channel, codec, {name: torch.Size(s).numel() for name, s in SHAPES.items()}, lambda members: [])
    given_, applied, sums = changes(rank, 0), {n: torch.zeros(torch.Size(s).numel()) for n, s in SHAPES.items()}, []
    given_ = {name: torch.zeros_like(t) for name, t in given_.items()}
    for step in range(7):
        mine = changes(rank, step)
        hold = frozenset({"conv"}) if step == 3 and rank == 1 else frozenset()
        outs = [torch.empty(t.numel()) for t in mine.values()]
        bad = step == 4 and rank == 0
        if bad:
            mine["w"][5] = torch.inf
        outcome = exchange.mean(Bucket(mine, outs, step, hold))
        assert outcome.non_finite == ([0] if step == 4 else [])
        if step == 5:  # all ranks skip this step: what was sent returns
            assert outcome.undo is not None
            outcome.undo()
        for name, out in zip(mine, outs, strict=True):
            given_[name] += 0.0 if name in hold or bad else mine[name]
            if step not in (4, 5):
                applied[name] += out
        sums.append(0 if step == 4 else checksum(torch.cat(outs)))
        if step == 2:  # a state that is loaded again changes nothing
            exchange.load_state_dict(exchange.state_dict())
    return sums, given_, applied, {name: codec.residuals(name)["residual"] for name in SHAPES}


def test_nothing_is_lost_and_all_ranks_compute_the_same_bits(cluster: Cluster) -> None:
    for inner, world in (("gather", 2), ("scatter-reduce", 3), ("scatter-reduce", 4)):
        results = cluster.run(exchanged, world, inner)
        assert all(result[0] == results[0][0] for result in results)
        for name in SHAPES:
            wanted = torch.stack([given_[name] for _, given_, _, _ in results]).mean(0)
            kept = torch.stack([residual[name] for *_, residual in results]).mean(0)
            assert torch.allclose(results[0][2][name] + kept, wanted, atol=2e-5), (inner, name)


def told(rank: int, low_rank: bool) -> tuple[list[int], list[int], bool, int]:
    """Exchange residuals, then a NaN of rank 0 in place of one: the ranks to blame, and whether residuals changed."""
    import torch.distributed as dist

    codec = tw.Codec(LowRank(0.15) if low_rank else tw.TopK(0.1), tw.Bits(8), Accumulated())
    exchange: Exchange = LowRankMean(ScatterReduce(), SHAPES) if low_rank else Gather()
    channel = Channel(dist.distributed_c10d._get_default_group())
    exchange.setup(channel, codec, {name: torch.Size(s).numel() for name, s in SHAPES.items()}, lambda members: [])
    residuals = {name: codec.ensure_residuals(name, t)["residual"] for name, t in changes(rank, 0).items()}
    for name, change in changes(rank, 0).items():
        residuals[name] += change
    outs = [torch.empty(t.numel()) for t in residuals.values()]
    read: list[Tensor] = []
    before = feedback.first_not_finite

    def counted(tensors: Sequence[Tensor]) -> int:
        read.extend(tensors)
        return before(tensors)

    for module in (thinwire.codec.codec, thinwire.exchange.low_rank):
        module.first_not_finite = counted  # type: ignore[attr-defined]
    try:
        good = exchange.mean(Bucket(residuals, outs, 0, frozenset())).non_finite
        checked = sum(any(t is r for r in residuals.values()) for t in read)
        given = {n: torch.full_like(r, torch.nan) if rank == 0 and n == "w" else r for n, r in residuals.items()}
        kept = {name: residual.clone() for name, residual in residuals.items()}
        bad = exchange.mean(Bucket(given, outs, 1, frozenset())).non_finite
    finally:
        for module in (thinwire.codec.codec, thinwire.exchange.low_rank):
            module.first_not_finite = before  # type: ignore[attr-defined]
    unchanged = rank != 0 or all(torch.equal(kept[name], residuals[name]) for name in kept)
    return good, bad, unchanged, checked


@pytest.mark.parametrize("low_rank", [True, False])
def test_a_residual_is_not_checked_again_and_a_nan_in_its_place_tells_all_ranks(
    cluster: Cluster, low_rank: bool
) -> None:
    assert cluster.run(told, 3, low_rank) == [([], [0], True, 0)] * 3


def test_saved_bases_are_checked() -> None:
    exchange = LowRankMean(Gather(), SHAPES)
    exchange.setup(_alone(), tw.Codec(LowRank(0.15), tw.Bits(2)), {}, lambda members: [])
    state = exchange.state_dict()
    assert set(state) == {"w", "conv", "wide"}
    wrong: list[dict[str, Any]] = [{"b": {}}, {"w": {"vectors": torch.zeros(2, 2), "of_rows": True}}, {"w": 3}]
    wrong.append({"w": {**state["w"], "vectors": state["w"]["vectors"] * torch.nan}})
    for bad in wrong:
        try:
            exchange.load_state_dict(bad)
        except ValueError as error:
            assert "basis" in str(error)
        else:
            raise AssertionError(bad)
    assert all(torch.equal(exchange.state_dict()[n]["vectors"], state[n]["vectors"]) for n in state)


def _alone() -> Channel:
    from thinwire.exchange.channel import LocalChannel

    return LocalChannel()
