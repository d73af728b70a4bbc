"""The default exchange: the fewest bytes for the number of workers, the density and the frame's size."""

import torch

import thinwire as tw
import thinwire.exchange
import thinwire.tune
from thinwire.codec.encode import encode_sums
from thinwire.exchange.base import AgreedSizes
from thinwire.exchange.choose import choose_exchange
from thinwire.exchange.scatter_reduce import share_out

LARGE = {"weight": 25_000_000, "bias": 1000}


def test_few_workers_gather_and_many_scatter() -> None:
    few, why_few = choose_exchange(tw.Codec(0.01), LARGE, 2)
    many, why_many = choose_exchange(tw.Codec(0.01), LARGE, 16)
    assert isinstance(few, tw.exchange.Gather)
    assert isinstance(many, tw.exchange.ScatterReduce)
    assert why_few.startswith("gather: ")
    assert why_many.startswith("scatter-reduce: ")
    assert "kB a step and rank gathered" in why_many


def test_small_frames_gather_even_with_many_workers() -> None:
    chosen, _ = choose_exchange(tw.Codec(0.01), {"weight": 50_000}, 16)
    assert isinstance(chosen, tw.exchange.Gather)


def test_frames_that_are_no_smaller_than_the_gradients_are_not_made() -> None:
    chosen, why = choose_exchange(tw.Codec(1.0, tw.Float32()), LARGE, 8)
    assert isinstance(chosen, tw.exchange.Dense)
    assert why.startswith("dense: the frames would be no smaller")


def test_shares_cover_every_element_once_and_are_even() -> None:
    sizes = [1_000_003, 40_000, 30_000, 7]
    for world in (1, 2, 3, 8, 64):
        deals = share_out(sizes, world, smallest=1024)
        for deal, n in zip(deals, sizes, strict=True):
            places = [deal.places(n, owner) for owner in range(world)]
            assert sorted(torch.cat(places).tolist()) == list(range(n))
            shares = [deal.share(n, owner) for owner in range(world)]
            assert shares == [len(p) for p in places]
            # A share below the size of tensors that travel whole would travel whole.
            if deal.world > 1:
                assert min(shares) >= 1024
                assert max(shares) - min(shares) <= 128
        whole = [deal.first for deal in deals if deal.world == 1]
        assert len(set(whole)) == min(world, len(whole))


def test_a_matrix_with_few_large_columns_or_rows_is_shared_evenly() -> None:
    for rows, columns in ((300, 4096), (4096, 300), (1024, 1024)):
        for world in (4, 14, 16):
            deal = share_out([rows * columns], world)[0]
            for matrix in (torch.zeros(rows, columns), torch.zeros(columns, rows).T):
                matrix[:, : columns // 16] = 1.0
                flat = matrix.reshape(-1)
                loads = [float(flat[deal.places(flat.numel(), owner)].sum()) for owner in range(world)]
                assert max(loads) < 1.25 * min(loads)


def test_agreed_sizes_follow_and_do_not_collapse() -> None:
    agreed = AgreedSizes()
    assert agreed.get("bucket", 0, lambda: [100_000]) == [100_000]
    agreed.learn("bucket", [10_000], [100])
    assert agreed.sizes["bucket"] == [10_500]  # the first guess is dropped at once
    agreed.learn("bucket", [50], [100])
    assert agreed.sizes["bucket"] == [9_450]  # a quiet step shrinks it a little
    agreed.learn("bucket", [9_330], [100])
    assert agreed.sizes["bucket"] == [12_385]  # a full one enlarges it
    agreed.get("regrouped", 1, lambda: [5])
    assert agreed.state_dict() == {"regrouped": [5]}


def test_selections_without_a_density_are_not_taken_for_dense() -> None:
    for world in (2, 8):
        some, _ = choose_exchange(tw.Codec(tw.StdDev(3.0), tw.Float32()), LARGE, world)
        unknown, why = choose_exchange(tw.Codec(tw.Threshold(1e-3), tw.Float32()), LARGE, world)
        assert not isinstance(some, tw.exchange.Dense) and isinstance(unknown, tw.exchange.Gather)
        assert "not known beforehand" in why


def test_what_was_rounded_at_random_is_not_selected_from_again() -> None:
    rule = tw.Adaptive(tw.tune.Payload(), rule="stochastic")
    codec = tw.Codec(rule, tw.Bits(8), tw.NoFeedback())
    second = tw.Codec(rule.for_sums(2.0), tw.Bits(8), tw.NoFeedback())
    sums = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    held = sums.clone()
    frame = encode_sums(second, {0: held}, ["a"], torch.empty(1 << 20, dtype=torch.uint8), step=0)
    sent = codec.decode(frame, {"a": sums})["a"]
    assert int((sent != 0).sum()) > 4900 and torch.allclose(sent + held, sums, atol=1e-6)
