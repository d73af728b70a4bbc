"""Rotate in the exchanges: the mean is exact over real processes, and messages have the size that is known before."""

import pytest
import torch
from torch import Tensor

import thinwire as tw
import thinwire.exchange
from tests.cluster import Cluster
from thinwire.codec.codec import Codec, Kernels
from thinwire.codec.encode import BucketViews, Part, Partition, encode_parts
from thinwire.codec.frame import read_frames, stored_bytes
from thinwire.codec.selection import Rotate, Window
from thinwire.codec.values import Values
from thinwire.exchange.base import Bucket, Exchange, slack
from thinwire.exchange.channel import Channel
from thinwire.exchange.choose import choose_exchange
from thinwire.exchange.gather import gathered_bytes
from thinwire.exchange.scatter_reduce import _PREFIX, share_out

SIZES = {"weight": 100_000, "table": 40_001, "bias": 100, "none": 0, "norm": 700}
NAMES, NUMELS = list(SIZES), list(SIZES.values())
WORLD = 4  # a power of two: dividing by it is exact
HELD_BY, HELD_AT = 1, 3  # this rank's tensor "weight" takes no part in this step


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Return whole numbers, whose sums do not depend on their order."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randint(-50, 50, (n,), generator=generator).float() for name, n in SIZES.items()}


def sent_for(exchange: Exchange, codec: Codec, rank: int, step: int) -> int:
    """Return the bytes that a rank is to send at a step."""
    if isinstance(exchange, tw.exchange.Gather) or "gather_below" in repr(exchange):
        known = codec.known_bytes(NAMES, NUMELS, step)
        assert known is not None
        return known * (WORLD - 1)
    windows = codec.windows(NAMES, NUMELS, step)
    assert windows is not None
    deals = share_out(NUMELS, WORLD, codec.min_numel)
    sizes = []
    for owner in range(WORLD):
        shares = [deal.share(n, owner) for deal, n in zip(deals, NUMELS, strict=True)]
        sizes.append(
            codec.windows_bytes(shares, [deal.window(w, owner) for deal, w in zip(deals, windows, strict=True)])
        )
    return sum(sizes) - sizes[rank] + (_PREFIX.size + sizes[rank]) * (WORLD - 1)


def exact_mean(rank: int, exchange: Exchange, kernels: Kernels) -> None:
    """Compare the mean of every step with one that is computed from all ranks' gradients."""
    group = torch.distributed.group.WORLD
    assert group is not None
    channel = Channel(group)
    codec = Codec(tw.Rotate(0.3), tw.Float32(), kernels=kernels)
    exchange.setup(channel, codec, SIZES, lambda members: [])
    waiting = [{name: torch.zeros(n) for name, n in SIZES.items()} for _ in range(WORLD)]
    for step in range(9):
        hold = frozenset(["weight"]) if (rank, step) == (HELD_BY, HELD_AT) else frozenset[str]()
        outs, before = [torch.empty(n) for n in NUMELS], channel.sent
        outcome = exchange.mean(Bucket(gradients(rank, step), outs, step, hold))
        assert not outcome.non_finite and channel.sent - before == sent_for(exchange, codec, rank, step)
        windows = codec.windows(NAMES, NUMELS, step)
        assert windows is not None
        for (name, n), window, out in zip(SIZES.items(), windows, outs, strict=True):
            there = slice(window.start, window.start + window.count)
            expected = torch.zeros(n)
            for r in range(WORLD):
                if (name, r, step) == ("weight", HELD_BY, HELD_AT):
                    continue
                waiting[r][name] += gradients(r, step)[name]
                expected[there] += waiting[r][name][there] / WORLD
                waiting[r][name][there] = 0.0
            assert torch.equal(out, expected), (step, name)
            assert torch.equal(codec.residuals(name)["residual"], waiting[rank][name])
            assert outcome.counts[name] == (0 if name in hold else window.count)
    assert not any(exchange.state_dict().get(kind) for kind in ("sizes", "parts", "results"))


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    "exchange",
    [tw.exchange.Gather(), tw.exchange.ScatterReduce(), tw.exchange.ScatterReduce(gather_below=1 << 30)],
    ids=repr,
)
def test_the_mean_is_exact_and_sizes_are_known(cluster: Cluster, exchange: Exchange, kernels: Kernels) -> None:
    cluster.run(exact_mean, WORLD, exchange, kernels)


def non_finite_step(rank: int, exchange: Exchange) -> list[list[int]]:
    group = torch.distributed.group.WORLD
    assert group is not None
    exchange.setup(Channel(group), Codec(tw.Rotate(0.3), tw.Bits(2)), SIZES, lambda members: [])
    found = []
    for step in range(3):
        given = gradients(rank, step)
        if (rank, step) == (1, 1):
            given["weight"][5] = torch.nan
        outs = [torch.empty(n) for n in NUMELS]
        found.append(exchange.mean(Bucket(given, outs, step, frozenset())).non_finite)
    return found


@pytest.mark.parametrize("kind", [tw.exchange.Gather, tw.exchange.ScatterReduce])
def test_all_ranks_see_a_value_that_is_not_finite(cluster: Cluster, kind: type[Exchange]) -> None:
    assert cluster.run(non_finite_step, 2, kind()) == [[[], [1], []]] * 2


def encode_for_owners(codec: Codec, tensors: dict[str, Tensor], step: int) -> tuple[list[tw.codec.Frame], list[int]]:
    """Return the frame of every owner, and the bytes of the values in it."""
    numels = [t.numel() for t in tensors.values()]
    deals = share_out(numels, WORLD, codec.min_numel)
    windows = codec.windows(list(tensors), numels, step)
    assert windows is not None
    parts, stored = [], []
    for owner in range(WORLD):
        shares = [deal.share(n, owner) for deal, n in zip(deals, numels, strict=True)]
        room = codec.frame_bound(shares) + slack(codec, shares)
        parts.append(Part(torch.empty(room, dtype=torch.uint8), shares, codec.reserves(shares)))
        counts = [deal.window(window, owner).count for deal, window in zip(deals, windows, strict=True)]
        stored.append(sum(stored_bytes(count, codec.values) for count in counts))
    frames, sent = encode_parts(codec, tensors, deals, parts, step=step)
    assert sent == [window.count for window in windows]
    outs = [torch.empty(n) for n in numels]
    split = [(deal.world, deal.first) for deal in deals]
    read_frames(frames, [part.shares for part in parts]).sum_to(outs, 1.0, split)
    for out, window, tensor in zip(outs, windows, tensors.values(), strict=True):
        inside = torch.zeros(out.numel(), dtype=torch.bool)
        inside[window.start : window.start + window.count] = True
        assert torch.equal(out != 0, inside & (tensor != 0))
    return frames, stored


@pytest.mark.parametrize("share", [0.3, 0.1, 0.08])
def test_the_parts_of_owners_have_hardly_more_bytes_than_values(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(100_000, generator=generator) for i in range(3)}
    for step in range(3):
        frames, stored = encode_for_owners(Codec(tw.Rotate(share), tw.Bits(2), tw.NoFeedback()), tensors, step)
        assert all(len(frame) <= 1.1 * values for frame, values in zip(frames, stored, strict=True))


def test_kernels_write_the_same_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    for feedback in (tw.NoFeedback(), tw.ErrorFeedback(0.9), tw.MomentumCorrection(0.5)):
        one, other = (
            Codec(tw.Rotate(0.08), tw.Bits(2, seed=3), feedback, kernels=kernels) for kernels in ("native", "torch")
        )
        for step in range(3):
            tensors = {name: torch.randn(n, generator=generator) for name, n in SIZES.items() if n}
            ours, theirs = (encode_for_owners(codec, tensors, step)[0] for codec in (one, other))
            assert [frame.tobytes() for frame in ours] == [frame.tobytes() for frame in theirs]
        for name in tensors:
            for slot, tensor in one.residuals(name).items():
                assert torch.equal(tensor, other.residuals(name)[slot])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_an_owner_has_a_window_of_a_window(world: int) -> None:
    n = 3000
    for partition in [Partition(world, 0), Partition(world, 5)] if world > 1 else [Partition(1, 0)]:
        for start, count in [(0, 0), (0, n), (1, 70), (63, 2), (64, 64), (777, 1501), (2999, 1), (n, 0)]:
            found = []
            for owner in range(world):
                places = partition.places(n, owner)
                mine = partition.window(Window(start, count), owner)
                found += places[mine.start : mine.start + mine.count].tolist()
            assert sorted(found) == list(range(start, start + count))


def test_the_choice_uses_the_mean_bytes_of_a_period() -> None:
    codec, numels = Codec(tw.Rotate(0.08), tw.Bits(2)), [1_000_000, 500, 3]
    known = [codec.known_bytes(["a", "b", "c"], numels, step) or 0 for step in range(13)]
    assert abs(gathered_bytes(codec, numels, 4) - 3 * sum(known) / 13) <= 3
    few, why = choose_exchange(codec, {"a": 1_000_000, "b": 500, "c": 3}, 4)
    many, _ = choose_exchange(codec, {"a": 100_000_000}, 16)
    assert isinstance(few, tw.exchange.Gather) and why.startswith("gather: ")
    assert isinstance(many, tw.exchange.ScatterReduce)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("values", [tw.Bits(2), tw.Float32(), tw.Unary()], ids=str)
def test_windows_of_many_tensors_are_the_same_in_one_call(share: float, values: Values) -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [70_000, 300, 1, 40_000, 0, 513]
    partitions = share_out(numels, 3)
    assert {partition.world for partition in partitions} == {1, 3}
    shares = [
        [partition.share(n, owner) for partition, n in zip(partitions, numels, strict=True)] for owner in range(3)
    ]
    codecs = [tw.Codec(Rotate(share), values, tw.ErrorFeedback(0.9)) for _ in range(2)]
    for step in range(5):
        tensors = {f"t{i}": torch.randn(n, generator=generator) for i, n in enumerate(numels)}
        if step == 3:
            tensors["t1"][7] = torch.nan
        found = []
        for codec, given in zip(codecs, (tensors, BucketViews(tensors)), strict=True):
            rooms = [torch.empty(codec.frame_bound(each, each), dtype=torch.uint8) for each in shares]
            parts = [Part(room, each, codec.reserves(each)) for room, each in zip(rooms, shares, strict=True)]
            _, counts = encode_parts(codec, given, partitions, parts, step=step)
            found.append(([room.tolist() for room in rooms], counts, codec.step))
        assert found[0] == found[1], step
        assert all(torch.equal(codecs[0].residuals(n)["residual"], codecs[1].residuals(n)["residual"]) for n in tensors)
